"""Triton model `reward_model`: replies with `rewards`, the standardised scores.

`rewards` is FP32 [B, 1], or [B, A] if the A attributes are not merged; on request, `probabilities` is FP32 [B, A]. A
process reward also replies with a score per step; its `rewards` are the minimum over the steps. If the weights come
from a store, `reward_version` INT64 [B, 1] is their version; one version scores a whole request.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_triton.checkpoints.inspection import tokenizer_kind
from rlhf_triton.models.modeling import RewardModel
from rlhf_triton.python_backend.serving.requests import read_limits
from rlhf_triton.python_backend.serving.reward_reader import reward_reader
from rlhf_triton.python_backend.serving.scoring import Engine, Reply, Wait
from rlhf_triton.python_backend.serving.step_reply import STEP_REPLY
from rlhf_triton.python_backend.serving.torch_scoring import TorchProcess
from rlhf_triton.python_backend.serving.triton import log, triton_model
from rlhf_triton.python_backend.serving.versions.stored_model import follow_store, one_version, version_column
from rlhf_triton.wire.contract import PROBABILITIES, PROCESS, REWARD_VERSION, REWARDS, STORE, TokenRow


def serve(args: Mapping[str, str]) -> Engine:
    """Return the engine that serves scores of one fixed checkpoint, or of its current version in a weights store."""
    process = TorchProcess(args)
    parameters = process.parameters
    folder = parameters.path("model")
    stored, per_token = (parameters.optional(name) is not None for name in (STORE, PROCESS))
    versions = follow_store(process) if stored else one_version(process)
    model: RewardModel = versions.version.model
    limits = read_limits(model.limits, parameters)
    reader = reward_reader(folder, limits, parameters.optional, skipped_pad_id=model.skipped_pad_id)
    if tokenizer_kind(folder) is not None:
        reader.load_tokenizer()
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
