"""Triton model `critic_save`: makes the sidecar write a checkpoint or rewind to an earlier step.

Replies once the sidecar has finished, with `status` 0 and the `weights_version` being served.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from python_backend.serving.journal_model import JournalModel
from python_backend.serving.triton import Call
from python_backend.store.journal import Entry, Result
from python_backend.store.ownership import Sender
from python_backend.wire import contract
from python_backend.wire.contract import optional_count, optional_counts, optional_text


class TritonPythonModel(JournalModel):
    """Journals saves and rewinds, so that the sidecar processes them in order with the training steps."""

    def accept(self, call: Call) -> Entry:
        optional_count(contract.DUMMY_VAR, call.array(contract.DUMMY_VAR), minimum=0)
        run_id = optional_text(contract.RUN_ID, call.array(contract.RUN_ID))
        sender = Sender.parse(call.header(contract.SENDER_HEADER))
        target = optional_count(contract.REWIND_TO, call.array(contract.REWIND_TO), minimum=0)
        if target is None:
            step = optional_count(contract.STEP, call.array(contract.STEP), minimum=0)
            keep_steps = optional_counts(contract.KEEP_STEPS, call.array(contract.KEEP_STEPS))
            return self.journal.accept_save(run_id=run_id, step=step, keep_steps=keep_steps, sender=sender)
        return self.journal.accept_rewind(run_id=run_id, target=target, sender=sender)

    def reply(self, result: Result) -> Mapping[str, np.ndarray]:
        return {
            contract.STATUS: np.zeros(1, np.int64),
            contract.WEIGHTS_VERSION: np.asarray([result.weights_version], np.int64),
        }
