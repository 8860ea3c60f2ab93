"""Reads the training set of `critic.pretrain`: token rows with a return for each response token."""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from rlhf_triton.checkpoints.inspection import tokenizer_kind
from rlhf_triton.checkpoints.special_tokens import reply_end
from rlhf_triton.checkpoints.tokenization import encode_bare_text, encode_prompt, fingerprint
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.config.sections import RunSection
from rlhf_triton.store.durable import INT64_MAX
from rlhf_triton.store.journal import DamagedEntry, JournalState, read_training_file
from rlhf_triton.store.jsonl import named_lines
from rlhf_triton.store.weights import WeightsError, WeightsStore
from rlhf_triton.trainer.critic_update import TrainingRow, split_rows
from rlhf_triton.wire.chats import render_row
from rlhf_triton.wire.contract import SEQUENCE_LENGTHS, ContractError, Limits
from rlhf_triton.wire.messages import BadMessages, is_text_of_messages, prompt_messages
from rlhf_triton.wire.training_payload import TrainPayload, train_payload

KEY = "critic.pretrain"
FIELDS = ("prompt", "response", "return")
HELD_OUT = 0.1  # fraction of the prompts whose rows are held out for evaluation


def tokenizer_of(folder: Path) -> str | None:
    """Return the fingerprint of a model's tokenizer; None if the model has no tokenizer."""
    return fingerprint(load_tokenizer(folder.absolute())) if tokenizer_kind(folder) else None


def read_rows(config: RunConfig, limits: Limits) -> list[TrainingRow]:
    """Return the rows of all files and runs in `critic.pretrain`, in order.

    Args:
        limits: the critic's limits.

    Raises:
        ConfigError: a file or run is damaged, has no rows, or has rows that do not fit the critic.
    """
    rows: list[TrainingRow] = []
    for source in config.critic.pretrain:
        before = len(rows)
        model = config.critic.model
        special = config.actor.prompts.add_special_tokens
        payloads = steps_of_run(source, model) if source.is_dir() else rows_of_file(source, model, special=special)
        for where, payload in payloads:
            arrays = {n: a[:, None] if n == SEQUENCE_LENGTHS else a[None] for n, a in payload.arrays().items()}
            try:
                rows += [row for row in split_rows(train_payload(arrays, limits)) if row.mask.any()]
            except ContractError as error:
                raise ConfigError(f"{KEY}: {where} does not fit {model}: {error}; remove it") from error
        if len(rows) == before:
            raise ConfigError(f"{KEY}: {source} has no rows to train on (a run keeps only its last steps); remove it")
    return rows


def steps_of_run(folder: Path, model: Path) -> Iterator[tuple[Path, TrainPayload]]:
    """Yield file and payload of each step that an earlier run has on disk. Its tokenizer must be `model`'s.

    Raises:
        ConfigError: the folder is not a run's with a critic, or has another tokenizer; its sidecar is running; or an
            entry is damaged.
    """
    run = RunSection(dir=folder)
    try:
        manifest = WeightsStore(run.weights_dir).manifest(0)
    except WeightsError as error:
        raise ConfigError(f"{KEY}: {folder} is not the folder of a run with a critic: {error}; remove it") from error
    if (tokenizer := tokenizer_of(model)) is None or tokenizer != manifest.tokenizer:
        raise ConfigError(
            f"{KEY}: the tokenizer of {folder} differs from {model}'s or is unknown, so its token ids may stand for "
            "other texts; remove it"
        )
    journal = JournalState(run.journal_dir, manifest.run_id)
    if journal.is_followed():
        raise ConfigError(f"{KEY}: {folder} is in training; stop it first, or remove it")
    for path in journal.training_files():
        try:
            yield path, read_training_file(path)[0]
        except DamagedEntry as error:
            raise ConfigError(f"{KEY}: {error}; restore the file, or remove {folder} from the list") from error


