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
    from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, LossInputs
    from rlhf_triton.client.client import TrainAnswer
    from rlhf_triton.client.critic import AsyncCriticClient, CriticClient, RowScores, RowValues
    from rlhf_triton.client.errors import RequestFailed, RequestRefused, ServerFailed
    from rlhf_triton.client.reward import AsyncRewardClient, RewardClient, Scores
    from rlhf_triton.config import ClientSection
    from rlhf_triton.environment import Environment, EnvironmentLost
    from rlhf_triton.errors import RlhfError
    from rlhf_triton.rewards.function import Sample, count
    from rlhf_triton.tools.api.runs import Run, train
    from rlhf_triton.tools.api.services import Services, serve
    from rlhf_triton.tools.report.user_sections import ReportSection
    from rlhf_triton.wire.contract import ContractError

_MODULES = {
    "AdvantageInputs": "actor.algorithms.inputs",
    "AsyncCriticClient": "client.critic",
    "AsyncRewardClient": "client.reward",
    "ClientSection": "config",
    "ContractError": "wire.contract",
    "CriticClient": "client.critic",
    "Environment": "environment",
    "EnvironmentLost": "environment",
    "LossInputs": "actor.algorithms.inputs",
    "ReportSection": "tools.report.data",
    "RequestFailed": "client.errors",
    "RequestRefused": "client.errors",
    "RewardClient": "client.reward",
    "RlhfError": "errors",
    "RowScores": "client.critic",
    "RowValues": "client.critic",
    "Run": "tools.api.runs",
    "Sample": "rewards.function",
    "Scores": "client.reward",
    "ServerFailed": "client.errors",
    "Services": "tools.api.services",
    "TrainAnswer": "client.client",
    "count": "rewards.function",
    "serve": "tools.api.services",
    "train": "tools.api.runs",
}

__all__ = [
    "AdvantageInputs",
    "AsyncCriticClient",
    "AsyncRewardClient",
    "ClientSection",
    "ContractError",
    "CriticClient",
    "Environment",
    "EnvironmentLost",
    "LossInputs",
    "ReportSection",
    "RequestFailed",
    "RequestRefused",
    "RewardClient",
    "RlhfError",
    "RowScores",
    "RowValues",
    "Run",
    "Sample",
    "Scores",
    "ServerFailed",
    "Services",
    "TrainAnswer",
    "count",
    "serve",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
