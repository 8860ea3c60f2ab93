"""An algorithm with its settings resolved, from built-in functions or a user's own.

The training loop never branches on an algorithm's name, only on whether it needs the critic.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rlhf_triton.actor.algorithms.inputs import (
    Advantage,
    ClipRange,
    Loss,
)
from rlhf_triton.actor.algorithms.user_functions import checked_advantage, checked_loss
from rlhf_triton.config.actor import AlgorithmSection, KLSection
from rlhf_triton.config.algorithms import LOSSES
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.without_effect import effect_line
from rlhf_triton.user_code import import_function

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Method:
    """An algorithm with its settings resolved from the configuration."""

    settings: AlgorithmSection
    advantage: Advantage
    loss: Loss
    clip: ClipRange
    whitens: bool
    kl_estimator: str
    kl_in_loss: bool
    loss_mean: str  # `token`, `sequence` or `constant`

    @property
    def own_loss(self) -> str | None:
        """The user's loss, `path/to/file.py:name`; None if the loss is built in."""
        return None if self.settings.loss_name in LOSSES else self.settings.loss_name

    @classmethod
    def from_settings(cls, settings: AlgorithmSection, kl: KLSection) -> Method:
        """Build the method that the settings select; `auto` and unset values take the algorithm's defaults.

        Raises: FunctionError if a user's function cannot be imported.
        """
        s = settings
        defaults = settings.defaults
        advantage = import_function(defaults.advantage if s.advantage == "auto" else s.advantage)
        loss = import_function(LOSSES[s.loss_name].function if s.loss_name in LOSSES else s.loss_name)
        kl_in = defaults.kl_in if kl.penalty_in == "auto" else kl.penalty_in
        default_estimator = "k3" if kl_in == "loss" else "abs"
        method = cls(
            settings=s,
            advantage=advantage if s.advantage == "auto" else checked_advantage(s.advantage, advantage),
            loss=loss if s.loss_name in LOSSES else checked_loss(s.loss_name, loss),
            clip=ClipRange(*s.clip),
            whitens=defaults.whitens,
            kl_estimator=default_estimator if kl.estimator == "auto" else kl.estimator,
            kl_in_loss=kl_in == "loss",
            loss_mean=defaults.loss_mean if s.loss_mean == "auto" else s.loss_mean,
        )
        if method.kl_in_loss and method.kl_estimator == "k1":
            logger.warning(
                "actor.kl.estimator: k1 in the loss has an expected gradient of 0 and penalises nothing; use k2 or k3, "
                "or actor.kl.penalty_in: reward"
            )
        return method


def log_choices(config: RunConfig) -> None:
    """Log the algorithm's resolved settings, and which settings of the run have no effect."""
    logger.info("actor.algorithm.name: %s sets %s", config.actor.algorithm.name, config.published_choices)
    if line := effect_line(config):
        logger.info("%s", line)
