"""Finds the special tokens of language models: what ends a response, what pads it, and what a reply's text omits."""

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError, read_config
from rlhf_triton.checkpoints.language_models import as_checkpoint_error
from rlhf_triton.checkpoints.tokenization import encode_bare_text, num_embeddings
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.wire.chats import NEXT_PROBE, PROBE, rendered_probe

GENERATION_FILE = "generation_config.json"
BRACKETED = re.compile(r"[<\[].*[>\]]", re.DOTALL)  # how special tokens are written


@dataclass(frozen=True)
class SpecialTokens:
    """Special token ids used in generation."""

    eos_ids: list[int]  # ascending; each ends a response; from tokenizer, generation config and chat template
    pad_id: int
    banned_ids: list[int]
    """Ascending ids that are never sampled: ids without a tokenizer entry, and padding and BOS, unless they end
    responses or occur in ordinary text."""
    template_end: int | None = None  # the one of `eos_ids` that only the chat template defines


def special_tokens(tokenizer: Any, eos: int | list[int] | None, *, vocab_size: int | None = None) -> SpecialTokens:
    """Return the special tokens of a language model.

    Args:
        eos: `eos_token_id` of the model's generation config.
        vocab_size: number of rows of the model's embedding table; None: the tokenizer's number of entries. A tokenizer
            may define ids beyond it, which the model can neither generate nor embed. `banned_ids` omits these, and
            `pad_id` is a different id if the padding token is one of them.

    Raises:
        CheckpointError: neither the tokenizer nor `eos` nor the chat template has an end-of-sequence token.
    """
    ids = eos if isinstance(eos, list) else [eos]
    named = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    end = reply_end(tokenizer)
    eos_ids = sorted(named if end is None else named | {end})
    if not eos_ids:
        raise CheckpointError(
            "actor.policy.model: tokenizer, generation config and chat template define no end-of-sequence token; set "
            "eos_token_id in its generation_config.json"
        )

    def has_embedding(token: int | None) -> bool:
        return token is not None and (vocab_size is None or token < vocab_size)

    pad_id = next(i for i in (tokenizer.pad_token_id, *eos_ids, 0) if has_embedding(i))
    roles = {i for i in (tokenizer.pad_token_id, tokenizer.bos_token_id) if has_embedding(i)} - set(eos_ids)
    banned = {i for i in roles if is_special(tokenizer, i)}
    banned.update(ids_without_entry(tokenizer, vocab_size or 0))
    return SpecialTokens(eos_ids, pad_id, sorted(banned), None if end in named else end)


