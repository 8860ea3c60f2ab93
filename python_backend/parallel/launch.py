"""Starts the ranks of a training process through torchrun. Imports no torch.

`python -m trainer` and `python -m actor` replace themselves by torchrun if their `ranks` setting is above 1 and no
launcher has started them. Under torchrun, Slurm or Kubernetes they find their rank in the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from python_backend.errors import RlhfError

MAX_RESTARTS = 10  # per start; each one resumes from the newest checkpoint and the journal
SHUTDOWN_S = 100  # how long rank 0 may take to write its last checkpoint after a signal


class RanksError(RlhfError):
    """The launcher started another number of ranks than the configuration names."""


def launcher(ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts `ranks` processes of `python -m module arguments` on this machine."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        f"--max-restarts={MAX_RESTARTS}", "--monitor-interval=0.5", f"--shutdown-timeout={SHUTDOWN_S}",
        "--module", module, *arguments,
    ]  # fmt: skip


def launch_ranks(ranks: int, module: str, arguments: Sequence[str], *, key: str) -> None:
    """Replace this process by torchrun if `ranks` is above 1 and no launcher has started it; otherwise return.

    Args:
        key: configuration key of `ranks`, for the error message.

    Raises:
        RanksError: a launcher started this process with another number of ranks.
    """
    if is_launched(os.environ):
        started = int(os.environ["WORLD_SIZE"])
        if started != ranks:
            raise RanksError(f"{key} is {ranks}, but the launcher started {started} processes; make them equal")
        return
    if ranks > 1:
        command = launcher(ranks, module, arguments)
        # By default the ranks share the store of torchrun's agent. A restart then often fails, because a new rank
        # connects to the port of the one that died.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        os.execv(command[0], command)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, has started this process."""
    return "RANK" in environment and "WORLD_SIZE" in environment
