"""An algorithm with its settings resolved. Built-in functions and a user's own are found by the same lookup.

The training loop never branches on an algorithm's name, only on whether it needs the critic.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from actor.algorithms.inputs import Advantage, ClipRange, Loss
from actor.algorithms.own_functions import checked_advantage, checked_loss
from python_backend.config import AlgorithmSection, KLSection
from python_backend.config.algorithms import LOSSES
from python_backend.rewards.function import import_function

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Method:
    """An algorithm with its settings resolved from the configuration."""

    settings: AlgorithmSection
    advantage: Advantage
    loss: Loss
    clip: ClipRange
    whitens: bool
    kl_estimator: str
    kl_in_loss: bool
    sequence_mean: bool

    @property
    def own_loss(self) -> str | None:
        """The user's loss, `path/to/file.py:name`; None if the loss is a built-in one."""
        return None if self.settings.loss_name in LOSSES else self.settings.loss_name

    @classmethod
    def of(cls, settings: AlgorithmSection, kl: KLSection) -> Method:
        """Build the method that the settings select; `auto` and unset values take the algorithm's defaults.

        Raises: FunctionError if a user's function cannot be imported.
        """
        s, defaults = settings, settings.defaults
        advantage = import_function(defaults.advantage if s.advantage == "auto" else s.advantage)
        loss = import_function(LOSSES.get(s.loss_name, s.loss_name))
        kl_in = defaults.kl_in if kl.penalty_in == "auto" else kl.penalty_in
        by_place = "k3" if kl_in == "loss" else "abs"
        method = cls(
            s,
            advantage if s.advantage == "auto" else checked_advantage(s.advantage, advantage),
            loss if s.loss_name in LOSSES else checked_loss(s.loss_name, loss),
            ClipRange(s.clip_ratio, s.clip_ratio if s.clip_ratio_high is None else s.clip_ratio_high, s.dual_clip),
            whitens=defaults.whitens if s.whiten_advantages is None else s.whiten_advantages,
            kl_estimator=by_place if kl.estimator == "auto" else kl.estimator,
            kl_in_loss=kl_in == "loss",
            sequence_mean=(defaults.loss_mean if s.loss_mean == "auto" else s.loss_mean) == "sequence",
        )
        if method.kl_in_loss and method.kl_estimator == "k1":
            logger.warning(
                "actor.kl.estimator: k1 in the loss has an expected gradient of 0 and penalises nothing; use k2 or k3, "
                "or actor.kl.penalty_in: reward"
            )
        return method
