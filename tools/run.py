"""`rlhf-triton run`: the whole system in one terminal: sidecar -> server -> PPO -> report.

Ctrl-C and SIGTERM stop the actor (which first writes a checkpoint), the sidecar and the server, in that order. If a
process dies, the run stops and the error message names the process.
"""

import argparse
import contextlib
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlhf_triton.actor.run.settings import describe_changes, find_changes, last_step, write_settings
from rlhf_triton.actor.run.stopping import ENDED, STOP_GRACE_S
from rlhf_triton.config.command_line import add_accept_changes, add_dry_run, limit_access, reporting, run_parser
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.without_effect import effect_line
from rlhf_triton.errors import REPORTED, RlhfError
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.process import StopSignals
from rlhf_triton.store.durable import read_json
from rlhf_triton.store.journal import Journal, JournalState
from rlhf_triton.store.run_lock import only_actor, only_run
from rlhf_triton.tools.arguments import parse, program
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.dry_run import print_memory
from rlhf_triton.tools.export import newest_saved_policy
from rlhf_triton.tools.report.data import loading_line
from rlhf_triton.tools.report.progress import RunProgress
from rlhf_triton.tools.server.child import LIBRARY_ENV, Child
from rlhf_triton.tools.server.health import count_failures
from rlhf_triton.tools.server.ports import PORT_KEYS, check_ports, free_port, with_free_ports
from rlhf_triton.tools.server.server_log import set_aside_if_large
from rlhf_triton.tools.server.starting import ensure_first_version, missing_versions, server_lock, supervised
from rlhf_triton.tools.server.supervisor import Supervisor
from rlhf_triton.tools.server.tritonserver import TritonServer
from rlhf_triton.tools.server.vllm import VllmServer, starts_vllm

POLL_S = 0.25
ACTOR_STOP_S = STOP_GRACE_S + 5.0
SIDECAR_STOP_S = 90.0


