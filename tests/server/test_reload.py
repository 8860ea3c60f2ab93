"""New weights come into service under load: one version per request, and no damaged one."""

import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from bare_client import ask
from critic_load import CriticLoad
from expected_outputs import TOLERANCE, assert_answer, direct_rewards
from live_system import make_run, reload_model, start_system
from model_inputs import identity, random_rows, scoring_inputs, training_inputs
from safetensors.torch import load_file
from tiny_checkpoints import add_tensors
from waiting import wait_for

from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE
from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.client.model_servers import ModelServers
from rlhf_triton.models.modeling import load_critic
from rlhf_triton.store.control_key import control_key
from rlhf_triton.tools.server.health import is_alive
from rlhf_triton.tools.weights import main
from rlhf_triton.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    CRITIC_TRAIN,
    LOAD_LABEL,
    REWARD_MODEL,
    REWARD_VERSION,
    REWARDS,
    VALUES,
    WEIGHTS_VERSION,
)

PAUSE_S = 0.03  # two cores must start two fresh stubs beside the load
NUM_STEPS = 3
ROWS = random_rows([3, 17, 40], seed=0)


def assert_serves(run, version):
    """Assert that the server serves `version` with its folder's values; return them."""
    answer = ask(run.url, CRITIC_INFER, scoring_inputs(ROWS), [VALUES, WEIGHTS_VERSION])
    assert answer[WEIGHTS_VERSION][0, 0] == version
    assert_answer(run, ROWS, answer)
    return answer[VALUES]


