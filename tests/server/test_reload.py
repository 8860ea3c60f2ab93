"""New weights come into service under load: one version per request, and none that is damaged."""

import asyncio
import re
import shutil
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from bare_client import BareClient, ask
from critic_load import CriticLoad
from live_system import (
    KEY,
    Checkpoints,
    FinishedRun,
    LiveRun,
    System,
    direct_rewards,
    direct_values,
    identity,
    make_run,
    random_rows,
    reload_model,
    scoring_inputs,
    start_system,
    training_inputs,
    wait_for,
)
from safetensors.torch import load_file, save_file
from sidecar_rig import Rig

from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE
from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.python_backend.models.modeling import load_critic
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.server.health import is_alive
from rlhf_triton.tools.weights import main
from rlhf_triton.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    LOAD_LABEL,
    REWARD_MODEL,
    REWARD_VERSION,
    REWARDS,
    VALUES,
    WEIGHTS_VERSION,
)

TOLERANCE = 1e-5
NUM_ASKING = 16
NUM_STEPS = 3
ROWS = random_rows([3, 17, 40], seed=0)
Output = pytest.CaptureFixture[str]


def assert_serves(run: LiveRun, version: int) -> list[np.ndarray]:
    """The server serves `version`, and its values are that folder's; returns them."""
    answer = ask(run.url, CRITIC_INFER, scoring_inputs(ROWS), [VALUES, WEIGHTS_VERSION])
    assert set(answer[WEIGHTS_VERSION].ravel().tolist()) == {version}
    values = [answer[VALUES][i, : row.size] for i, row in enumerate(ROWS)]
    for ours, direct in zip(values, direct_values(run.store.folder(version), ROWS), strict=True):
        np.testing.assert_allclose(ours, direct, atol=TOLERANCE, rtol=0)
    return values


def store_of(run: LiveRun) -> WeightsStore:
    return WeightsStore(run.config.run.reward_weights_dir)


