"""Trains the critic of a run that has ended again, and compares it with the run's journal and checkpoints."""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.store.journal import Journal, JournalState
from rlhf_triton.store.journal_entry import Entry, Result, read_training_file
from rlhf_triton.store.record_log import first_difference
from rlhf_triton.store.weights import Origin, WeightsStore
from rlhf_triton.trainer.checkpoint import CheckpointFolder, CheckpointState
from rlhf_triton.trainer.critic_update import load_update
from rlhf_triton.training_engine.ranks import ALONE
from rlhf_triton.training_engine.slices import read_tensors
from rlhf_triton.wire.training_payload import TrainPayload


class CriticReplay:
    """The critic of a run, loaded from the checkpoint of a step, or as it started; trains further steps."""

    def __init__(self, config: RunConfig, step: int) -> None:
        """Load the critic after `step`. Raises RlhfError if it has no intact checkpoint of it."""
        self._checkpoints = CheckpointFolder(config.run.critic_checkpoints_dir)
        self._journal = JournalState(config.run.journal_dir, config.run.identity)
        self._store = WeightsStore(config.run.weights_dir)
        self._threads = config.trainer.threads
        self._step = step
        self._store.verify_files(0)
        folder = self._store.folder(0)
        self._update = load_update(folder, config.trainer, seed=config.run.seed, dtype=config.critic.dtype)
        if step:
            self._checkpoints.load(step, self._update)

    def resumed(self, config: RunConfig) -> "CriticReplay":
        """Return the same critic with the settings with which the run has resumed."""
        again = CriticReplay(config, 0)
        with tempfile.TemporaryDirectory() as folder:
            self._update.trained.save(folder)
            again._update.trained.load(folder, self._update.trained.optimizer_step)
        return again

    def save(self, new: RunConfig) -> None:
        """Write the critic into the folder of a new run, so that its sidecar continues after the same step.

        Its version 0 has the files of this run's, in a store of its own: later versions differ, and `critic.pretrain`
        finds the new run's steps by the run id. The step counts as trained, as it would after a rewind to it.
        """
        store = WeightsStore(new.run.weights_dir)
        trained = self._update.trained
        first = self._store.manifest(0)

        def copy_files(folder: Path) -> None:
            for name in first.files:
                shutil.copyfile(self._store.folder(0) / name, folder / name)

        origin = Origin(
            run_id=new.run.identity, tokenizer=first.tokenizer, made_from=first.made_from, source=first.source
        )
        store.set_current(store.add(copy_files, origin).version)
        done = Entry(self._step, 0, "train")
        result = Result(entry=done.name, weights_version=0)
        Journal(new.run.journal_dir, new.run.identity).finish(done, result)
        state = CheckpointState(
            run_id=new.run.identity,
            step=self._step,
            optimizer_step=trained.optimizer_step,
            version=0,
            epoch=0,
            requested=True,
            settings=trained.settings,
            base_digest=store.manifest(0).digest,
            results=[asdict(result)],
        )
        CheckpointFolder(new.run.critic_checkpoints_dir).save(self._update, state)

    def train(self, step: int, payload: TrainPayload) -> str:
        """Train on the payload of `step`; return the first difference from the run, "" if there is none.

        The journal's entry, its result and the checkpoint of the step are compared only if the run still has them.
        """
        self._step = step
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
