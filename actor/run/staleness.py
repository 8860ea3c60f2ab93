"""Staleness of scores: critic updates sent before a row was scored, minus updates in the weights that scored it.

Versions count published weights and steps count updates, so a rewind, a rollback or `publish.every` makes them diverge.
The manifests of the weights store map versions to steps. Without access to the store, the actor takes the step of the
newest response of critic_train that named the version or an older one.
"""

from collections import Counter
from collections.abc import Callable, Sequence

Metric = float | dict[str, int]  # a scalar, or the count of each integer value
KEPT_VERSIONS = 1000  # bounds memory; rows are scored by recent versions


def needed_update(step: int, *, max_staleness: int, every: int) -> int:
    """Return the critic update to await before scoring the rows of `step`; below 1 if there is none.

    The scoring requests then demand the version that contains the update, or a newer one.

    Args:
        step: `step - 1` updates are sent before its rows are scored.
        max_staleness: how many of these updates may be missing from the scoring weights.
        every: only every `every`-th update is published, so the weights may lack up to `every - 1` updates anyway.
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
        manifest_step: Callable[[int], int | None] = lambda version: None,
    ) -> None:
        """
        Args:
            version: weights version that contains the updates up to `step`.
            every: updates per published version (`publish.every`).
            manifest_step: returns the step of a version from the weights store, or None if unknown.
        """
        self._every = every
        self._manifest_step = manifest_step
        self._steps = {version: step}

    def restart(self, version: int, step: int) -> None:
        """Forget all versions except `version`, which contains the updates up to `step`, after a rewind."""
        self._steps = {version: step}

    def record(self, version: int, step: int) -> None:
        """Record that `version` was the newest version after update `step`; it contains no later update."""
        earlier = max((self._steps[number] for number in self._steps if number < version), default=0)
        self._steps.setdefault(version, max(earlier, step // self._every * self._every))
        if len(self._steps) > KEPT_VERSIONS:
            del self._steps[min(self._steps)]

    def step_of(self, version: int) -> int:
        """Return the last update that `version` contains.

        Without a manifest, return the step of the newest response that named this version or an older one. It is at
        most the true step, unless a rollback published the version.
        """
        step = self._manifest_step(version)
        if step is None:
            recorded = max((number for number in self._steps if number <= version), default=None)
            step = 0 if recorded is None else self._steps[recorded]
        return step

    def metrics(self, versions: Sequence[int], *, sent: int) -> dict[str, Metric]:
        """Return the staleness metrics: maximum (`train_rollouts/staleness`), mean, and rows per value.

        Args:
            versions: the weights version that scored each row.
            sent: number of updates sent before the rows were scored.
        """
        steps = {version: self.step_of(version) for version in {*versions}}
        rows = Counter(sorted(max(0, sent - steps[version]) for version in versions))
        return {
            "train_rollouts/staleness": float(max(rows)),
            "train_rollouts/staleness_mean": sum(rows.elements()) / len(versions),
            "train_rollouts/staleness_rows": {str(value): count for value, count in rows.items()},
        }
