"""The checkpoints of a run: the policy's, in the run's folder, and the critic's of the same step, in tritonserver.

state.json also holds the digest of each file, so that a damaged checkpoint is detected and the previous one is used.

    <run.dir>/checkpoints/actor/
        <step>/{shard-...safetensors, state.json}    trained weights and optimizer, a file of each rank
        <step>.set-aside/    skipped by a resume: damaged, or of a step that the critic never received
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.actor.algorithms.kl import KLControl
from rlhf_triton.actor.algorithms.stages import RewardShaper, RunningMoments
from rlhf_triton.actor.data.prompts import StepInputs
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.settings import actor_checkpoints
from rlhf_triton.actor.run.stopping import ENDED
from rlhf_triton.checkpoints.inspection import CheckpointError, fingerprint_model, is_same_model
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.store.durable import numbers_in, remove_folder, sweep, write_folder, write_json
from rlhf_triton.store.sealed_folder import (
    ASIDE_SUFFIX,
    DamagedCheckpoint,
    read_state,
    saved_steps,
    set_aside,
    write_sealed,
)
from rlhf_triton.wire.contract import STEP_AHEAD

logger = logging.getLogger(__name__)
WAY_OUT = "or start a run in another folder (run.dir)"


@dataclass(frozen=True)
class RunState:
    """The mutable state of a run that a checkpoint saves and restores."""

    policy: Policy
    shaper: RewardShaper
    kl: KLControl
    inputs: StepInputs

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that a step changes."""
        return {
            "optimizer_step": self.policy.trained.optimizer_step,
            "kl_coef": self.kl.coef,
            "reward_moments": self.shaper.moments.state(),
        }

    def restore(self, folder: Path, numbers: Mapping[str, Any]) -> None:
        """Load the trained weights and the optimizer in `folder`, and the numbers of the same step.

        They may have `kl_target`, `actor.kl.target` until then: a coefficient that was fixed is as configured now.
        """
        self.policy.trained.load(folder, numbers["optimizer_step"])
        if None not in (self.kl.target, numbers.get("kl_target", self.kl.target)):
            self.kl.coef = numbers["kl_coef"]
        self.shaper.moments = RunningMoments(*numbers["reward_moments"])


class RunCheckpoints:
    """Saves and restores the state of a run, and lets the critic return to the same step.

    Files are written in a thread: on the event loop they would delay responses past their deadlines.
    """

    def __init__(self, config: RunConfig, state: RunState, critic: RemoteCritic) -> None:
        self._settings = config.actor
        self._dir = config.run.dir
        self._run_id = config.run.identity
        self._folder = actor_checkpoints(config.run.dir)
        self._state = state
        self._critic = critic
        self._reference = reference_of(config, state.policy)

    async def resume(self) -> int:
        """Restore the newest intact checkpoint and rewind the critic to it; return its step, 0 for a new run.

        Raises:
            CheckpointError: no checkpoint is intact, or the newest intact one was saved with other settings.
            RequestFailed: the critic cannot be rewound.
        """
        sweep(self._dir)
        step, state = await self._newest_usable()
        set_log_position(step=step)
        if state:
            self._state.restore(self._folder / str(step), state)
            self._state.inputs.restore(step, state)
            logger.info("resuming from the checkpoint of step %d", step)
            if step >= self._settings.steps:
                logger.info("%s", ENDED.format(step, self._settings.steps))
        return step

    async def _newest_usable(self) -> tuple[int, dict[str, Any]]:
        """Rewind the critic to the newest intact checkpoint that it can reach; return its step and state, or (0, {}).

        A run that ended during an outage may have left a checkpoint of a step that the critic never received.
        Checkpoints newer than the returned one are set aside.
        """
        steps = self.steps()
        skipped: dict[int, str] = {}  # step of a skipped checkpoint -> reason
        for step in reversed(steps):
            folder = self._folder / str(step)
            reference = self._reference["reference_fingerprint"]
            try:
                state = await asyncio.to_thread(check_checkpoint_of, self._state.policy, folder, reference=reference)
                await self._critic.rewind(step)
            except DamagedCheckpoint as error:
                if step == steps[0]:
                    raise CheckpointError(
                        f"{error}; there is no earlier checkpoint, so restore this one, or start a run in another "
                        "folder (run.dir)"
                    ) from error
                skipped[step] = str(error)
            except RequestFailed as error:
                if error.code != STEP_AHEAD or step == steps[0]:
                    raise
                skipped[step] = f"the checkpoint of step {step} is ahead of the critic: {error}"
            else:
                for older in self._folder.glob(f"*{ASIDE_SUFFIX}") if skipped else ():
                    remove_folder(older)
                for newer, reason in skipped.items():
                    aside = set_aside(self._folder / str(newer))
                    logger.warning("%s; kept as %s, resuming from step %d instead", reason, aside.name, step)
                return step, state
        await self._critic.rewind(0)
        return 0, {}

    def steps(self) -> list[int]:
        """Return the steps of the policy's checkpoints, in order."""
        return saved_steps(self._folder)

    async def save(self, step: int, *, keep: int | None = None) -> None:
        """Write the policy's checkpoint, and start the save of the critic's. The policy must not change meanwhile.

        `keep`: number of newest checkpoints to keep; default: `actor.keep_checkpoints`.
        """
        about = {"run_id": self._run_id, "weights_version": self._critic.weights_version, **self._reference}
        keep = keep or self._settings.keep_checkpoints
        await asyncio.to_thread(save_checkpoint, self._folder, self._state, step, about, keep=keep)
        self._critic.start_save(step, self.steps())

    async def save_last(self, step: int) -> None:
        """Write the files of a run that stops after `step`: its checkpoint, unless it exists, and `policy/`.

        The previous checkpoint is kept as well, because the critic may not have received its update of this step.
        """
        if step not in self.steps():
            await self.save(step, keep=self._settings.keep_checkpoints + 1)
        await self._write_policy(step)

    async def finish(self, step: int) -> None:
        """Wait until the critic's saves are done, and write the policy after `step`, the run's last, to `policy/`."""
        await self._critic.finish_saves(self.steps())
        await self._write_policy(step)

    async def _write_policy(self, step: int) -> None:
        await asyncio.to_thread(write_policy, self._state.policy, self._dir / "policy", {"step": step})


