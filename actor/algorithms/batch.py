"""Builds the training batch for policy and critic from scored rows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import masked_whiten, returns_to_go
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs
from rlhf_triton.actor.algorithms.kl import kl_estimate
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.rollout_rows import (
    Conversation,
    Group,
    RolloutRow,
    conversations_of,
    failure_of,
    padded,
    rows_of,
)
from rlhf_triton.errors import RlhfError
from rlhf_triton.wire.contract import MASK, PREV_VALUES, RETURNS, SEQUENCE_LENGTHS, TOKENS


def make_batch(
    groups: Sequence[Group],
    method: Method,
    shaper: RewardShaper,
    *,
    kl_coef: float,
    truncated: str = "score",
    num_dropped: int = 0,
) -> PPOBatch:
    """Return the training batch of the rows of all groups, with advantages and returns.

    A conversation without a score is masked out in all of its rows. Advantages and returns are computed per
    conversation, however many rows it has.

    Args:
        kl_coef: KL coefficient of this step.
        truncated: `environment.truncated`, how to treat conversations that a limit ended: `mask` excludes them, `score`
            treats them as ended, and `bootstrap` also adds the discounted value of their last token after the stages.
        num_dropped: number of groups at the end that only the critic learns from.
    """
    settings = method.settings
    conversations = [apply_truncation(conversation, truncated) for conversation in conversations_of(groups)]
    rows = rows_of(conversations)
    ends = [conversation[-1] for conversation in conversations]
    group_ids = torch.tensor([i for i, group in enumerate(groups) for _ in group.conversations])
    owner = torch.tensor([i for i, conversation in enumerate(conversations) for _ in conversation])
    versions = torch.tensor([row.score.version for row in rows])
    scored = torch.tensor([not failure_of(conversation) for conversation in conversations])
    ended = torch.tensor([end.ended for end in ends])
    counted = scored & (group_ids < len(groups) - num_dropped)
    if settings.mask_unfinished:
        counted &= ended
    mask = positions(rows, lambda row: row.sampled).float() * scored[owner, None]
    logprobs = logprobs_by_position(rows, "policy_logprobs")
    ref_logprobs = logprobs_by_position(rows, "ref_logprobs")
    engine_logprobs = logprobs_by_position(rows, "logprobs")
    kl = None
    if logprobs is not None and ref_logprobs is not None:
        # Outside the mask log-probs may be -inf (banned tokens in a prompt), which would make the KL non-finite.
        kl = torch.where(mask > 0, kl_estimate(logprobs, ref_logprobs, method.kl_estimator), 0.0)
    penalty = torch.zeros_like(mask) if kl is None or method.kl_in_loss else kl_coef * kl
    values = torch.where(mask > 0, padded([_or_zeros(row, row.score.values) for row in rows])[:, :-1], 0.0)
    layout = ConversationLayout(conversations)
    inputs = AdvantageInputs(
        **_rewards(conversations, layout, in_groups=settings.defaults.needs_groups),
        **_components(conversations),
        penalty=layout.gather(penalty),
        values=layout.gather(values),
        mask=layout.gather(mask),
        groups=group_ids,
        scored=scored,
        ended=ended,
        counted=counted,
        gamma=settings.gamma,
        lam=0.95 if settings.lam is None else settings.lam,
        lam_values=settings.defaults.lam_values,
        lam_length=settings.defaults.lam_length if settings.lam is None else None,
    )
    inputs = shaper.run(inputs)
    if truncated == "bootstrap":
        inputs = add_bootstrap_values(inputs, conversations)
    advantages, returns = map(layout.scatter, method.advantage(inputs))
    rewards_to_go = None
    if (versions >= 0).any():
        rewards_to_go = layout.scatter(returns_to_go(inputs.token_rewards, inputs.mask, gamma=inputs.gamma))
    weights = policy_mask = mask * (counted & inputs.counted)[owner, None]
    if method.loss_mean == "sequence":
        weights = weights / inputs.mask.sum(-1)[owner, None].clamp(min=1)
    return PPOBatch(
        tokens=padded([row.tokens for row in rows]),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        mask=mask,
        policy_weights=weights,
        logprobs=engine_logprobs if settings.old_logprobs == "sampler" and engine_logprobs is not None else logprobs,
        ref_logprobs=ref_logprobs,
        advantages=masked_whiten(advantages, policy_mask) if method.whitens else advantages * policy_mask,
        returns=returns * mask,
        prev_values=values,
        kl=kl,
        rewards_to_go=rewards_to_go,
        groups=group_ids[owner],
        versions=versions,
        positive=torch.tensor([end.score.reward > 0 for end in ends])[owner],
        sampled_logprobs=logprobs if engine_logprobs is None else engine_logprobs,
        conversations=owner,
    )


def _rewards(
    conversations: Sequence[Conversation], layout: "ConversationLayout", *, in_groups: bool
) -> dict[str, Tensor]:
    """Return the reward fields of `AdvantageInputs`: one reward per conversation, and process rewards if there are any.

    An algorithm that needs groups compares conversations with environments by their total rewards alone.
    """
    rows = rows_of(conversations)
    scores = [conversation[-1].score for conversation in conversations]
    is_total = in_groups and rows[0].turns is not None
    if is_total or all(row.score.steps is None for row in rows):
        return {"rewards": torch.tensor([score.reward for score in scores])}
    steps = positions(rows, lambda row: _or_zeros(row, row.score.steps))
    ends = positions(rows, lambda row: _or_zeros(row, row.score.ends)).bool()
    outcomes = torch.tensor([score.outcome for score in scores])
    return {"rewards": outcomes, "process_rewards": layout.gather(steps), "process_ends": layout.gather(ends)}


def _components(conversations: Sequence[Conversation]) -> dict[str, Tensor]:
    """Return the component fields of `AdvantageInputs`; none unless at least two components count in the rewards."""
    scores = [conversation[-1].score for conversation in conversations]
    weights = {name: weight for score in scores for name, weight in score.weights.items() if weight}
    if len(weights) < 2:
        return {}
    components = [[score.components.get(name, math.nan) for name in weights] for score in scores]
    return {"components": torch.tensor(components), "component_weights": torch.tensor([*weights.values()])}


def positions(rows: Sequence[RolloutRow], field: Callable[[RolloutRow], np.ndarray]) -> Tensor:
    """Return the array `field(row)` `[n]` of each row as one tensor `[B, S-1]`: position t belongs to token t + 1."""
    return padded([field(row) for row in rows])[:, 1:]


def logprobs_by_position(rows: Sequence[RolloutRow], name: str) -> Tensor | None:
    """Return the rows' log-probs in field `name`, float32 `[B, S-1]`; None unless all scored rows have them."""
    missing = [row for row in rows if getattr(row, name) is None]
    if len(missing) == len(rows) or not all(row.score.failure for row in missing):
        return None
    return positions(rows, lambda row: _or_zeros(row, getattr(row, name)))


