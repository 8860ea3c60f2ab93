"""`rlhf-triton replay RUN`: steps of a finished or stopped run, computed again from its samples and compared."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_triton.actor.run.settings import (
    FIXED_KEYS,
    SETTINGS_FILE,
    actor_checkpoints,
    adapted_keys,
    flat_settings,
    started_with,
    write_settings,
)
from rlhf_triton.config.actor import PolicySection
from rlhf_triton.config.command_line import interrupt_on_signals, reporting
from rlhf_triton.config.keys import with_value
from rlhf_triton.config.live_models import reward_is_live
from rlhf_triton.config.loading import parse_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.config.trained_model import Resume, resume_marks
from rlhf_triton.config.yaml_file import dump_yaml
from rlhf_triton.errors import REPORTED, RlhfError, reason_of
from rlhf_triton.store.run_lock import in_progress
from rlhf_triton.store.sealed_folder import saved_steps, verify_folder
from rlhf_triton.store.weights import WeightsStore
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
    first = arguments.step
    last = arguments.step if arguments.to is None else arguments.to
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
    """Write a new run in `folder` that continues `run_dir` before `step` with changed settings; return as `main`.

    Raises:
        RlhfError: `folder` exists, a setting is wrong, or policy or critic before `step` are not kept.
    """
    old = started_with(run_dir)
    if old is None:
        raise RlhfError(f"{run_dir} is not the folder of a run: it has no {SETTINGS_FILE}")
    if folder.exists():
        raise RlhfError(f"--fork: {folder} exists; choose another folder")
    sections = sections_of(old)
    sections["run"] = {**sections["run"], "dir": str(folder), "run_id": None}
    config = parse_config(sections, "--fork", overrides)
    if config.run.dir != folder:
        raise RlhfError(f"run.dir: {config.run.dir}, but --fork names the folder, {folder}; remove run.dir")
    was = flat_settings(old)
    now = flat_settings(config)
    changed = {key: [was.get(key), now[key]] for key in now if was.get(key) != now[key]}
    if step > 1:
        _check_fork(run_dir, old, config, changed)
    try:
        checkpoint = actor_checkpoints(run_dir) / str(step - 1)
        if checkpoint.exists():
            critic = _critic_of(old, run_dir, step - 1, required=True) if config.serves_critic else None
            verify_folder(checkpoint)
            shutil.copytree(checkpoint, actor_checkpoints(folder) / checkpoint.name)
            if critic is not None:
                critic.save(config)
        elif step > 1 and replay(run_dir, step - 1, step - 1, new=config):
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        write_settings(config, changed)
        sections = sections_of(config)
        if not config.actor.kl.serves_reference:
            sections.pop("reference", None)  # filled in when settings are read, and without effect
        written = folder / "run.yaml"
        written.write_text(dump_yaml(sections), encoding="utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"{program()} run --config {written} continues with step {step}")
    return 0


def sections_of(config: RunConfig) -> dict[str, Any]:
    """Return the settings that are not defaults, or that are although the algorithm was published with others."""
    sections = config.model_dump(mode="json", exclude_defaults=True)
    settings = flat_settings(config)
    for key, published in config.actor.algorithm.defaults.recipe.items():
        if settings[key] != published:
            sections = with_value(sections, key, settings[key])
    return sections


def _check_fork(run_dir: Path, old: RunConfig, new: RunConfig, changed: Mapping[str, object]) -> None:
    """Raise RlhfError if a fork after the first step cannot start with these settings."""
    if new.serves_critic and not old.serves_critic:
        raise RlhfError(
            f"--fork: actor.algorithm.name: {new.actor.algorithm.name} needs a critic, and {run_dir} has none; choose "
            "an algorithm without one, or fork with --step 1"
        )
    marks = resume_marks("actor.policy", PolicySection) | resume_marks("trainer", TrainerSection)
    kept = (*FIXED_KEYS, *adapted_keys(old, new), "critic.pretrain")
    fixed = [key for key in changed if marks.get(key) is Resume.FIXED or key.startswith(kept)]
    if fixed:
        raise RlhfError(f"--fork: {fixed[0]} cannot change after the first step; remove it, or fork with --step 1")
    versions = WeightsStore(old.run.model_copy(update={"dir": run_dir}).reward_weights_dir).versions()
    if reward_is_live(old) and versions[1:]:
        raise RlhfError(
            f"--fork: {run_dir} has published versions of its reward model, which a fork does not take over; fork with "
            "--step 1, or start a new run from such a version"
        )


def replay(run_dir: Path, first: int, last: int, new: RunConfig | None = None) -> int:
    """Replay the steps from the newest checkpoint before `first` to `last`; print and return as `main`.

    `new`: settings of a new run, which gets checkpoints of the last step if all are identical.
    """
    from rlhf_triton.actor.replay.replay import Replay  # torch: slow to import
    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    run = Replay(run_dir, first, last)
    print(run.origin, flush=True)
    critic: CriticReplay | None = None
    settings: RunConfig | None = None
    for step in run.run():
        difference = step.difference
        if step.payload is not None and step.step == run.start + 1:
            critic = _critic_of(run.config, run_dir, run.start, required=new is not None and new.serves_critic)
        elif critic is not None and run.config is not settings:
            critic = critic.resumed(_in_folder(run.config, run_dir))
        settings = run.config
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
        if critic is not None and new.serves_critic:
            critic.save(new)
    return 0


def _critic_of(config: RunConfig, run_dir: Path, step: int, *, required: bool = False) -> CriticReplay | None:
    """Return the critic after `step`; None, with a line that says why, if it is not kept.

    Raises RlhfError if it is `required`.
    """
    from rlhf_triton.trainer.critic_replay import CriticReplay

    config = _in_folder(config, run_dir)
    try:
        return CriticReplay(config, step)
    except REPORTED as error:  # the policy is replayed without it
        if required:
            steps = saved_steps(config.run.critic_checkpoints_dir)
            available = (
                f"its checkpoints are of steps {', '.join(map(str, steps))}" if steps else "it has no checkpoint"
            )
            raise RlhfError(
                f"--fork: the critic after step {step} is not kept: {reason_of(error)}; {available}"
            ) from error
        print(f"the critic is not replayed: {reason_of(error)}", flush=True)
        return None


def _in_folder(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the settings of a run whose folder may have been moved."""
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir})})
