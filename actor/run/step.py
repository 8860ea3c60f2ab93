"""The computation of a training step, shared by a run and its replay."""

from collections.abc import Sequence

from rlhf_triton.actor.algorithms.batch import make_batch
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.rollout_rows import Group, conversations_of, rows_of
from rlhf_triton.actor.policy.update import PolicyUpdate, PolicyUpdateResult
from rlhf_triton.actor.run.checkpoints import RunState
from rlhf_triton.config.run_config import RunConfig


class StepTraining:
    """Makes the batch of a step, updates the policy with it, then adapts the KL coefficient."""

    def __init__(self, config: RunConfig, method: Method, state: RunState, policy_update: PolicyUpdate) -> None:
        self._truncated = config.truncated
        self._num_warmup_steps = config.actor.algorithm.critic_warmup_steps
        self._method = method
        self._state = state
        self._policy_update = policy_update

    def make_batch(self, groups: Sequence[Group], dropped: Sequence[Group]) -> PPOBatch:
        """Return the batch of all rows of a step; the critic alone learns from the `dropped` groups."""
        return make_batch(
            [*groups, *dropped],
            self._method,
            self._state.shaper,
            kl_coef=self._state.kl.coef,
            truncated=self._truncated,
            num_dropped=len(dropped),
        )

    def trains_policy(self, step: int) -> bool:
        """Return whether the policy is trained in `step`, and not the critic alone."""
        return step > self._num_warmup_steps

    def update(self, batch: PPOBatch, seed: int) -> PolicyUpdateResult:
        """Train the policy on the batch of `policy_batch`, see `PolicyUpdate.run`."""
        return self._policy_update.run(batch, seed=seed, kl_coef=self._state.kl.coef)

    def adapt_kl(self, kl_per_sequence: float | None, groups: Sequence[Group]) -> None:
        """Adapt the KL coefficient to the mean KL of these groups, in nats per sequence; None: it is not measured."""
        if kl_per_sequence is not None:
            self._state.kl.update(kl_per_sequence, len(conversations_of(groups)))


def policy_batch(batch: PPOBatch, groups: Sequence[Group]) -> PPOBatch:
    """Return the part of a step's batch that the policy learns from: the rows of its first groups."""
    rows = rows_of(conversations_of(groups))
    return batch.first(len(rows), max(len(row.tokens) for row in rows))
