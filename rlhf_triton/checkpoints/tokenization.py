"""Encodes texts with a tokenizer, and compares tokenizers."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_triton.checkpoints.config_keys import read_key
from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError, model_type_of, read_config
from rlhf_triton.checkpoints.row_length import text_config

MAX_ROW_TOKENS = 32_768  # row limit if neither the checkpoint nor the configuration sets one
SENTENCEPIECE_SPACE = "\u2581"  # SentencePiece puts it before a text


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of `tokenizer(text)`, special tokens included, but do not add special tokens twice.

    Special tokens that the text already has at its start or end, such as in the output of a chat template, are not
    added again. The ids then equal those of `apply_chat_template(tokenize=True)`.
    """
    encoded = tokenizer(text, return_special_tokens_mask=True)
    # The mask is 0 for tokens of the text, special ones included.
    ids = encoded["input_ids"]
    added = encoded["special_tokens_mask"]
    # No token comes from the text, or the mask has another length (T5's tokenizer does not add a second </s>).
    if 0 not in added or len(added) != len(ids):
        return list(ids)
    start = added.index(0)
    end = len(ids) - added[::-1].index(0)
    has_start = text.lstrip().startswith(_literal(tokenizer, ids[:start]))
    has_end = text.rstrip().endswith(_literal(tokenizer, ids[end:]))
    return list(ids[start if has_start else 0 : end if has_end else len(ids)])


def encode_prompt(tokenizer: Any, text: str, *, special: bool = True) -> tuple[list[int], list[int]]:
    """Return two lists: the special tokens that the tokenizer puts before the text, such as BOS, and the text's ids.

    As in `encode_text`, special tokens at the start of the text are not added again. No EOS or [SEP] is added at the
    end, because the response follows. Without `special`, the first list is empty.
    """
    if not special:
        return [], encode_bare_text(tokenizer, text)
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids = encoded["input_ids"]
    added = encoded["special_tokens_mask"]
    bare = encode_bare_text(tokenizer, text)
    before = ids[: added.index(0)] if 0 in added and len(added) == len(ids) else []
    if bare[: len(before)] == before:
        return before, bare[len(before) :]
    return ([] if text.lstrip().startswith(_literal(tokenizer, before)) else before), bare


def without_embedding(tokenizer: Any, ids: Sequence[int], num_embeddings: int | None) -> str:
    """Return an error message if a token id of a text has no embedding in the policy, otherwise ""."""
    if num_embeddings is None or (largest := max(ids, default=0)) < num_embeddings:
        return ""
    return (
        f"token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) is outside the policy's {num_embeddings} "
        "embeddings; remove it, or resize the embeddings to the tokenizer (resize_token_embeddings)"
    )


def encode_bare_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of the text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class Encoded(NamedTuple):
    """The tokens of a row."""

    ids: list[int]
    types: list[int] | None = None  # token types of a text pair, such as 1 in BERT's second text


def _literal(tokenizer: Any, special_ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(special_ids))


def single_tokens(tokenizer: Any, names: Sequence[str | int]) -> list[int]:
    """Return the id of each name: a text that is one token, an entry of the vocabulary, or an id itself.

    Raises:
        CheckpointError: a name is not one token, or two names are the same token.
    """
    ids = [_single_token(tokenizer, name) for name in names]
    for i, token in enumerate(ids):
        if token in ids[:i]:
            raise CheckpointError(
                f"{names[ids.index(token)]!r} and {names[i]!r} are the same token, {token}; remove one"
            )
    return ids


def _single_token(tokenizer: Any, name: str | int) -> int:
    if isinstance(name, int):
        return name
    ids = encode_bare_text(tokenizer, name)
    if len(ids) == 2 and tokenizer.convert_ids_to_tokens(ids[0]) == SENTENCEPIECE_SPACE:
        return ids[1]
    # A tokenizer may drop characters, or replace them by its unknown token.
    if len(ids) == 1 and tokenizer.decode(ids).strip().casefold() == name.strip().casefold():
        return ids[0]
    entry = tokenizer.get_vocab().get(name)
    if entry is None:
        pieces = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids))) or "none"
        raise CheckpointError(
            f"{name!r} is {len(ids)} tokens ({pieces}) of the tokenizer in {tokenizer.name_or_path}, but must be one; "
            "give a text that is one token, an entry of its vocabulary, or a token id"
        )
    return int(entry)


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of the vocabulary (token -> id, added tokens included). Equal hashes mean equal token ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def is_encoder(folder: Path) -> bool:
    """Return whether the model in `folder` is an encoder according to transformers: its head reads a row's [CLS].

    An encoder's chats get the tokenizer's special tokens. Other models' chats get only their template's, as in
    `apply_chat_template(tokenize=True)`; even a decoder's tokenizer may have a [CLS].
    """
    from transformers.models.auto import modeling_auto

    names = {
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,  # XLNet
    }
    config = read_config(folder) if (folder / CONFIG_FILE).is_file() else {}
    return model_type_of(config) in names and not read_key(config, "is_decoder", bool, False)


def rendering_fingerprint(tokenizer: Any) -> str:
    """Return a hash of everything that determines the ids of a text or chat. Equal hashes mean equal ids.

    It covers vocabulary, normaliser, pre-tokenizer, special tokens and chat template.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: Any = [type(tokenizer).__name__, fingerprint(tokenizer)]  # for a tokenizer written in Python
    if backend is not None:
        state = json.loads(backend.to_str())
        del state["truncation"], state["padding"]  # left there by the last call
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    whole = json.dumps([state, special, tokenizer.chat_template, tokenizer.truncation_side])
    return hashlib.sha256(whole.encode()).hexdigest()


def num_embeddings(folder: Path) -> int | None:
    """Return the size of the embedding table from config.json in `folder`; None if it is not stated."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    try:
        return read_key(text_config(read_config(folder)), "vocab_size", int, None)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error
