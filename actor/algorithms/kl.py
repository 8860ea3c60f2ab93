"""KL coefficient: fixed, or adapted to keep the policy at a target KL from the reference."""

from __future__ import annotations

MOST_ERROR = 0.2  # from the paper: bounds the change of the coefficient per rollout


class KLControl:
    """Holds `kl_coef` and adapts it if there is a target.

        error = clip(kl / target - 1, -0.2, 0.2)
        coef <- coef * (1 + error * min(samples / horizon, 1))

    Without the minimum, which the paper lacks, the coefficient would become negative from 5 * horizon samples on.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
    """

    def __init__(self, coef: float, *, target: float | None, horizon: int) -> None:
        """
        Args:
            coef: initial coefficient, >= 0.
            target: target KL in nats per sequence; None: the coefficient is fixed.
            horizon: time constant of the controller, in responses.
        """
        self.coef = coef
        self._target = target
        self._horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapt the coefficient to the mean KL per sequence (nats, k1) of a rollout with `samples` responses."""
        if self._target is None:
            return
        error = min(max(kl / self._target - 1, -MOST_ERROR), MOST_ERROR)
        self.coef *= 1 + error * min(samples / self._horizon, 1.0)
