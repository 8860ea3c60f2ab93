"""`python -m tools doctor` on machines and configurations that are broken in one way each."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from live_system import Checkpoints, System, make_run, wait_for
from small_disk import SmallDisk, small_disk
from test_triton_home import OTHER, PYTHON, copy_of

from python_backend.wire.contract import CRITIC_SAVE
from tools.doctor import command, machine
from tools.doctor.finding import Finding, Level, run_checks
from tools.server.triton_home import find_tritonserver

ROOT = Path(__file__).resolve().parents[2]


def doctor(
    *arguments: str, packages: Path | None = None, python: Sequence[str] = (), before: Callable[[], None] | None = None
) -> tuple[int, str]:
    """Run the command in a process of its own; `packages` comes before the installed ones. Return exit code, output.

    `python`: options of the interpreter; `before` runs in the process first.
    """
    path = os.pathsep.join(map(str, [*([packages] if packages else []), ROOT]))
    done = subprocess.run(
        [sys.executable, *python, "-m", "tools", "doctor", *arguments],
        preexec_fn=before,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def problems(found: str) -> list[str]:
    return [line for line in found.splitlines() if line.startswith(("FAILED", "warning"))]


def pretend_installed(folder: Path, name: str, version: str) -> Path:
    """A folder for PYTHONPATH in which this version of the package is installed."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 4) as disk:
        yield disk


@pytest.fixture
def config(tmp_path: Path, checkpoints: Checkpoints) -> Path:
    """A configuration of a PPO run, on free ports."""
    return make_run(tmp_path / "run", checkpoints).path


def findings(*arguments: str) -> dict[str, Finding]:
    return {found.name: found for found in command.findings(Path(arguments[0]), arguments[1:])}


def test_a_machine_that_works_and_a_run_that_has_not_begun(config: Path) -> None:
    code, found = doctor("--config", str(config))
    assert (code, problems(found)) == (0, []), found
    for name in ("python", "libpython", "numpy", "nvidia-pytriton", "tritonserver", "shared memory", "disk", "clock"):
        assert f"\nok       {name}" in f"\n{found}"
    assert "reward_model" in found
    assert "server           not running" in found


def test_numpy_2_is_named_with_its_remedy(tmp_path: Path) -> None:
    code, found = doctor(packages=pretend_installed(tmp_path, "numpy", "2.1.0"))
    assert code == 1
    assert any(line.startswith("warning  numpy            2.1.0, tested with 1.26.4") for line in problems(found))
    assert 'empty tensors: run `pip install "numpy<2"`' in found


def test_a_wheel_of_another_version_is_named(tmp_path: Path) -> None:
    code, found = doctor(packages=pretend_installed(tmp_path, "nvidia_pytriton", "0.5.1"))
    assert code == 0
    assert problems(found) == [
        "warning  nvidia-pytriton  0.5.1, tested with 0.7.0: pip install 'nvidia-pytriton==0.7.0' if anything fails"
    ]


def test_packages_that_are_not_installed_are_named() -> None:
    """`-S`: a Python without the packages of its environment."""
    code, found = doctor(python=["-S"])
    assert code == 1
    for name in machine.PACKAGES:
        assert f"FAILED   {name:<16} not installed: pip install '{name}==" in found
    assert "FAILED   tritonserver     no tritonserver found" in found
    assert "or set server.tritonserver to the path of one" in found
    assert "\nok       clock" in found


def test_few_open_files_are_named() -> None:
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 8192))  # noqa: E731
    code, found = doctor(before=few)
    text = "warning  open files       at most 256 per process, 4096 are enough: ulimit -n 8192"
    assert (code, problems(found)) == (0, [text])


def test_too_few_open_files_keep_a_run_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    (found,) = machine.open_files()
    assert found.level is Level.FAILED
    assert found.text.endswith("raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch", "rich"])
