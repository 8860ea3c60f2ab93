"""The YAML configuration as typed sections. Unknown keys are rejected; the command line can override values.

Each process uses `run` and its own section. Models inside tritonserver do not read the YAML: their settings are
rendered into config.pbtxt.
"""

from rlhf_triton.config.actor import (
    ActorSection,
    AlgorithmSection,
    GenerationSection,
    KLSection,
    PolicySection,
    PromptFileSection,
    PromptsSection,
    RewardsSection,
)
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.config.loading import load_config, parse_config
from rlhf_triton.config.rewards import RewardTerm
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.sections import (
    CriticSection,
    GatewaySection,
    ModelSection,
    RewardSection,
    RunSection,
    ServerSection,
    TrainerSection,
)

__all__ = [
    "ActorSection",
    "AlgorithmSection",
    "ClientSettings",
    "ConfigError",
    "CriticSection",
    "EnvironmentSection",
    "GatewaySection",
    "GenerationSection",
    "KLSection",
    "ModelSection",
    "PolicySection",
    "PromptFileSection",
    "PromptsSection",
    "RewardSection",
    "RewardTerm",
    "RewardsSection",
    "RunConfig",
    "RunSection",
    "ServerSection",
    "TrainerSection",
    "load_config",
    "parse_config",
]
