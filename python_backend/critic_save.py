"""critic_save inside tritonserver: has the sidecar write a checkpoint, or rewind to an earlier step.

Replies once that is on disk and served, with `status` 0 and the `weights_version` that is served.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from python_backend.contract import (
    DUMMY_VAR,
    KEEP_STEPS,
    REWIND_TO,
    RUN_ID,
    SENDER_HEADER,
    STATUS,
    STEP,
    WEIGHTS_VERSION,
    optional_count,
    optional_counts,
    optional_text,
)
from python_backend.journal import Entry, Result
from python_backend.journal_model import JournalModel
from python_backend.ownership import Sender
from python_backend.serving import Call


class TritonPythonModel(JournalModel):
    """Journals saves and rewinds, so that they are done in order with the trainings."""

    def accept(self, call: Call) -> Entry:
        optional_count(DUMMY_VAR, call.array(DUMMY_VAR), minimum=0)
        run_id = optional_text(RUN_ID, call.array(RUN_ID))
        sender = Sender.parse(call.header(SENDER_HEADER))
        target = optional_count(REWIND_TO, call.array(REWIND_TO), minimum=0)
        if target is None:
            step = optional_count(STEP, call.array(STEP), minimum=0)
            keep_steps = optional_counts(KEEP_STEPS, call.array(KEEP_STEPS))
            return self.journal.accept_save(run_id=run_id, step=step, keep_steps=keep_steps, sender=sender)
        return self.journal.accept_rewind(run_id=run_id, target=target, sender=sender)

    def reply(self, result: Result) -> Mapping[str, np.ndarray]:
        return {
            STATUS: np.zeros(1, np.int64),
            WEIGHTS_VERSION: np.asarray([result.weights_version], np.int64),
        }
