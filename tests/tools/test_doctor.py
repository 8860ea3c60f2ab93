"""`rlhf-triton doctor` on faulty machines and configurations, and finding tritonserver."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest
import torch
from small_disk import small_disk
from tiny_checkpoints import change_tensors
from waiting import wait_for

from rlhf_triton.config.sections import ServerSection
from rlhf_triton.tools import doctor
from rlhf_triton.tools.checks import machine
from rlhf_triton.tools.checks.findings import Level
from rlhf_triton.tools.server.container import BODY_LIMIT
from rlhf_triton.tools.server.health import is_alive
from rlhf_triton.tools.server.triton_home import (
    STUB,
    ServerStartError,
    accepts,
    find_tritonserver,
    lay_out_backends,
    server_environment,
)
from rlhf_triton.tools.server.tritonserver import server_command
from rlhf_triton.wire.contract import CRITIC_SAVE

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "3.8"


def run_doctor(*arguments, packages=None, python=(), before=None):
    """Run the command in a process of its own; `packages` comes before the installed ones. Return exit code, output.

    `python`: options of the interpreter; `before` runs in the process first.
    """
    path = os.pathsep.join(map(str, [*([packages] if packages else []), ROOT]))
    done = subprocess.run(
        [sys.executable, *python, "-m", "rlhf_triton.tools", "doctor", *arguments],
        preexec_fn=before,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def problems(found):
    return [line for line in found.splitlines() if line.startswith(("FAILED", "warning"))]


def findings(*arguments):
    return {found.name: found for found in doctor.findings(Path(arguments[0]), arguments[1:])}


def test_doctor_passes_before_the_run_starts(config):
    code, found = run_doctor("--config", str(config))
    assert (code, problems(found)) == (0, []), found
    for name in ("python", "libpython", "numpy", "nvidia-pytriton", "tritonserver", "shared memory", "disk", "clock"):
        assert f"\nok       {name}" in f"\n{found}"
    assert "reward_model" in found
    assert "server           not running" in found


def test_doctor_reports_package_versions_and_open_file_limit_with_remedies(tmp_path, config):
    for name, version in (("numpy", "2.1.0"), ("nvidia_pytriton", "0.5.1")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (tmp_path / "torch.py").write_text("raise ImportError('lib.so.13: no such file')\n")
    few = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (256, 8192))
    code, found = run_doctor("--config", str(config), packages=tmp_path, before=few)
    assert code == 1
    assert "\nok       clock" in found
    numpy, torch, pytriton, files, unchecked, server = problems(found)
    assert numpy.startswith("warning  numpy            2.1.0, tested with 1.26.4")
    assert torch.startswith("FAILED   torch            ")
    assert " cannot be imported (lib.so.13: no such file): pip install --force-reinstall 'torch==" in torch
    remedy = "pip install 'nvidia-pytriton==0.7.0' if anything fails"
    assert pytriton == f"warning  nvidia-pytriton  0.5.1, tested with 0.7.0: {remedy}"
    assert files == "warning  open files       at most 256 per process, 4096 are enough: ulimit -n 8192"
    assert unchecked == "warning  configuration    not checked: install the packages above first"
    assert 'empty tensors: run `pip install "numpy<2"`' in server


def test_doctor_reports_packages_that_are_not_installed():
    """`-S`: a Python without the packages of its environment."""
    required = [name for name in importlib.metadata.requires("rlhf-on-triton") or [] if ";" not in name]
    assert {re.split(r"[<>=\[]", name)[0] for name in required} <= {name.lower() for name in machine.PACKAGES}
    code, found = run_doctor(python=["-S"])
    assert code == 1
    for name in machine.PACKAGES:
        assert f"FAILED   {name:<16} not installed: pip install '{name}==" in found
    assert "FAILED   tritonserver     no tritonserver found" in found
    assert "or set server.tritonserver to the path of one" in found
    assert "\nok       clock" in found


def test_doctor_reports_full_disks_small_shared_memory_and_clock_skew(tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk") as disk:
        monkeypatch.setattr(machine, "SHARED_MEMORY", disk.folder)
        (memory,) = machine.shared_memory()
        assert memory.level is Level.FAILED
        assert "docker run --shm-size=1g" in memory.text
        disk.fill()
        space, write = machine.disk(disk.folder / "run", 0)
        assert (space.level, write.level) == (Level.FAILED, Level.FAILED)
        assert "0.0 GiB free" in space.text
        assert "No space left on device; set run.dir" in write.text
        disk.empty()
        disk.read_only(True)
        assert "Read-only file system" in list(machine.disk(disk.folder, 0))[1].text
    now = machine.time.time()
    monkeypatch.setattr(machine.time, "time", lambda: now + 60)
    _, clock = machine.disk(tmp_path, 0)
    assert "+60 s against the clock of" in clock.text
    assert clock.level is Level.WARNING  # live instances are recognised without a clock


def test_doctor_reports_taken_ports_and_unwritable_folders(config):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monitored = [f"monitoring.actor_port={port}", f"monitoring.trainer_port={port}"]
        found = findings(str(config), f"server.http_port={port}", "server.dir=/proc/none", monitored[0])
        shared, taken_alone = (
            findings(str(config), *overrides)["monitoring"] for overrides in (monitored, monitored[:1])
        )
    assert found["server"].text == "not running"
    expected = {
        "ports": f"port {port} (server.http_port) on 127.0.0.1 cannot be used: Address already in use",
        "server.dir": "/proc/none cannot be written: ",
        "monitoring": f"monitoring.actor_port: {port} is server.http_port, too; choose another port",
    }
    assert {name: found[name].level for name in expected} == dict.fromkeys(expected, Level.FAILED)
    assert {name: found[name].text.startswith(text) for name, text in expected.items()} == dict.fromkeys(expected, True)
    assert shared.text == f"monitoring.trainer_port: {port} is monitoring.actor_port, too; choose another port"
    assert (shared.level, taken_alone.level) == (Level.FAILED, Level.WARNING)
    assert f"monitoring.actor_port: {port} is taken, so there would be no metrics" in taken_alone.text


def test_doctor_warns_about_settings_without_effect(config):
    found = findings(str(config), "actor.validation.every=9", "actor.validation.size=0")["settings"]
    assert (found.level, found.text) == (
        Level.WARNING,
        "without effect in this run: actor.validation.every, actor.validation.prompts (actor.validation.size is 0)",
    )
    assert "settings" not in findings(str(config), "actor.validation.every=9")


def test_doctor_reports_each_configuration_problem(config, tmp_path):
    settings = [
        f"reward.model={tmp_path / 'none'}",
        f"actor.prompts.path={tmp_path / 'no.jsonl'}",
        "critic.device=cuda:98",
        "server.training_key_env=NOT_SET",
    ]
    found = [each for each in doctor.findings(config, settings) if each.level is not Level.OK]
    device, files, rendering, left_out = found
    assert {each.level for each in found[:-1]} == {Level.FAILED}
    assert [line.partition(": ")[0] for line in files.text.splitlines()] == ["reward.model", "actor.prompts.path"]
    assert device.text.startswith("critic.device: cuda:98 needs 99 GPUs; ")
    assert device.text.endswith(", or set it to cpu")
    assert rendering.text.startswith("server.training_key_env names NOT_SET")
    assert (left_out.level, left_out.text) == (
        Level.WARNING,
        "not checked: weights, prompts, tokenizers, rewards, environment, adapters; correct the problems above first",
    )
    unknown = findings(str(config), "actor.algorithm.name=gpro")
    assert [each.name for each in unknown.values() if each.level is Level.FAILED] == ["configuration"]
    assert unknown["disk"].level is Level.OK


def test_doctor_goes_on_after_a_refused_prompt(config, tmp_path, checkpoints):
    (tmp_path / "empty.jsonl").touch()
    found = findings(
        config,
        f"actor.prompts.path={tmp_path / 'empty.jsonl'}",
        f"critic.model={checkpoints.other_policy}",
        "actor.policy.lora_rank=2",
        "actor.policy.lora_targets=[q_porj]",
        "actor.generation.engine=vllm",
        "actor.generation.vllm.command=no-such-vllm",
        "rewards.model={}",
    )
    refused = {"prompts", "vllm", "tokenizers", "adapters"}
    assert {name for name, each in found.items() if each.level is Level.FAILED} == refused
    assert found["configuration"].text == "not checked: rewards, environment; correct the problems above first"


def test_doctor_checks_the_adapters_of_a_critic_that_serves_another_trainer(tmp_path, checkpoints):
    (tmp_path / "my.yaml").write_text(f"run: {{dir: {tmp_path}/run}}\ncritic: {{model: {checkpoints.critic}}}")
    found = findings(tmp_path / "my.yaml", "trainer.lora_rank=2", "trainer.lora_targets=[q_porj]")["adapters"]
    assert found.level is Level.FAILED
    assert found.text.startswith("trainer.lora_targets: 'q_porj' matches no linear layer of ")


DAMAGE = {
    "score.weight has values that are not finite": lambda own: own["score.weight"].fill_(float("nan")),
    "model.norm.weight has shape [3], but config.json implies": lambda own: own.update(
        {"model.norm.weight": torch.ones(3)}
    ),
    "the weights have no model.norm.weight": lambda own: own.pop("model.norm.weight"),
}


@pytest.mark.parametrize("told", DAMAGE)
def test_doctor_reports_weights_that_do_not_load(told, tmp_path, checkpoints):
    """Every other check of doctor passed on this model, although `serve` refused it."""
    shutil.copytree(checkpoints.reward, tmp_path / "reward")
    (tmp_path / "my.yaml").write_text(f"run: {{dir: {tmp_path}/run}}\nreward: {{model: {tmp_path}/reward}}")
    assert findings(tmp_path / "my.yaml")["weights"].text == "reward.model loads, and its weights are finite"
    change_tensors(tmp_path / "reward", DAMAGE[told])
    found = findings(tmp_path / "my.yaml")["weights"]
    assert found.level is Level.FAILED
    assert found.text.startswith("reward.model: ")
    assert told in found.text


def test_doctor_probes_a_running_servers_models_and_names_a_dead_one(live):
    found = findings(str(live.run.path))
    assert found["ports"].text == "used by this run's server"
    answered = {name for name, each in found.items() if each.text.startswith("answers in")}
    assert answered == {"reward_model", "critic", "critic_infer", "critic_train", "critic_save"}
    with live.without_probes():  # the supervisor would load it again
        (stub,) = [
            process
            for process in psutil.Process(live.server.process.pid).children(recursive=True)
            if is_alive(process) and f"{os.sep}{CRITIC_SAVE}{os.sep}" in " ".join(process.cmdline())
        ]
        stub.kill()
        wait_for(lambda: not is_alive(stub))
        (broken,) = [each for each in findings(str(live.run.path)).values() if each.level is Level.FAILED]
        assert broken.name == CRITIC_SAVE
        assert str(live.run.config.run.logs_dir / "tritonserver.log") in broken.text
    wait_for(lambda: findings(str(live.run.path))[CRITIC_SAVE].level is Level.OK, live.server)


# ---- rlhf_triton.tools.server.triton_home ----


@pytest.fixture
def wheel():
    return find_tritonserver(None)


def executable(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def copy_of(wheel, root, stubs):
    """Copy the wheel's tree under `root`; `stubs` says which Python's stub is in which folder."""
    binary = executable(root / "pytriton" / "tritonserver" / "bin" / "tritonserver")
    (binary.parent.parent / "backends").symlink_to(wheel.backend_source_dir)
    for folder, version in stubs.items():
        place = binary.parent.parent / "python_backend_stubs" / folder
        place.mkdir(parents=True)
        (place / STUB).symlink_to(wheel.stub.parents[1] / version / STUB)
    return binary


def test_find_tritonserver_uses_path_if_no_wheel_is_installed(wheel, tmp_path, monkeypatch):
    assert wheel.from_wheel
    binary = copy_of(wheel, tmp_path, {PYTHON: PYTHON})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(binary.parent))
    assert find_tritonserver(None).binary == binary
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match=r"no tritonserver found, .* `pip install nvidia-pytriton`"):
        find_tritonserver(None)


def test_lay_out_backends_is_idempotent_for_wheel_and_image(wheel, tmp_path, monkeypatch):
    """With the package, which the stub's Python may not find, as in an editable install whose path is not ASCII."""
    for _ in range(2):
        folder = lay_out_backends(wheel, tmp_path / "backends") / "python"
        names = {"libtriton_python.so", "triton_python_backend_utils.py", STUB, "rlhf_triton"}
        assert {path.name for path in folder.iterdir()} == names
        assert (folder / STUB).resolve() == wheel.stub.resolve()
    # The layout of the NGC image, which keeps its own: stub beside the backend's library, no folder of stubs.
    binary = executable(tmp_path / "tritonserver" / "bin" / "tritonserver")
    backends = lay_out_backends(wheel, binary.parent.parent / "backends")
    home = find_tritonserver(binary)
    assert (home.from_wheel, home.backend_source_dir) == (False, backends)
    assert lay_out_backends(home, tmp_path / "elsewhere") == backends
    assert not (tmp_path / "elsewhere").exists()