def _or_zeros(row: RolloutRow, array: np.ndarray | None) -> np.ndarray:
    return np.zeros(len(row.tokens), np.float32) if array is None else array


class ConversationLayout:
    """Maps tensors per row, `[B, S-1]`, to tensors per conversation, `[C, T]`, and back.

    The T positions of a conversation are the positions of all of its rows, in the order of its turns.
    """

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        positions_of = list[np.ndarray]()
        first = 0
        for conversation in conversations:
            positions_of.append(_positions_in_time(conversation, first))
            first += len(conversation)
        self._shape = first, max(len(row.tokens) for row in rows_of(conversations)) - 1
        self._inside = padded([np.ones(len(pairs), np.bool_) for pairs in positions_of])
        self._rows, self._columns = padded(positions_of).unbind(-1)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return a tensor `[B, S-1]` per conversation, `[C, T]`, padded with 0 on the right."""
        return torch.where(self._inside, tensor[self._rows, self._columns], torch.zeros((), dtype=tensor.dtype))

    def scatter(self, tensor: Tensor) -> Tensor:
        """Return a tensor `[C, T]` per row, `[B, S-1]`; the inverse of `gather`."""
        scattered = tensor.new_zeros(self._shape)
        inside = self._inside.to(tensor.device)
        scattered[self._rows[inside], self._columns[inside]] = tensor[inside]
        return scattered


def _positions_in_time(conversation: Conversation, first: int) -> np.ndarray:
    """Return the (row, position) of each of a conversation's positions in the order of its turns, int64 `[T, 2]`.

    `first`: index of the conversation's first row in the batch.
    """
    parts = list[tuple[int, int, int, int]]()  # number of the turn, row, first position, position after the last
    for i, row in enumerate(conversation):
        begin = 0
        for turn in row.turns or ():
            parts.append((turn.number, i, begin, turn.end - 1))
            begin = turn.end - 1
        parts.append((parts[-1][0] if row.turns else 0, i, begin, len(row.tokens) - 1))
    pairs = [(first + i, position) for _, i, begin, end in sorted(parts) for position in range(begin, end)]
    return np.array(pairs, np.int64).reshape(-1, 2)


def apply_truncation(conversation: Conversation, treatment: str) -> Conversation:
    """Return the conversation with `environment.truncated` applied if a limit ended it; see `make_batch`."""
    limit = conversation[-1].truncated
    if not limit:
        return conversation
    if treatment == "mask":
        return tuple(row.with_score(failure=row.score.failure or f"ended by {limit}") for row in conversation)
    return tuple(replace(row, ended=True) for row in conversation)


def add_bootstrap_values(inputs: AdvantageInputs, conversations: Sequence[Conversation]) -> AdvantageInputs:
    """Add the discounted value of the last token to the last step of each conversation that a limit ended."""
    assert inputs.process_rewards is not None
    steps = inputs.process_rewards.clone()
    for i, conversation in enumerate(conversations):
        end = conversation[-1]
        sampled = inputs.mask[i].nonzero()
        if end.truncated and end.score.values is not None and len(sampled):
            steps[i, sampled[-1]] += inputs.gamma * float(end.score.values[-1])
    return replace(inputs, process_rewards=steps)


def critic_payload(batch: PPOBatch) -> dict[str, np.ndarray]:
    """Return the inputs of a critic_train request, packed as `TrainPayload`: the scored rows, without padding.

    The critic may be unable to process an unscored row, and the server would then refuse the whole payload. The journal
    needs an update for every step, so if no row is scored, the payload is two tokens without targets.
    """
    scored = batch.mask.any(-1)
    lengths = batch.lengths
    if not scored.any():
        scored = torch.arange(len(lengths)) == lengths.argmax()
        lengths = lengths.clamp(max=2)
    ends = lengths[:, None] * scored[:, None]  # 0 for the other rows
    inside = torch.arange(batch.tokens.shape[1]) < ends
    targets = {RETURNS: batch.returns, PREV_VALUES: batch.prev_values, MASK: batch.mask}
    return {
        TOKENS: batch.tokens[inside][None].numpy(),
        SEQUENCE_LENGTHS: lengths[scored, None].numpy(),
        **{name: tensor[inside[:, 1:]][None].numpy() for name, tensor in targets.items()},
    }


def describe_failures(conversations: Sequence[Conversation]) -> str:
    """Describe the missing rewards: number, prompts and causes; "" if none is missing."""
    causes = [(conversation[0].prompt, failure_of(conversation)) for conversation in conversations]
    failed = [(prompt, cause) for prompt, cause in causes if cause]
    if not failed:
        return ""
    prompts = [*dict.fromkeys(prompt.where or prompt.prompt_id for prompt, _ in failed)]
    named = ", ".join(prompts[:3]) + (", …" if len(prompts) > 3 else "")
    reasons = "; ".join(sorted({cause for _, cause in failed})[:3])
    return f"{len(failed)} of {len(causes)} rewards are unavailable (prompts {named}): {reasons}"


def check_failures(
    conversations: Sequence[Conversation], max_failed_fraction: float, *, dropped: Sequence[Conversation] = ()
) -> None:
    """Raise RlhfError if more than `max_failed_fraction` of a step's conversations have no score, or none has one.

    `dropped`: conversations that dynamic sampling has replaced; the policy cannot learn from their scores.
    """
    everything = [*conversations, *dropped]
    failed = sum(bool(failure_of(conversation)) for conversation in everything)
    if failed > max_failed_fraction * len(everything) or all(map(failure_of, conversations)):
        raise RlhfError(
            f"{describe_failures(everything)}; the limit is actor.rewards.max_failed_fraction "
            f"({max_failed_fraction:g}), and the policy needs at least one"
        )


def score_returns(conversations: Sequence[Conversation]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, returns, mask) of scored conversations, each `[C, T]`.

    The returns are undiscounted sums of the scores, without the KL penalty.
    """
    rows = rows_of(conversations)
    layout = ConversationLayout(conversations)
    mask = layout.gather(positions(rows, lambda row: row.sampled).float())
    values = layout.gather(padded([_or_zeros(row, row.score.values) for row in rows])[:, :-1])
    steps = layout.gather(positions(rows, lambda row: _or_zeros(row, row.score.steps))) * mask
    outcome = torch.tensor([conversation[-1].score.outcome for conversation in conversations])
    return values, (steps.flip(1).cumsum(1).flip(1) + outcome[:, None]) * mask, mask
