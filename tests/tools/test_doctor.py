"""`python -m tools doctor` on machines and configurations that are broken in several ways, and finding tritonserver."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_system import Checkpoints, System, make_run, wait_for
from small_disk import small_disk
from tiny_checkpoints import save_tiny
from tiny_tokenizers import CHATS, save_chat_policy, save_text_reward

from actor.data.prompt_files import read_rows
from actor.data.prompt_reader import PromptReader
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.config import ConfigError, ServerSection, load_config
from python_backend.wire.contract import CRITIC_SAVE
from tools import doctor
from tools.doctor import Finding, Level, run_checks
from tools.preflight import check_run, files
from tools.server.container import BODY_LIMIT
from tools.server.triton_home import (
    STUB,
    ServerStartError,
    TritonHome,
    accepts,
    find_tritonserver,
    lay_out_backends,
    server_environment,
)
from tools.server.tritonserver import TritonServer
from tools.token_checks import prompt_warnings, token_findings

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "3.8"


def run_doctor(
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
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def problems(found: str) -> list[str]:
    return [line for line in found.splitlines() if line.startswith(("FAILED", "warning"))]


@pytest.fixture
def config(tmp_path: Path, checkpoints: Checkpoints) -> Path:
    """A configuration of a PPO run, on free ports."""
    return make_run(tmp_path / "run", checkpoints).path


def findings(*arguments: str) -> dict[str, Finding]:
    return {found.name: found for found in doctor.findings(Path(arguments[0]), arguments[1:])}


def test_a_machine_that_works_and_a_run_that_has_not_begun(config: Path) -> None:
    code, found = run_doctor("--config", str(config))
    assert (code, problems(found)) == (0, []), found
    for name in ("python", "libpython", "numpy", "nvidia-pytriton", "tritonserver", "shared memory", "disk", "clock"):
        assert f"\nok       {name}" in f"\n{found}"
    assert "reward_model" in found
    assert "server           not running" in found


def test_other_versions_a_broken_package_and_few_open_files_are_named_with_their_remedies(
    tmp_path: Path, config: Path
) -> None:
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


def test_packages_that_are_not_installed_are_named() -> None:
    """`-S`: a Python without the packages of its environment."""
    required = [name for name in importlib.metadata.requires("rlhf-on-triton") or [] if "extra ==" not in name]
    assert {re.split("[<>=]", name)[0] for name in required} <= doctor.PACKAGES.keys()
    code, found = run_doctor(python=["-S"])
    assert code == 1
    for name in doctor.PACKAGES:
        assert f"FAILED   {name:<16} not installed: pip install '{name}==" in found
    assert "FAILED   tritonserver     no tritonserver found" in found
    assert "or set server.tritonserver to the path of one" in found
    assert "\nok       clock" in found


def test_what_no_run_can_work_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few open files, a Python without libpython or of another version, tritonservers that do not start."""
    wheel = find_tritonserver(None)
    broken = copy_of(wheel, tmp_path / "broken", {PYTHON: PYTHON})
    broken.write_text("#!/bin/sh\necho 'libre2.so.5: cannot open shared object file' >&2\nexit 127\n")
    other = copy_of(wheel, tmp_path / "other", {OTHER: OTHER})
    started = [functools.partial(doctor.tritonserver, binary) for binary in (broken, other)]
    found = list(run_checks([("tritonserver", check) for check in started]))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    found += run_checks([("open files", doctor.open_files), ("python", doctor.python)])
    assert {each.level for each in found} == {Level.FAILED}
    expected = [
        "does not start: libre2.so.5: cannot",
        f"there are stubs for {OTHER}",
        "raise nofile in /etc/security/limits.conf, or docker run --ulimit nofile=65536",
        "3.9.1, must be 3.10 to 3.12",
        "apt install libpython",
    ]
    assert [each.text for each, part in zip(found, expected, strict=True) if part not in each.text] == []


def test_disks_shared_memory_and_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", 4) as disk:
        monkeypatch.setattr(doctor, "SHARED_MEMORY", disk.folder)
        (memory,) = doctor.shared_memory()
        assert memory.level is Level.FAILED
        assert "docker run --shm-size=1g" in memory.text
        disk.fill()
        space, write = doctor.disk(disk.folder / "run", 0)
        assert (space.level, write.level) == (Level.FAILED, Level.FAILED)
        assert "0.0 GiB free" in space.text
        assert "No space left on device; set run.dir" in write.text
        disk.empty()
        disk.read_only(True)
        assert "Read-only file system" in list(doctor.disk(disk.folder, 0))[1].text
    now = doctor.time.time()
    monkeypatch.setattr(doctor.time, "time", lambda: now + 60)
    assert "+60 s against the clock of" in list(doctor.disk(tmp_path, 0))[1].text


