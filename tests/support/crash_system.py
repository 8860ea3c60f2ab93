"""The system that the crash tests kill and restart: servers with their supervisors, the sidecar, and an actor."""

import os
import signal
import threading
import time
from functools import partial
from typing import NamedTuple

import psutil
from live_system import make_run

from rlhf_triton.config.loading import load_config
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.sealed_folder import read_state
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.server.child import LIBRARY_ENV, Child
from rlhf_triton.tools.server.health import is_alive
from rlhf_triton.tools.server.server_log import tail
from rlhf_triton.tools.server.shared_memory import SHARED_MEMORY
from rlhf_triton.tools.server.starting import ensure_first_version, supervised
from rlhf_triton.tools.server.supervisor import Supervisor
from rlhf_triton.tools.server.triton_home import ServerStartError
from rlhf_triton.tools.server.vllm import VllmServer


class Background(threading.Thread):
    """A thread that runs `work` and keeps the error that ends it."""

    def __init__(self, name, work):
        """`work` returns soon after `given_up` is set."""
        super().__init__(target=work, name=name, daemon=True)
        self.error = None
        self.given_up = threading.Event()

    def run(self):
        try:
            super().run()
        except BaseException as error:  # thread edge: the main thread reports it
            self.error = error

    def give_up(self):
        """Set `given_up`, and wait for the thread if it has been started."""
        self.given_up.set()
        if self.is_alive():
            self.join()


STOP_S = 90.0
LONGEST_PAUSE_S = 1.5  # before a program that has ended is restarted
FAILED_STARTS = 3
GONE_S = 5.0  # how long the other ranks may outlive one that was killed
POLL_S = 0.02
RANK = "rank "  # and its number: a victim
VLLM = "vLLM"


class Program(NamedTuple):
    """A module of the run that has a process of its own."""

    name: str
    module: str
    stopped: int
    """Exit code after SIGTERM."""


PROGRAMS = {
    "actor": Program("actor", "rlhf_triton.actor", 130),
    "sidecar": Program("critic sidecar", "rlhf_triton.trainer", 0),
}


def make_crash_run(folder, checkpoints, ranks=1):
    """Write the YAML of a run in `folder`; return its path. All versions are kept: each is compared with another's."""
    trainer = {
        "warmup_steps": 2,
        "max_steps": 1000,
        "global_batch_size": 12,
        "token_budget": 512,
        "checkpoint_every": 5,
        "publish": {"every": 1, "keep": 100_000},
        "ranks": ranks,
    }
    return make_run(folder, checkpoints, critic={"reload": "swap"}, trainer=trainer).path


