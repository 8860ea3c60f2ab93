"""The loaders of models, onto the device that sections default to: the CPU, or a GPU in `make test-device`."""

import pytest

from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.models import language_model, modeling, token_reward
from rlhf_triton.trainer.trained_critic import TrainedCritic


def default_device():
    return TrainerSection().device


def skip_on_gpus(reason):
    """Skip the test if the default device is a GPU."""
    if default_device() != "cpu":
        pytest.skip(reason)


def on_default_device(load):
    return lambda *arguments, **settings: load(*arguments, **{"device": default_device(), **settings})


load_critic = on_default_device(modeling.load_critic)


def load_trained(folder):
    """Load a critic to train."""
    critic = load_critic(folder)
    return TrainedCritic(critic.model, critic)


load_reward = on_default_device(modeling.load_reward)
load_language_model = on_default_device(language_model.load_language_model)
load_process_reward = on_default_device(token_reward.load_process_reward)
load_logit_reward = on_default_device(token_reward.load_logit_reward)
