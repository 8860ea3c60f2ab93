"""The last complete step of a run, whose checkpoint is written however the run ends."""

import logging

from rlhf_triton.actor.algorithms.stages import RewardShaper, RunningMoments
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.run.checkpoints import RunCheckpoints
from rlhf_triton.actor.run.stopping import RESUMES, Stopped
from rlhf_triton.errors import REPORTED, NotFinite, RlhfError, reason_of
from rlhf_triton.models.device_errors import is_device_error
from rlhf_triton.training_engine.sharding import all_finite

logger = logging.getLogger(__name__)


class LastStep:
    """Records the state after the last complete step, to detect later whether an update has changed it."""

    step = 0
    is_updating = False
    """True from the start of the policy's update to the end of its step; set by the loop."""

    def __init__(self, policy: Policy, shaper: RewardShaper, checkpoints: RunCheckpoints) -> None:
        self._policy = policy
        self._shaper = shaper
        self._checkpoints = checkpoints
        self._optimizer_step = 0
        self._moments = shaper.moments.state()

    def record(self, step: int) -> None:
        """Record the current state as the state after `step`."""
        self.step = step
        self.is_updating = False
        self._optimizer_step = self._policy.trained.optimizer_step
        self._moments = self._shaper.moments.state()

    async def save(self, error: Exception) -> str:
        """Write the checkpoint of the last complete step, and `policy/`; return why that is impossible, or "".

        It is impossible if a later update has changed the state, or if the device does not answer.
        """
        lost = self._why_lost(error) if self.step else ""
        if self.step and not lost:
            self._shaper.moments = RunningMoments(*self._moments)
            try:
                await self._checkpoints.save_last(self.step)
            except REPORTED as save_error:  # the first error is the one to report
                lost = reason_of(save_error)
        return lost

    def _why_lost(self, error: Exception) -> str:
        """Return why the state after the last complete step is lost; "" if it is intact.

        An update that fails before its first optimizer step leaves the weights unchanged. On several ranks, only a
        failure with NotFinite is sure to have happened on all of them.
        """
        is_safe = isinstance(error, REPORTED if self._policy.ranks.size == 1 else NotFinite)
        if self._policy.trained.optimizer_step != self._optimizer_step or (self.is_updating and not is_safe):
            return f"the policy's update of step {self.step + 1} had started"
        if is_device_error(error):
            return "its device does not answer"
        if not all_finite([*self._policy.model.parameters(), *self._policy.generator.parameters()]):
            return "its weights are not finite"
        return ""

    def describe(self, error: Exception, lost: str) -> None:
        """Add to the message of `error`, or log, after which step the run stopped and where the next start resumes."""
        saved = self._checkpoints.steps()
        where = "before it had resumed" if saved else "before the first step ended"
        if self.step in saved:
            where = f"after step {self.step}, whose checkpoint is written"
        elif self.step:
            where = f"after step {self.step}, which has no checkpoint: {lost}"
        where += f"; {RESUMES if saved else 'the next start begins at step 1'}"
        if isinstance(error, Stopped):
            error.args = (f"stopped {where}",)
        elif isinstance(error, RlhfError) and self.step:
            error.args = (f"{error}; the run stopped {where}",)
        elif self.step:
            logger.warning("the run stopped %s", where)
