"""Triton model `critic_save`: makes the sidecar write a checkpoint or rewind to an earlier step.

Replies once the sidecar has finished, with `status` 0 and the `weights_version` being served.
"""

import numpy as np

from rlhf_triton.python_backend.serving.journal_model import JournalServer
from rlhf_triton.python_backend.serving.triton import Call, parameters_of, triton_model
from rlhf_triton.store.journal import Entry, Journal, Result
from rlhf_triton.store.ownership import Sender
from rlhf_triton.wire import contract
from rlhf_triton.wire.contract import optional_count, optional_counts


def accept(journal: Journal, call: Call, run_id: str | None, sender: Sender | None) -> Entry:
    """Journal a save or a rewind, so that the sidecar processes it in order with the training steps."""
    optional_count(contract.DUMMY_VAR, call.array(contract.DUMMY_VAR), minimum=0)
    target = optional_count(contract.REWIND_TO, call.array(contract.REWIND_TO), minimum=0)
    if target is None:
        step = optional_count(contract.STEP, call.array(contract.STEP), minimum=0)
        keep_steps = optional_counts(contract.KEEP_STEPS, call.array(contract.KEEP_STEPS))
        return journal.accept_save(run_id=run_id, step=step, keep_steps=keep_steps, sender=sender)
    return journal.accept_rewind(run_id=run_id, target=target, sender=sender)


def reply(_: Result) -> contract.Arrays:
    """Return the response tensors."""
    return {contract.STATUS: np.zeros(1, np.int64)}


TritonPythonModel = triton_model(lambda args: JournalServer(parameters_of(args), accept, reply))
