"""`python -m rlhf_triton.training_engine.agent RANKS MODULE ARGUMENTS...`: torchrun on this machine, for `launch`.

Restarts all ranks if one dies. On SIGINT or SIGTERM, it lets rank 0 finish. Its exit code is rank 0's, or 1 if ranks
died more often than MAX_RESTARTS.
"""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.process import RUN_MODULE
from rlhf_triton.training_engine.launch import AGENT, FOLDER, AgentFolder

MAX_RESTARTS = 10  # per start; each one resumes from the newest checkpoint and the journal


def main(argv: Sequence[str]) -> int:
    """Start the ranks, restart them as needed, and return the job's exit code."""
    ranks, module, *arguments = argv
    with tempfile.TemporaryDirectory(prefix="rlhf-ranks-") as root:
        folder = AgentFolder(Path(root))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: folder.stop())
        os.environ[FOLDER], os.environ[AGENT] = root, str(os.getpid())
        # Otherwise ranks print a C++ stack trace when another one dies.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun warns otherwise; the ranks set their own number
        # By default the ranks share the store of torchrun's agent. Restarts then often fail, because a new rank
        # connects to the port of the dead one.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

        with contextlib.suppress(ChildFailedError):  # torchrun has logged which rank failed
            torchrun(
                [
                    "--standalone",
                    f"--nproc-per-node={ranks}",
                    f"--max-restarts={MAX_RESTARTS}",
                    "--monitor-interval=0.2",
                    "--signals-to-handle=SIGHUP,SIGQUIT",
                    "--no-python",
                    sys.executable,
                    "-u",
                    RUN_MODULE,
                    module,
                    *arguments,
                ]
            )
        code = folder.exit_code()
        return 1 if code is None else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
