"""Triton model `critic`: serves the weights version that CURRENT names and hot-swaps newer ones.

Replies with `values` FP32 [B, S], zero-padded, and `weights_version` INT64 [B, 1]. One version scores a whole request.
"""

import functools
from collections.abc import Mapping

import numpy as np

from rlhf_triton.models.batching import padded_rows
from rlhf_triton.python_backend.serving.requests import RowReader, read_limits
from rlhf_triton.python_backend.serving.scoring import Engine, Reply, Scoring
from rlhf_triton.python_backend.serving.torch_scoring import TorchProcess, forward_tokens
from rlhf_triton.python_backend.serving.triton import Call, triton_model
from rlhf_triton.python_backend.serving.versions.stored_model import follow_store, version_column
from rlhf_triton.wire.contract import (
    AFTER_CRITIC,
    PROMPT_LENGTHS,
    RESPONSE_VALUES,
    VALUES,
    WEIGHTS_VERSION,
    ContractError,
    ScoringRows,
)


def serve(args: Mapping[str, str]) -> Engine:
    """Return the engine that serves values of the current version in a weights store."""
    process = TorchProcess(args)
    versions = follow_store(process)
    limits = read_limits(versions.version.model.limits, process.parameters)
    reader = RowReader(
        process.parameters.path("model"), limits, add_special_tokens=False, checks_size=True, owner="critic"
    )
    return Engine(
        process,
        read=functools.partial(read, reader),
        versions=versions,
        forward=forward_tokens,
        reply=REPLY,
        max_length=limits.max_length,
    )


def read(reader: RowReader, call: Call) -> ScoringRows:
    """Return the rows of a request. Raises ContractError if it is invalid."""
    # If a caller names no outputs, Triton requests all of them. So a missing `prompt_lengths` is an error only if
    # `values` was not requested as well; otherwise the reply omits `response_values`.
    rows = reader.read(call)
    if RESPONSE_VALUES in call.wanted and VALUES not in call.wanted and call.array(PROMPT_LENGTHS) is None:
        raise ContractError(f"{PROMPT_LENGTHS}: missing; the output {RESPONSE_VALUES} requires it")
    return rows


def response_values(scoring: Scoring) -> np.ndarray | None:
    """Return the values before each response token, at indices p-1 ... length-2; None without prompt lengths."""
    starts = [row.prompt_length for row in scoring.rows]
    parts = [output[p - 1 : -1] for output, p in zip(scoring.outputs, starts, strict=True) if p is not None]
    return padded_rows(parts, max(1, *(part.size for part in parts))) if parts else None


REPLY: Reply = {
    VALUES: lambda scoring: padded_rows(scoring.outputs, scoring.width),
    RESPONSE_VALUES: response_values,
    WEIGHTS_VERSION: version_column,
    # The ensemble critic_infer always requests this output, even for `rewards` alone; it needs no forward pass.
    AFTER_CRITIC: version_column,
}
TritonPythonModel = triton_model(serve)
