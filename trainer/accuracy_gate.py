"""The gate of a live reward model: a new version must rank preference pairs about as well as the served version."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_triton.client.reward_source import RESERVED, Row, chat_row, text_row
from rlhf_triton.config.rewards import text_parameters
from rlhf_triton.config.run_config import ConfigError
from rlhf_triton.config.sections import RewardSection
from rlhf_triton.models.batching import plan_micro_batches
from rlhf_triton.models.modeling import RewardModel
from rlhf_triton.python_backend.serving.requests import row_limits
from rlhf_triton.python_backend.serving.reward_reader import reward_reader
from rlhf_triton.store.jsonl import named_lines
from rlhf_triton.training_engine.trained import MAX_ROWS
from rlhf_triton.wire.contract import ContractError, TokenRow
from rlhf_triton.wire.messages import BadMessages, is_text_of_messages, plain_messages

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pairs:
    """The gate's preference pairs, tokenised as for the served model."""

    chosen: list[TokenRow]
    rejected: list[TokenRow]
    token_budget: int

    def accuracy(self, model: RewardModel) -> float:
        """Return the fraction of pairs whose chosen text has the higher reward; ties and NaN count as wrong."""
        rows = [*self.chosen, *self.rejected]
        scores = np.empty(len(rows), np.float32)
        lengths = [row.tokens.size for row in rows]
        for batch in plan_micro_batches(lengths, token_budget=self.token_budget, max_rows=MAX_ROWS):
            scores[batch] = model.score([rows[i].tokens for i in batch], types=[rows[i].types for i in batch])[:, 0]
        return float((scores[: len(self.chosen)] > scores[len(self.chosen) :]).mean())


def read_pairs(section: RewardSection, model: RewardModel) -> Pairs:
    """Read and tokenise `reward.gate` with the limits of `model`.

    Raises:
        ConfigError: the file has no pairs, a line is not a pair, or the model returns several rewards per row.
    """
    assert section.gate is not None
    if model.num_outputs > 1:
        raise ConfigError(
            "reward.gate needs one reward per row; set reward.attribute_weights to one weight per label, or remove the "
            "gate"
        )
    limits = row_limits(model.limits, section.max_length)
    get = text_parameters(section).get
    folder = section.model.absolute()
    reader = reward_reader(folder, limits, get, skipped_pad_id=model.skipped_pad_id)

    def encode(pair: dict[str, Any], side: str, where: str) -> TokenRow:
        row = _row(pair, side, where)
        text, second = row.pair if section.text == "pair" else (row.text, "")
        try:
            return reader.row_of_text(0, text, row.metadata, second)
        except ContractError as error:
            raise ConfigError(f"{where}: {error.message_without_row}") from error

    sides: dict[str, list[TokenRow]] = {side: [] for side in SIDES}
    for where, pair in named_lines(section.gate, "reward.gate", SIDES):
        for side in SIDES:
            sides[side].append(encode(pair, side, f"{where}: {side}"))
    if not sides["chosen"]:
        raise ConfigError(f"reward.gate: {section.gate} has no pairs; add some, or remove reward.gate")
    return Pairs(**sides, token_budget=section.token_budget)


def _row(pair: dict[str, Any], side: str, where: str) -> Row:
    """Return one side of a pair as clients send it."""
    prompt = pair.get("prompt")
    reply = pair.get(side)
    columns = {name: value for name, value in pair.items() if name not in (*SIDES, *RESERVED)}
    if len({type(pair.get(name)) for name in SIDES} & {str, list}) > 1:
        raise ConfigError(f"{where}: chosen and rejected must both be texts or both be messages")
    if isinstance(reply, str) and (prompt is None or isinstance(prompt, str)):
        if is_text_of_messages(reply) or is_text_of_messages(prompt or ""):
            raise ConfigError(
                f"{where}: is a text that contains messages; store the list of messages itself, also as `prompt`"
            )
        return Row((reply,), metadata=columns) if prompt is None else text_row(prompt, reply, columns)
    try:
        before = plain_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or [])
        messages = plain_messages(reply or None)
    except BadMessages as error:
        raise ConfigError(
            f"{where}{error}; it and `prompt`, if given, must both be texts or both lists of messages"
        ) from error
    if messages[: len(before)] == before:  # as in UltraFeedback, whose sides are whole conversations
        before = []
    return chat_row([*before, *messages], columns)