def refuse_all(listener: socket.socket) -> None:
    """Close each connection, until the listener is closed."""
    while listener.fileno() >= 0:
        with contextlib.suppress(OSError):
            listener.accept()[0].close()


def test_ports_that_are_taken_and_a_folder_that_cannot_be_written(config: Path) -> None:
    """Another program listens, which is not the run's server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.settimeout(0.1)
        threading.Thread(target=refuse_all, args=(taken,), daemon=True).start()
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


def test_weights_that_are_gone(config: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A link leads nowhere, and then the file that an index names is missing."""
    shutil.copytree(checkpoints.policy, tmp_path / "dangling")
    weights = tmp_path / "dangling" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "none")
    policy = f"actor.policy.model={weights.parent}"
    found = findings(str(config), policy)
    assert (found["files"].level, found["disk"].level) == (Level.FAILED, Level.OK)
    assert "dangling" in found["files"].text
    shard = "model-00001-of-00001.safetensors"
    weights.rename(weights.with_name(shard))
    weights.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    missing = findings(str(config), policy)["files"]
    assert (missing.level, f"names {shard}, which is missing" in missing.text) == (Level.FAILED, True)


def test_what_text_prompts_begin_with(config: Path, checkpoints: Checkpoints) -> None:
    other = [f"{key}.model={checkpoints.other_policy}" for key in ("actor.policy", "critic")]  # adds BOS
    for overrides, level, told in (
        ([], Level.OK, "text prompts begin with no special token"),
        (other, Level.OK, "text prompts begin with <s>"),
        ([*other, "actor.prompts.add_special_tokens=false"], Level.WARNING, "text prompts lack <s>, with which"),
    ):
        found = findings(str(config), *overrides)["prompts"]
        assert (found.level, found.text[: len(told)]) == (level, told)


def test_settings_without_effect(config: Path) -> None:
    found = findings(str(config), "actor.kl.horizon=9")["settings"]
    assert (found.level, found.text) == (
        Level.WARNING,
        "without effect in this run: actor.kl.horizon (actor.kl.target is not set)",
    )
    assert "settings" not in findings(str(config), "actor.kl.horizon=9", "actor.kl.target=1")


def test_what_is_wrong_with_a_configuration_has_a_line_each(config: Path, tmp_path: Path) -> None:
    settings = [
        f"reward.model={tmp_path / 'none'}",
        f"actor.prompts.path={tmp_path / 'no.jsonl'}",
        "critic.device=cuda:98",
        "server.training_key_env=NOT_SET",
    ]
    found = [each for each in doctor.findings(config, settings) if each.level is not Level.OK]
    reward, prompts, device, rendering = found
    assert {each.level for each in found} == {Level.FAILED}
    assert (reward.name, reward.text.split()[0]) == ("files", "reward.model:")
    assert (prompts.name, prompts.text.split()[0]) == ("files", "actor.prompts.path:")
    assert device.text.startswith("critic.device: cuda:98 needs 99 GPUs; ")
    assert device.text.endswith(", or set it to cpu")
    assert rendering.text.startswith("server.training_key_env names NOT_SET")
    unknown = findings(str(config), "actor.algorithm.name=gpro")
    assert [each.name for each in unknown.values() if each.level is Level.FAILED] == ["configuration"]
    assert unknown["disk"].level is Level.OK


