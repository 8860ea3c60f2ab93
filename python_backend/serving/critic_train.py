"""Triton model `critic_train`: accepts training payloads into the journal.

Replies with `loss_mean` and `weights_version` once every critic instance serves the updated weights.
"""

import functools
import json
from collections.abc import Mapping

import numpy as np

from rlhf_triton.checkpoints.inspection import CONFIG_FILE
from rlhf_triton.checkpoints.row_length import max_positions
from rlhf_triton.process import keep_freed_memory
from rlhf_triton.python_backend.serving.journal_model import JournalServer, traceparent_of
from rlhf_triton.python_backend.serving.triton import Call, parameters_of, triton_model
from rlhf_triton.store.journal import Entry, Journal, Result
from rlhf_triton.store.ownership import Sender
from rlhf_triton.store.weights import FIRST_VERSION, WeightsStore
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import Limits, optional_count
from rlhf_triton.wire.training_payload import train_payload


def serve(args: Mapping[str, str]) -> JournalServer:
    """Return the server that journals training payloads; the sidecar, a separate process, trains on them."""
    parameters = parameters_of(args)
    keep_freed_memory()  # page faults for every payload would cost more than validating it
    store = WeightsStore(parameters.path("store"))
    number = store.current()
    if number is None:
        raise RuntimeError(f"the weights store {store.root} is empty; {FIRST_VERSION}")
    store.verify_file(store.manifest(number), CONFIG_FILE)
    config = json.loads((store.folder(number) / CONFIG_FILE).read_bytes())
    limits = Limits(int(config["vocab_size"]), max_positions(config))
    return JournalServer(parameters, functools.partial(accept, limits), reply)


def accept(limits: Limits, journal: Journal, call: Call, run_id: str | None, sender: Sender | None) -> Entry:
    """Validate a payload and append it to the journal."""
    names = (contract.TOKENS, contract.SEQUENCE_LENGTHS, contract.RETURNS, contract.PREV_VALUES, contract.MASK)
    payload = train_payload({name: call.array(name) for name in names}, limits)
    step = optional_count(contract.STEP, call.array(contract.STEP), minimum=1)
    return journal.accept_training(payload, run_id=run_id, step=step, sender=sender, traceparent=traceparent_of(call))


def reply(result: Result) -> contract.Arrays:
    """Return the response tensors."""
    return {contract.LOSS_MEAN: np.asarray([result.loss_mean], np.float32)}


TritonPythonModel = triton_model(serve)