def test_server_environment_extends_the_users_and_unknown_options_are_left_out(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = server_environment(wheel)
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep) == [*map(str, wheel.library_path), "/mine"]
    assert environment["OMP_NUM_THREADS"] == "3"
    assert accepts(wheel, "--http-port")
    assert not accepts(wheel, BODY_LIMIT)
    usage = f"echo 'Usage: tritonserver [options]'\necho '  {BODY_LIMIT} <integer>' >&2; exit 1\n"
    home = dataclasses.replace(wheel, binary=executable(tmp_path / "tritonserver", usage))
    assert accepts(home, BODY_LIMIT)
    assert f"{BODY_LIMIT}={256 << 20}" in server_command(home, tmp_path, tmp_path, ServerSection(), "key", None)


def test_find_tritonserver_refuses_unusable_servers_and_pythons(wheel, tmp_path, monkeypatch):
    def refused(sentence, explicit=None):
        with pytest.raises(ServerStartError, match=sentence):
            find_tritonserver(explicit)

    refused(r"nothing is not an executable file: --tritonserver \(", tmp_path / "nothing")
    refused("is not an executable file", tmp_path)
    alone = Path(shutil.copy("/bin/true", tmp_path / "tritonserver"))
    refused(r"has no python backend beside it .* ends in -py3", alone)
    sentence = rf"is built for Python {OTHER}, but this is Python {PYTHON}: run the command with"
    refused(sentence, copy_of(wheel, tmp_path, {PYTHON: OTHER}))
    with monkeypatch.context() as patch:  # a second NumPy cannot be installed beside the first
        patch.setattr(importlib.metadata, "version", lambda name: "2.3.1")
        refused(r'NumPy 2\.3\.1 is installed, .*`pip install "numpy<2"`')
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path) if name == "LIBDIR" else None)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    refused(rf"has no libpython{PYTHON}\.so\.1\.0, .*: use a Python that has it")
    monkeypatch.setattr(sys, "base_prefix", "/srv/jörg/python")
    refused(r"installed in /srv/jörg/python, .* a Python that is installed elsewhere")