@pytest.fixture
def reward_version_0_again(live):
    """Restore the checkpoint that other tests of this server expect."""
    yield
    assert main(["rollback", "--model", "reward", "--config", str(live.run.path), "--to", "0"]) == 0
    assert {record.version for record in live.run.reward_store.serving()} == {live.run.reward_store.current()}
    answer = ask(live.run.url, REWARD_MODEL, scoring_inputs(ROWS), [REWARDS, REWARD_VERSION])
    assert answer[REWARD_VERSION][0, 0] == live.run.reward_store.current()
    expected = direct_rewards(live.run.config.reward.model, ROWS)
    np.testing.assert_allclose(answer[REWARDS][:, 0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_an_update_changes_the_served_values_through_triton(live):
    """With `critic.reload=triton` the instance does not follow CURRENT on its own."""
    run = live.run
    live.stop_sidecar()
    reload_model(run, CRITIC, lambda config: config["parameters"].update(reload={"string_value": "triton"}))
    live.start_sidecar("critic.reload=triton")
    before = assert_serves(run, run.store.current())
    pid = run.store.serving()[0].pid
    answer = ask(run.url, CRITIC_TRAIN, training_inputs(seed=2))
    after = assert_serves(run, int(answer["weights_version"][0]))
    assert np.abs(after - before).max() > 1e-3
    assert run.critic_updates(up_to=run.journal.last_step())[-1]["reload"] == "triton"
    assert run.store.serving()[0].pid != pid
    with ControlPlane(run.config.server.grpc_url) as control:
        label = control.config(CRITIC).parameters[LOAD_LABEL].string_value
    assert label.startswith(f"{run.store.current()}-")
    live.stop_sidecar()
    reload_model(run, CRITIC, lambda config: None)
    live.start_sidecar()


# ---- under load ----


@pytest.mark.usefixtures("reward_version_0_again")
def test_no_request_fails_or_mixes_versions_during_reloads(live, tmp_path):
    """Three swaps of the critic, a reload through Triton's load API, and a swap of the reward model."""
    run, first = live.run, live.run.next_step()

    many = random_rows(range(1, 60), seed=1)  # several forward passes
    with (
        CriticLoad(run.url, ROWS, model=CRITIC_INFER, pause_s=PAUSE_S) as load,
        CriticLoad(run.url, many, model=CRITIC_INFER, clients=1, pause_s=PAUSE_S) as large,
        CriticLoad(run.url, ROWS, model=REWARD_MODEL, clients=4, pause_s=PAUSE_S) as rewards,
    ):
        for i in range(NUM_STEPS):
            answer = ask(run.url, CRITIC_TRAIN, {**training_inputs(seed=10 + i), **identity("test", first + i)})
            wait_for(lambda version=answer["weights_version"][0]: version in load.versions())
            if i == 1:
                servers = ModelServers([run.config.server.grpc_url], control_key(run.store.root))
                (outcome,) = servers.load(run.store.current(), timeout_s=120.0)
                assert outcome.error is None
                new = Path(shutil.copytree(run.config.reward.model, tmp_path / "new"))
                add_tensors(new, {"score.weight": 1.5 * load_file(new / WEIGHTS_FILE)["score.weight"]})
                assert main(["publish", "--model", "reward", "--config", str(run.path), str(new)]) == 0
                wait_for(lambda: run.reward_store.current() in rewards.versions(name=REWARD_VERSION))
    assert (len(load.versions()) > NUM_STEPS, len(rewards.versions(name=REWARD_VERSION))) == (True, 2)
    updates = run.critic_updates(up_to=run.journal.last_step())
    assert [line["reload"] for line in updates[-NUM_STEPS:]] == ["swap"] * NUM_STEPS
    for each, rows in ((load, ROWS), (large, many), (rewards, ROWS)):
        assert {*each.outcomes} == {"200"}
        for answer in each.answers:
            assert_answer(run, rows, answer)
    assert main(["ready", "--model", "reward", "--config", str(run.path)]) == 0
    assert run.metric("weights_version", model=REWARD_MODEL) == run.reward_store.current()
    assert run.metric("weights_taken_up_total", model=REWARD_MODEL) >= 1


# ---- several processes of the critic ----


# On GPUs Triton makes an instance for each of them (`device: cuda`); here both are on the CPU. Each merges the adapters
# that a version is into version 0.
SEVERAL = {
    "instances": {
        "critic": {"instances": 2},
        "trainer": {"lora_rank": 2, "precision": "bfloat16", "publish": {"format": "adapter"}},
    },
    "ranks": {"critic": {"tensor_parallel": 2}},
}
OTHER_THREADS = 8  # the sidecar's threads for gRPC, and Python's own


@pytest.fixture(scope="module", params=SEVERAL)
def several(request, tmp_path_factory, checkpoints):
    sections = SEVERAL[request.param]
    sections = {**sections, "trainer": {**sections.get("trainer", {}), "threads": 2}}
    system = start_system(make_run(tmp_path_factory.mktemp("several"), checkpoints, **sections))
    wait_for(lambda: len(processes_of(system)) == 2, system.server)
    yield system
    system.stop()


def processes_of(system):
    """Return the processes that serve the critic: two instances, or one with a second rank below it."""
    found = [psutil.Process(record.pid) for record in system.run.store.serving()]
    ranks = [child for process in found for child in process.children()]
    return found + [rank for rank in ranks if "rlhf_triton.python_backend.serving.ranks.process" in rank.cmdline()]


def cpu_s(process):
    times = process.cpu_times()
    return float(times.user + times.system)


def assert_stored(store, version, served):
    """Assert that the served values of ROWS are the version's, whose folder may be an adapter."""
    critic = load_critic(store.folder(version))
    for row, ours in zip(ROWS, served, strict=True):
        np.testing.assert_allclose(ours[: row.size], critic.values([row])[0], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_critic_instances_share_requests_and_swap_versions_together(several):
    store = several.run.store
    processes = processes_of(several)
    before = [cpu_s(process) for process in processes]
    with CriticLoad(several.run.url, ROWS) as load:
        wait_for(lambda: len(load.answers) > 400)
        shares = [cpu_s(process) - start for process, start in zip(processes, before, strict=True)]
        for seed in range(NUM_STEPS):
            version = int(ask(several.run.url, CRITIC_TRAIN, training_inputs(seed=seed))["weights_version"][0])
        wait_for(lambda: {record.version for record in store.serving()} == {version})
        count = len(load.answers)
        wait_for(lambda: len(load.answers) > count + 50)
    assert min(shares) > 0.1 * sum(shares)
    assert {*load.outcomes} == {"200"}
    assert load.versions(count + 20) == {version}
    assert len(load.versions()) > NUM_STEPS // 2
    is_adapter = several.run.config.trainer.publish.format == "adapter"
    assert [store.manifest(number).base for number in (0, version)] == [None, 0 if is_adapter else None]
    for number in load.versions():
        served = next(answer[VALUES] for answer in load.answers if answer[WEIGHTS_VERSION][0, 0] == number)
        assert_stored(store, number, served)
    sidecar = psutil.Process(several.sidecar.process.pid)
    # Seen once is enough: others may give other priorities to what runs on their machine.
    wait_for(lambda: sidecar.nice() == min(19, psutil.Process().nice() + 10), several.sidecar)
    assert sidecar.num_threads() <= 2 + OTHER_THREADS


@pytest.mark.slow
def test_killed_critic_instance_is_replaced(several):
    """Requests of the killed instance are lost. If a rank is missing, rank 0 refuses requests until it is unloaded."""
    processes = processes_of(several)
    with CriticLoad(several.run.url, ROWS) as load:
        processes[1].kill()
        ended = processes if several.run.config.critic.tensor_parallel == 2 else processes[1:]
        wait_for(lambda: not any(map(is_alive, ended)))
        wait_for(lambda: len({*processes_of(several)} - {*ended}) == 2, several.server)
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > count + 50 and {*load.outcomes[-50:]} == {"200"})
    if several.run.config.critic.tensor_parallel == 2:
        assert {*load.outcomes} <= {"200", "503", "404"}
    assert load.versions(-1) == {several.run.store.current()}
    assert_stored(several.run.store, several.run.store.current(), load.answers[-1][VALUES])


# ---- `rlhf-triton weights` without a server ----


def config_of(rig, folder):
    """Return the rig's configuration as a file."""
    path = folder / "run.yaml"
    path.write_text(rig.config.model_dump_json(exclude_none=True))
    return ["--config", str(path)]


def test_weights_verify_names_the_damaged_version(rig, tmp_path, capsys):
    """`weights list` is tested in tests/trainer/test_reward_publishing.py."""
    rig.train(1, 2)
    config = config_of(rig, tmp_path)
    path = rig.store.folder(1) / WEIGHTS_FILE
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-9])
    assert main(["verify", *config]) == 1
    told = capsys.readouterr()
    assert "version 1: model.safetensors has digest" in told.out
    assert (told.out.count("good"), told.err) == (2, "error: 1 of 3 versions cannot be served\n")
    assert main(["verify", *config, "--version", "2"]) == 0
    for target, message in (
        ([], "version 1: model.safetensors has digest"),
        (["--to", "77"], "version 77 is not in the weights store"),
    ):
        assert main(["rollback", *config, *target]) == 2  # to the parent of the current one, or to the given one
        assert message in capsys.readouterr().err
    assert rig.store.current() == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollback_serves_old_bytes_under_a_new_number(make, tmp_path, capsys, dtype):
    """Without a serving instance it moves CURRENT and says so."""
    rig = make(dtype=dtype)
    rig.begin().train(1, 2, 3)
    old = rig.store.manifest(1)
    weights = rig.weights(1)
    config = config_of(rig, tmp_path)
    assert main(["rollback", *config, "--to", "1"]) == 0
    told = capsys.readouterr().out
    assert "version 4 is served, with the weights of version 1 (step 1)" in told
    assert "a sidecar is training this critic" in told
    new = rig.store.manifest(4)
    assert (new.digest, new.parent, new.step) == (old.digest, 1, 1)
    assert (rig.store.current(), rig.instances[0].served[-1]) == (4, 4)
    assert torch.equal(rig.weights(4), weights)
    (result,) = rig.train(4)  # the sidecar trains on from its own weights, with a number above
    assert (result.error, result.weights_version) == (None, 5)
    assert rig.store.manifest(5).step == 4
    rig.stop()
    rig.instances.pop().close()
    assert main(["rollback", *config, "--to", "4"]) == 2
    assert "CURRENT is now 6, but no serving instance is alive" in capsys.readouterr().err
    assert rig.store.current() == 6
