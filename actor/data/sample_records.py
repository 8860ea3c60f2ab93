"""Groups of conversations as records of the journal of samples, and back, bit for bit.

An array `[n]` of all rows is stored as one column. Its digest for each row names the row whose content is damaged.
"""

import contextlib
import dataclasses
from typing import Any

import numpy as np
from safetensors import SafetensorError

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import SampledTurn
from rlhf_triton.actor.data.rollout_rows import Group, RolloutRow, Score, rows_of
from rlhf_triton.digests import short_digest
from rlhf_triton.store.record_log import StoredRecord, decoded

SCORE = "score."
POLICY_STEPS = "versions"  # the name of `RolloutRow.policy_steps` in a record
DIGESTS = "digests"
LENGTHS = "lengths"
PROMPT_TOKENS = "prompt_tokens"
PROMPT_LENGTHS = "prompt_lengths"


def record_of(group: Group, **about: Any) -> StoredRecord:
    """Return the record of a group; `about`: further entries of its header."""
    rows = rows_of(group.conversations)
    prompts = list({id(row.prompt): row.prompt for row in rows}.values())
    numbers = {id(prompt): number for number, prompt in enumerate(prompts)}
    fields = [_fields_of(row) for row in rows]
    defaults = _fields_of(
        RolloutRow(prompt=prompts[0], tokens=rows[0].tokens, sampled=rows[0].sampled, ended=False, score=Score())
    )
    lengths = np.array([len(row.tokens) for row in rows])
    columns: dict[str, dict[str, Any]] = {}
    arrays: dict[str, np.ndarray] = {}
    digests: list[int] = []
    for name in defaults:
        having = [i for i, row in enumerate(fields) if isinstance(row[name], np.ndarray)]
        if not having:
            continue
        parts = [fields[i][name] for i in having]
        columns[name] = {"rows": having, "dtype": parts[0].dtype.name}
        if name == "policy_logprobs" and all(fields[i][name] is fields[i]["logprobs"] for i in having):
            columns[name]["same"] = "logprobs"
        else:
            arrays[name] = _narrowed(np.concatenate(parts))
            digests += map(short_digest, _split(arrays[name], lengths[having]))
    header = {
        "kind": "group",
        **about,
        "prompts": [{**vars(prompt), "tokens": None} for prompt in prompts],
        "conversations": [len(conversation) for conversation in group.conversations],
        "columns": columns,
        "rows": [
            {"prompt": numbers[id(row.prompt)]}
            | {
                name: _as_json(value)
                for name, value in values.items()
                if name not in columns and repr(value) != repr(defaults[name])
            }
            for row, values in zip(rows, fields, strict=True)
        ],
    }
    return StoredRecord(
        header,
        {
            **arrays,
            LENGTHS: lengths,
            PROMPT_TOKENS: np.concatenate([prompt.tokens for prompt in prompts]),
            PROMPT_LENGTHS: np.array([len(prompt.tokens) for prompt in prompts]),
            DIGESTS: np.array(digests, np.uint64),
        },
    )


def group_of(record: StoredRecord) -> Group:
    """Return the group that `record_of` has stored."""
    header = record.header
    arrays = record.arrays
    tokens = _split(arrays[PROMPT_TOKENS], arrays[PROMPT_LENGTHS])
    prompts = [Prompt(**{**fields, "tokens": part}) for fields, part in zip(header["prompts"], tokens, strict=True)]
    rows: list[dict[str, Any]] = [{**fields, "prompt": prompts[fields["prompt"]]} for fields in header["rows"]]
    for name, column in header["columns"].items():
        having = column["rows"]
        if "same" in column:
            parts = [rows[i][column["same"]] for i in having]
        else:
            parts = _split(arrays[name].astype(column["dtype"]), arrays[LENGTHS][having])
        for i, part in zip(having, parts, strict=True):
            rows[i][name] = part
    remaining = iter(rows)
    conversations = tuple(tuple(_row_of(next(remaining)) for _ in range(size)) for size in header["conversations"])
    return Group(conversations, header.get("number", -1))


def describe_damage(payload: bytes) -> str:
    """Return which sample and field of a record's payload is damaged, or else the record's step; "" if unknown."""
    where = ""
    with contextlib.suppress(ValueError, LookupError, TypeError, SafetensorError):  # the header is damaged
        record = decoded(payload)
        header = record.header
        arrays = record.arrays
        where = f"step {header['step']}" + (f", group {header['number']}" if "number" in header else "")
        digests = iter(arrays[DIGESTS].tolist())
        for name, column in header["columns"].items():
            having = column["rows"]
            parts = [] if "same" in column else _split(arrays[name], arrays[LENGTHS][having])
            for i, part in zip(having, parts, strict=False):
                if short_digest(part) != next(digests):
                    prompt = header["prompts"][header["rows"][i]["prompt"]]["prompt_id"]
                    return f"{where}, sample {i} (prompt {prompt}): `{name}`"
    return where


def _fields_of(row: RolloutRow) -> dict[str, Any]:
    names = {"policy_steps": POLICY_STEPS}
    fields = {names.get(name, name): value for name, value in vars(row).items() if name not in ("prompt", "score")}
    return fields | {f"{SCORE}{name}": value for name, value in vars(row.score).items()}


def _row_of(fields: dict[str, Any]) -> RolloutRow:
    score = {name.removeprefix(SCORE): value for name, value in fields.items() if name.startswith(SCORE)}
    own = {"ended": False} | {name: value for name, value in fields.items() if not name.startswith(SCORE)}
    own["policy_steps"] = own.pop(POLICY_STEPS, None)
    if own.get("turns") is not None:
        own["turns"] = tuple(_turn_of(**turn) for turn in own["turns"])
    return RolloutRow(**{**own, "messages": tuple(own.get("messages", ()))}, score=Score(**score))


def _turn_of(tokens: object = None, **fields: Any) -> SampledTurn:
    """Return a turn; `tokens`: a copy of the row's, in older records."""
    return SampledTurn(**fields)


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(part) for part in value]
    return dataclasses.asdict(value) if isinstance(value, SampledTurn) else value


def _narrowed(array: np.ndarray) -> np.ndarray:
    """Return token ids as int32, in half the space."""
    narrow = array.astype(np.int32) if array.dtype == np.int64 else array
    return narrow if narrow is array or np.array_equal(narrow, array) else array


def _split(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(array, np.cumsum(lengths)[:-1])
