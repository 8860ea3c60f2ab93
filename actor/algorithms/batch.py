"""Builds the training batch for policy and critic from scored samples."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import masked_whiten
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs
from rlhf_triton.actor.algorithms.losses import kl_estimate
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.reinforce_plus_plus import advantage as returns_to_go
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.sample import (
    Conversation,
    Group,
    SampledRow,
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

    A conversation without a score is masked out, with all of its rows. Rewards, advantages and returns are those of
    conversations, whatever their number of rows.

    Args:
        kl_coef: KL coefficient of this step.
        truncated: `environment.truncated`, of conversations that a limit has ended: `mask` leaves them out, `bootstrap`
            adds the discounted value of the last token after the stages, and `score` takes them as they are.
        num_dropped: groups at the end that only the critic learns from.
    """
    settings = method.settings
    conversations = [with_limit(each, truncated) for each in conversations_of(groups)]
    rows, ends = rows_of(conversations), [conversation[-1] for conversation in conversations]
    group = torch.tensor([i for i, each in enumerate(groups) for _ in each.conversations])
    owner = torch.tensor([i for i, conversation in enumerate(conversations) for _ in conversation])
    versions = torch.tensor([row.score.version for row in rows])
    scored = torch.tensor([not failure_of(conversation) for conversation in conversations])
    ended = torch.tensor([end.ended for end in ends])
    learned = scored & (group < len(groups) - num_dropped)
    if settings.mask_unfinished:
        learned &= ended
    mask = positions(rows, lambda row: row.sampled).float() * scored[owner, None]
    logprobs = known_positions(rows, "policy_logprobs")
    ref_logprobs = known_positions(rows, "ref_logprobs")
    engine = known_positions(rows, "logprobs")
    kl = None
    if logprobs is not None and ref_logprobs is not None:
        # Outside the mask log-probs may be -inf (banned tokens in a prompt), which would make the KL non-finite.
        kl = torch.where(mask > 0, kl_estimate(logprobs, ref_logprobs, method.kl_estimator), 0.0)
    penalty = torch.zeros_like(mask) if kl is None or method.kl_in_loss else kl_coef * kl
    values = torch.where(mask > 0, padded([_or_zeros(row, row.score.values) for row in rows])[:, :-1], 0.0)
    lines = Lines(conversations)
    inputs = AdvantageInputs(
        **_rewards(conversations, lines, in_groups=settings.defaults.needs_groups),
        penalty=lines.joined(penalty),
        values=lines.joined(values),
        mask=lines.joined(mask),
        groups=group,
        scored=scored,
        ended=ended,
        counted=learned,
        gamma=settings.gamma,
        lam=0.95 if settings.lam is None else settings.lam,
        lam_values=settings.defaults.lam_values,
        lam_length=settings.defaults.lam_length if settings.lam is None else None,
    )
    inputs = shaper.run(inputs)
    if truncated == "bootstrap":
        inputs = with_values_of_ends(inputs, conversations)
    advantages, returns = map(lines.split, method.advantage(inputs))
    weights = learned_mask = mask * (learned & inputs.counted)[owner, None]
    if method.loss_mean == "sequence":
        weights = weights / inputs.mask.sum(-1)[owner, None].clamp(min=1)
    return PPOBatch(
        tokens=padded([row.tokens for row in rows]),
        lengths=torch.tensor([len(row.tokens) for row in rows]),
        mask=mask,
        policy_weights=weights,
        logprobs=engine if settings.old_logprobs == "sampler" and engine is not None else logprobs,
        ref_logprobs=ref_logprobs,
        advantages=masked_whiten(advantages, learned_mask) if method.whitens else advantages * learned_mask,
        returns=returns * mask,
        prev_values=values,
        kl=kl,
        rewards_to_go=lines.split(returns_to_go(inputs)[1]) if (versions >= 0).any() else None,
        groups=group[owner],
        versions=versions,
        positive=torch.tensor([end.score.reward > 0 for end in ends])[owner],
        sampled_logprobs=logprobs if engine is None else engine,
        conversations=owner,
    )


