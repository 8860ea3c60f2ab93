"""Triton model `critic`: serves the weights version that CURRENT names and hot-swaps newer ones.

Replies with `values` FP32 [B, S], zero-padded, and `weights_version` INT64 [B, 1]. One version scores a whole request.
"""

from collections.abc import Mapping

from rlhf_triton.models.batching import padded_rows
from rlhf_triton.python_backend.serving.requests import RowReader, read_limits
from rlhf_triton.python_backend.serving.scoring import Engine, Reply
from rlhf_triton.python_backend.serving.torch_scoring import TorchProcess, forward_tokens
from rlhf_triton.python_backend.serving.triton import triton_model
from rlhf_triton.python_backend.serving.versions.stored_model import follow_store, version_column
from rlhf_triton.wire.contract import AFTER_CRITIC, VALUES, WEIGHTS_VERSION


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
        read=reader.read,
        versions=versions,
        forward=forward_tokens,
        reply=REPLY,
        max_length=limits.max_length,
    )


REPLY: Reply = {
    VALUES: lambda scoring: padded_rows(scoring.outputs, scoring.width),
    WEIGHTS_VERSION: version_column,
    # The ensemble critic_infer always requests this output, even for `rewards` alone; it needs no forward pass.
    AFTER_CRITIC: version_column,
}
TritonPythonModel = triton_model(serve)