def test_a_package_that_breaks_on_import_has_a_line_with_the_remedy(name: str, tmp_path: Path, config: Path) -> None:
    (tmp_path / f"{name}.py").write_text("raise ImportError('lib.so.13: no such file')\n")
    code, found = doctor("--config", str(config), packages=tmp_path)
    assert code == 1
    broken, unchecked = problems(found)
    assert broken.startswith(f"FAILED   {name:<16} ")
    assert f" cannot be imported (lib.so.13: no such file): pip install --force-reinstall '{name}==" in broken
    assert unchecked == "warning  configuration    not checked: install the packages above first"
    assert "\nok       clock" in found


def test_a_python_without_libpython_or_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    found = list(run_checks([("python", machine.python)]))
    assert [each.level for each in found] == [Level.FAILED, Level.FAILED]
    assert "3.9.1, must be 3.10 to 3.12" in found[0].text
    assert "apt install libpython" in found[1].text


def test_a_wheel_that_is_for_another_python_or_whose_libraries_do_not_load(tmp_path: Path) -> None:
    wheel = find_tritonserver(None)
    broken = copy_of(wheel, tmp_path / "broken", {PYTHON: PYTHON})
    broken.write_text("#!/bin/sh\necho 'libre2.so.5: cannot open shared object file' >&2\nexit 127\n")
    other = copy_of(wheel, tmp_path / "other", {OTHER: OTHER})
    for binary, told in ((broken, "does not start: libre2.so.5: cannot"), (other, f"there are stubs for {OTHER}")):
        (found,) = run_checks([("tritonserver", functools.partial(machine.tritonserver, binary))])
        assert found.level is Level.FAILED
        assert told in found.text