@dataclass(eq=False)
class RunProcesses:
    """Starts and watches the processes of one run; measures their peak memory and the server's failed requests."""

    arguments: argparse.Namespace
    """Options of the command line."""
    overrides: Sequence[str]
    """Overrides from the command line, plus those of ports and vLLM's address."""
    config: RunConfig
    progress: RunProgress
    signals: StopSignals
    _started: float = field(default_factory=time.monotonic)
    _peak_rss: int = 0
    _supervisor: Supervisor[TritonServer] | None = None
    _sidecar: Child | None = None
    _actor: Child | None = None
    _vllm: Supervisor[VllmServer] | None = None

    def execute(self) -> None:
        """Run everything, from the server to the report. Raises ConfigError, ServerStartError, RlhfError."""
        section = with_free_ports(self.config.server)
        self._override(*(f"server.{key}={getattr(section, key)}" for key in PORT_KEYS))
        check_ports(self.config.server)
        if gpus := self.config.gpu_precisions:
            self.progress.log(f"on GPUs: {gpus}")
        changed = find_changes(self.config, accepted=self.arguments.accept_changes)
        for line in (
            *filter(None, [effect_line(self.config)]),
            *(f"resuming with another setting: {change}" for change in describe_changes(changed)),
        ):
            self.progress.log(line)
        self.config.run.dir.mkdir(parents=True, exist_ok=True)
        write_settings(self.config, changed)
        if self.config.serves_critic and missing_versions(self.config):
            self._start_sidecar()
        if self.config.needs_server:
            self._start_server()
        failures_at_start = self._server_failures()
        if self.config.serves_critic and self._sidecar is None:
            self._start_sidecar()
        if starts_vllm(self.config):
            self._start_vllm()
        self.progress.phase(f"training: {self.config.actor.algorithm.name}")
        self._actor = self._child("actor", "rlhf_triton.actor")
        while self._actor.poll() is None:
            self._poll()
        self._actor.raise_if_failed()
        if self._sidecar is not None:
            self.progress.phase("stopping the sidecar, which writes its last checkpoint")
            if self._sidecar.stop(signal.SIGTERM, SIDECAR_STOP_S, self._poll_resources) != 0:
                raise RlhfError(self._sidecar.exit_message())
        failures = max(0, self._server_failures() - failures_at_start)  # a restarted server counts from 0
        self.stop()
        with self.signals.raising():
            self._report(failures)

    def _child(self, name: str, module: str) -> Child:
        log = self.config.run.logs_dir / f"{name.split()[-1]}.log"
        arguments = ["--config", str(self.arguments.config), *self.overrides]
        return Child(name, [module, *arguments], log, LIBRARY_ENV)

    def _start_sidecar(self) -> None:
        """Start the sidecar; it makes version 0 of the live models that have none, which the server then loads."""
        missing = missing_versions(self.config)
        task = f", which creates {missing}" if missing else ""
        self.progress.phase(f"starting the critic sidecar{task}")
        journal = Journal(self.config.run.journal_dir, self.config.run.identity)
        self._sidecar = self._child("critic sidecar", "rlhf_triton.trainer")
        while missing_versions(self.config):
            self._poll("INFO")
        while not journal.is_followed():  # until then, training requests are refused
            self._poll()

    def _start_server(self) -> None:
        self.progress.phase("starting tritonserver")
        with self.signals.raising():
            ensure_first_version(self.config, self.arguments.config, self.overrides)
        log = self.progress.log
        check = self.signals.check
        self._supervisor = supervised(self.config, log=log, check=check)
        check()

    def _start_vllm(self) -> None:
        self.progress.phase("starting vLLM")
        url = f"127.0.0.1:{free_port()}"
        config = self.config
        check = self.signals.check
        self._vllm = Supervisor(lambda: VllmServer(config, url, check), log=self.progress.log, name="vLLM")
        self._override(f"actor.generation.vllm.servers=[{url}]")

    @property
    def parts(self) -> str:
        """Names of the processes that `stop` would stop now, as text for a message."""
        parts = {"actor": self._actor, "vLLM": self._vllm, "sidecar": self._sidecar, "server": self._supervisor}
        *first, last = [name for name, part in parts.items() if part is not None] or ["before anything was started"]
        return f"{', '.join(first)} and {last}" if first else last

    def stop(self) -> None:
        """Stop the processes that are still running, in this order: actor, vLLM, sidecar, server."""
        if self._actor is not None:
            self._actor.stop(signal.SIGINT, ACTOR_STOP_S)
            self._relay_messages(self._actor)
        if self._vllm is not None:
            self._vllm.stop()
        if self._sidecar is not None:  # without a version 0 it has nothing to write, and takes long to notice a signal
            self._sidecar.stop(signal.SIGTERM, 0.0 if missing_versions(self.config) else SIDECAR_STOP_S)
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor = None

    def _override(self, *overrides: str) -> None:
        self.overrides = [*self.overrides, *overrides]
        self.config = load_config(self.arguments.config, self.overrides)

    def _poll(self, *more_levels: str) -> None:
        """Restart the server if needed, relay messages. Raises RlhfError if the actor failed or the sidecar ended."""
        self._poll_resources()
        if self._supervisor is not None:
            self._supervisor.restart_if_down()
        if self._vllm is not None:
            self._vllm.restart_if_down()
        for child in (self._sidecar, self._actor):
            if child is not None:
                self._relay_messages(child, *more_levels)
                set_aside_if_large(child.log_path)
                child.raise_if_failed()
        if self._sidecar is not None and self._sidecar.poll() == 0:
            raise RlhfError(self._sidecar.exit_message())

    def _relay_messages(self, child: Child, *more_levels: str) -> None:
        for message in child.new_messages(*more_levels):
            self.progress.log(f"  | {child.name}: {message}")

    def _poll_resources(self) -> None:
        self.progress.refresh()
        self._peak_rss = max(self._peak_rss, tree_rss_bytes())
        time.sleep(POLL_S)
        self.signals.check()

    def _server_failures(self) -> int:
        if self._supervisor is None:
            return 0
        # If the server does not answer, it is being restarted, and its counters will start from 0 again.
        server = self._supervisor.server
        return count_failures(server.section.metrics_url, server.models())

    def _report(self, failures: int) -> None:
        from rlhf_triton.tools.report.curves import write_curves
        from rlhf_triton.tools.report.data import finish_run
        from rlhf_triton.tools.report.page import write_page

        self.progress.phase("writing the report")
        run_dir = self.config.run.dir
        run = finish_run(
            run_dir,
            server_failures=failures,
            peak_rss_mb=self._peak_rss / 1e6,
            seconds_total=time.monotonic() - self._started,
        )
        write_curves(run, run_dir / "curves.png")
        write_page(run, run_dir / "report.html")