def ids_without_entry(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the ids below `vocab_size` without a tokenizer entry, ascending: they neither encode nor decode to text.

    Embeddings are often padded to a multiple of a power of two, and a vocabulary may have gaps.
    """
    entries = set(tokenizer.get_vocab().values())
    return [i for i in range(vocab_size) if i not in entries and not _has_entry(tokenizer, i)]


def _has_entry(tokenizer: Any, token: int) -> bool:
    """Return whether the token has an entry that `get_vocab` omits, because another token has the same text."""
    try:
        entry = tokenizer.convert_ids_to_tokens(token)
    except (LookupError, ValueError):  # raised by tokenizers outside the `tokenizers` library
        return False
    return entry is not None and entry != tokenizer.unk_token


def special_tokens_in(folder: Path) -> SpecialTokens:
    """Return the special tokens of the language model in `folder`, without loading it; see `special_tokens`.

    Raises:
        CheckpointError: see `special_tokens`; or the folder has no tokenizer or no configuration.
    """
    return special_tokens(load_tokenizer(folder), end_of_sequence(folder), vocab_size=num_embeddings(folder))


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the ids, ascending, of the tokens with which the chat template ends a reply; [] if it has none.

    A template may end the last reply and earlier ones with different tokens, or only start the next message with one.
    """
    return sorted({end for end in _turn_ends(tokenizer) if end is not None})


def reply_end(tokenizer: Any) -> int | None:
    """Return the token that ends a policy's reply in its chat template; None if there is none.

    In some templates, the token that ends earlier replies only ends a part of a reply, such as gpt-oss's <|end|>.
    """
    last, earlier = _turn_ends(tokenizer)
    return earlier if last is None else last


def _turn_ends(tokenizer: Any) -> tuple[int | None, int | None]:
    """Return the tokens that end the last reply of a conversation and earlier replies."""
    if not getattr(tokenizer, "chat_template", None):
        return None, None
    named = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    named -= {tokenizer.bos_token_id, tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    added = {i for i in named if tokenizer.decode([i]).strip()}  # some tokenizers have whitespace as added tokens
    question, reply = ({"role": role, "content": PROBE} for role in ("user", "assistant"))

    def first_added(messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the added tokens between a reply and any following text."""
        behind = [i for i in _behind_reply(tokenizer, messages) if i in added or tokenizer.decode([i]).strip()]
        return [*itertools.takewhile(added.__contains__, behind)]

    def end(tokens: list[int]) -> int | None:
        """Return the token that ends the reply: EOS if present, because tokens before it may belong to the reply."""
        return tokenizer.eos_token_id if tokenizer.eos_token_id in tokens else next(iter(tokens), None)

    last = first_added([question, reply])
    earlier = end(first_added([question, reply, {**question, "content": NEXT_PROBE}]))
    return earlier if earlier in last else end(last), earlier


def _behind_reply(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the ids of the template's text between the last `PROBE` and `NEXT_PROBE`; [] if the template fails."""
    text = rendered_probe(tokenizer, messages)
    behind = text.rpartition(PROBE)[2] if PROBE in text else ""
    return encode_bare_text(tokenizer, behind.partition(NEXT_PROBE)[0])


def end_of_sequence(folder: Path) -> int | list[int] | None:
    """Return `eos_token_id` of the generation config of the language model in `folder`.

    Raises:
        CheckpointError: the folder has no model configuration.
    """
    from transformers import AutoConfig, GenerationConfig

    with as_checkpoint_error(folder):
        try:
            if (folder / GENERATION_FILE).is_file():
                return GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            return GenerationConfig.from_model_config(config).eos_token_id
        except ValueError:  # a class that transformers does not know, such as many reward models'
            return read_config(folder).get("eos_token_id")


@functools.lru_cache(maxsize=8)
def dropped_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids to drop at the end of a reply: BOS, padding, and tokens that end a sequence or a turn.

    Excludes tokens that occur in ordinary text, such as "!" as padding.
    """
    folder = Path(str(tokenizer.name_or_path))
    has_settings = tokenizer.name_or_path and any((folder / name).is_file() for name in (GENERATION_FILE, CONFIG_FILE))
    eos = end_of_sequence(folder) if has_settings else None
    ends = eos if isinstance(eos, list) else [eos]
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *ends, *turn_ends(tokenizer)}
    return frozenset(i for i in named if i is not None and is_special(tokenizer, i))


def is_special(tokenizer: Any, token: int) -> bool:
    """Return whether a token with a role such as padding never occurs in ordinary text.

    The role alone does not prove it: a tokenizer lists every token with a role as special, even "!".
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python; its special tokens are separate from its vocabulary
        return True
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None or BRACKETED.fullmatch(piece):  # Unigram and WordPiece also have these in their vocabulary
        return True
    return [each.id for each in backend.model.tokenize(piece)] != [token]


def without_end(tokenizer: Any, ids: Sequence[int]) -> Sequence[int]:
    """Return the ids without the `dropped_ids` at the end. Inside a reply they are kept: they end a part (gpt-oss)."""
    dropped = dropped_ids(tokenizer)
    end = len(ids)
    while end and ids[end - 1] in dropped:
        end -= 1
    return ids[:end]


def reply_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode a policy's sampled ids, including special tokens with a meaning, such as `<think>`.

    Omits only the `dropped_ids` at the end, and BOS and padding at the start. Functions, judges, environments, parsers,
    reports and reward models read this text.
    """
    padding = {tokenizer.bos_token_id, tokenizer.pad_token_id} & dropped_ids(tokenizer)
    content = itertools.dropwhile(padding.__contains__, without_end(tokenizer, ids))
    return str(tokenizer.decode([*content], skip_special_tokens=False))