def test_a_port_that_is_taken_is_named(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = findings(str(config), f"server.grpc_port={port}")["ports"]
    assert found.level is Level.FAILED
    assert found.text.startswith(f"port {port} (server.grpc_port) on 127.0.0.1 cannot be used: Address already in use")


def test_a_port_that_another_program_listens_on_is_not_the_servers(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.settimeout(0.1)
        threading.Thread(target=refuse_all, args=(taken,), daemon=True).start()
        found = findings(str(config), f"server.http_port={port}")
    assert found["ports"].text.startswith(f"port {port} (server.http_port) on 127.0.0.1 cannot be used")
    assert found["server"].text == "not running"


def refuse_all(listener: socket.socket) -> None:
    """Close each connection, until the listener is closed."""
    while listener.fileno() >= 0:
        with contextlib.suppress(OSError):
            listener.accept()[0].close()


def test_ports_of_prometheus(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = findings(str(config), f"monitoring.actor_port={port}")["monitoring"]
        both = findings(str(config), f"monitoring.actor_port={port}", f"monitoring.trainer_port={port}")["monitoring"]
    assert (one.level, one.text[: len("monitoring.actor_port")]) == (Level.WARNING, "monitoring.actor_port")
    assert f"{port} is taken, so there would be no metrics" in one.text
    assert (both.level, both.text) == (
        Level.FAILED,
        f"monitoring.trainer_port: {port} is monitoring.actor_port, too; choose another port",
    )


def test_a_folder_of_the_server_that_cannot_be_written(config: Path) -> None:
    found = findings(str(config), "server.dir=/proc/none")["server.dir"]
    assert found.level is Level.FAILED
    assert "/proc/none cannot be written: " in found.text


def test_a_link_to_weights_that_are_gone(config: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoints.policy, tmp_path / "dangling")
    weights = tmp_path / "dangling" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "none")
    found = findings(str(config), f"actor.policy.checkpoint={tmp_path / 'dangling'}")
    assert found["files"].level is Level.FAILED
    assert "dangling" in found["files"].text
    assert found["disk"].level is Level.OK
    shard = "model-00001-of-00001.safetensors"
    weights.rename(weights.with_name(shard))
    weights.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    found = findings(str(config), f"actor.policy.checkpoint={weights.parent}")
    assert found["files"].level is Level.FAILED
    assert f"names {shard}, which is missing" in found["files"].text


def test_what_text_prompts_begin_with(config: Path, checkpoints: Checkpoints) -> None:
    assert findings(str(config))["prompts"].text == "text prompts begin with no special token"
    other = [f"{key}.checkpoint={checkpoints.other_policy}" for key in ("actor.policy", "critic")]  # adds BOS
    assert findings(str(config), *other)["prompts"].text == "text prompts begin with <s>"
    found = findings(str(config), *other, "actor.prompts.add_special_tokens=false")["prompts"]
    assert found.level is Level.WARNING
    assert found.text.startswith("text prompts lack <s>, with which")


def test_a_full_disk_and_one_that_cannot_be_written(disk: SmallDisk) -> None:
    disk.fill()
    space, write = machine.disk(disk.folder / "run", 0)
    assert (space.level, write.level) == (Level.FAILED, Level.FAILED)
    assert "0.0 GiB free" in space.text
    assert "No space left on device; set run.dir" in write.text
    disk.empty()
    disk.read_only(True)
    assert "Read-only file system" in list(machine.disk(disk.folder, 0))[1].text


def test_little_shared_memory(disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", disk.folder)
    (found,) = machine.shared_memory()
    assert found.level is Level.FAILED
    assert "docker run --shm-size=1g" in found.text


def test_a_clock_that_is_ahead_of_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = machine.time.time()
    monkeypatch.setattr(machine.time, "time", lambda: now + 60)
    assert "+60 s against the clock of" in list(machine.disk(tmp_path, 0))[1].text


@pytest.mark.slow
def test_what_is_missing_of_a_configuration_has_a_line_each(config: Path, tmp_path: Path) -> None:
    overrides = [f"reward.checkpoint={tmp_path / 'none'}", f"actor.prompts.path={tmp_path / 'no.jsonl'}"]
    code, found = doctor("--config", str(config), *overrides)
    assert code == 1
    assert [line.split()[1:3] for line in problems(found)] == [
        ["files", "reward.checkpoint:"],
        ["files", "actor.prompts.path:"],
    ]
    (tmp_path / "empty.jsonl").touch()
    empty = findings(str(config), f"actor.prompts.path={tmp_path / 'empty.jsonl'}")["files"]
    assert empty.text == f"actor.prompts.path: {tmp_path / 'empty.jsonl'} has no prompts"
    code, found = doctor("--config", str(config), "actor.algorithm.name=gpro")
    assert code == 1
    assert [line.split()[1] for line in problems(found)] == ["configuration"]
    assert "\nok       disk" in found


@pytest.mark.slow
def test_a_gpu_that_is_not_there_and_a_repository_that_cannot_be_rendered(config: Path) -> None:
    code, found = doctor("--config", str(config), "critic.device=cuda:98", "server.training_key_env=NOT_SET")
    assert code == 1
    device, rendering = problems(found)
    assert device.startswith("FAILED   devices          critic.device: cuda:98 needs 99 GPUs; ")
    assert device.endswith(", or set it to cpu")
    assert rendering.startswith("FAILED   rendering        server.training_key_env names NOT_SET")


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # until tritonserver reaps it
    except psutil.NoSuchProcess:
        return True


def test_a_model_whose_process_died_is_named_with_its_log(live: System) -> None:
    with live.without_probes():  # the supervisor would load it again
        (stub,) = [
            process
            for process in psutil.Process(live.server.process.pid).children(recursive=True)
            if not has_ended(process) and f"{os.sep}{CRITIC_SAVE}{os.sep}" in " ".join(process.cmdline())
        ]
        stub.kill()
        wait_for(lambda: has_ended(stub))
        found = findings(str(live.run.path))
        broken = [each for each in found.values() if each.level is Level.FAILED]
        assert [each.name for each in broken] == [CRITIC_SAVE]
        assert str(live.run.config.run.logs_dir / "tritonserver.log") in broken[0].text
    wait_for(lambda: findings(str(live.run.path))[CRITIC_SAVE].level is Level.OK, live.server)


def test_the_models_of_a_running_server_answer(live: System) -> None:
    found = findings(str(live.run.path))
    assert found["ports"].text == "used by this run's server"
    answered = {name for name, each in found.items() if each.text.startswith("answers in")}
    assert answered == {"reward_model", "critic", "critic_infer", "critic_train", "critic_save"}
