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

    advantage: Advantage
    loss: Loss
    own_loss: str | None  # `path/to/file.py:name` of a user's loss
    gamma: float
    lam: float
    whitens: bool
    kl_estimator: str
    kl_in_loss: bool
    sequence_mean: bool
    mask_unfinished: bool
    clip: ClipRange
    entropy_bonus: float

    @classmethod
    def of(cls, settings: AlgorithmSection, kl: KLSection) -> Method:
        """Build the method that the settings select; `auto` and unset values take the algorithm's defaults.

        Raises: FunctionError if a user's function cannot be imported.
        """
        defaults, own_advantage, loss_name = settings.defaults, settings.advantage != "auto", settings.loss_name
        own_loss = None if loss_name in LOSSES else loss_name
        advantage = import_function(settings.advantage if own_advantage else defaults.advantage)
        loss = import_function(LOSSES.get(loss_name, loss_name))
        kl_in = defaults.kl_in if kl.penalty_in == "auto" else kl.penalty_in
        kl_estimator = kl.estimator
        if kl_estimator == "auto":
            kl_estimator = "k3" if kl_in == "loss" else "abs"
        if (kl_in, kl_estimator) == ("loss", "k1"):
            logger.warning(
                "actor.kl.estimator: k1 in the loss has an expected gradient of 0 and penalises nothing; use k2 or k3, "
                "or actor.kl.penalty_in: reward"
            )
        loss_mean = defaults.loss_mean if settings.loss_mean == "auto" else settings.loss_mean
        high = settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high
        return cls(
            advantage=checked_advantage(settings.advantage, advantage) if own_advantage else advantage,
            loss=checked_loss(own_loss, loss) if own_loss else loss,
            own_loss=own_loss,
            gamma=settings.gamma,
            lam=settings.lam,
            whitens=defaults.whitens if settings.whiten_advantages is None else settings.whiten_advantages,
            kl_estimator=kl_estimator,
            kl_in_loss=kl_in == "loss",
            sequence_mean=loss_mean == "sequence",
            mask_unfinished=settings.mask_unfinished,
            clip=ClipRange(settings.clip_ratio, high, settings.dual_clip),
            entropy_bonus=settings.entropy_bonus,
        )
