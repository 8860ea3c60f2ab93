"""`rlhf-triton`: help, exit codes, and the output of `status`."""

import argparse
import dataclasses
import json
import os
import pkgutil
import re
import signal
import stat
import subprocess
import sys
import time
import types
from pathlib import Path
from unittest import mock

import pytest
from live_system import make_run
from run_yaml import write_yaml
from shebang import SHEBANG

import rlhf_triton.actor.__main__
import rlhf_triton.trainer.__main__
from rlhf_triton.actor.run.settings import write_settings
from rlhf_triton.config.command_line import add_run_arguments
from rlhf_triton.config.loading import load_config
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import exclusive_lock, write_json
from rlhf_triton.store.heartbeat import Heartbeat
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.run_lock import only_run, only_server
from rlhf_triton.store.serving_records import ServingRecord
from rlhf_triton.tools import __main__ as program_module
from rlhf_triton.tools import run as tools_run
from rlhf_triton.tools import serve, status, weights
from rlhf_triton.tools.__main__ import COMMANDS
from rlhf_triton.tools.arguments import parse
from rlhf_triton.tools.report.progress import RunProgress
from rlhf_triton.tools.server import starting
from rlhf_triton.tools.server.ports import PORT_KEYS
from rlhf_triton.tools.server.server_log import readable

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "transformers", "matplotlib", "peft"}
CONFIG = ["--config", "{folder}/none.yaml"]
LOST = mock.Mock(**{"write.side_effect": BrokenPipeError(32, "Broken pipe")})  # as stdout
ERRORS = {  # a command that starts, and cannot do what it was started for
    "run": CONFIG,
    "serve": CONFIG,
    "weights": ["list", *CONFIG],
    "gateway": CONFIG,
    "status": CONFIG,
    "report": ["{folder}/none"],
    "export": ["{folder}"],
    "replay": ["{folder}", "--step", "1"],
    "example-model": ["{folder}/file"],
    "init": ["models", "--reward", "{folder}", "--no-load"],
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Return the script that pip writes for `[project.scripts]`."""
    named = re.search(r'^\[project\.scripts\]\nrlhf-triton = "(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert callable(pkgutil.resolve_name(named[1]))
    module, _, function = named[1].partition(":")
    path = tmp_path_factory.mktemp("bin") / "rlhf-triton"
    path.write_text(f"{SHEBANG}import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(program, *arguments):
    """Run the program with one line on stderr per imported module."""
    command = [sys.executable, "-X", "importtime", str(program), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment_of(), capture_output=True, text=True)


def environment_of(**more):
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


def imported(done):
    lines = [line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert "rlhf_triton.tools" in lines
    return set(lines)


def test_help_lists_each_command_without_heavy_imports(program):
    done = run(program, "--help")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "usage: rlhf-triton <command> [--help]")
    for name, what in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", done.stdout, re.M)
        assert len(what) < 100
    packages = {f"rlhf_triton.{name}" for name in ("python_backend", "actor", "trainer", "config")}
    assert not imported(done) & {*HEAVY, *packages, "numpy", "pydantic", "yaml"}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_imports_no_heavy_package(name, program):
    done = run(program, name, "--help")
    assert (done.returncode, done.stdout.startswith(f"usage: rlhf-triton {name} ")) == (0, True)
    assert not imported(done) & HEAVY


@pytest.mark.parametrize(
    ("arguments", "told"),
    [([], "usage: rlhf-triton"), (["staus"], "did you mean status?"), (["weights"], "usage: rlhf-triton weights")],
)
def test_wrong_arguments_exit_with_code_2(arguments, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rlhf-triton", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        code = program_module.main()
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    assert (code, told in shown.out + shown.err) == (2, True)


@pytest.mark.parametrize(
    ("command", "module", "package", "extra"),
    [
        ("gateway", "rlhf_triton.tools.gateway.command", "h11", "gateway"),
        ("gateway", "rlhf_triton.tools.gateway.command", "transformers", "gateway,serving"),
        ("serve", "rlhf_triton.tools.serve", "psutil", "serve"),
        ("run", "rlhf_triton.tools.run", "matplotlib", "train"),
        ("example-model", "rlhf_triton.tools.example_model", "torch", "serve"),
        ("example-model", "rlhf_triton.tools.example_model", "gguf", "demo"),
    ],
)
def test_missing_package_error_names_the_extra_to_install(command, module, package, extra, monkeypatch, capsys):
    def missing():
        raise ModuleNotFoundError(f"No module named '{package}.part'", name=f"{package}.part")

    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(main=missing))
    monkeypatch.setattr(program_module, "ROOT", Path("/"))
    monkeypatch.setattr(sys, "argv", ["tools"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert program_module.main([command]) == 2
    told = f"error: {command} needs the package {package}: pip install '.[{extra}]'\n"
    assert capsys.readouterr().err == told


def test_overrides_are_accepted_before_and_after_options():
    whole = argparse.ArgumentParser()
    commands = argparse.ArgumentParser()
    add_run_arguments(whole)
    add_run_arguments(commands.add_subparsers().add_parser("list"))
    for parser, first in ((whole, []), (commands, ["list"])):
        for words in ("a=1 --config x.yaml b=2", "--config x.yaml a=1 b=2", "a=1 b=2 --config x.yaml"):
            assert parse(parser, [*first, *words.split()]).overrides == ["a=1", "b=2"]
        with pytest.raises(SystemExit):
            parse(parser, [*first, "--config", "x.yaml", "a=1", "--unknown"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("x.yaml", "give the configuration as --config x.yaml"),
        (
            "--model models/reward",
            "give a YAML file as --config FILE; it names the models' folders, such as reward.model",
        ),
        (
            "--config x.yaml --port 9000",
            "--port; settings are written as section.key=value, such as server.http_port=…",
        ),
        ("--config x.yaml --nonsense=1", "section.key=value, such as server.http_port=…"),
    ],
)
def test_misplaced_setting_or_file_error_shows_the_right_form(words, told, capsys):
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    with pytest.raises(SystemExit):
        parse(parser, words.split())
    assert told in capsys.readouterr().err


def test_help_that_mentions_the_configuration_is_no_such_option():
    parser = argparse.ArgumentParser()
    parser.add_argument("file", help="becomes the --config of a run")
    assert parse(parser, ["x.yaml"]).file == "x.yaml"


def test_each_commands_error_exits_with_code_2_and_one_line(tmp_path, monkeypatch, capsys):
    assert set(COMMANDS) - set(ERRORS) == {"doctor"}, "a command has no error here"
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["rlhf-triton"])
    (tmp_path / "file").touch()
    for name, arguments in ERRORS.items():
        assert program_module.main([name, *(argument.format(folder=tmp_path) for argument in arguments)]) == 2, name
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("error: ")
        assert str(tmp_path) in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("list", "no versions are served: the configuration has no critic, and reward.store is false; http://"),
        ("ready --model critic", "no versions are served: the configuration has no critic, and reward.store is false"),
        ("list reward.store=true", "weights/reward is empty; `rlhf-triton serve` creates version 0"),
    ],
)
def test_weights_command_refuses_a_configuration_without_versions(words, told, tmp_path, capsys):
    (tmp_path / "my.yaml").write_text(f"run: {{dir: {tmp_path}}}\nreward: {{model: m}}")
    assert weights.main([*words.split(), "--config", str(tmp_path / "my.yaml")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--print-command"]])
def test_serve_names_the_setting_of_a_folder_that_cannot_be_written(
    options, tmp_path, checkpoints, capsys, monkeypatch
):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "my.yaml").write_text(
        f"reward: {{model: {checkpoints.reward}}}\ncritic: {{model: {checkpoints.policy}}}"
    )
    ports = [f"server.{key}=0" for key in PORT_KEYS]
    arguments = ["--config", str(tmp_path / "my.yaml"), f"run.dir={tmp_path}/my.yaml/run", *ports]
    assert serve.main([*options, *arguments]) == 2
    assert re.search(r"^error: run\.dir: \S+ cannot be used: Not a directory; choose an", capsys.readouterr().err, re.M)


@pytest.mark.parametrize(
    ("command", "code"), [("run", 130), ("weights list", 130), ("gateway", 130), ("doctor", 130), ("serve", 0)]
)
def test_interrupted_command_exits_with_its_code_and_no_traceback(command, code, program, tmp_path):
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


@pytest.mark.parametrize(("left", "says"), [(0, "export"), (5, "export"), (7, "from_pretrained")])
def test_run_command_names_the_newest_policy_after_an_error(tmp_path, checkpoints, monkeypatch, capsys, left, says):
    """The checkpoint is of step 7; `policy/` is missing, or of an earlier stop, or of that step."""
    config = make_run(tmp_path / "a run", checkpoints)
    folder = config.config.run.dir

    def execute(_):
        (folder / "checkpoints" / "actor" / "7").mkdir(parents=True)
        if left:
            (folder / "policy").mkdir()
            write_json(folder / "policy" / "policy.json", {"step": left})
        raise RlhfError("the actor was killed")

    monkeypatch.setattr(tools_run.RunProcesses, "execute", execute)
    assert tools_run.main(["--config", str(config.path)]) == 2
    shown = capsys.readouterr()
    assert "error: the actor was killed" in shown.err
    (line,) = [line for line in shown.out.splitlines() if line.startswith("policy: ")]
    assert says in line
    if says == "export":
        assert line == f"policy: rlhf-triton export '{folder}' writes that of step 7 as a Hugging Face folder"


@pytest.mark.usefixtures("signals_kept")
@pytest.mark.parametrize(
    ("lost", "error", "code"),
    [("stdout", KeyboardInterrupt, 130), ("stdout", RlhfError, 2), ("run.lock", RlhfError, 2), ("stdout", None, 0)],
)
def test_run_stops_its_processes_and_names_the_cause_without_its_output(
    tmp_path, checkpoints, monkeypatch, capsys, lost, error, code
):
    """`tee` has gone, or the disk is full: nothing can be printed, or the phase not be written."""
    run = make_run(tmp_path / "run", checkpoints)
    folder = run.config.run.dir

    def execute(_):
        (folder / "checkpoints" / "actor" / "7").mkdir(parents=True)
        if lost == "run.lock":
            (folder / lost).unlink()
            (folder / lost).mkdir()
        if error is None:
            (folder / "summary.json").write_text('{"steps": 7}')
        else:
            raise error("the actor was killed")

    stopped = mock.Mock()
    monkeypatch.setattr(tools_run.RunProcesses, "execute", execute)
    monkeypatch.setattr(tools_run.RunProcesses, "stop", stopped)
    if lost == "stdout":
        monkeypatch.setattr(sys, "stdout", LOST)
    assert tools_run.main(["--config", str(run.path)]) == code
    assert stopped.call_count == (error is not None)
    assert {0: "", 2: "error: the actor was killed", 130: "stopped; "}[code] in capsys.readouterr().err


@pytest.mark.usefixtures("signals_kept")
@pytest.mark.parametrize(
    ("version", "order"),
    [(None, ["critic sidecar", "server", "actor"]), (3, ["server", "critic sidecar", "actor"])],
    ids=["first start", "resumed"],
)
def test_run_lets_the_sidecar_make_the_first_version_that_its_server_loads(
    tmp_path, checkpoints, monkeypatch, version, order
):
    run = make_run(tmp_path / "run", checkpoints)
    current = run.config.run.weights_dir / "CURRENT"
    current.parent.mkdir(parents=True)
    if version is not None:
        write_json(current, {"version": version})
    started = []

    def child(name, *_):
        started.append(name)
        polls = mock.Mock(side_effect=lambda: write_json(current, {"version": 0}) if name != "actor" else 0)
        return mock.Mock(**{"new_messages.return_value": [], "stop.return_value": 0}, poll=polls, log_path=run.path)

    def supervised(*_, **__):
        assert current.exists()
        started.append("server")
        return mock.Mock()

    monkeypatch.setattr(tools_run, "Child", child)
    monkeypatch.setattr(tools_run, "supervised", supervised)
    monkeypatch.setattr(tools_run.Journal, "is_followed", lambda _: True)
    monkeypatch.setattr(tools_run.RunProcesses, "_server_failures", lambda _: 0)
    monkeypatch.setattr(tools_run.RunProcesses, "_report", mock.Mock())
    monkeypatch.setattr(tools_run, "_print_outcome", mock.Mock())
    assert tools_run.main(["--config", str(run.path)]) == 0
    assert started == order


@pytest.mark.usefixtures("signals_kept")
def test_run_kills_a_sidecar_that_makes_the_first_version(tmp_path, checkpoints, monkeypatch):
    """It may be pretraining or reading a large model, and there is nothing to lose yet."""
    run = make_run(tmp_path / "run", checkpoints)
    sidecar = mock.Mock(**{"new_messages.side_effect": lambda *_: os.kill(os.getpid(), signal.SIGINT) or []})
    sidecar.configure_mock(log_path=run.path, **{"poll.return_value": None})
    monkeypatch.setattr(tools_run, "Child", lambda *_: sidecar)
    assert tools_run.main(["--config", str(run.path)]) == 130
    sidecar.stop.assert_called_once_with(signal.SIGTERM, 0.0)


def test_fresh_moves_the_folder_behind_a_link(tmp_path):
    """New runs stay on the disk that the link names. Release 0.1.0 renamed links."""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "older").mkdir()
    (disk / "run.previous").symlink_to(tmp_path / "older")
    link = tmp_path / "link"
    link.symlink_to(disk / "run")
    (disk / "run").mkdir()
    for number in range(2):
        (link / f"{number}").touch()
        tools_run.set_aside(link)
        assert sorted(path.name for path in disk.rglob("*")) == [f"{number}", "run", "run.previous"]
    assert (tmp_path / "older").is_dir()


@pytest.mark.usefixtures("signals_kept")
@pytest.mark.parametrize("part", ["server", "critic sidecar"])
def test_fresh_moves_no_folder_under_a_running_server_or_sidecar(tmp_path, checkpoints, monkeypatch, capsys, part):
    """They would go on in the folder of the new run."""
    run = make_run(tmp_path / "run", checkpoints)
    folder = run.config.run.dir
    folder.mkdir(exist_ok=True)
    journal = Journal(run.config.run.journal_dir, run.config.run.identity)
    monkeypatch.setattr(tools_run.preflight, "check", lambda *_: [])
    with only_server(folder) if part == "server" else journal.lock():
        assert tools_run.main(["--config", str(run.path), "--fresh"]) == 2
    assert f"{part}" in capsys.readouterr().err
    assert not folder.with_name(f"{folder.name}.previous").exists()


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_run_command_refuses_a_configuration_without_a_policy(tmp_path, monkeypatch, capsys, arguments):
    """It started the server, and then named the default of actor.policy.model."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    config = tmp_path / "served.yaml"
    config.write_text(f"run: {{dir: {tmp_path}/run}}\nreward: {{model: {tmp_path}}}\n")
    assert tools_run.main(["--config", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"error: {config} has no policy to train: set actor.policy.model and actor.prompts.path, or"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("figures", "override", "is_finished"),
    [
        ({"steps": 3}, "actor.steps=3", True),
        ({"steps": 3}, "actor.steps=4", False),
        ({"steps": 2}, "actor.steps=3", False),  # stopped before the report: in the validation, for example
        ({"steps": 3}, "actor.validation.size=4", False),
    ],
)
def test_run_command_starts_nothing_after_the_last_step(
    tmp_path, checkpoints, monkeypatch, capsys, figures, override, is_finished
):
    run = make_run(tmp_path / "run", checkpoints)
    folder = run.config.run.dir
    (folder / "checkpoints" / "actor" / "3").mkdir(parents=True)
    write_settings(run.config, {})
    write_json(folder / "summary.json", figures)
    (folder / "report.html").touch()
    started = mock.Mock()
    monkeypatch.setattr(tools_run.RunProcesses, "execute", started)
    assert tools_run.main(["--config", str(run.path), override]) == 0
    assert started.called != is_finished
    assert (
        "ended: step 3 is the last; raise actor.steps (3) to continue training, or " in capsys.readouterr().out
    ) == is_finished


def lines_of(config, capsys):
    assert status.main(["--config", str(config)]) == 0
    return capsys.readouterr().out.splitlines()


def test_status_describes_a_run_in_each_phase(tmp_path, checkpoints, capsys):
    run = make_run(tmp_path, checkpoints)
    assert lines_of(run.path, capsys) == [
        f"run       test in {tmp_path}: not running; no step has ended",
        f"server    http://{run.config.server.http_url} does not answer",
        "actor     no step has ended",
        "sidecar   has not begun; 0 of the journal's entries pending, last step 0",
        f"reward    {run.config.reward.model}, without versions",
        "critic    no version yet",
        "samples   none are kept",
    ]
    settings = ["actor.steps=77", "reward.token_budget=512", "reward.instances=2", "reward.threads=3"]
    write_json(tmp_path / "settings.json", load_config(run.path, settings).model_dump(mode="json"))
    (tmp_path / "metrics.jsonl").write_text('{"step": 8}\n')
    with only_run(tmp_path), RunProgress(tmp_path, 8) as progress:
        progress.phase("starting tritonserver")
        capsys.readouterr()
        lines = lines_of(run.path, capsys)
    assert lines[0].partition(": ")[2] == "running: starting tritonserver"
    text = "\n".join(lines)
    assert "step 8 of 77 ended" in text, "status shows other settings than the run was started with"
    (tmp_path / "checkpoints" / "actor" / "6").mkdir(parents=True)
    assert lines_of(run.path, capsys)[0].endswith(": not running; the next start begins with step 7"), (
        "status takes a killed run for one in progress"
    )
    (tmp_path / "actor_summary.json").write_text('{"steps": 8}')
    assert lines_of(run.path, capsys)[0].endswith(": finished after step 8 of 77; the next start continues")
    write_json(tmp_path / "settings.json", load_config(run.path, ["actor.steps=8"]).model_dump(mode="json"))
    assert lines_of(run.path, capsys)[0].endswith(": finished after step 8")
    run.store.root.mkdir(parents=True, exist_ok=True)
    (run.store.root / "CURRENT").write_text("3")
    *_, critic, instances, samples = lines_of(run.path, capsys)
    assert critic == "critic    version 3 is not in the weights store"
    assert (instances.strip(), samples) == ("no instance is alive", "samples   none are kept")


def test_status_shows_a_running_server_and_a_silent_remote_instance(live, capsys):
    run, store = live.run, live.run.store
    last = json.loads((run.config.run.dir / "metrics.jsonl").read_text().splitlines()[-1])
    current = store.current()
    silent = dataclasses.replace(ServingRecord.of_this_process("critic_9", current), place="cafe0123", host="far")
    store.records.put(silent)
    hours_ago = time.time() - 3 * 3600
    os.utime(store.root / "serving" / silent.file_name, (hours_ago, hours_ago))
    try:
        lines = lines_of(run.path, capsys)
        weights.show(store)
        assert f"{silent.name} (silent)" in capsys.readouterr().out
    finally:
        store.records.withdraw(silent)
    assert lines[1] == f"server    http://{run.url} is up"
    assert lines[2].startswith(f"actor     step {last['step']} of 3 ended ")
    assert f"reward {last['train_rollouts/rewards']:.3g}, KL " in lines[2]
    reported = re.search(r"; 0 of the journal's entries pending, last step (\d+)$", lines[3])
    assert int(reported[1]) >= 3  # more if other tests trained the critic of this run
    assert lines[4].startswith(f"reward    CURRENT is version {run.reward_store.current()} ")
    critic = lines.index(f"critic    CURRENT is version {current} (step {store.manifest(current).step})")
    assert any(f"serves version {current}" in line for line in lines[critic:] if silent.name not in line)
    assert f"          {silent.name} serves version {current}; last sign of life 3 h ago" in lines


def test_status_shows_a_blocked_sidecar_and_each_logs_last_problem(tmp_path, checkpoints, capsys):
    run = make_run(tmp_path, checkpoints)
    folders = run.config.run
    folders.journal_dir.mkdir(parents=True)
    beat = Heartbeat(epoch=1, step=7, micro_batch=0, state="publishing", time=time.time() - 300)
    journal = Journal(folders.journal_dir, folders.identity)
    journal.write_heartbeat(dataclasses.replace(beat, trouble="No space left on device"))
    noise = "[Error] File: otlp_http_exporter.cc:122 [OTLP HTTP Client] ERROR: Export 512 trace span(s) error: 1"
    logs = {
        "actor.log": "10:00:00 WARNING the first\n10:00:01 ERROR the second\n10:00:02 INFO step 8\n",
        "sidecar.log": '{"level": "ERROR", "message": "no disk"}\n{"level": "INFO", "message": "step 7"}\n',
        "tritonserver.log": f"{noise}\n",  # a collector that is away is no problem of the run
    }
    folders.logs_dir.mkdir()
    for name, text in logs.items():
        (folders.logs_dir / name).write_text(text)
    assert readable(noise.encode()) is None, "the terminal shows a line of noise"
    (folders.dir / "metrics.jsonl").write_text('{"step": 8, "train_rollouts/rewards": 0.5}\n{"step": 9, "tra')
    lines = lines_of(run.path, capsys)
    assert lines[0].endswith(": not running; the next start begins with step 1")
    assert re.fullmatch(r"actor     step 8 of 3 ended \d+ s ago: reward 0\.5", lines[2])
    sidecar = "sidecar   not running, was publishing at step 7, heartbeat 5 min ago; 0 of the journal's entries pending"
    assert lines[3].startswith(sidecar)
    assert lines[3].endswith("; blocked: No space left on device")
    with exclusive_lock(folders.journal_dir / "LOCK", patience_s=0):
        assert lines_of(run.path, capsys)[3].startswith("sidecar   stuck, was publishing at step 7, heartbeat 5 min")
    journal.write_heartbeat(dataclasses.replace(beat, time=time.time()))
    assert lines_of(run.path, capsys)[3].startswith("sidecar   publishing at step 7, heartbeat ")
    problems = [line for line in lines if line.startswith("problem")]
    assert problems == ["problem   actor.log: 10:00:01 ERROR the second", "problem   sidecar.log: ERROR no disk"]


@pytest.mark.parametrize(
    ("command", "roles"),
    [
        (tools_run, ("reward", "critic", "reference", "trainer", "actor.policy")),
        (serve, ("reward", "critic", "reference")),
        (rlhf_triton.trainer.__main__, ("trainer",)),
        (rlhf_triton.actor.__main__, ("actor.policy",)),
    ],
)
def test_commands_refuse_a_missing_gpu_before_loading_a_model(
    command, roles, tmp_path, checkpoints, capsys, monkeypatch
):
    """torch and Triton report it in their own words, or with a traceback."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = write_yaml(tmp_path, "ppo", "model", checkpoints)
    for role in roles:
        overrides = [f"{role}.device=cuda:98", "actor.kl.reference=triton"]
        assert command.main(["--config", str(path), *overrides]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {role}.device: cuda:98 needs 99 GPUs; "), error
        assert error.endswith(", or set it to cpu")


@pytest.mark.usefixtures("signals_kept")
@pytest.mark.parametrize(("command", "code"), [(serve, 0), (tools_run, 130)])
def test_signal_at_the_end_of_the_servers_start_stops_it(command, code, tmp_path, checkpoints, monkeypatch):
    """The server is running, but the caller has not received it yet."""
    path = write_yaml(tmp_path, "grpo", "functions", checkpoints)
    server = mock.Mock()

    def start(*_, **__):
        signal.raise_signal(signal.SIGTERM)
        return server

    monkeypatch.setattr(starting, "start_server", start)
    monkeypatch.setattr(starting, "ServerHealth", mock.Mock())
    assert command.main(["--config", str(path)]) == code
    server.stop.assert_called_once_with()


@pytest.mark.usefixtures("signals_kept")
def test_serve_drains_without_its_output(tmp_path, checkpoints, monkeypatch):
    """Such as after Ctrl-C in `rlhf-triton serve | tee log`, which ends `tee` first."""
    path = write_yaml(tmp_path, "grpo", "functions", checkpoints)
    server = mock.Mock(log_path=tmp_path / "tritonserver.log")
    monkeypatch.setattr(starting, "start_server", lambda *_, **__: server)
    monkeypatch.setattr(starting, "ServerHealth", lambda *_: mock.Mock(restart_reason=None))
    monkeypatch.setattr(serve.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(sys, "stdout", LOST)
    assert serve.main(["--config", str(path)]) == 0
    assert [name for name, *_ in server.method_calls if name in ("drain", "stop")] == ["drain", "stop"]