BASE = {"eos_token": "<|endoftext|>"}
ENDS = "a response ends with '<|endoftext|>' (0), '<|im_end|>' (2)"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [("ok", "ends", "a response ends with '<|im_end|>' (2)")]),
        (BASE, [("warning", "ends", f"{ENDS}; '<|im_end|>' (2) because the chat template ends a reply with it")]),
        ({**BASE, "ends": [0, 2]}, [("ok", "ends", f"{ENDS}, one of which is padding, too")]),
        (
            {"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }} END\n{% endfor %}"},
            [
                ("ok", "ends", "a response ends with '<|im_end|>' (2)"),
                ("warning", "ends", "the chat template ends a reply with 'END', which is no special token"),
            ],
        ),
        (
            {"more": 2, "ends": [2, 161, 200]},
            [
                (
                    "warning",
                    "ends",
                    "a response ends with '<|im_end|>' (2); generation_config.json or template name None (161), ",
                ),
                (
                    "ok",
                    "embeddings",
                    "actor.policy.model: 2 of 162 have no entry in the tokenizer, and are never sampled",
                ),
            ],
        ),
        (
            {"more": -2},
            [
                ("ok", "ends", "a response ends with '<|im_end|>' (2)"),
                ("warning", "embeddings", "actor.policy.model: 158, none for "),
            ],
        ),
    ],
    ids=str,
)
def test_what_ends_a_response_and_sizes_that_differ(
    tmp_path: Path, config: Path, settings: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    save_chat_policy(tmp_path / "policy", **settings)
    overrides = [f"actor.policy.model={tmp_path / 'policy'}", "actor.algorithm.name=grpo"]
    found = [*token_findings(load_config(config, [*overrides, "actor.algorithm.responses_per_prompt=2"]))]
    assert [(each.level.value, each.name) for each in found] == [(level, name) for level, name, _ in expected]
    assert all(each.text.startswith(text) for each, (_, _, text) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "settings", "is_told"),
    [
        ("qwen2", [], True),
        ("llama", [], True),
        ("llama", ["reward.append_eos=true"], False),  # which is what its template ends a turn with
        ("qwen2", ["reward.template='{{ text }}'"], False),
        ("bert", [], True),  # no special token, but its "\nassistant :"
    ],
)
def test_a_text_that_is_a_rendered_chat_is_named_once_with_the_remedy(
    tmp_path: Path, config: Path, family: str, settings: list[str], *, is_told: bool
) -> None:
    """Doctor and the start of a run say it: the reward model then reads no end of the reply's turn."""
    chat = "{% for m in messages %}{{ m.role }} :\n{{ m.content }} [end]\n{% endfor %}" if family == "bert" else None
    tokenizer = save_text_reward(tmp_path / "reward", family, **({"chat_template": chat} if chat else {}))
    question = [{"role": "user", "content": "Open it."}]
    prompts = tmp_path / "prompts.jsonl"
    text = tokenizer.apply_chat_template(question, tokenize=False) + "assistant :\n" * (family == "bert")
    rows = [{"text": "Open it: \n user"}, {"text": text}, {"text": text}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    given = [f"reward.model={tmp_path / 'reward'}", f"actor.prompts.path={prompts}", *settings]
    loaded = load_config(config, [*given, "actor.prompts.max_tokens=100"])
    end = {"qwen2": "<|im_end|>", "llama": "</s>", "bert": "[end]"}[family]
    told = "".join(prompt_warnings(loaded, check_run(loaded)))
    assert bool(told) == is_told
    assert [each.text for each in files(loaded) if each.level is Level.WARNING and "reward" in each.text] == (
        [told] if is_told else []
    )
    if is_told:
        assert told.startswith(f"{prompts}:2 is a text with ")
        assert f"so its reply is scored without {end!r}" in told
        assert told.endswith("give the chat as `messages` (2 such rows)")


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
STARTED = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
WITHOUT_HEADER = "{% for m in messages %}{{ '[INST]' if m.role == 'user' }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("template", "is_told"), [(TURNS, True), (STARTED, False), (WITHOUT_HEADER, False)])
def test_a_template_without_a_generation_prompt_is_named(
    tmp_path: Path, config: Path, template: str, *, is_told: bool
) -> None:
    save_chat_policy(tmp_path / "policy", chat_template=template)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "Open it."}]}))
    given = [f"actor.policy.model={tmp_path / 'policy'}", f"actor.prompts.path={tmp_path / 'prompts.jsonl'}"]
    loaded = load_config(config, given)
    reader = PromptReader.of(loaded, load_tokenizer(tmp_path / "policy"), None)
    prompts = [reader.prompt(row) for row in read_rows(tmp_path / "prompts.jsonl")]
    told = [each for each in prompt_warnings(loaded, prompts) if "add_generation_prompt" in each]
    assert len(told) == is_told
    assert all("prompts end before '<assistant>'" in each for each in told)


@pytest.mark.parametrize("family", ["llama", "bert", "qwen2"])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_template_without_the_bos_of_texts_is_named(
    tmp_path: Path, config: Path, family: str, *, writes_bos: bool
) -> None:
    template = "{{ bos_token }}" * writes_bos + "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_text_reward(tmp_path / "reward", family, chat_template=template)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "Open it."}]}))
    given = [f"reward.model={tmp_path / 'reward'}", f"actor.prompts.path={prompts}"]
    found = [each.text for each in files(load_config(config, given)) if "writes none" in each.text]
    assert [text.partition(",")[0] for text in found] == ["reward.model begins texts with <s>"] * (
        family == "llama" and not writes_bos
    )


