"""The checkpoints of a run: the policy's, in the run's folder, and the critic's of the same step, in tritonserver."""

import asyncio
import logging
from typing import Any

from rlhf_triton.actor.policy.checkpoint import (
    RunState,
    check_checkpoint_of,
    critic_steps,
    reference_fingerprint,
    restore,
    save_checkpoint,
    set_aside,
    write_policy,
)
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.settings import actor_checkpoints
from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.config import RunConfig
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.store.durable import sweep
from rlhf_triton.store.sealed_folder import DamagedCheckpoint, saved_steps
from rlhf_triton.wire.contract import STEP_AHEAD

logger = logging.getLogger(__name__)


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
        self._reference = {
            "reference": str(config.reference.model),
            "reference_fingerprint": reference_fingerprint(config, state.policy),
        }

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
            restore(self._folder / str(step), state, self._state)
            logger.info("resuming from the checkpoint of step %d", step)
            if step >= self._settings.steps:
                logger.warning(
                    "step %d is the last: raise actor.steps (%d) to continue training, or start over with --fresh",
                    step,
                    self._settings.steps,
                )
        return step

    async def _newest_usable(self) -> tuple[int, dict[str, Any]]:
        """Rewind the critic to the newest intact checkpoint that it can reach; return its step and state, or (0, {}).

        A run that ended during an outage may have left a checkpoint of a step that the critic never received.
        Checkpoints newer than the returned one are set aside.
        """
        steps = saved_steps(self._folder)
        skipped: dict[int, str] = {}  # step of a skipped checkpoint -> reason
        for step in reversed(steps):
            try:
                state = await asyncio.to_thread(
                    check_checkpoint_of,
                    self._state.policy,
                    self._folder / str(step),
                    reference=self._reference["reference_fingerprint"],
                )
                await self._critic.rewind(state["critic_step"])
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
                for newer, reason in skipped.items():
                    aside = set_aside(self._folder, newer)
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
        state = {
            "step": step,
            "run_id": self._run_id,
            "critic_step": step,
            "weights_version": self._critic.weights_version,
            **self._reference,
        }
        keep = keep or self._settings.keep_checkpoints
        await asyncio.to_thread(save_checkpoint, self._folder, self._state, state, keep=keep)
        self._critic.start_save(step, critic_steps(self._folder))

    async def save_last(self, step: int) -> None:
        """Write the files of a run that stops after `step`: its checkpoint, unless it exists, and `policy/`.

        The previous checkpoint is kept as well, because the critic may not have received its update of this step.
        """
        if step not in self.steps():
            await self.save(step, keep=self._settings.keep_checkpoints + 1)
        await self._write_policy(step)

    async def finish(self, step: int) -> None:
        """Wait until the critic's saves are done, and write the policy after `step`, the run's last, to `policy/`."""
        await self._critic.finish_saves(critic_steps(self._folder))
        await self._write_policy(step)

    async def _write_policy(self, step: int) -> None:
        await asyncio.to_thread(write_policy, self._state.policy, self._dir / "policy", {"step": step})