def changed(run: LiveRun, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """The checkpoint of version 0 with other weights."""
    shutil.copytree(run.config.reward.model, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def publish(run: LiveRun, folder: Path, *overrides: str) -> int:
    return main(["publish", "--model", "reward", "--config", str(run.path), str(folder), *overrides])


@pytest.fixture
def reward_version_0_again(live: System) -> Iterator[None]:
    """Other tests of this server expect its checkpoint."""
    yield
    assert main(["rollback", "--model", "reward", "--config", str(live.run.path), "--to", "0"]) == 0
    answer = ask(live.run.url, REWARD_MODEL, scoring_inputs(ROWS), [REWARDS, REWARD_VERSION])
    assert set(answer[REWARD_VERSION].ravel().tolist()) == {store_of(live.run).current()}
    expected = direct_rewards(live.run.config.reward.model, ROWS)
    np.testing.assert_allclose(answer[REWARDS][:, 0], expected, atol=TOLERANCE, rtol=0)


def metric(run: LiveRun, name: str, model: str) -> float:
    """A counter or gauge of a model in the server's metrics; 0 before its first event."""
    with urllib.request.urlopen(f"http://{run.config.server.metrics_url}/metrics", timeout=120) as answer:
        found = re.search(rf'^rlhf_{name}{{model="{model}"}} (\S+)', answer.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_an_update_and_a_rollback_change_the_served_values_by_swap(live: System):
    run = live.run
    first, pid = run.store.current() or 0, run.store.serving()[0].pid
    before = assert_serves(run, first)
    answer = ask(run.url, CRITIC_TRAIN, training_inputs(seed=1), headers=KEY)
    after = assert_serves(run, int(answer["weights_version"][0]))
    assert max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)) > 1e-3
    assert run.critic_updates(up_to=run.journal.last_step())[-1]["reload"] == "swap"
    assert main(["rollback", "--config", str(run.path), "--to", str(first)]) == 0
    assert main(["ready", "--config", str(run.path)]) == 0
    current = run.store.current() or 0
    assert run.store.manifest(current).digest == run.store.manifest(first).digest
    assert_serves(run, current)
    assert [(record.pid, record.version) for record in run.store.serving()] == [(pid, current)]


@pytest.mark.slow
def test_an_update_changes_the_served_values_through_triton(finished: FinishedRun):
    """With `critic.reload=triton` the instance no longer takes up CURRENT on its own."""
    run = finished.run
    finished.stop_sidecar()
    reload_model(run, CRITIC, lambda config: config["parameters"].update(reload={"string_value": "triton"}))
    finished.start_sidecar("critic.reload=triton")
    before = assert_serves(run, run.store.current() or 0)
    pid = run.store.serving()[0].pid
    answer = ask(run.url, CRITIC_TRAIN, training_inputs(seed=2))
    after = assert_serves(run, int(answer["weights_version"][0]))
    assert max(float(np.abs(a - b).max()) for a, b in zip(after, before, strict=True)) > 1e-3
    assert run.critic_updates(up_to=run.journal.last_step())[-1]["reload"] == "triton"
    assert run.store.serving()[0].pid != pid
    with ControlPlane(run.config.server.grpc_url) as control:
        label = control.active_parameters(CRITIC)[LOAD_LABEL]
    assert label.startswith(f"{run.store.current()}-")


# ---- under load ----


class Load:
    """Clients that ask for values and rewards until `done`; has the rows and their answers by version."""

    def __init__(self, url: str) -> None:
        self.url, self.done = url, asyncio.Event()
        self.values = defaultdict[int, list[tuple[np.ndarray, np.ndarray]]](list)
        self.rewards = defaultdict[int, list[tuple[np.ndarray, float]]](list)

    async def ask(self, number: int) -> None:
        """One client; the first sends requests of many forward passes. Raises if a request is refused."""
        generator = np.random.default_rng(number)
        async with BareClient(self.url) as client:
            while not self.done.is_set():
                count = generator.integers(1, 4) if number else 64
                rows = random_rows(generator.integers(1, 60, count).tolist(), seed=int(generator.integers(1 << 30)))
                model = CRITIC_INFER if number % 4 < 3 else REWARD_MODEL
                answer = await client.infer(model, scoring_inputs(rows))
                if model == CRITIC_INFER:
                    (version,) = {*answer[WEIGHTS_VERSION].ravel().tolist()}
                    self.values[version] += zip(rows, answer[VALUES], strict=True)
                (version,) = {*answer[REWARD_VERSION].ravel().tolist()}
                self.rewards[version] += zip(rows, answer[REWARDS][:, 0].tolist(), strict=True)
                await asyncio.sleep(0.03)  # two cores must start two fresh stubs beside this


async def seen(versions: Container[int], version: int) -> None:
    while version not in versions:
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("reward_version_0_again")
def test_no_request_fails_or_mixes_versions_during_reloads(live: System, tmp_path: Path):
    """3 swaps of the critic and a reload of it through Triton's load API, and a swap of the reward model."""
    run, first = live.run, live.run.next_step()

    def num_saves() -> int:
        return sum(line.get("reason") == "save" for line in run.critic_metrics())

    async def change(load: Load) -> None:
        saves = num_saves()
        async with BareClient(run.url, headers=KEY) as client:
            for i in range(NUM_STEPS):
                arrays = {**training_inputs(seed=10 + i), **identity("test", first + i)}
                await seen(load.values, int((await client.infer(CRITIC_TRAIN, arrays))["weights_version"][0]))
                if i == 1:
                    await client.infer(CRITIC_SAVE, {"dummy_var": np.zeros(1, np.int64)})
                    await asyncio.to_thread(wait_for, lambda: num_saves() > saves)
                    new = changed(run, tmp_path / "new", lambda tensors: tensors["score.weight"].mul_(1.5))
                    assert await asyncio.to_thread(publish, run, new) == 0
                    await seen(load.rewards, store_of(run).current() or 0)

    async def under_load() -> Load:
        load = Load(run.url)
        clients = [asyncio.create_task(load.ask(number)) for number in range(NUM_ASKING)]
        try:
            await change(load)
        finally:
            load.done.set()
        await asyncio.gather(*clients)
        return load

    load = asyncio.run(under_load())
    assert (len(load.values) > NUM_STEPS, len(load.rewards)) == (True, 2)
    for version, pairs in load.values.items():
        direct = direct_values(run.store.folder(version), [row for row, _ in pairs])
        for (row, values), expected in zip(pairs, direct, strict=True):
            np.testing.assert_allclose(values[: row.size], expected, atol=TOLERANCE, rtol=0)
    for version, scored in load.rewards.items():
        expected = direct_rewards(store_of(run).folder(version), [row for row, _ in scored])
        np.testing.assert_allclose([reward for _, reward in scored], expected, atol=TOLERANCE, rtol=0)
    assert main(["ready", "--model", "reward", "--config", str(run.path)]) == 0
    assert metric(run, "weights_version", REWARD_MODEL) == store_of(run).current()
    assert metric(run, "weights_taken_up_total", REWARD_MODEL) >= 1


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
OTHER_THREADS = 8  # of the sidecar: gRPC's, and Python's own


@pytest.fixture(scope="module", params=SEVERAL)
def several(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints
) -> Iterator[System]:
    sections = SEVERAL[request.param]
    sections = {**sections, "trainer": {**sections.get("trainer", {}), "threads": 2}}
    system = start_system(make_run(tmp_path_factory.mktemp("several"), checkpoints, **sections))
    wait_for(lambda: len(processes_of(system)) == 2, system.server)
    yield system
    system.stop()


def processes_of(system: System) -> list[psutil.Process]:
    """The processes that serve the critic: two instances, or one with a second rank below it."""
    found = [psutil.Process(record.pid) for record in system.run.store.serving()]
    ranks = [child for process in found for child in process.children()]
    return found + [rank for rank in ranks if "rlhf_triton.python_backend.serving.ranks.process" in rank.cmdline()]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.slow
def test_processes_share_the_requests_and_change_versions_together(several: System):
    store, processes = several.run.store, processes_of(several)
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
    assert {outcome for *_, outcome in load.outcomes} == {"200"}
    assert {number for number, _ in load.answers[count + 20 :]} == {version}
    assert len({number for number, _ in load.answers}) > NUM_STEPS // 2
    is_adapter = several.run.config.trainer.publish.format == "adapter"
    assert [store.manifest(number).base for number in (0, version)] == [None, 0 if is_adapter else None]
    for number in {number for number, _ in load.answers}:
        critic, served = load_critic(store.folder(number)), next(v for each, v in load.answers if each == number)
        for row, ours in zip(ROWS, served, strict=True):
            np.testing.assert_allclose(ours[: row.size], critic.values([row])[0], atol=TOLERANCE, rtol=0)
    sidecar = psutil.Process(several.sidecar.process.pid)
    # Seen once is enough: others may give other priorities to what runs on their machine.
    wait_for(lambda: sidecar.nice() == min(19, psutil.Process().nice() + 10), several.sidecar)
    assert sidecar.num_threads() <= 2 + OTHER_THREADS


@pytest.mark.slow
def test_a_killed_process_is_replaced(several: System):
    """What a killed instance had taken over is lost. Without a rank, rank 0 refuses requests until it is unloaded."""
    processes = processes_of(several)
    with CriticLoad(several.run.url, ROWS) as load:
        processes[1].kill()
        ended = processes if several.run.config.critic.tensor_parallel == 2 else processes[1:]
        wait_for(lambda: not any(map(is_alive, ended)), timeout_s=120.0)
        wait_for(lambda: len({*processes_of(several)} - {*ended}) == 2, several.server)
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > count + 50 and {code for *_, code in load.outcomes[-50:]} == {"200"})
    if several.run.config.critic.tensor_parallel == 2:
        assert {code for *_, code in load.outcomes} <= {"200", "503", "404"}
    version, values = load.answers[-1]
    assert version == several.run.store.current()
    for row, ours in zip(ROWS, values, strict=True):
        expected = load_critic(several.run.store.folder(version)).values([row])[0]
        np.testing.assert_allclose(ours[: row.size], expected, atol=TOLERANCE, rtol=0)


