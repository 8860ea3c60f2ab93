"""`rlhf-triton`, the installed form of `python -m tools`: help, exit codes, and completion in bash and zsh."""

from __future__ import annotations

import argparse
import os
import pkgutil
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_system import Checkpoints, make_run
from shebang import SHEBANG

from python_backend.config.command_line import add_run_arguments
from tools.__main__ import COMMANDS
from tools.arguments import parse_or_complete
from trainer.publish import initialise_stores

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "matplotlib", "peft"}
CONFIG = ["--config", "{folder}/none.yaml"]
ERRORS = {  # a command that starts, and cannot do what it was started for
    "run": CONFIG,
    "serve": CONFIG,
    "render": CONFIG,
    "weights": ["list", *CONFIG],
    "gateway": CONFIG,
    "status": CONFIG,
    "import": ["--reward", "{folder}", "--no-load"],
    "chaos": ["--out", "{folder}"],
    "fuzz": ["--out", "{folder}/file/out"],
    "bench": ["update", "--report-only", "{folder}"],
    "report": ["{folder}/none"],
    "export": ["{folder}"],
}
INTERRUPTED = ["run", "render", "weights list", "gateway", "status", "doctor"]
BASH = """\
eval "$REGISTRATION"
COMP_LINE=$1 COMP_POINT=${#1}
_python_argcomplete rlhf-triton
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """\
compdef() { }
_describe() { print -l -- ${(P)2} }
eval "$REGISTRATION"
BUFFER=$1 CURSOR=${#1}
words=(${(z)1})
_python_argcomplete
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script that pip writes for `[project.scripts]`."""
    named = re.search(r'^\[project\.scripts\]\nrlhf-triton = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert named is not None
    assert callable(pkgutil.resolve_name(named[1]))
    module, _, function = named[1].partition(":")
    path = tmp_path_factory.mktemp("bin") / "rlhf-triton"
    path.write_text(f"{SHEBANG}import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture(scope="module")
def registration() -> str:
    """What a user's shell evaluates."""
    command = [str(Path(sys.executable).with_name("register-python-argcomplete")), "rlhf-triton"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program; stderr then has a line for each imported module."""
    command = [sys.executable, "-X", "importtime", str(program), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment_of(**environment), capture_output=True, text=True, check=False
    )


def environment_of(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    lines = [line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "tools" in lines
    return {line.partition(".")[0] for line in lines}


def test_help_has_a_line_for_each_command_and_imports_nothing(program: Path) -> None:
    done = run(program, "--help")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "usage: rlhf-triton <command> [--help]")
    for name, (_, what) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", done.stdout, re.M)
        assert len(what) < 100
    assert imported(done) <= {*sys.stdlib_module_names, "tools", "sitecustomize", "usercustomize"} | site_hooks()


def site_hooks() -> set[str]:
    """What every interpreter of this environment imports, for its installed packages."""
    command = [sys.executable, "-X", "importtime", "-c", "import tools"]
    done = subprocess.run(command, env=environment_of(), capture_output=True, text=True, check=True)
    return imported(done)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_completion_of_a_command_are_quick_to_import(name: str, program: Path, tmp_path: Path) -> None:
    done = run(program, name, "--help")
    assert (done.returncode, done.stdout.startswith(f"usage: rlhf-triton {name} ")) == (0, True)
    assert not imported(done) & HEAVY
    line = f"rlhf-triton {name} "
    answer = tmp_path / "answer"
    shell = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = run(program, _ARGCOMPLETE_STDOUT_FILENAME=str(answer), **shell)
    assert "--help" in answer.read_text().split("\013")
    assert not imported(done) & HEAVY


@pytest.mark.parametrize(
    ("line", "offered", "withheld"),
    [
        ("we", {"weights"}, {"run"}),
        ("", set(COMMANDS), {"--config"}),
        ("weights ", {"list", "verify", "publish", "rollback", "ready"}, {"weights", "--model"}),
        ("weights rollback --", {"--config", "--model", "--to"}, {"--server"}),
        ("weights list --model ", {"critic", "reward"}, {"list"}),
        ("bench update --r", {"--rows", "--repeats", "--report-only"}, {"--quick"}),
        ("run --config ", {"my.yaml", "folder/"}, {"notes.txt"}),
        ("run --device-gib ", set(), {"my.yaml", "notes.txt"}),
        ("run --config my.yaml trainer.publish.", {"trainer.publish.keep="}, {"trainer.lr=", "trainer.publish="}),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(
    shell: str, line: str, offered: set[str], withheld: set[str], program: Path, registration: str, tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "folder").mkdir()
    for name in ("my.yaml", "notes.txt"):
        (tmp_path / name).touch()
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    environment = environment_of(PATH=path, REGISTRATION=registration)
    script = {"bash": BASH, "zsh": ZSH}[shell]
    command = [shell, "-c", script, shell, f"rlhf-triton {line}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    answers = {answer.partition(":")[0].strip() for answer in done.stdout.splitlines()}  # zsh's have an explanation
    assert offered <= answers, done.stderr
    assert not withheld & answers


@pytest.mark.slow
def test_exit_code_1_of_what_is_checked(program: Path, tmp_path: Path, checkpoints: Checkpoints) -> None:
    made = make_run(tmp_path, checkpoints)
    initialise_stores(made.config)
    os.truncate(made.store.folder(0) / "model.safetensors", 1000)
    config = ["--config", str(made.path)]
    for arguments, says in [
        (["weights", "ready", *config], "not ready: "),
        (["weights", "verify", *config], "error: 1 of 1 versions cannot be served"),
        (["doctor", *config, f"critic.checkpoint={tmp_path}"], "failed"),
        (["run", *config, "--dry-run", "--host-gib", "0.001"], "error: cpu needs "),
    ]:
        done = run(program, *arguments)
        assert done.returncode == 1, done.stderr[-500:]
        assert says in done.stdout + done.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["run"], ["run", "--nonsense"], ["bench", "nonsense"], ["weights"]], ids=str
)
def test_exit_code_2_of_wrong_arguments(arguments: list[str], program: Path) -> None:
    done = run(program, *arguments)
    assert done.returncode == 2
    assert "usage: rlhf-triton" in done.stdout + done.stderr or "error: unknown" in done.stderr


def test_overrides_stand_on_both_sides_of_options() -> None:
    whole, commands = argparse.ArgumentParser(), argparse.ArgumentParser()
    add_run_arguments(whole)
    add_run_arguments(commands.add_subparsers().add_parser("list"))
    for parser, first in ((whole, []), (commands, ["list"])):
        for words in ("a=1 --config x.yaml b=2", "--config x.yaml a=1 b=2", "a=1 b=2 --config x.yaml"):
            assert parse_or_complete(parser, [*first, *words.split()]).overrides == ["a=1", "b=2"]
        with pytest.raises(SystemExit):
            parse_or_complete(parser, [*first, "--config", "x.yaml", "a=1", "--unknown"])


def test_every_command_has_an_error() -> None:
    assert set(COMMANDS) - set(ERRORS) == {"doctor"}, "it reports an error as a finding"


@pytest.mark.parametrize("name", ERRORS)
def test_exit_code_2_of_an_error(name: str, program: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(program, name, *(argument.format(folder=tmp_path) for argument in ERRORS[name]))
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(said)) == (2, 1), said
    assert said[0].startswith("error: ")
    assert str(tmp_path) in said[0]


@pytest.mark.parametrize(("command", "code"), [*((name, 130) for name in INTERRUPTED), ("serve", 0)])
def test_exit_code_of_an_interrupted_command(command: str, code: int, program: Path, tmp_path: Path) -> None:
    """The signal arrives while the command reads its YAML, a pipe that stays empty."""
    os.mkfifo(tmp_path / "my.yaml")
    arguments = [str(program), *command.split(), "--config", str(tmp_path / "my.yaml")]
    with subprocess.Popen(
        arguments,
        env=environment_of(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in background jobs
    ) as process:
        try:
            pipe = None
            while pipe is None:
                assert process.poll() is None, process.communicate()
                try:
                    pipe = os.open(tmp_path / "my.yaml", os.O_WRONLY | os.O_NONBLOCK)
                except OSError:  # no reader yet
                    time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            os.close(pipe)  # ends a read that begins just after the signal, which Python has only noted by then
            _, error = process.communicate()
        finally:
            process.kill()
    assert process.returncode == code
    assert "Traceback" not in error
