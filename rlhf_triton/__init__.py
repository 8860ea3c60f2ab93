"""Exact rewards and a live critic for RL on language models, served by a stock Triton server.

    import rlhf_triton as rt

    reward = rt.RewardClient("127.0.0.1:8000")
    scores = reward.score(["The weather is lovely.", [{"role": "user", "content": "Hi"}]])
    trainer = trl.GRPOTrainer(..., reward_funcs=reward.as_trl())

    critic = rt.CriticClient("127.0.0.1:8000", run_id="mine")
    critic.rewind(0)
    critic.values(rows)

The names in `__all__` are public and documented in docs/python.md; everything else may change. Each name is imported on
first use; the clients import neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_triton.actor.algorithms.inputs import AdvantageInputs as AdvantageInputs
    from rlhf_triton.actor.algorithms.inputs import LossInputs as LossInputs
    from rlhf_triton.client.client import TrainAnswer as TrainAnswer
    from rlhf_triton.client.critic import AsyncCriticClient as AsyncCriticClient
    from rlhf_triton.client.critic import CriticClient as CriticClient
    from rlhf_triton.client.critic import RowScores as RowScores
    from rlhf_triton.client.critic import RowValues as RowValues
    from rlhf_triton.client.errors import RequestFailed as RequestFailed
    from rlhf_triton.client.errors import RequestRefused as RequestRefused
    from rlhf_triton.client.errors import ServerFailed as ServerFailed
    from rlhf_triton.client.reward import AsyncRewardClient as AsyncRewardClient
    from rlhf_triton.client.reward import RewardClient as RewardClient
    from rlhf_triton.client.reward import Scores as Scores
    from rlhf_triton.config.client import ClientSettings as ClientSettings
    from rlhf_triton.environment import Environment as Environment
    from rlhf_triton.environment import EnvironmentLost as EnvironmentLost
    from rlhf_triton.errors import RlhfError as RlhfError
    from rlhf_triton.rewards.counters import count as count
    from rlhf_triton.rewards.sample import Sample as Sample
    from rlhf_triton.tools.api.runs import Run as Run
    from rlhf_triton.tools.api.runs import train as train
    from rlhf_triton.tools.api.services import Services as Services
    from rlhf_triton.tools.api.services import serve as serve
    from rlhf_triton.tools.report.user_sections import ReportSection as ReportSection
    from rlhf_triton.wire.contract import ContractError as ContractError

_MODULES = {
    "AdvantageInputs": "actor.algorithms.inputs",
    "AsyncCriticClient": "client.critic",
    "AsyncRewardClient": "client.reward",
    "ClientSettings": "config.client",
    "ContractError": "wire.contract",
    "CriticClient": "client.critic",
    "Environment": "environment",
    "EnvironmentLost": "environment",
    "LossInputs": "actor.algorithms.inputs",
    "ReportSection": "tools.report.user_sections",
    "RequestFailed": "client.errors",
    "RequestRefused": "client.errors",
    "RewardClient": "client.reward",
    "RlhfError": "errors",
    "RowScores": "client.critic",
    "RowValues": "client.critic",
    "Run": "tools.api.runs",
    "Sample": "rewards.sample",
    "Scores": "client.reward",
    "ServerFailed": "client.errors",
    "Services": "tools.api.services",
    "TrainAnswer": "client.client",
    "count": "rewards.counters",
    "serve": "tools.api.services",
    "train": "tools.api.runs",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
