"""Client for the control plane of a running tritonserver: load, reload, statistics and probes, each with a timeout.

Uses gRPC, because a load over HTTP stalls all HTTP inference until it ends.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException

from rlhf_triton.client.errors import DEAD_PROCESS, RESTRICTED, code_of
from rlhf_triton.errors import RlhfError
from rlhf_triton.store import control_key
from rlhf_triton.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    DUMMY_VAR,
    LOGPROBS,
    NEEDS_MORE,
    PROBE_HEADER,
    REFERENCE,
    REWARD_CHECKPOINT,
    REWARD_COMPONENT,
    REWARD_ERROR,
    REWARD_FUNCTION_PREFIX,
    REWARD_MODEL,
    REWARDS,
    SEQUENCE_LENGTHS,
    TOKENS,
    UNTIL_LOADED,
    VALUES,
    WEIGHTS_VERSION,
    Arrays,
)

CALL_TIMEOUT_S = 10.0
UNLOAD_POLL_S = 0.05

# Short backoffs notice a starting server at once (by default gRPC backs off for up to two minutes); with a local
# pool, other clients in this process do not share these settings. A proxy from the environment cannot reach loopback.
_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5000),  # not a backoff: the time that a busy server has to answer the handshake
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_DEAD_PROCESS = re.compile(r"Stub process '[^']*' is not healthy\.")
# Models may also return UNAVAILABLE, so gRPC's own connection errors can only be recognised by their text.
_CONNECTION_ERROR = re.compile(
    r"failed to connect|socket closed|connection (reset|refused)|recvmsg|broken pipe|stream removed|goaway",
    re.IGNORECASE,
)
_NO_REPLY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
# Outputs that a probe requests from each scoring model.
PROBED_OUTPUTS = {
    REWARD_CHECKPOINT: (REWARDS,),
    REWARD_MODEL: (REWARDS,),  # if it is an ensemble, this also probes the mixture
    REFERENCE: (LOGPROBS,),
    CRITIC: (VALUES, WEIGHTS_VERSION),
    CRITIC_INFER: (VALUES, WEIGHTS_VERSION),  # its rewards are reward_model's, if any
}
# Invalid inputs: a probe of these models expects a rejection.
_REJECTIONS = {CRITIC_TRAIN: (TOKENS, np.full((1, 1), -1)), CRITIC_SAVE: (DUMMY_VAR, np.full(1, -1))}
_PROBE = {PROBE_HEADER: "1"}


class Failure(Enum):
    """Why a call of the control plane failed."""

    NO_REPLY = "no reply, or an unexpected one"
    REFUSED = "the server tried to load the model and failed; the message contains the model's own error"
    FAILED = "the model answered with an error (INTERNAL)"
    DIED = "the model's process has crashed or was killed: every request fails until the model is reloaded"
    UNUSABLE = "the model has lost its device or one of its ranks; its process refuses every request"


class ControlPlaneError(RlhfError):
    """The server rejected the request, failed or did not respond; the message names the model and the cause."""

    def __init__(self, message: str, kind: Failure = Failure.NO_REPLY, code: str | None = None) -> None:
        """`code`: the code in the server's message, see `client.errors`."""
        super().__init__(message)
        self.kind = kind
        self.code = code


