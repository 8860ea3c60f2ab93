"""The models that are served from weights stores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_triton.wire.contract import CRITIC, REWARD_CHECKPOINT, REWARD_MODEL

if TYPE_CHECKING:
    from rlhf_triton.config.run_config import RunConfig

LIVE_MODELS = ("critic", "reward")


@dataclass(frozen=True)
class LiveModel:
    """A model that is served from a weights store."""

    name: str
    """The model's section in the configuration."""
    store: Path
    """Folder of the weights store."""
    served_as: str
    """Name of the Triton model whose instances follow the store."""
    reload: Literal["swap", "triton"]
    """How instances switch to a published version."""


def live_model(config: RunConfig, name: str) -> LiveModel:
    """Return one of `LIVE_MODELS`, whether or not it is served."""
    if name == "critic":
        return LiveModel(name, config.run.weights_dir, CRITIC, config.critic.reload)
    served_as = REWARD_MODEL if config.rewards is None else REWARD_CHECKPOINT
    return LiveModel(name, config.run.reward_weights_dir, served_as, "swap")


def reward_is_live(config: RunConfig) -> bool:
    """Return whether the reward model is served from a weights store."""
    return config.reward.store and config.uses_reward_model


def live_models(config: RunConfig) -> list[LiveModel]:
    """Return the models that are served from weights stores."""
    is_live = {"critic": config.serves_critic, "reward": reward_is_live(config)}
    return [live_model(config, name) for name in LIVE_MODELS if is_live[name]]
