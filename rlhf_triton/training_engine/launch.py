"""Starts the ranks of a training process and coordinates the end of their job. Imports no torch.

The trainer and actor processes replace themselves by the agent (module `agent`) if their `ranks` setting is above 1 and
no launcher has started them. The agent is torchrun with two additions: a stop signal reaches only rank 0, and rank 0's
exit code becomes the agent's. Under another launcher, such as torchrun itself, Slurm or Kubernetes, the ranks also read
their number from the environment.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.errors import RlhfError
from rlhf_triton.process import RUN_MODULE, die_with_parent
from rlhf_triton.store.durable import replace_file

FOLDER = "RLHF_AGENT_FOLDER"  # environment variable: the folder of the agent that started this rank
AGENT = "RLHF_AGENT_PID"  # environment variable: the process id of that agent


def launch_ranks(ranks: int, module: str, arguments: Sequence[str], *, key: str) -> None:
    """Replace this process by an agent if `ranks` is above 1 and no launcher has started it; otherwise return.

    A rank of an agent exits here if the job has already ended; it is killed when the agent ends.

    Args:
        key: configuration key of `ranks`, for the error message.

    Raises:
        RlhfError: a launcher started this process with another number of ranks.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # set by torchrun, and launchers like it
        started = int(os.environ["WORLD_SIZE"])
        if started != ranks:
            raise RlhfError(f"{key} is {ranks}, but the launcher started {started} processes; make them equal")
        if FOLDER in os.environ:
            has_agent = die_with_parent(int(os.environ[AGENT]))
            if not has_agent or not AgentFolder(Path(os.environ[FOLDER])).enter():
                sys.exit(0)
        if os.environ["RANK"] != "0":  # other ranks end when rank 0 does
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            if FOLDER not in os.environ:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif ranks > 1:
        agent = [sys.executable, RUN_MODULE, "rlhf_triton.training_engine.agent", str(ranks), module, *arguments]
        os.execv(agent[0], agent)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals on which this process should finish its work and end.

    For a rank of our agent, SIGTERM means that another rank has died: it dies at once, and the agent restarts all
    ranks.
    """
    return (signal.SIGINT,) if FOLDER in os.environ else (signal.SIGINT, signal.SIGTERM)


def ended(code: int) -> int:
    """Call `end_job` on rank 0; return the code."""
    return end_job(code) if os.environ.get("RANK") == "0" else code


def end_job(code: int) -> int:
    """Tell the agent, if there is one, that the job has ended with exit code `code`; return the code."""
    if FOLDER in os.environ:
        AgentFolder(Path(os.environ[FOLDER])).end(code)
    return code


class AgentFolder:
    """Files through which an agent and its ranks share rank 0's process id and the end of the job."""

    def __init__(self, root: Path) -> None:
        self._first = root / "rank-0"
        self._end = root / "end"

    def enter(self) -> bool:
        """If this process is rank 0, record its process id. Returns False if the job has already ended."""
        if os.environ["RANK"] == "0":
            self._first.write_text(str(os.getpid()))
        return not self._end.exists()

    def stop(self) -> None:
        """End the job: signal rank 0 to finish; ranks that start later exit at once."""
        if self.exit_code() is None:
            self.end(0)
        # Rank 0 writes its process id before it checks for the end, so one side sees the other. If rank 0 has died, its
        # successor exits at once.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(self._first.read_text()), signal.SIGINT)

    def end(self, code: int) -> None:
        """Record the exit code of the job."""
        replace_file(self._end, str(code).encode(), durable=False)

    def exit_code(self) -> int | None:
        """Return the exit code of the job; None until it has ended."""
        return int(self._end.read_text()) if self._end.exists() else None