class ControlPlane(AbstractContextManager["ControlPlane"]):
    """A connection to one server; safe to use from several threads."""

    def __init__(self, grpc_url: str, key: str | None = None) -> None:
        """Open a connection.

        Args:
            grpc_url: `host:port`.
            key: key for model control, needed only by `load`; default: from the environment.
        """
        self._url = grpc_url
        key = key or os.environ.get(control_key.VARIABLE)
        self._control = {control_key.GRPC_HEADER: key} if key else None
        self._client = triton.InferenceServerClient(grpc_url, channel_args=_CHANNEL_OPTIONS)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls in flight fail."""
        self._client.close()

    def is_live(self) -> bool:
        """Return whether the server reports that it is live; False if it cannot be reached."""
        try:
            return bool(self._client.is_server_live(client_timeout=1.0))
        except InferenceServerException:
            return False

    def answers_inference(self, timeout_s: float) -> bool:
        """Return whether the server responds to a gRPC inference request within `timeout_s`, even if with an error.

        A server whose inference threads are deadlocked still reports that it is live. The request names a model that
        does not exist, so the server rejects it at once, without queueing it.
        """
        try:
            self._client.infer("no-model", [], client_timeout=timeout_s)
        except InferenceServerException as error:
            return str(error.status()).removeprefix("StatusCode.") not in _NO_REPLY
        return True

    def is_ready(self, model: str) -> bool:
        """Return whether the server lists the model as ready.

        A model whose stub process has died is still listed as ready, so send it a probe request as well.
        """
        return bool(self._call(model, self._client.is_model_ready, model))

    def server_version(self) -> tuple[int, ...]:
        """Return the server's version, such as `(2, 51, 0)`."""
        metadata = self._call("the server", self._client.get_server_metadata)
        return tuple(int(number) for number in re.findall(r"\d+", metadata.version)[:3])

    def load(
        self, model: str, *, parameters: Mapping[str, str] | None = None, unload: bool = False, timeout_s: float
    ) -> None:
        """Load the model, or reload it with the config `parameters`.

        The old instance serves until the new one is ready. With `unload`, it ends first; until then, requests to the
        model, and to ensembles that contain it, get 404 at once. Without parameters, Triton reloads only if the files
        on disk have changed. With parameters, this sends the active config with `parameters.<key>.string_value` set;
        that counts as a change, so Triton always starts a new instance.

        Raises:
            ControlPlaneError: the model could not be loaded (REFUSED) and the old instance keeps serving; the server
                did not respond within `timeout_s` (it may still finish the load) or cannot be reached; or the
                parameters are already active.
        """
        override = None
        if parameters:
            config = self.config(model)
            if all(config.parameters[key].string_value == value for key, value in parameters.items()):
                raise ControlPlaneError(
                    f"{model} was not reloaded: {dict(parameters)} is already active, "
                    "and Triton reloads only a changed configuration; send a value that differs"
                )
            for key, value in parameters.items():
                config.parameters[key].string_value = value
            override = json_format.MessageToJson(config, preserving_proto_field_name=True)
        if unload:
            self._unload(model, timeout_s)
        subject = f"{model} could not be loaded"
        try:
            self._client.load_model(model, headers=self._control, config=override, client_timeout=timeout_s)
        except InferenceServerException as error:
            sentence = self._sentence(subject, error, timeout_s)
            is_reply = str(error.status()).removeprefix("StatusCode.") not in _NO_REPLY
            kind = Failure.REFUSED if is_reply else Failure.NO_REPLY
            raise ControlPlaneError(sentence, kind, code_of(str(error.message()))) from error

    def _unload(self, model: str, timeout_s: float) -> None:
        """Unload the model and wait until its process has ended."""
        self._call(model, self._client.unload_model, model, headers=self._control)
        deadline = time.monotonic() + timeout_s
        while True:
            index = self._call(model, self._client.get_model_repository_index, headers=self._control)
            if all(entry.state != "UNLOADING" for entry in index.models if entry.name == model):
                return
            if time.monotonic() > deadline:
                raise ControlPlaneError(f"{model} was not unloaded within {timeout_s:g} s")
            time.sleep(UNLOAD_POLL_S)

    def config(self, model: str) -> Any:
        """Return the configuration that the model was loaded with, overrides included, as a ModelConfig message."""
        return self._call(model, self._client.get_model_config, model).config

    def num_instances(self, model: str) -> int:
        """Return the number of the model's instances, each a process, over all devices."""
        return sum(group.count * max(1, len(group.gpus)) for group in self.config(model).instance_group)

    def probe(self, model: str, timeout_s: float, outputs: Sequence[str] = ()) -> Arrays:
        """Send the model a request without side effects; return the `outputs` of its reply, {} if it has none.

        A scoring model scores one row of two tokens with id 0, by default for the outputs that prove that it computes;
        reward functions are not run. A reward model that needs more than tokens rejects the row, which also proves that
        it is alive. critic_train and critic_save receive an invalid request and must reject it. Other models are not
        probed.

        Raises ControlPlaneError: the model did not answer, or accepted an invalid request.
        """
        if model in _REJECTIONS:
            self._probe_rejection(model, timeout_s)
            return {}
        wanted = tuple(outputs) or PROBED_OUTPUTS.get(model, ())
        if model.startswith(REWARD_FUNCTION_PREFIX):  # the sample is artificial, so NaN is a valid score
            wanted = (REWARD_COMPONENT, REWARD_ERROR)
        return self._probe_scoring(model, wanted, timeout_s) if wanted else {}

    def _probe_scoring(self, model: str, outputs: Sequence[str], timeout_s: float) -> Arrays:
        inputs = [_tensor(TOKENS, np.zeros((1, 2))), _tensor(SEQUENCE_LENGTHS, np.full((1, 1), 2))]
        wanted = [triton.InferRequestedOutput(name) for name in outputs]
        try:
            reply = self._call(
                model,
                self._client.infer,
                model,
                inputs,
                outputs=wanted,
                headers=_PROBE,
                timeout_s=timeout_s,
            )
        except ControlPlaneError as error:
            if error.code == NEEDS_MORE:
                return {}
            raise
        arrays = {name: reply.as_numpy(name) for name in outputs}
        empty = [name for name, array in arrays.items() if array is None or array.size == 0]
        if empty:
            raise ControlPlaneError(
                f"{model} returned empty {', '.join(empty)}; the usual cause is NumPy 2 in the server's Python: "
                "install numpy<2 there"
            )
        return arrays

    def _probe_rejection(self, model: str, timeout_s: float) -> None:
        name, value = _REJECTIONS[model]
        try:
            self._client.infer(model, [_tensor(name, value)], headers=_PROBE, client_timeout=timeout_s)
        except InferenceServerException as error:
            # Rejections by the server's core, not by the model, do not count; they start with the request's id.
            refused = error.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.UNIMPLEMENTED")
            if refused and not str(error.message()).startswith("[request id"):
                return
            raise self._error(model, error, timeout_s) from error
        raise ControlPlaneError(f"{model} accepted {name} = -1, so another model is served under its name")

    def _call(self, subject: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timeout_s = kwargs.pop("timeout_s", CALL_TIMEOUT_S)
        try:
            return method(*args, client_timeout=timeout_s, **kwargs)
        except InferenceServerException as error:
            raise self._error(subject, error, timeout_s) from error

    def _error(self, subject: str, error: InferenceServerException, timeout_s: float) -> ControlPlaneError:
        failed = Failure.FAILED if str(error.status()).endswith("INTERNAL") else Failure.NO_REPLY
        kinds = {UNTIL_LOADED: Failure.UNUSABLE, DEAD_PROCESS: Failure.DIED}
        code = code_of(str(error.message()))
        return ControlPlaneError(self._sentence(subject, error, timeout_s), kinds.get(code or "", failed), code)

    def _sentence(self, subject: str, error: InferenceServerException, timeout_s: float) -> str:
        status = str(error.status()).removeprefix("StatusCode.")
        if status == "DEADLINE_EXCEEDED":
            return f"{subject}: no answer within {round(timeout_s, 1):g} s"
        if code_of(str(error.message())) == RESTRICTED:
            return (
                f"{subject}: the key for model control of the server on {self._url} is missing or wrong; set "
                f"{control_key.VARIABLE} to the content of {control_key.KEY_FILE} in the weights folder of its run"
            )
        if status == "UNAVAILABLE" and _CONNECTION_ERROR.search(str(error.message())):
            return f"{subject}: the server on {self._url} cannot be reached"
        return f"{subject}: {root_cause(str(error.message()))}"


USER_ERRORS = ("CheckpointError: ", "FunctionError: ", "WeightsError: ")  # errors of models with a remedy for the user


def root_cause(message: str) -> str:
    """Return the innermost error of Triton's nested error text, with file and line if it is a bug."""
    message = message.strip().rstrip(";").strip()
    message = _DEAD_PROCESS.sub("its process has died", message)
    message = re.sub(r"^load failed for model '[^']*': (version \d+ is at \w+ state: )?", "", message)
    message = re.sub(r"^\[request id: [^\]]*\] ", "", message)
    message = re.sub(r"^(Internal|Invalid argument|Unavailable|Not found|Unknown): ", "", message)
    text, _, frames = message.partition("\n\nAt:\n")
    if (reason := text.partition(": ")[2]) and text.startswith(USER_ERRORS):
        return " ".join(reason.split())
    place = re.match(r"\s*(.+)\((\d+)\): ", frames)
    where = f" ({PurePath(place[1]).name} line {place[2]})" if place else ""
    return " ".join(text.split()) + where


def _tensor(name: str, values: np.ndarray) -> triton.InferInput:
    tensor = triton.InferInput(name, list(values.shape), "INT64")
    tensor.set_data_from_numpy(values.astype(np.int64))
    return tensor