def test_models_without_embeddings_for_what_the_policy_may_send_are_refused(tmp_path: Path, config: Path) -> None:
    """By name, before the start: a run would end at the first such token."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    tokenizer = save_chat_policy(tmp_path / "policy", more=8)
    added = {"extra_special_tokens": ["<end>"], "chat_template": CHATS["qwen2"].replace("<|im_end|>", "<end>")}
    save_chat_policy(tmp_path / "added", more=-1, **added)
    for name, size in {"small": 156, "enough": 160}.items():
        save_tiny(tmp_path / name, "llama", "critic", vocab_size=size, max_position_embeddings=64)
        tokenizer.save_pretrained(tmp_path / name)
    grpo = ["actor.algorithm.name=grpo", "actor.algorithm.responses_per_prompt=2"]
    for model, changes, told in (
        ("policy", [f"critic.model={tmp_path / 'enough'}"], None),
        (
            "policy",
            [f"critic.model={tmp_path / 'small'}"],
            "critic.model: .*small has 156 embeddings, none for .* and 1 ",
        ),
        ("added", grpo, None),  # the template is not used
        (
            "added",
            [*grpo, f"actor.prompts.path={chats}"],
            r"added has 160 embeddings, none for '<end>' \(160\), which its",
        ),
    ):
        settings = ["actor.prompts.max_tokens=40", f"actor.policy.model={tmp_path / model}", *changes]
        with contextlib.nullcontext() if told is None else pytest.raises(ConfigError, match=told):
            check_run(load_config(config, settings))


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # until tritonserver reaps it
    except psutil.NoSuchProcess:
        return True


def test_the_models_of_a_running_server_answer_and_one_whose_process_died_is_named_with_its_log(live: System) -> None:
    found = findings(str(live.run.path))
    assert found["ports"].text == "used by this run's server"
    answered = {name for name, each in found.items() if each.text.startswith("answers in")}
    assert answered == {"reward_model", "critic", "critic_infer", "critic_train", "critic_save"}
    with live.without_probes():  # the supervisor would load it again
        (stub,) = [
            process
            for process in psutil.Process(live.server.process.pid).children(recursive=True)
            if not has_ended(process) and f"{os.sep}{CRITIC_SAVE}{os.sep}" in " ".join(process.cmdline())
        ]
        stub.kill()
        wait_for(lambda: has_ended(stub))
        (broken,) = [each for each in findings(str(live.run.path)).values() if each.level is Level.FAILED]
        assert broken.name == CRITIC_SAVE
        assert str(live.run.config.run.logs_dir / "tritonserver.log") in broken.text
    wait_for(lambda: findings(str(live.run.path))[CRITIC_SAVE].level is Level.OK, live.server)


# ---- tools.server.triton_home ----


@pytest.fixture
def wheel() -> TritonHome:
    return find_tritonserver(None)


def executable(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def copy_of(wheel: TritonHome, root: Path, stubs: dict[str, str]) -> Path:
    """A wheel's tree under `root`; `stubs` says which Python's stub stands in which folder."""
    binary = executable(root / "pytriton" / "tritonserver" / "bin" / "tritonserver")
    (binary.parent.parent / "backends").symlink_to(wheel.backend_source_dir)
    for folder, version in stubs.items():
        place = binary.parent.parent / "python_backend_stubs" / folder
        place.mkdir(parents=True)
        (place / STUB).symlink_to(wheel.stub.parents[1] / version / STUB)
    return binary


def test_path_is_the_last_resort(wheel: TritonHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel.from_wheel
    binary = copy_of(wheel, tmp_path, {PYTHON: PYTHON})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(binary.parent))
    assert find_tritonserver(None).binary == binary
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match=r"no tritonserver found, .* `pip install nvidia-pytriton`"):
        find_tritonserver(None)


def test_backends_are_laid_out_again_and_again(
    wheel: TritonHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package, where its path is not ASCII: in an editable install the stub's Python cannot open that."""
    files = {"libtriton_python.so", "triton_python_backend_utils.py", STUB}
    for package, names in ((tmp_path / "plain", set()), (tmp_path / "ü", {"ü"})):
        monkeypatch.setattr("tools.server.triton_home._PACKAGE", package)
        folder = lay_out_backends(wheel, tmp_path / "backends") / "python"
        assert {path.name for path in folder.iterdir()} == files | names
        assert (folder / STUB).resolve() == wheel.stub.resolve()
    # The layout of the NGC image, which keeps its own: stub beside the backend's library, no folder of stubs.
    binary = executable(tmp_path / "tritonserver" / "bin" / "tritonserver")
    backends = lay_out_backends(wheel, binary.parent.parent / "backends")
    home = find_tritonserver(binary)
    assert (home.from_wheel, home.backend_source_dir) == (False, backends)
    assert lay_out_backends(home, tmp_path / "elsewhere") == backends
    assert not (tmp_path / "elsewhere").exists()


def test_environment_and_options_of_the_server(
    wheel: TritonHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    server = TritonServer(home, tmp_path, ServerSection(), tmp_path / "log", backends=tmp_path, control_key="key")
    assert f"{BODY_LIMIT}={256 << 20}" in server._command()


def test_a_server_or_a_python_that_cannot_be_used_is_one_sentence(
    wheel: TritonHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sentence: str, explicit: Path | None = None) -> None:
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
