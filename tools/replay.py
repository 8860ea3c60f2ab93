"""`rlhf-triton replay RUN`: steps of a finished or stopped run, computed again from its samples and compared."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rlhf_triton.actor.run.settings import actor_checkpoints, flat_settings, started_with, write_settings
from rlhf_triton.config import RunConfig, parse_config
from rlhf_triton.config.command_line import interrupt_on_signals, reporting
from rlhf_triton.errors import REPORTED, RlhfError, reason_of
from rlhf_triton.store.run_lock import in_progress
from rlhf_triton.tools.arguments import parse, program

if TYPE_CHECKING:
    from rlhf_triton.trainer.critic_replay import CriticReplay


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per step; return 0 if all are identical, 1 after the first one that differs, or 2 after an error."""
    parser = argparse.ArgumentParser(
        description="Compute steps of a run again, without its servers, and compare each bit with the run."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder (run.dir)")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, counted from 1")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--to", type=int, metavar="M", help="the last step; default: N")
    kinds.add_argument("--fork", type=Path, metavar="DIR", help="instead, make a new run that goes on before step N")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="with --fork: its settings")
    arguments = parse(parser, argv)
    interrupt_on_signals()
    first, last = arguments.step, arguments.step if arguments.to is None else arguments.to
    if not 1 <= first <= last:
        wrong = f"--step {first}" if first < 1 else f"--step {first} --to {last}"
        raise RlhfError(f"{wrong}: steps are counted from 1, and --to is not before --step")
    if in_progress(arguments.run):
        raise RlhfError(f"{arguments.run} is the folder of a run in progress; stop it, or wait for its end")
    if arguments.overrides and arguments.fork is None:
        raise RlhfError(f"{arguments.overrides[0]}: a replay keeps the run's settings; only --fork changes them")
    if arguments.fork is not None:
        return fork(arguments.run, first, arguments.fork, arguments.overrides)
    return replay(arguments.run, first, last)


def fork(run_dir: Path, step: int, folder: Path, overrides: Sequence[str]) -> int:
    """Write a new run in `folder`, with the policy of `run_dir` before `step` and changed settings; return as `main`.

    Raises:
        RlhfError: `folder` exists, the run has a critic, its steps up to `step` are not kept, or a setting is wrong.
    """
    old = started_with(run_dir)
    if old is None:
        raise RlhfError(f"{run_dir} is not the folder of a run: it has no settings.json")
    if old.serves_critic:
        raise RlhfError(f"--fork: {run_dir} trains a critic, whose state a fork cannot take over; start a new run")
    if folder.exists():
        raise RlhfError(f"--fork: {folder} exists; choose another folder")
    sections = old.model_dump(mode="json", exclude_defaults=True)
    sections["run"] = {**sections["run"], "dir": str(folder), "run_id": None}
    config = parse_config(sections, "--fork", overrides)
    checkpoint = actor_checkpoints(run_dir) / str(step - 1)
    if checkpoint.exists():
        shutil.copytree(checkpoint, actor_checkpoints(folder) / checkpoint.name)
    elif step > 1 and replay(run_dir, step - 1, step - 1, new=config):
        return 1
    folder.mkdir(exist_ok=True)
    was, now = flat_settings(old), flat_settings(config)
    write_settings(config, {key: [was.get(key), now[key]] for key in now if was.get(key) != now[key]})
    sections = config.model_dump(mode="json", exclude_defaults=True)
    if not config.actor.kl.serves_reference:
        sections.pop("reference", None)  # filled in when settings are read, and without effect
    written = folder / "run.yaml"
    written.write_text(yaml.safe_dump(sections))
    print(f"{program()} run --config {written} continues with step {step}")
    return 0


def replay(run_dir: Path, first: int, last: int, new: RunConfig | None = None) -> int:
    """Replay the steps from the newest checkpoint before `first` to `last`; print and return as `main`.

    `new`: settings of a new run, which gets a checkpoint of the last step if all are identical.
    """
    from rlhf_triton.actor.run.replay import Replay  # torch: slow to import
    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    run = Replay(run_dir, first, last)
    print(f"from {f'the checkpoint of step {run.start}' if run.start else 'the start of the run'}", flush=True)
    critic: CriticReplay | None = None
    for step in run.run():
        if step.payload is not None and step.step == run.start + 1:
            critic = _critic_of(run.config, run_dir, run.start)
        difference = step.difference
        if critic is not None and step.payload is not None and not difference:
            difference = critic.train(step.step, step.payload)
        result = difference or f"identical{', the critic too' if critic else ''}"
        if not (difference or step.has_weights):
            result += " (the run kept no digests of the weights)"
        print(f"step {step.step}: {result} ({step.seconds:.1f} s)", flush=True)
        if difference:
            lines = run.differing_environment() or ["nothing: the code, the processor, or a file has changed"]
            print("\n  ".join(["what differs in the environment:", *lines]))
            return 1
    if new is not None:
        run.save(new)
    return 0


def _critic_of(config: RunConfig, run_dir: Path, step: int) -> CriticReplay | None:
    """Return the critic after `step`; None, with a line that says why, if it is not kept."""
    from rlhf_triton.trainer.critic_replay import CriticReplay

    here = config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})
    try:
        return CriticReplay(here, step)
    except REPORTED as error:  # the policy is replayed without it
        print(f"the critic is not replayed: {reason_of(error)}", flush=True)
        return None