# ---- `rlhf-triton weights` without a server ----


def config_of(rig: Rig, folder: Path) -> list[str]:
    """The rig's configuration as a file."""
    path = folder / "run.yaml"
    path.write_text(rig.config.model_dump_json(exclude_none=True))
    return ["--config", str(path)]


def test_weights_verify_names_the_damaged_version(rig: Rig, tmp_path: Path, capsys: Output):
    """The list is in tests/trainer/test_reward_publishing.py."""
    rig.train(1, 2)
    config = config_of(rig, tmp_path)
    path = rig.store.folder(1) / WEIGHTS_FILE
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-9])
    assert main(["verify", *config]) == 1
    told = capsys.readouterr()
    assert "version 1: cannot read model.safetensors" in told.out
    assert (told.out.count("good"), told.err) == (2, "error: 1 of 3 versions cannot be served\n")
    assert main(["verify", *config, "--version", "2"]) == 0
    for target, message in ([], "version 1: cannot read"), (["--to", "77"], "version 77 is not in the weights store"):
        assert main(["rollback", *config, *target]) == 2  # to the parent of the current one, or to the given one
        assert message in capsys.readouterr().err
    assert rig.store.current() == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollback_serves_old_bytes_under_a_new_number(
    make: Callable[..., Rig], tmp_path: Path, capsys: Output, dtype: str
):
    """Without an instance it moves CURRENT, and says so."""
    rig = make(dtype=dtype)
    rig.serve()
    rig.start().train(1, 2, 3)
    old, weights = rig.store.manifest(1), rig.weights(1)
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


def test_commands_report_an_empty_store(tmp_path: Path, capsys: Output):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/nothing}}")
    assert main(["list", "--config", str(tmp_path / "run.yaml")]) == 2
    assert re.search("error: the weights store .* is empty", capsys.readouterr().err)
