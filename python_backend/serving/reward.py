"""Triton model `reward_model`: replies with `rewards`, the standardised scores.

`rewards` is FP32 [B, 1], or [B, A] if the A attributes are not merged; on request, `probabilities` is FP32 [B, A]. A
process reward also replies with a score per step; its `rewards` are the minimum over the steps. If the weights come
from a store, `reward_version` INT64 [B, 1] is their version; one version scores a whole request.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlhf_triton.models.modeling import RewardModel, StandardizationChoice
from rlhf_triton.python_backend.serving.requests import read_limits
from rlhf_triton.python_backend.serving.reward_reader import reward_reader
from rlhf_triton.python_backend.serving.scoring import Engine, Reply, Wait
from rlhf_triton.python_backend.serving.step_reply import STEP_REPLY
from rlhf_triton.python_backend.serving.torch_scoring import TorchProcess
from rlhf_triton.python_backend.serving.triton import Parameters, log, triton_model
from rlhf_triton.python_backend.serving.versions.follower import Version
from rlhf_triton.python_backend.serving.versions.stored_model import OneVersion, follow_store, version_column
from rlhf_triton.wire.contract import PROBABILITIES, PROCESS, REWARD_VERSION, REWARDS, STORE, TokenRow


def serve(args: Mapping[str, str]) -> Engine:
    """Return the engine that serves scores of one fixed checkpoint, or of its current version in a weights store."""
    process = TorchProcess(args)
    parameters = process.parameters
    folder = parameters.path("model")
    loader, options = read_loader(parameters)

    def load(folder: Path, served: Any = None) -> Any:
        return process.load(loader, folder, served, **options)

    stored, per_token = (parameters.optional(name) is not None for name in (STORE, PROCESS))
    versions = follow_store(process, "reward", load) if stored else OneVersion(Version(0, load(folder)))
    model: RewardModel = versions.version.model
    limits = read_limits(model.limits, parameters)
    reader = reward_reader(folder, limits, parameters.optional, skipped_pad_id=model.skipped_pad_id)
    log(f"{parameters.model}: {folder.name}, rewards are (score - {model.mean:g}) / {model.std:g}")
    return Engine(
        process,
        read=reader.read,
        versions=versions,
        forward=_forward_token_scores if per_token else _forward,
        reply=STEP_REPLY if per_token else REPLY,
        max_length=limits.max_length,
    )


def _forward(model: Any, rows: Sequence[TokenRow], width: int) -> Wait:
    return model.launch([row.tokens for row in rows], width, [row.types for row in rows])


def _forward_token_scores(model: Any, rows: Sequence[TokenRow], width: int) -> Wait:
    return model.launch_token_scores([row.tokens for row in rows], width)


# A row's outputs are its rewards, followed by the scores of all attributes.
REPLY: Reply = {
    REWARDS: lambda scoring: np.stack(scoring.outputs)[:, : scoring.model.model.num_outputs],
    REWARD_VERSION: version_column,
    PROBABILITIES: lambda scoring: scoring.model.model.probabilities(
        np.stack(scoring.outputs)[:, scoring.model.model.num_outputs :]
    ),
}
TritonPythonModel = triton_model(serve)


def read_loader(parameters: Parameters) -> tuple[str, dict[str, Any]]:
    """Return the name of the model's loader and its options."""
    options: dict[str, Any] = {"standardization": read_standardization(parameters.text("standardization"))}
    weights = json.loads(parameters.text("attribute_weights"))
    score = parameters.optional("score") or "auto"
    is_process = parameters.optional(PROCESS) is not None
    logit = parameters.optional("logit")
    if logit is not None:
        rule = json.loads(logit)
        probability = score == "probability" or (score == "auto" and is_process and bool(rule["against"]))
        return "load_logit_reward", {**options, **rule, "probability": probability}
    if is_process:
        return "load_process_reward", {**options, "attribute_weights": weights, "score": score}
    return "load_reward", {**options, "pooling": parameters.text("pooling"), "attribute_weights": weights}


def read_standardization(setting: str) -> StandardizationChoice:
    """Parse the model parameter `standardization`: `model`, `off`, or JSON `{"mean": m, "std": s}`."""
    if setting in ("model", "off"):
        return cast(StandardizationChoice, setting)
    constants = json.loads(setting)
    return constants["mean"], constants["std"]