def save_checkpoint(root: Path, run: RunState, step: int, about: Mapping[str, Any], *, keep: int) -> None:
    """Write the checkpoint of `step` and delete all but the `keep` newest checkpoints.

    `about`: further entries of state.json.
    """
    policy = run.policy
    state = {
        "step": step,
        **about,
        **run.inputs.state(step),
        **run.numbers(),
        "kl_target": run.kl.target,
        "settings": policy.trained.settings,
        "start": str(policy.settings.model),
        "start_fingerprint": policy.fingerprint,
    }
    write_sealed(root / str(step), state, policy.trained.save)
    for old in numbers_in(root)[:-keep]:
        remove_folder(root / str(old))
    sweep(root)


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
    if not is_same_model(state["start_fingerprint"], policy.fingerprint):
        raise CheckpointError(
            f"{folder} was saved by a run that started from {state['start']}, but actor.policy.model is now "
            f"{policy.settings.model}, which has different weights, config.json or tokenizer: it would not be the "
            f"same policy, nor the same reference of the KL; set actor.policy.model back, {WAY_OUT}"
        )
    saved = state.get("reference_fingerprint")
    if reference is not None and saved is not None and not is_same_model(saved, reference):
        raise CheckpointError(
            f"{folder} was saved by a run whose KL was measured against {state['reference']}, but reference.model "
            f"has different weights, config.json or tokenizer now; set it back, {WAY_OUT}"
        )
    policy.trained.check_fixed(state["settings"], folder)
    return state


def reference_of(config: RunConfig, policy: Policy) -> dict[str, str | None]:
    """Return the reference's folder and its fingerprint.

    The fingerprint is None if there is no KL, or the folder is not accessible.
    """
    kl = config.actor.kl
    folder = config.reference.model
    fingerprint = None
    if kl.serves_reference:
        fingerprint = fingerprint_model(folder) if folder.is_dir() else None
    elif kl.uses_reference:
        fingerprint = policy.fingerprint
    return {"reference": str(folder), "reference_fingerprint": fingerprint}


def write_policy(policy: Policy, folder: Path, about: Mapping[str, Any]) -> None:
    """Write the policy to `folder`, and `about` to a JSON file in it, named after the folder."""

    def fill(staging: Path) -> None:
        policy.save(staging)
        write_json(staging / f"{folder.name}.json", about)

    write_folder(folder, fill)
