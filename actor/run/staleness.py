"""How stale scores are: critic updates sent before a row was scored, minus those in the weights that scored it.

Versions are numbered by publishing, steps by training: a rewind, a rollback and `publish.every` move them apart. The
manifests of the weights store say which step a version is of. An actor that does not see the store counts from the
answers of critic_train, and takes a version that they do not explain for one without any update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from actor.run.metrics import Metric

KEPT_VERSIONS = 1000


def needed_update(step: int, *, max_staleness: int, every: int) -> int:
    """The update whose answer must be in before rows of `step` are scored, so that none is too stale; may be < 1.

    Args:
        step: `step - 1` updates are sent before its rows are scored.
        max_staleness: most of these that the scoring weights may lack.
        every: only each `every`-th update is published, so weights may lack `every - 1` in any case.
    """
    oldest = step - 1 - max(max_staleness, every - 1)
    return -(-oldest // every) * every  # the first published at or after it


class VersionSteps:
    """How many updates each weights version contains: of the newest versions."""

    def __init__(
        self, version: int, step: int, *, every: int, save_every: int,
        manifest_step: Callable[[int], int | None] = lambda version: None,
    ) -> None:  # fmt: skip
        """
        Args:
            version: what the rewind at the start named; the weights of `step`.
            every: each so many updates are published together.
            save_every: a save publishes what is not published yet; there is one after so many steps.
            manifest_step: the step that the weights store says a version is of, or None.
        """
        self._every = every
        self._save_every = save_every
        self._manifest_step = manifest_step
        self._steps = {version: step}

    def learn(self, version: int, step: int) -> None:
        """Take in the answer to update `step`: `version` is the newest that contains no later one."""
        before = max((self._steps[number] for number in self._steps if number < version), default=0)
        contained = next((s for s in range(step, before, -1) if self._is_published(s)), before)
        self._steps.setdefault(version, contained)
        if len(self._steps) > KEPT_VERSIONS:
            del self._steps[min(self._steps)]

    def step_of(self, version: int, *, sent: int) -> int:
        """The last update in `version`, where `sent` have been sent.

        Without a manifest, a version that no answer has named counts from the one before that was named. One that
        would then contain an update of a later version, or one that was not sent, is another's: a rollback published
        it, and its weights may be as old as they like.
        """
        found = self._manifest_step(version)
        if found is not None:
            return found
        known = max((number for number in self._steps if number <= version), default=None)
        if known is None:  # older than all that is known here
            return 0
        step = self._steps[known]
        for _ in range(version - known):
            step = self._next_published(step)
        later = min((self._steps[number] for number in self._steps if number > version), default=sent + 1)
        return step if version == known or step < later else 0

    def histogram(self, versions: Iterable[int], *, sent: int) -> dict[int, int]:
        """Rows by their staleness.

        Args:
            versions: the weights version that scored each row.
            sent: updates sent before that.
        """
        rows = Counter(versions)
        stale: Counter[int] = Counter()
        for version, count in rows.items():
            stale[max(0, sent - self.step_of(version, sent=sent))] += count
        return dict(sorted(stale.items()))

    def _is_published(self, step: int) -> bool:
        return step % self._every == 0 or step % self._save_every == 0

    def _next_published(self, step: int) -> int:
        following = (step // size * size + size for size in (self._every, self._save_every))
        return min(following)


def staleness_metrics(histogram: dict[int, int]) -> dict[str, Metric]:
    """`train_rollouts/staleness` (of the stalest row), its mean, and the rows at each value."""
    rows = sum(histogram.values())
    mean = sum(value * count for value, count in histogram.items()) / rows
    return {
        "train_rollouts/staleness": float(max(histogram)),
        "train_rollouts/staleness_mean": mean,
        "train_rollouts/staleness_rows": {str(value): count for value, count in histogram.items()},
    }
