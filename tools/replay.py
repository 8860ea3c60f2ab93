"""`rlhf-triton replay RUN`: steps of a finished or stopped run, computed again from its samples and compared."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlhf_triton.config.command_line import interrupt_on_signals, reporting
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.run_lock import in_progress
from rlhf_triton.tools.arguments import parse


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per step; return 0 if all are identical, 1 after the first one that differs, or 2 after an error."""
    parser = argparse.ArgumentParser(
        description="Compute steps of a run again, without its servers, and compare each bit with the run."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder (run.dir)")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, counted from 1")
    parser.add_argument("--to", type=int, metavar="M", help="the last step; default: N")
    arguments = parse(parser, argv)
    interrupt_on_signals()
    first, last = arguments.step, arguments.step if arguments.to is None else arguments.to
    if not 1 <= first <= last:
        raise RlhfError(f"--step {first} --to {last}: steps are counted from 1, and --to is not before --step")
    if in_progress(arguments.run):
        raise RlhfError(f"{arguments.run} is the folder of a run in progress; stop it, or wait for its end")
    return replay(arguments.run, first, last)


def replay(run_dir: Path, first: int, last: int) -> int:
    """Replay the steps from the newest checkpoint before `first` to `last`; print and return as `main`."""
    from rlhf_triton.actor.run.replay import Replay  # torch: slow to import
    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    run = Replay(run_dir, first, last)
    print(f"from {f'the checkpoint of step {run.start}' if run.start else 'the start of the run'}", flush=True)
    for step in run.run():
        result = step.difference or ("identical" if step.has_weights else "identical, but for the weights: no digests")
        print(f"step {step.step}: {result} ({step.seconds:.1f} s)", flush=True)
        if step.difference:
            lines = run.differing_environment() or ["nothing: the code, the processor, or a file has changed"]
            print("\n  ".join(["what differs in the environment:", *lines]))
            return 1
    return 0
