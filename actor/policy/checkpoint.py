"""The actor's checkpoints: policy, optimizer and run state, written atomically.

`critic_step` in state.json is the step of the matching critic checkpoint; a resumed actor rewinds the critic to it.
state.json also holds the digest of each file, so that a damaged checkpoint is detected and the previous one is used.

    <root>/<step>/{shard-...safetensors, state.json}    trained weights and optimizer, a file of each rank
    <root>/<step>.set-aside/    skipped by a resume: damaged, or of a step that the critic never received
"""

import contextlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.actor.algorithms.losses import KLControl
from rlhf_triton.actor.algorithms.stages import RewardShaper, RunningMoments
from rlhf_triton.actor.data.prompts import StepInputs
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.checkpoints.inspection import CheckpointError, fingerprint_weights
from rlhf_triton.config import RunConfig
from rlhf_triton.store.durable import numbers_in, remove_folder, sweep, sync_directory, write_folder, write_json
from rlhf_triton.store.sealed_folder import STATE_FILE, DamagedCheckpoint, read_state, saved_steps, sealed

logger = logging.getLogger(__name__)
WAY_OUT = "or start a run in another folder (run.dir)"


@dataclass(frozen=True)
class RunState:
    """The mutable state of a run that a checkpoint saves and restores."""

    policy: Policy
    shaper: RewardShaper
    kl: KLControl
    inputs: StepInputs


def critic_steps(root: Path) -> list[int]:
    """Return the critic steps that the readable checkpoints in `root` refer to."""
    steps = []
    for step in saved_steps(root):
        with contextlib.suppress(DamagedCheckpoint):  # no run resumes from a damaged checkpoint
            steps.append(read_state(root / str(step))["critic_step"])
    return steps


def set_aside(root: Path, step: int) -> Path:
    """Rename the checkpoint of `step` to `<step>.set-aside`, delete older ones so renamed, and return the new path."""
    aside = root / f"{step}.set-aside"
    for before in root.glob("*.set-aside"):
        shutil.rmtree(before, ignore_errors=True)
    (root / str(step)).rename(aside)
    sync_directory(root)
    return aside


def save_checkpoint(root: Path, run: RunState, state: Mapping[str, Any], *, keep: int) -> None:
    """Write the checkpoint of `state["step"]` and delete all but the `keep` newest checkpoints."""
    policy = run.policy
    whole = {
        **state,
        **run.inputs.state(state["step"]),
        "optimizer_step": policy.trained.optimizer_step,
        "settings": policy.trained.settings,
        "kl_coef": run.kl.coef,
        "reward_moments": run.shaper.moments.state(),
        "start": str(policy.settings.model),
        "start_fingerprint": policy.fingerprint,
    }

    def fill(folder: Path) -> None:
        files = policy.trained.save(folder)
        (folder / STATE_FILE).write_text(json.dumps(sealed(whole, files)))

    write_folder(root / str(state["step"]), fill)
    for step in numbers_in(root)[:-keep]:
        remove_folder(root / str(step))
    sweep(root)


def write_policy(policy: Policy, folder: Path, about: Mapping[str, Any]) -> None:
    """Write the policy to `folder`, and `about` to a JSON file in it, named after the folder."""

    def fill(staging: Path) -> None:
        policy.save(staging)
        write_json(staging / f"{folder.name}.json", about)

    write_folder(folder, fill)


def reference_fingerprint(config: RunConfig, policy: Policy) -> str | None:
    """Return the fingerprint of the reference weights; None if there is no KL or the weights are not accessible."""
    actor, folder = config.actor, config.reference.model
    if not actor.kl.uses_reference:
        return None
    if not actor.kl.serves_reference:
        return policy.fingerprint
    return fingerprint_weights(folder) if folder.is_dir() else None


def check_checkpoint_of(policy: Policy, folder: Path, *, reference: str | None = None) -> dict[str, Any]:
    """Verify that a checkpoint is intact and fits `policy` and its settings; return its saved state.

    Args:
        reference: the `reference_fingerprint` of this run; None: not compared.

    Raises:
        DamagedCheckpoint: a file is missing or differs from what was written.
        CheckpointError: it was saved with a different `actor.policy.model` or `reference.model`, or with
            a different setting that is fixed, see `config.trained_model.Resume`.
    """
    policy.trained.verify(folder)
    state = read_state(folder)
    if state["start_fingerprint"] != policy.fingerprint:
        raise CheckpointError(
            f"{folder} was saved by a run that started from {state['start']}, but actor.policy.model is now "
            f"{policy.settings.model}, which has different weights: the KL would be measured against a different "
            f"reference; set actor.policy.model back, {WAY_OUT}"
        )
    if None not in (reference, known := state.get("reference_fingerprint")) and reference != known:
        raise CheckpointError(
            f"{folder} was saved by a run whose KL was measured against {state['reference']}, but reference.model "
            f"has different weights now; set it back, {WAY_OUT}"
        )
    policy.trained.changed(state["settings"], folder)
    return state


def restore(folder: Path, state: Mapping[str, Any], run: RunState) -> None:
    """Load a checkpoint that passed `check_checkpoint_of` into `run`."""
    run.policy.trained.load(folder, state["optimizer_step"])
    if run.kl.target is not None:  # a fixed one is as configured now
        run.kl.coef = state["kl_coef"]
    run.shaper.moments = RunningMoments(*state["reward_moments"])
    run.inputs.restore(state["step"], state)
