"""`run.deterministic`: the whole loop is bit-identical, whichever process is killed during it."""

import signal

import psutil
import pytest
from live_system import make_run, start_system, stop_process, validations_of
from safetensors.torch import load_file
from waiting import wait_for

from rlhf_triton.digests import digest_of
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.sealed_folder import saved_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 7
CHECKPOINT_EVERY = 3
KILLED_AT = 5
# What another clock, other weights version numbers or a second start of the actor change.
OF_THIS_RUN = ("time", "timers/", "tokens_per_s", "client/", "train_rollouts/weights_version")


def outcome(folder):
    """Return what must not depend on kills: the last checkpoint, the validations, and the metrics."""
    lines = [
        {name: value for name, value in line.items() if not name.startswith(OF_THIS_RUN)}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
    tensors = {}  # not bytes: which rank writes a tensor that is not sharded may differ
    for file in sorted((folder / "checkpoints" / "actor" / str(STEPS)).rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors.setdefault(name, []).append(tensor.tolist())
    return [digest_of(folder / "policy" / "model.safetensors"), tensors, validations_of(folder), lines]


def deterministic_run(folder, checkpoints):
    """Return a run of few steps on two ranks, each with several optimizer steps and micro-batches."""
    return make_run(
        folder,
        checkpoints,
        run={"deterministic": True},
        trainer={"global_batch_size": 3, "token_budget": 64},
        actor={
            "ranks": 2,
            "steps": STEPS,
            "checkpoint_every": CHECKPOINT_EVERY,
            "rollout_size": 12,
            "generation_batch_size": 6,
            "max_new_tokens": 24,
            "token_budget": 128,
            "update_epochs": 2,
            "kl_coef": 0.1,
            "kl_target": 0.01,
            "rewards_normalization": "running",
            "rewards_clip": 2,
            "missing_eos_penalty": 0.5,
            "entropy_bonus": 0.01,
            "clip_ratio_high": 0.28,
            "update_max_kl": 0.5,
            "validation_every": CHECKPOINT_EVERY,
        },
    )


def finish(actor):
    """Wait until the actor has ended successfully."""
    try:
        assert actor.process.wait(400) == 0, actor.log_path.read_text()
    finally:
        stop_process(actor)


@pytest.fixture(scope="module")
def calm(tmp_path_factory, checkpoints):
    """Return a system on which an actor has run to its end without a kill."""
    system = start_system(deterministic_run(tmp_path_factory.mktemp("calm"), checkpoints))
    try:
        finish(system.run.start("actor"))
        yield system
    finally:
        system.stop()


def kill_critic(system):
    """SIGKILL the sidecar and every process that serves the critic; then start another sidecar."""
    for record in system.run.store.serving():
        psutil.Process(record.pid).kill()
    system.sidecar.process.kill()
    system.sidecar.process.wait()
    system.start_sidecar()


def ranks_of(agent):
    """The processes of the ranks, by rank."""
    found = {}
    for process in psutil.Process(agent.process.pid).children(recursive=True):
        try:
            found[int(process.environ()["RANK"])] = process
        except (KeyError, psutil.Error):
            continue
    return found


def kill_rank(agent, rank):
    """SIGKILL one rank, and wait until all ranks of this attempt are gone."""
    ranks = ranks_of(agent)
    ranks[rank].kill()
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks.values()), agent)


def newest(run, room):
    return max(saved_steps(run.config.run.dir / "checkpoints" / room), default=0)


def test_deterministic_run_is_bit_identical_after_kills_of_all_processes(calm, tmp_path, checkpoints):
    """The critic's process and the sidecar, and then a rank of the actor, whose step 5 is trained already.

    All ranks go back to step 3. SIGTERM stops the actor, whose requests then hold other rows; finally rank 0 is killed.
    """
    run = deterministic_run(tmp_path, checkpoints)
    system = start_system(run)
    actor = run.start("actor")
    try:
        wait_for(lambda: run.journal.last_step() >= 1, actor)
        kill_critic(system)
        wait_for(lambda: run.journal.last_step() >= KILLED_AT, actor)
        kill_rank(actor, 1)
        assert newest(run, "actor") == CHECKPOINT_EVERY
        kill_critic(system)
        resumed = f"resuming from the checkpoint of step {CHECKPOINT_EVERY}"
        wait_for(lambda: f"step {KILLED_AT}/" in actor.log_path.read_text().partition(resumed)[2], actor)
        assert actor.stop(signal.SIGTERM, 60.0) == 130
        aside = {path.name for path in (run.config.run.journal_dir / "test" / "set_aside").glob("*/*.train*")}
        assert aside & {f"{KILLED_AT:08d}.train", f"{KILLED_AT:08d}.train.json"}
        last = int(read_jsonl(run.config.run.dir / "metrics.jsonl")[-1]["step"])
        assert [newest(run, room) for room in ("actor", "critic")] == [last, last]
        assert f"stopped after step {last}, whose checkpoint is written" in actor.log_path.read_text()
        actor = run.start("actor-again", module="rlhf_triton.actor")
        wait_for(lambda: run.journal.last_step() > last, actor)
        kill_rank(actor, 0)
        finish(actor)
        log = actor.log_path.read_text()
        assert (log.count(f"resuming from the checkpoint of step {last}"), "Traceback" in log) == (2, False)
        for ours, theirs in zip(outcome(run.config.run.dir), outcome(calm.run.config.run.dir), strict=True):
            assert ours == theirs
        critics = [each.store.manifest(each.store.current()) for each in (run, calm.run)]
        assert (critics[0].step, critics[0].digest) == (STEPS, critics[1].digest)
        lines = read_jsonl(run.config.run.dir / "metrics.jsonl")
        assert [line["train_rollouts/staleness_rows"] for line in lines] == [{"0": 12}] * STEPS
    finally:
        stop_process(actor)
        system.stop()
