"""The loaders of models, onto the device that sections default to: the CPU, or a card in `make test-device`."""

from typing import Any

import pytest

from rlhf_triton.config import TrainerSection
from rlhf_triton.python_backend.models import language_model, modeling, token_reward
from rlhf_triton.python_backend.models.language_model import LanguageModel
from rlhf_triton.python_backend.models.modeling import CriticModel, RewardModel


def default_device() -> str:
    return TrainerSection().device


def skip_on_cards(reason: str) -> None:
    """Skip the test if the default device is a card."""
    if default_device() != "cpu":
        pytest.skip(reason)


def load_critic(*arguments: Any, **settings: Any) -> CriticModel:
    return modeling.load_critic(*arguments, **{"device": default_device(), **settings})


def load_reward(*arguments: Any, **settings: Any) -> RewardModel:
    return modeling.load_reward(*arguments, **{"device": default_device(), **settings})


def load_language_model(*arguments: Any, **settings: Any) -> LanguageModel:
    return language_model.load_language_model(*arguments, **{"device": default_device(), **settings})


def load_process_reward(*arguments: Any, **settings: Any) -> RewardModel:
    return token_reward.load_process_reward(*arguments, **{"device": default_device(), **settings})


def load_logit_reward(*arguments: Any, **settings: Any) -> RewardModel:
    return token_reward.load_logit_reward(*arguments, **{"device": default_device(), **settings})
