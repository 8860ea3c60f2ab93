"""The sidecar on two ranks as real processes: killed in each phase, stopped by a signal, and failing permanently."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import yaml
from out_of_memory import let_memory_be_short
from safetensors.torch import load_file
from sidecar_rig import payload
from tiny_checkpoints import save_tiny

from rlhf_triton.config.loading import load_config
from rlhf_triton.models.canary import canary_row, check_canary
from rlhf_triton.models.modeling import load_critic
from rlhf_triton.python_backend.serving.versions.follower import Follower
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.weights import WeightsStore

PATIENCE_S = 200.0
POLL_S = 0.002
STEPS = 7

pytestmark = pytest.mark.slow


class Job:
    """A sidecar, and an instance that serves its critic."""

    def __init__(self, folder, checkpoint, ranks):
        schedule = {"lr": 1e-2, "warmup_steps": 2, "max_steps": 100}
        path = folder / "run.yaml"
        path.write_text(
            yaml.safe_dump(
                {
                    "run": {"dir": str(folder), "run_id": "run"},
                    "critic": {"model": str(checkpoint)},
                    "server": {"grpc_port": 1},
                    "trainer": {
                        "ranks": ranks,
                        "optimizer": schedule,
                        "global_batch_size": 4,
                        "token_budget": 20,
                        "checkpoint_every": 3,
                        "publish": {"keep": 100},
                    },
                }
            )
        )
        self.path, config = path, load_config(path)
        self.journal = Journal(config.run.journal_dir, "run")
        self.store = WeightsStore(config.run.weights_dir)
        self.log = folder / "sidecar.log"
        self.checkpoints = config.run.dir / "checkpoints" / "critic"
        self.served = Follower(self.store, "critic_0", load=self._load, swaps=True, log_error=print)
        self.start()

    def start(self):
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "rlhf_triton.trainer", "--config", str(self.path)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def ranks(self):
        found = {}
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error, KeyError):  # it has just ended
                found[int(process.environ()["RANK"])] = process
        return found

    def both(self):
        """Return the two ranks by number, once they run."""
        return self.until(lambda: len(found := self.ranks()) == 2 and found)

    def answers(self, *entries):
        return [self.until(lambda entry=entry: self.journal.result(entry)) for entry in entries]

    def until(self, look):
        deadline = time.monotonic() + PATIENCE_S
        while not (found := look()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(POLL_S)
        return found

    def send(self, step):
        return self.journal.accept_training(payload(step), run_id="run", step=step)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self):
        self.process.kill()
        self.process.wait()
        if hasattr(self.served, "version"):
            self.served.stop()

    def _load(self, folder, served):
        """Load the critic as its Triton model does."""
        critic = load_critic(folder) if served is None else served.with_weights(folder)
        canary = self.store.manifest(int(folder.name)).canary
        if canary is not None:
            check_canary(critic, critic.values([canary_row(critic)])[0], canary)
        return critic


@pytest.fixture
def make(tmp_path):
    save_tiny(tmp_path / "critic", "llama", "critic")
    jobs = []

    def new(name, ranks=2):
        (tmp_path / name).mkdir()
        jobs.append(Job(tmp_path / name, tmp_path / "critic", ranks))
        jobs[-1].until(lambda: jobs[-1].store.current() is not None and jobs[-1].journal.is_followed())
        jobs[-1].served.start()
        return jobs[-1]

    yield new
    for job in jobs:
        job.close()


def kill(job, victim, others):
    victim.kill()
    _, alive = psutil.wait_procs([victim, *others], timeout=PATIENCE_S)
    assert not alive


def staging(job):
    return any(name.startswith(".staging-") for name in os.listdir(job.store.root))  # noqa: PTH208 - only names


def test_killed_ranks_do_not_change_the_sidecars_results(make):
    calm = make("calm")
    rough = make("rough")
    expected = calm.answers(*(calm.send(step) for step in range(1, STEPS + 1)))
    entries = [rough.send(1)]
    rough.answers(*entries)
    for rank in (0, 1):
        for phase in ("idle", "training", "publishing"):
            ranks = rough.both()
            rough.until(lambda: rough.journal.is_followed() and rough.journal.heartbeat().state == "idle")
            if phase != "idle":
                entries.append(rough.send(len(entries) + 1))
            if phase == "publishing":
                rough.until(lambda: staging(rough))
            kill(rough, ranks[rank], [ranks[1 - rank]])
            if phase == "idle":
                entries.append(rough.send(len(entries) + 1))
            rough.answers(*entries)
    assert [(r.weights_version, r.loss_mean, r.error) for r in rough.answers(*entries)] == [
        (r.weights_version, r.loss_mean, r.error) for r in expected
    ]
    for version in range(STEPS + 1):
        assert rough.store.manifest(version).digest == calm.store.manifest(version).digest
    assert rough.served.version.number == STEPS
    assert (calm.stop(), rough.stop()) == (0, 0)
    for path in (calm.checkpoints / str(STEPS)).glob("*.safetensors"):
        ours = load_file(path)
        theirs = load_file(rough.checkpoints / str(STEPS) / path.name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_sidecar_error_ends_all_ranks_once_and_a_killed_agent_leaves_none(make):
    job = make("run")
    ranks = [*job.both().values()]
    job.process.kill()
    assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1]
    job.process.wait()
    state = job.checkpoints / "9" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")  # a damaged checkpoint that cannot be recomputed
    job.start()
    assert job.process.wait(PATIENCE_S) == 2
    assert job.log.read_text().count("error: ") == 1


def test_out_of_memory_on_one_rank_ends_all_ranks_once_and_names_the_setting(make, monkeypatch, tmp_path):
    """There are no ten restarts as for a dead rank: each attempt would train the same step."""
    where = ("rlhf_triton.trainer.critic_update", "CriticUpdate", "_loss")
    let_memory_be_short(monkeypatch, tmp_path, *where, condition="os.environ.get('RANK') == '1'")
    job = make("run")
    ranks = [*job.both().values()]
    job.send(1)
    assert job.process.wait(PATIENCE_S) == 2
    assert not psutil.wait_procs(ranks, timeout=PATIENCE_S)[1]
    error = "rank 1 ran out of memory on cpu (CUDA out of memory); lower trainer.token_budget"
    assert job.log.read_text().count(error) == 1
    assert job.log.read_text().count("following run") == 1


def test_out_of_memory_for_optimizer_state_ends_the_sidecar_with_the_reason(make, monkeypatch, tmp_path):
    let_memory_be_short(monkeypatch, tmp_path, "torch.optim", "AdamW", "step")
    job = make("run", ranks=1)
    job.send(1)
    assert job.process.wait(PATIENCE_S) == 2
    error = "error: this process ran out of memory on cpu (CUDA out of memory); lower trainer.token_budget"
    assert job.log.read_text().count(error) == 1
    assert job.log.read_text().count("Traceback") == 1  # where