class DisturbedSystem:
    """Servers and programs of a run. Call `restart_killed` from the main thread; `kill` from any thread."""

    def __init__(self, path, generator, programs=("sidecar",)):
        """Start the servers, wait until they are ready, and start the programs, of PROGRAMS.

        vLLM is one of the servers if `actor.generation.vllm.servers` has its address.

        Raises:
            ServerStartError: a server does not start.
        """
        self.config = load_config(path)
        self.troubles = []
        """Processes that ended, or did not start, without having been killed."""
        self._path = path
        self._random = generator
        self._children = {program: [] for program in programs}
        self._restart_at = {}
        self._killed = set()
        self._failed_starts = 0
        ensure_first_version(self.config, path, [])
        self._supervisor = supervised(self.config, log=_say_restarts, check=lambda: None)
        self._vllm = [
            Supervisor(partial(VllmServer, self.config, url), log=_say_restarts, name=VLLM)
            for url in self.config.actor.generation.vllm.servers
        ]
        for program in programs:
            self._start(program)

    @property
    def region_prefix(self):
        """Common prefix of the names of all shared-memory regions."""
        return f"rlhf-{os.getpid()}-"

    @property
    def victims(self):
        """Names of the processes: the programs, tritonserver, and its models with a process of their own."""
        return [*self._children, "tritonserver", *sorted(self._supervisor.server.processes())]

    def restart_killed(self):
        """Restart the processes that were killed.

        Raises:
            ServerStartError: FAILED_STARTS restarts of the server have failed.
        """
        for vllm in self._vllm:
            vllm.restart_if_down()
        self._supervisor.restart_if_down()
        if self._supervisor.failed_starts > self._failed_starts:
            self._failed_starts += 1
            self.troubles.append(f"the server did not start: {tail(self._supervisor.server.log_path)}")
            if self._failed_starts == FAILED_STARTS:
                raise ServerStartError(self.troubles[-1])
        if self._supervisor.server.poll() is None:
            for program in self._children:
                self._restart_if_killed(program)

    def is_whole(self):
        """Whether server and programs run, every model has its process, and no rank is missing."""
        server = self._supervisor.server
        pids = {server.pid, *(child.process.pid for child in self._newest()), *(vllm.server.pid for vllm in self._vllm)}
        if pids & self._killed:  # even if it is not seen to have ended yet
            return False
        if server.poll() is not None or any(child.poll() is not None for child in self._newest()):
            return False
        return all(server.processes().values()) and len(self.ranks()) == self.config.trainer.ranks

    def processes_of(self, victim):
        """Return the victim's processes; empty while there is none."""
        try:
            if victim.startswith(RANK):
                return [process for process in self.ranks() if process.environ()["RANK"] == victim.removeprefix(RANK)]
            if victim in self._children:
                return [psutil.Process(self._children[victim][-1].process.pid)]
            if victim == "tritonserver":
                return [psutil.Process(self._supervisor.server.pid)]
            if victim == VLLM:
                return [psutil.Process(vllm.server.pid) for vllm in self._vllm]
        except psutil.NoSuchProcess:
            return []
        return self._supervisor.server.processes()[victim]

    def ranks(self):
        """Return the processes that train the critic: those of the ranks, or the sidecar itself if it trains alone."""
        try:
            sidecar = psutil.Process(self._children["sidecar"][-1].process.pid)
            children = sidecar.children() if self.config.trainer.ranks > 1 else [sidecar]
            return [process for process in children if process.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            return []

    def await_end(self, ranks):
        """Wait until these processes have ended, at most GONE_S, which counts as a failure; return the seconds."""
        start = time.monotonic()
        while any(map(is_alive, ranks)):
            if time.monotonic() - start > GONE_S:
                self.troubles.append(f"a rank still runs {GONE_S:g} s after another one was killed")
                break
            time.sleep(POLL_S)
        return time.monotonic() - start

    def kill(self, process):
        """Send SIGKILL; return False if the process has ended."""
        self._killed.add(process.pid)
        try:
            process.send_signal(signal.SIGKILL)  # psutil checks that the pid has not been reused
        except psutil.NoSuchProcess:
            return False
        return True

    def stop_program(self, program):
        """Stop a program as `rlhf-triton run` does, which makes it write its last checkpoint."""
        child = self._children[program][-1]
        if child.stop(signal.SIGTERM, STOP_S) != PROGRAMS[program].stopped:
            self.troubles.append(f"when stopped at the end, {child.exit_message()}")

    def stop(self):
        """Stop programs and servers."""
        for child in self._newest():
            child.stop(signal.SIGTERM, STOP_S)
        for vllm in self._vllm:
            vllm.stop()
        self._supervisor.stop()

    def leftovers(self):
        """Return shared memory, processes and unfinished folders that are left after `stop`."""
        regions = [f"shared memory {path.name}" for path in SHARED_MEMORY.glob(f"{self.region_prefix}*")]
        folders = [self.config.run.weights_dir, self.config.run.dir / "checkpoints" / "critic"]
        unfinished = [str(path) for folder in folders for path in folder.glob(".*-*") if path.is_dir()]
        run = str(self.config.run.dir.absolute())
        processes = [
            f"process {process.pid}: {' '.join(process.info['cmdline'])[:200]}"
            for process in psutil.process_iter(["cmdline"])
            if process.pid != os.getpid() and self._is_ours(process.info["cmdline"] or [], run)
        ]
        return regions + unfinished + processes

    def check_run(self, last):
        """Check a run that has been stopped after step `last`: only killed processes ended, and none is left; each step
        has trained the critic once and has its line of metrics, and every response was scored.
        """
        assert self.troubles == [], f"only killed processes end: {self.troubles}"
        assert self.leftovers() == []
        run_dir = self.config.run.dir
        current = self.store.current()
        critic = read_state(run_dir / "checkpoints" / "critic" / str(last))
        # A step is one optimizer step, so the critic's checkpoint counts its updates.
        trained = (critic["step"], critic["optimizer_step"], self.store.manifest(current).step)
        assert trained == (last, last, last), "a step trained the critic twice or never"
        steps = read_jsonl(run_dir / "metrics.jsonl")
        assert [line["step"] for line in steps] == list(range(1, last + 1))
        assert [line for line in read_jsonl(run_dir / "critic_metrics.jsonl") if "error" in line] == []
        assert {line["train_rollouts/masked_samples"] for line in steps} == {0}, "a response was not scored"

    @property
    def store(self):
        """The critic's versions."""
        return WeightsStore(self.config.run.weights_dir)

    def _is_ours(self, command, run):
        is_stub = any(argument.startswith(self.region_prefix) for argument in command)
        return (
            is_stub
            or ({program.module for program in PROGRAMS.values()} & set(command) and str(self._path) in command)
            or f"--model-repository={run}" in command
            or (bool(self._vllm) and self.config.actor.generation.vllm.command in command)
        )

    def _newest(self):
        return [children[-1] for children in self._children.values()]

    def _restart_if_killed(self, program):
        child = self._children[program][-1]
        if child.poll() is None:
            return
        if program not in self._restart_at:
            if child.process.pid not in self._killed:
                self.troubles.append(child.exit_message())
            self._restart_at[program] = time.monotonic() + self._random.uniform(0, LONGEST_PAUSE_S)
        elif time.monotonic() >= self._restart_at[program]:
            del self._restart_at[program]
            self._start(program)

    def _start(self, program):
        kind = PROGRAMS[program]
        children = self._children[program]
        log = self.config.run.logs_dir / f"{program}-{len(children):03d}.log"
        children.append(Child(kind.name, [kind.module, "--config", str(self._path)], log, LIBRARY_ENV))


def _say_restarts(line):
    if "died" in line or ("serv" in line and "again" in line):
        say(f"  {line.splitlines()[0]}")
