"""Trains the critic of a run that has ended again, and compares it with the run's journal and checkpoints."""

from collections.abc import Mapping

import numpy as np
import torch

from rlhf_triton.config import RunConfig
from rlhf_triton.store.journal import JournalState
from rlhf_triton.store.journal_entry import Entry, read_training_file
from rlhf_triton.store.record_log import first_difference
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.critic_update import load_update
from rlhf_triton.training_engine.ranks import ALONE
from rlhf_triton.training_engine.slices import read_tensors
from rlhf_triton.wire.training_payload import TrainPayload


class CriticReplay:
    """The critic after a step, of which it has a checkpoint, or after the start."""

    def __init__(self, config: RunConfig, step: int) -> None:
        """Load the critic after `step`. Raises RlhfError if it has no intact checkpoint of it."""
        self._checkpoints = CheckpointFolder(config.run.dir / "checkpoints" / "critic")
        self._journal = JournalState(config.run.journal_dir, config.run.identity)
        self._threads = config.trainer.threads
        folder = WeightsStore(config.run.weights_dir).folder(0)
        self._update = load_update(folder, config.trainer, seed=config.run.seed, dtype=config.critic.dtype)
        if step:
            self._checkpoints.load(step, self._update)

    def train(self, step: int, payload: TrainPayload) -> str:
        """Train on the payload of `step`; return the first difference from the run, "" if there is none.

        What the run no longer has is not compared: the journal's entry, its result, or a checkpoint of the step.
        """
        entry = Entry(step, 0, "train")
        for path in self._journal.training_files():
            if path.name == entry.name:
                sent, _ = read_training_file(path)
                if different := _different_value(sent.arrays(), payload.arrays()):
                    return f"the critic's payload: {different}"
        result = self._journal.result(entry) if self._journal.is_answered(entry) else None
        if result is not None and result.loss_mean is None:  # the update failed, and left the critic as it was
            return ""
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        report = self._update.train(payload, lambda _: None, result.skipped_batches if result else None)
        torch.set_num_threads(threads)
        if result is not None and result.loss_mean != report.loss_mean:
            return f"the critic's loss: {result.loss_mean} in the run, {report.loss_mean} here"
        return self._different_tensor(step) if step in self._checkpoints.steps() else ""

    def _different_tensor(self, step: int) -> str:
        trained = self._update.trained
        now = {**trained.weights(), **trained.state()}
        saved = {name: torch.empty_like(tensor) for name, tensor in now.items()}
        read_tensors(saved, self._checkpoints.root / str(step), ALONE)
        return next((f"the critic's `{name}`" for name in now if not torch.equal(now[name], saved[name])), "")


def _different_value(was: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]) -> str:
    """Return the first field, position and both values that differ in a bit; "" if none does."""
    for name, array in was.items():
        if array.shape != now[name].shape:
            return f"`{name}` has the shape {list(array.shape)} in the run, {list(now[name].shape)} here"
        index = first_difference(array, now[name])
        if index is not None:
            return f"`{name}` at position {index}: {array[index]} in the run, {now[name][index]} here"
    return ""