def tree_rss_bytes() -> int:
    """Return the resident memory of this process and its descendants; shared pages count once per process."""
    total = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def is_finished(config: RunConfig, *, accepts_changes: bool) -> bool:
    """Return whether the run has ended with its last step, report included, and its settings are unchanged.

    Otherwise a start finishes the run, for example its validation. Raises ConfigError as `find_changes`.
    """
    folder = config.run.dir
    last = last_step(folder)
    if last < config.actor.steps or (read_json(folder / "summary.json") or {}).get("steps") != last:
        return False
    return (folder / "report.html").is_file() and not find_changes(config, accepted=accepts_changes)


def set_aside(run_dir: Path) -> None:
    """Rename the folder of an earlier run to `<dir>.previous`; a folder that already has this name is deleted.

    A link stays, and its folder is renamed, so that the next run is on the same disk.
    """
    folder = run_dir.resolve()
    previous = folder.with_name(f"{folder.name}.previous")
    if previous.is_symlink():
        previous.unlink()
    shutil.rmtree(previous, ignore_errors=True)
    folder.rename(previous)
    folder.mkdir()


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Run the system; return 0 when done, 2 after an error (printed to stderr), 130 after Ctrl-C."""
    parser = run_parser("Run the whole system in one terminal.")
    parser.add_argument(
        "--fresh", action="store_true", help="move an earlier run to <dir>.previous instead of resuming it"
    )
    add_accept_changes(parser)
    add_dry_run(parser)
    args = parse(parser, argv)
    signals = StopSignals()
    with signals.raising():
        config = load_config(args.config, args.overrides)
        if not config.has_actor:
            raise RlhfError(
                f"{args.config} has no policy to train: set actor.policy.model and actor.prompts.path, or serve its "
                "models with `rlhf-triton serve`"
            )
        limit_access(config.run)
        if args.dry_run:
            return print_memory(config)
        if not args.fresh and is_finished(config, accepts_changes=args.accept_changes):
            run_dir = config.run.dir
            say(ENDED.format(last_step(run_dir), config.actor.steps))
            _print_outcome(run_dir)
            return 0
        warnings = preflight.check(config, "run")
        if args.fresh and config.run.dir.exists():
            with only_run(config.run.dir), only_actor(config.run.dir), server_lock(config):
                if JournalState(config.run.journal_dir, config.run.identity).is_followed():
                    raise RlhfError(f"the critic sidecar of {config.run.dir} is running; stop it first")
                set_aside(config.run.dir)
    return _supervise(args, config, signals, warnings)


def _supervise(arguments: argparse.Namespace, config: RunConfig, signals: StopSignals, warnings: Sequence[str]) -> int:
    """Run it to its end; `warnings`: warnings for the log."""
    try:
        with only_run(config.run.dir), RunProgress(config.run.dir, config.actor.steps) as progress:
            for line in warnings:
                progress.log(line)
            run = RunProcesses(arguments, arguments.overrides, config, progress, signals)
            try:
                run.execute()
            except BaseException as error:
                why = " after an error, named below" if isinstance(error, REPORTED) else ""
                progress.phase(f"stopping {run.parts}{why}")
                with signals.raising():  # the second signal: the kernel then stops what is left, all at once
                    run.stop()
                if why:
                    _print_policy(config.run.dir)
                raise
    except KeyboardInterrupt:
        again = shlex.join(["run", "--config", str(arguments.config), *arguments.overrides])
        say(f"stopped; {program()} {again} {_what_resumes(config.run.dir)}", sys.stderr)
        _print_policy(config.run.dir)
        return 130
    _print_outcome(config.run.dir)
    return 0


def _what_resumes(run_dir: Path) -> str:
    if step := last_step(run_dir):
        return f"resumes from the newest checkpoint (step {step})"
    return "begins at step 1: there is no checkpoint yet"


def _print_outcome(run_dir: Path) -> None:
    from rlhf_triton.tools.report.page import format_value

    summary = json.loads((run_dir / "summary.json").read_text())
    for name, value in summary.items():
        say(f"  {name:<32}{format_value(value)}")
    say(f"report: {run_dir / 'report.html'}")
    _print_policy(run_dir)


def _print_policy(run_dir: Path) -> None:
    """Print how to load the newest policy of the run; after an error it is only in a checkpoint."""
    with contextlib.suppress(OSError):  # the cause of a run's end is still to be reported
        if folder := newest_saved_policy(run_dir):
            say(f"policy: {folder}, which {loading_line(run_dir)} loads")
        elif newest := last_step(run_dir):
            say(
                f"policy: {program()} {shlex.join(['export', str(run_dir)])} writes that of step {newest} as a Hugging "
                "Face folder"
            )
