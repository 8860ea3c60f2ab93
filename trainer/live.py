"""A live reward model: publishes versions that fit the served one and pass the gate of preferred texts."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.tokenization import (
    LONGEST_ROW_TOKENS,
    load_tokenizer,
    rendering_fingerprint,
)
from rlhf_triton.config import ConfigError, RewardSection, RunConfig
from rlhf_triton.config.live_models import live_model
from rlhf_triton.config.rewards import text_parameters
from rlhf_triton.errors import RlhfError
from rlhf_triton.python_backend.models.canary import canary_outputs
from rlhf_triton.python_backend.models.modeling import RewardModel
from rlhf_triton.python_backend.serving.reward_reader import reward_reader
from rlhf_triton.rewards.function import MESSAGES_KEY, PROMPT_KEY, REPLY_KEY, RESPONSE_KEY, with_reply
from rlhf_triton.store.jsonl import named_lines
from rlhf_triton.store.weights import WeightsError, WeightsStore
from rlhf_triton.trainer.publish import Publisher, Reload, copy_checkpoint, reward_loader
from rlhf_triton.wire.contract import ContractError, TokenRow
from rlhf_triton.wire.messages import BadMessages, is_text_of_messages, plain_messages

ROWS_PER_FORWARD = 16
SIDES = ("chosen", "rejected")
TOLERANCE = 0.01  # of the gate: how far a new version's accuracy may be below the served version's


@dataclass(frozen=True)
class Pairs:
    """The texts of the gate, tokenised as the served model does."""

    chosen: list[TokenRow]
    rejected: list[TokenRow]

    def accuracy(self, model: RewardModel) -> float:
        """Return the share of pairs whose chosen text has the higher reward; a tie counts as wrong, and so does NaN."""
        scores = _scores(model, [*self.chosen, *self.rejected])
        return float((scores[: len(self.chosen)] > scores[len(self.chosen) :]).mean())


def read_pairs(section: RewardSection, model: RewardModel) -> Pairs:
    """Read the pairs of `reward.gate` for models with the limits of `model`.

    Raises:
        ConfigError: the file has no pair, a line is not one, or the model returns several rewards per row.
    """
    assert section.gate is not None
    if model.num_outputs > 1:
        raise ConfigError(
            "reward.gate needs one reward per row; set reward.attribute_weights to one weight per label, or remove the "
            "gate"
        )
    lengths = [length for length in (model.limits.max_length, section.max_length) if length]
    limits = dataclasses.replace(model.limits, max_length=min(lengths, default=LONGEST_ROW_TOKENS))
    get, folder = text_parameters(section).get, section.model.absolute()
    reader = reward_reader(folder, limits, get, skipped_pad_id=model.skipped_pad_id)

    def encode(pair: dict[str, Any], side: str, where: str) -> TokenRow:
        try:
            return reader.row_of_text(0, *_row(pair, side, where, is_pair=section.text == "pair"))
        except ContractError as error:
            raise ConfigError(f"{where}: {error.of_only_row}") from error

    sides: dict[str, list[TokenRow]] = {side: [] for side in SIDES}
    for where, pair in named_lines(section.gate, "reward.gate", SIDES):
        for side in SIDES:
            sides[side].append(encode(pair, side, f"{where}: {side}"))
    if not sides["chosen"]:
        raise ConfigError(f"reward.gate: {section.gate} has no pair")
    return Pairs(**sides)


def _row(pair: dict[str, Any], side: str, where: str, *, is_pair: bool) -> tuple[str, dict[str, Any], str]:
    """Return text, metadata and second text of one side of a pair, as a client of the server sends them."""
    prompt, reply = pair.get("prompt"), pair.get(side)
    own = (*SIDES, PROMPT_KEY, MESSAGES_KEY, RESPONSE_KEY, REPLY_KEY)
    columns = {name: value for name, value in pair.items() if name not in own}
    if len({type(pair.get(name)) for name in SIDES} & {str, list}) > 1:
        raise ConfigError(f"{where}: chosen and rejected must both be texts or both be messages")
    if isinstance(reply, str) and (prompt is None or isinstance(prompt, str)):
        if is_text_of_messages(reply) or is_text_of_messages(prompt or ""):
            raise ConfigError(f"{where}: messages written as a text; store the list itself, here and as `prompt`")
        known = {**columns, RESPONSE_KEY: reply}
        if prompt is None:
            return reply, known, ""
        known[PROMPT_KEY] = prompt
        return (prompt, known, reply) if is_pair else (prompt + reply, known, "")
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    before = [] if asked is None else _messages(asked, where)
    said = _messages(reply, where)
    if before and said[: len(before)] == before:  # as in UltraFeedback, whose sides are whole conversations
        before = []
    text, metadata = with_reply([*before, *said], "", columns)
    return text, metadata, ""


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    try:
        return plain_messages(value or None)
    except BadMessages as error:
        raise ConfigError(
            f"{where}{error}; it and `prompt`, if there is one, must both be texts, or both be messages"
        ) from error


def _scores(model: RewardModel, rows: list[TokenRow]) -> np.ndarray:
    """Return the rewards float32 `[n]`; rows of similar length share a forward pass."""
    scores = np.empty(len(rows), np.float32)
    order = sorted(range(len(rows)), key=lambda i: rows[i].tokens.size)
    for start in range(0, len(order), ROWS_PER_FORWARD):
        batch = order[start : start + ROWS_PER_FORWARD]
        scores[batch] = model.score([rows[i].tokens for i in batch], types=[rows[i].types for i in batch])[:, 0]
    return scores


def check_tokenizer(checkpoint: Path, folder: Path) -> None:
    """Raise CheckpointError unless the checkpoint in `folder` renders texts as the served `checkpoint` does."""
    theirs, ours = (rendering_fingerprint(load_tokenizer(path.absolute())) for path in (folder, checkpoint))
    if theirs != ours:
        raise CheckpointError(
            f"{folder} has another tokenizer than reward.model ({checkpoint}), or another chat template: requests are "
            "rendered with those of reward.model; to serve it, start a run with this checkpoint"
        )


# Publishes versions of a live reward model: copies of Hugging Face checkpoints that fit the served one.


def publish_reward(
    config: RunConfig, checkpoint: Path, *, beat: Callable[[str], None], say: Callable[[str], None] = print
) -> Reload:
    """Serve the weights in a checkpoint instead of those of the served version, if they pass every check.

    Args:
        beat: called repeatedly while waiting, with a description of the state.
        say: receives the accuracies that the gate measured.

    Raises:
        CheckpointError: the checkpoint is damaged, not finite, or of another architecture, head or tokenizer.
        RlhfError: it is less accurate than the served version, beyond `TOLERANCE`.
        VersionRejected: its copy failed verification, or an instance rejected it; the old version serves.
    """
    section, model = config.reward, live_model(config, "reward")
    store = WeightsStore(model.store, config.run.integrity)
    current = store.current()
    if current is None:
        raise WeightsError(f"the weights store {store.root} is empty; `rlhf-triton serve` creates version 0")
    check_tokenizer(section.model, checkpoint)
    served = reward_loader(section)(store.folder(current))
    candidate = served.with_weights(checkpoint)
    candidate.check_finite()
    if not np.isfinite(canary_outputs(candidate)).all():
        raise CheckpointError(f"{checkpoint}: the rewards of the canary row are not finite")
    if section.gate is not None:
        pairs = read_pairs(section, served)
        before, after = pairs.accuracy(served), pairs.accuracy(candidate)
        say(f"accuracy on {len(pairs.chosen)} pairs: {after:.4f}, served version {current}: {before:.4f}")
        if not after >= before - TOLERANCE:
            raise RlhfError(
                f"not published: its accuracy {after:.4f} is below the served version's {before:.4f} minus "
                f"{TOLERANCE:g}, on the pairs of reward.gate"
            )
    manifest = store.manifest(current)
    publisher = Publisher.of(config, store, run_id=manifest.run_id, epoch=manifest.epoch, model=model)
    write = functools.partial(copy_checkpoint, checkpoint)
    return publisher.publish(candidate, step=0, parent=current, beat=beat, write=write, source=checkpoint)
