"""Runs the real sidecar on a real journal and store, in a thread; only the serving instances are simulated."""

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from settings import nested
from tiny_checkpoints import VOCAB
from waiting import wait_for

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.serving_records import ServingRecord
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.sidecar import run_sidecar
from rlhf_triton.wire.training_payload import TrainPayload

PATIENCE_S = 120.0


class Killed(BaseException):
    """Simulates SIGKILL: a BaseException that nothing in the sidecar catches."""


class Instance(threading.Thread):
    """A simulated critic instance, like python_backend/serving/critic.py: follows CURRENT, records what it serves."""

    def __init__(self, store, name="critic_0"):
        super().__init__(daemon=True)
        self.store = store
        self.instance = name
        self.refuses = set()
        self.served = []
        self.paused = threading.Event()
        self._stop_now = threading.Event()

    def run(self):
        refused = None
        while not self._stop_now.wait(0.003):
            number = self.store.current()
            if self.paused.is_set() or number is None or number in (*self.served[-1:], refused):
                continue
            if number in self.refuses:
                refused = number
                self._say(rejected=number, error="it looks odd")
            else:
                self.served.append(number)
                self._say()

    def _say(self, **more):
        previous = self.served[-2] if len(self.served) > 1 else None
        self._record = ServingRecord.of_this_process(self.instance, self.served[-1], previous=previous, **more)
        self.store.records.put(self._record)

    def close(self):
        self._stop_now.set()
        self.join()
        self.store.records.withdraw(self._record)


class Rig:
    """A run's folder, its instances, and its current sidecar."""

    def __init__(self, folder, checkpoint, dtype="float32", **settings):
        trainer = {
            "lr": 1e-2,
            "warmup_steps": 2,
            "max_steps": 100,
            "global_batch_size": 4,
            "checkpoint_every": 100,
            **settings,
        }
        self.config = RunConfig.model_validate(
            {
                "run": {"dir": folder, "run_id": "run"},
                "critic": {"model": checkpoint, "dtype": dtype},
                "trainer": nested(TrainerSection, trainer),
                "server": {"grpc_port": 1},
            }
        )
        self.journal = Journal(self.config.run.journal_dir, "run")
        self.store = WeightsStore(self.config.run.weights_dir)
        self.checkpoints = CheckpointFolder(folder / "checkpoints" / "critic")
        self.instances = []
        self.error = None
        self.thread = None

    def metrics(self):
        """Return the lines of critic_metrics.jsonl."""
        return read_jsonl(self.config.run.dir / "critic_metrics.jsonl")

    def serve(self, name="critic_0"):
        instance = Instance(self.store, name)
        instance.start()
        self.instances.append(instance)
        return instance

    def begin(self):
        """Start the sidecar, and an instance that serves its critic."""
        self.serve()
        return self.start()

    def start(self):
        self.error = None
        self.stop_now = threading.Event()
        config = self.config
        stop = self.stop_now

        def run():
            try:
                run_sidecar(config, stop)
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        return self

    def ended(self):
        """Wait until the sidecar ends on its own; return the exception that ended it, or None."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        return self.error

    def assert_ends(self, kind, *parts):
        """Assert that the sidecar ends right after its start, with an error whose message has these parts."""
        error = self.start().ended()
        assert isinstance(error, kind), error
        for part in parts:
            assert part in str(error), error

    def stop(self):
        self.stop_now.set()
        return self.ended()

    def close(self):
        if self.thread is not None:
            self.stop()
        for instance in self.instances:
            instance.close()

    def kill(self):
        """Kill the sidecar once it is idle."""
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, Journal, "changed_at", "before", call=1)  # called by an idle sidecar only
            assert isinstance(self.ended(), Killed)

    def send(self, step, value=None):
        return self.journal.accept_training(payload(step if value is None else value), run_id="run", step=step)

    def answer(self, entry):
        wait_for(lambda: self.journal.result(entry) is not None or self.error is not None)
        result = self.journal.result(entry)
        assert result is not None, self.error
        return result

    def train(self, *steps):
        return [self.answer(self.send(step)) for step in steps]

    def save(self, step=None, keep_steps=None):
        return self.answer(self.journal.accept_save(run_id="run", step=step, keep_steps=keep_steps))

    def rewind(self, target):
        return self.answer(self.journal.accept_rewind(run_id="run", target=target))

    def weights(self, version=None):
        version = self.store.current() if version is None else version
        tensors = load_file(self.store.folder(version) / "model.safetensors")
        return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def payload(value):
    rng = np.random.default_rng(value)
    lengths = rng.integers(2, 9, 7)
    count = int(lengths.sum()) - 7
    targets = [rng.normal(size=count).astype(np.float32) for _ in range(2)]
    return TrainPayload(rng.integers(0, VOCAB, lengths.sum()), lengths, *targets, np.ones(count, np.float32))


def overflowing():
    """Return a payload with finite returns whose gradient is not finite."""
    sane = payload(0)
    return TrainPayload(sane.tokens, sane.lengths, np.full_like(sane.returns, 1e38), sane.prev_values, sane.mask)


def kill_at(patch, owner, name, when, call):
    """Kill the sidecar before or after its `call`-th call of `owner.name`."""
    original = getattr(owner, name)
    calls = []

    def killing(*args, **kwargs):
        calls.append(None)
        if len(calls) == call and when == "before":
            raise Killed
        result = original(*args, **kwargs)
        if len(calls) == call:
            raise Killed
        return result

    patch.setattr(owner, name, killing)