def _rewards(conversations: Sequence[Conversation], lines: "Lines", *, in_groups: bool) -> dict[str, Tensor]:
    """Return the fields of `AdvantageInputs` that have rewards: of whole conversations, and if there are any, of steps.

    Within groups, conversations with environments are compared by their total rewards.
    """
    rows, scores = rows_of(conversations), [conversation[-1].score for conversation in conversations]
    is_total = in_groups and rows[0].turns is not None
    if is_total or all(row.score.steps is None for row in rows):
        return {"rewards": torch.tensor([score.reward for score in scores])}
    steps = positions(rows, lambda row: _or_zeros(row, row.score.steps))
    ends = positions(rows, lambda row: _or_zeros(row, row.score.ends)).bool()
    outcomes = torch.tensor([score.outcome for score in scores])
    return {"rewards": outcomes, "process_rewards": lines.joined(steps), "process_ends": lines.joined(ends)}


def positions(rows: Sequence[SampledRow], field: Callable[[SampledRow], np.ndarray]) -> Tensor:
    """Return a field `[n]` of each sample by position, `[B, S-1]`: position t belongs to token t + 1."""
    return padded([field(row) for row in rows])[:, 1:]


def known_positions(rows: Sequence[SampledRow], name: str) -> Tensor | None:
    """Return the log-probs of this name by position, float32 `[B, S-1]`; None unless all scored samples have them."""
    missing = [row for row in rows if getattr(row, name) is None]
    if len(missing) == len(rows) or not all(row.score.failure for row in missing):
        return None
    return positions(rows, lambda row: _or_zeros(row, getattr(row, name)))


def _or_zeros(row: SampledRow, array: np.ndarray | None) -> np.ndarray:
    return np.zeros(len(row.tokens), np.float32) if array is None else array


class Lines:
    """The positions of each conversation as one line: those of its rows, turn after turn in the order of time."""

    def __init__(self, conversations: Sequence[Conversation]) -> None:
        places, first = list[np.ndarray](), 0
        for conversation in conversations:
            places.append(_line(conversation, first))
            first += len(conversation)
        self._shape = first, max(len(row.tokens) for row in rows_of(conversations)) - 1
        self._inside = padded([np.ones(len(line), np.bool_) for line in places])
        self._rows, self._columns = padded(places).unbind(-1)

    def joined(self, tensor: Tensor) -> Tensor:
        """Return the lines `[C, T]` of a tensor `[B, S-1]`, 0 behind their ends."""
        return torch.where(self._inside, tensor[self._rows, self._columns], torch.zeros((), dtype=tensor.dtype))

    def split(self, lines: Tensor) -> Tensor:
        """Scatter lines `[C, T]` back into a tensor `[B, S-1]`."""
        found = lines.new_zeros(self._shape)
        inside = self._inside.to(lines.device)
        found[self._rows[inside], self._columns[inside]] = lines[inside]
        return found


def _line(conversation: Conversation, first: int) -> np.ndarray:
    """Return row and position of each place in a conversation's line, int64 `[T, 2]`; its rows begin at `first`."""
    parts = list[tuple[int, int, int, int]]()  # number of the turn, row, first position, position after the last
    for place, row in enumerate(conversation):
        begin = 0
        for turn in row.turns or ():
            parts.append((turn.number, place, begin, turn.end - 1))
            begin = turn.end - 1
        parts.append((parts[-1][0] if row.turns else 0, place, begin, len(row.tokens) - 1))
    places = [(first + row, position) for _, row, begin, end in sorted(parts) for position in range(begin, end)]
    return np.array(places, np.int64).reshape(-1, 2)


