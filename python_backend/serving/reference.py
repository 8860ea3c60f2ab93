"""Triton model `reference`: log-probs under the frozen initial policy.

Replies with `logprobs` FP32 [B, S], zero-padded. Index t is the log-prob of token t+1 under the sampling distribution:
at the sampling temperature, with banned tokens excluded.
"""

from collections.abc import Mapping

from rlhf_triton.models.batching import padded_rows
from rlhf_triton.models.language_model import LanguageModel
from rlhf_triton.python_backend.serving.requests import read_limits
from rlhf_triton.python_backend.serving.scoring import Engine
from rlhf_triton.python_backend.serving.torch_scoring import TorchProcess, forward_tokens
from rlhf_triton.python_backend.serving.triton import Call, log, triton_model
from rlhf_triton.python_backend.serving.versions.stored_model import one_version
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import ContractError, ScoringRows, scoring_rows
from rlhf_triton.wire.texts import printable


def serve(args: Mapping[str, str]) -> Engine:
    """Return the engine that serves log-probs of one fixed checkpoint."""
    process = TorchProcess(args)
    parameters = process.parameters
    folder = parameters.path("model")
    versions = one_version(process)
    model: LanguageModel = versions.version.model
    limits = read_limits(model.limits, parameters)

    def read(call: Call) -> ScoringRows:
        tokens = call.array(contract.TOKENS)
        if tokens is None:
            raise ContractError(f"{contract.TOKENS}: missing")
        return scoring_rows(tokens, call.array(contract.SEQUENCE_LENGTHS), limits=limits)

    temperature = parameters.text(contract.TEMPERATURE)
    banned = printable(parameters.text(contract.BANNED_TOKEN_IDS), limit=200)
    log(f"{parameters.model}: {folder.name}, log-probs at temperature {temperature}, banned tokens {banned}")
    return Engine(
        process,
        read=read,
        versions=versions,
        forward=forward_tokens,
        reply={contract.LOGPROBS: lambda scoring: padded_rows(scoring.outputs, scoring.width)},
        max_length=limits.max_length,
    )


TritonPythonModel = triton_model(serve)
