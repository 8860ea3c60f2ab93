"""Staleness of scores: critic updates sent before a row was scored, minus those in the weights that scored it.

Versions count published weights and steps count updates, so a rewind, a rollback or `publish.every` makes them diverge.
The manifests of the weights store map versions to steps. Without access to the store, the actor infers the step from
the responses of critic_train, and treats a version that they do not explain as containing no update.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from rlhf_triton.actor.run.metrics import Metric

KEPT_VERSIONS = 1000  # bounds memory; rows are scored by recent versions


def needed_update(step: int, *, max_staleness: int, every: int) -> int:
    """Return the critic update to await before scoring the rows of `step`; below 1 if there is none.

    The scoring requests then demand the version that the update was served as, or a newer one.

    Args:
        step: `step - 1` updates are sent before its rows are scored.
        max_staleness: how many of these updates may be missing from the scoring weights.
        every: only every `every`-th update is published, so the weights may lack `every - 1` in any case.
    """
    oldest = step - 1 - max(max_staleness, every - 1)
    return -(-oldest // every) * every  # rounded up to a published update


class VersionSteps:
    """Maps recent weights versions to the number of updates that they contain."""

    def __init__(
        self,
        version: int,
        step: int,
        *,
        every: int,
        save_every: int,
        manifest_step: Callable[[int], int | None] = lambda version: None,
    ) -> None:
        """
        Args:
            version: weights version of `step`, as returned by the rewind at the start.
            every: updates per published version (`publish.every`).
            save_every: steps between saves; a save also publishes pending updates.
            manifest_step: returns the step of a version from the weights store, or None if unknown.
        """
        self._every = every
        self._save_every = save_every
        self._manifest_step = manifest_step
        self._steps = {version: step}

    def learn(self, version: int, step: int) -> None:
        """Record the response to update `step`: `version` is the newest version, and contains no later update."""
        before = max((self._steps[number] for number in self._steps if number < version), default=0)
        contained = next((s for s in range(step, before, -1) if self._is_published(s)), before)
        self._steps.setdefault(version, contained)
        if len(self._steps) > KEPT_VERSIONS:
            del self._steps[min(self._steps)]

    def step_of(self, version: int, *, sent: int) -> int:
        """Return the last update that `version` contains, after `sent` updates have been sent.

        Without a manifest, the step of a version that no response named is extrapolated from the last named version.
        If the extrapolated step reaches that of a later named version, or exceeds `sent`, a rollback published the
        version; its weights may be of any age, so the result is 0.
        """
        found = self._manifest_step(version)
        if found is not None:
            return found
        known = max((number for number in self._steps if number <= version), default=None)
        if known is None:  # older than all recorded versions
            return 0
        step = self._steps[known]
        for _ in range(version - known):
            step = min(step // size * size + size for size in (self._every, self._save_every))  # published next
        later = min((self._steps[number] for number in self._steps if number > version), default=sent + 1)
        return step if version == known or step < later else 0

    def histogram(self, versions: Iterable[int], *, sent: int) -> dict[int, int]:
        """Return the number of rows per staleness.

        Args:
            versions: the weights version that scored each row.
            sent: updates sent before the rows were scored.
        """
        rows = Counter(versions)
        stale: Counter[int] = Counter()
        for version, count in rows.items():
            stale[max(0, sent - self.step_of(version, sent=sent))] += count
        return dict(sorted(stale.items()))

    def _is_published(self, step: int) -> bool:
        return step % self._every == 0 or step % self._save_every == 0


def staleness_metrics(histogram: dict[int, int]) -> dict[str, Metric]:
    """Return the staleness metrics: maximum (`train_rollouts/staleness`), mean, and rows per value."""
    rows = sum(histogram.values())
    mean = sum(value * count for value, count in histogram.items()) / rows
    return {
        "train_rollouts/staleness": float(max(histogram)),
        "train_rollouts/staleness_mean": mean,
        "train_rollouts/staleness_rows": {str(value): count for value, count in histogram.items()},
    }
