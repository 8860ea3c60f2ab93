"""The weight of the KL penalty: fixed, or adapted to keep the policy at a target distance from its start."""

from __future__ import annotations

MOST_ERROR = 0.2


class KLControl:
    """`kl_coef`, adapted where there is a target.

        error = clip(kl / target - 1, -0.2, 0.2)
        coef <- coef * (1 + error * samples / horizon)

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """

    def __init__(self, coef: float, *, target: float | None, horizon: int) -> None:
        """
        Args:
            coef: where it begins, >= 0.
            target: nats per sequence; None: `coef` stays as it is.
            horizon: responses over which it follows.
        """
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Take in the mean KL per sequence (nats, k1) of a rollout of so many samples."""
        if self._target is None:
            return
        error = min(max(kl / self._target - 1, -MOST_ERROR), MOST_ERROR)
        self.coef *= 1 + error * samples / self._horizon