def rows_of_file(path: Path, model: Path, *, special: bool) -> Iterator[tuple[str, TrainPayload]]:
    """Yield place and payload of each line of a JSONL file, tokenised with the tokenizer of `model`.

    A line has a `prompt` (text, messages or token ids), a `response` (text or token ids) and a `return`, one number for
    all tokens of the response. A text response gets the end-of-sequence token at its end or, after messages, the chat
    template's end of a reply, as the policy's responses do.

    Args:
        special: start text prompts with the tokenizer's BOS.

    Raises:
        RlhfError: a line is not such an object, or has texts although the model has no tokenizer.
    """
    tokenizer = functools.cache(lambda: load_tokenizer(model.absolute()))
    chat_end = functools.cache(lambda: reply_end(tokenizer()))
    for where, line in named_lines(path, KEY, FIELDS):
        prompt, response, target = [line.get(name) for name in FIELDS]
        end = chat_end() if isinstance(prompt, list) and isinstance(response, str) and not _is_ids(prompt) else None
        if prompt and isinstance(prompt, str | list) and not _is_ids(prompt):
            prompt = _prompt_ids(tokenizer(), line, where, special=special)
        if isinstance(response, str):
            end = tokenizer().eos_token_id if end is None else end
            response = encode_bare_text(tokenizer(), response)
            response += [] if end in (None, *response[-1:]) else [end]
        is_number = isinstance(target, int | float) and not isinstance(target, bool) and -3e38 < target < 3e38
        if not (_is_ids(prompt) and _is_ids(response) and is_number):
            raise ConfigError(
                f"{KEY}: {where} must have a prompt (text, messages or token ids), a response (text or token ids), "
                f"neither of them empty, and a return (a finite number), got {json.dumps(line)[:80]}"
            )
        mask = np.zeros(len(prompt) + len(response) - 1, np.float32)
        mask[len(prompt) - 1 :] = 1
        tokens = np.array([*prompt, *response], np.int64)
        returns = np.where(mask > 0, np.float32(target), mask)
        yield where, TrainPayload(tokens, np.array([len(tokens)]), returns, np.zeros_like(mask), mask)


def _prompt_ids(tokenizer: Any, line: dict[str, Any], where: str, *, special: bool) -> list[int]:
    """Return the token ids of a prompt, a text or messages, tokenised as in the actor."""
    prompt = line["prompt"]
    if isinstance(prompt, str):
        if is_text_of_messages(prompt):
            raise ConfigError(
                f"{KEY}: {where}: prompt is a text that contains messages; store the list of messages itself"
            )
        before, ids = encode_prompt(tokenizer, prompt, special=special)
        return [*before, *ids]
    try:
        messages = prompt_messages(prompt)
    except BadMessages as error:
        raise ConfigError(f"{KEY}: {where}: prompt{error}") from error
    rejected = "the chat template rejects the prompt"
    try:
        text = render_row(tokenizer, messages, line, owner="critic", name="prompt", rejected=rejected)
    except BadMessages as error:
        raise ConfigError(f"{KEY}: {where}: {error}") from error
    return encode_bare_text(tokenizer, text)


def _is_ids(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < INT64_MAX for item in value)
    )


def split(rows: Sequence[TrainingRow], seed: int) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Return the training rows and the held-out rows, in order: the latter are all rows of a tenth of the prompts.

    At least one prompt is held out. Raises ConfigError if all rows have the same prompt.
    """
    starts = [row.tokens[: int((row.mask > 0).argmax()) + 1].tobytes() for row in rows]
    prompts = [*dict.fromkeys(starts)]
    if len(prompts) < 2:
        raise ConfigError(f"{KEY}: all rows have the same prompt, but one prompt must be held out; add rows of others")
    num_held_out = max(1, round(HELD_OUT * len(prompts)))
    chosen = {prompts[i] for i in np.random.default_rng(seed).permutation(len(prompts))[:num_held_out]}
    sides: tuple[list[TrainingRow], list[TrainingRow]] = ([], [])
    for row, prompt in zip(rows, starts, strict=True):
        sides[prompt in chosen].append(row)
    return sides


def packed(rows: Sequence[TrainingRow]) -> TrainPayload:
    """Pack rows into a payload with `prev_values` 0: the value loss must not clip around another critic's values."""
    tokens, returns, mask = (
        np.concatenate([getattr(row, name) for row in rows]) for name in ("tokens", "returns", "mask")
    )
    return TrainPayload(tokens, np.array([row.tokens.size for row in rows]), returns, np.zeros_like(returns), mask)