def with_limit(conversation: Conversation, treatment: str) -> Conversation:
    """Apply `environment.truncated` to a conversation that a limit has ended; see `make_batch`."""
    limit = conversation[-1].truncated
    if not limit:
        return conversation
    if treatment == "mask":
        return tuple(row.scored(failure=row.score.failure or f"{limit} has ended it") for row in conversation)
    return tuple(replace(row, ended=True) for row in conversation)


def with_values_of_ends(inputs: AdvantageInputs, conversations: Sequence[Conversation]) -> AdvantageInputs:
    """Add the discounted value of the last token to the last reward of each conversation that a limit has ended."""
    assert inputs.process_rewards is not None
    steps = inputs.process_rewards.clone()
    for line, conversation in enumerate(conversations):
        end = conversation[-1]
        sampled = inputs.mask[line].nonzero()
        if end.truncated and end.score.values is not None and len(sampled):
            steps[line, sampled[-1]] += inputs.gamma * float(end.score.values[-1])
    return replace(inputs, process_rewards=steps)


def critic_payload(batch: PPOBatch) -> dict[str, np.ndarray]:
    """Return the inputs of a critic_train request, packed as `TrainPayload`: the scored rows, without padding.

    A row may lack its score because the critic cannot take it, and the server refuses a payload that has such a row.
    The journal has an update of each step: if limits have ended all conversations, two tokens without targets are sent.
    """
    scored, lengths = batch.mask.any(-1), batch.lengths
    if not scored.any():
        scored, lengths = torch.arange(len(lengths)) == lengths.argmax(), lengths.clamp(max=2)
    ends = lengths[:, None] * scored[:, None]  # nothing of the other rows
    inside = torch.arange(batch.tokens.shape[1]) < ends
    targets = {RETURNS: batch.returns, PREV_VALUES: batch.prev_values, MASK: batch.mask}
    return {
        TOKENS: batch.tokens[inside][None].numpy(),
        SEQUENCE_LENGTHS: lengths[scored, None].numpy(),
        **{name: tensor[inside[:, 1:]][None].numpy() for name, tensor in targets.items()},
    }


def failures(conversations: Sequence[Conversation]) -> str:
    """Describe the missing rewards: number, prompts and causes; "" if none is missing."""
    causes = [(conversation[0].prompt, failure_of(conversation)) for conversation in conversations]
    failed = [(prompt, cause) for prompt, cause in causes if cause]
    if not failed:
        return ""
    prompts = [*dict.fromkeys(prompt.where or prompt.prompt_id for prompt, _ in failed)]
    named = ", ".join(prompts[:3]) + (", …" if len(prompts) > 3 else "")
    reasons = "; ".join(sorted({cause for _, cause in failed})[:3])
    return f"{len(failed)} of {len(causes)} rewards are unavailable (prompts {named}): {reasons}"


def check_failures(conversations: Sequence[Conversation], max_failed_fraction: float) -> None:
    """Raise RlhfError if more than `max_failed_fraction` of the conversations, or all, have no score."""
    failed = sum(bool(failure_of(conversation)) for conversation in conversations)
    if failed > max_failed_fraction * len(conversations) or failed == len(conversations):
        raise RlhfError(
            f"{failures(conversations)}; at most actor.rewards.max_failed_fraction ({max_failed_fraction:g}) may be"
        )


def score_returns(conversations: Sequence[Conversation]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (values, returns, mask) of scored conversations, each `[C, T]`.

    The returns are undiscounted sums of the scores alone, without KL penalty.
    """
    rows, lines = rows_of(conversations), Lines(conversations)
    mask = lines.joined(positions(rows, lambda row: row.sampled).float())
    values = lines.joined(padded([_or_zeros(row, row.score.values) for row in rows])[:, :-1])
    steps = lines.joined(positions(rows, lambda row: _or_zeros(row, row.score.steps))) * mask
    outcome = torch.tensor([conversation[-1].score.outcome for conversation in conversations])
    return values, (steps.flip(1).cumsum(1).flip(1) + outcome[:, None]) * mask, mask
