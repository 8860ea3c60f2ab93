"""Tokenizers of checkpoints: loading and comparing them, special tokens, and texts as token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import CheckpointError

CHARACTERS_PER_TOKEN = 8
SPARE_TOKENS = 64
LONGEST_WORD = CHARACTERS_PER_TOKEN * SPARE_TOKENS  # a cut looks no further for the end of one


def load_tokenizer(folder: Path | str) -> Any:
    """Return the checkpoint's own tokenizer. Raises CheckpointError if the folder has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no tokenizer that transformers can load: {error}") from error


def encode_text(tokenizer: Any, text: str, max_length: int) -> list[int]:
    """Return the ids of `tokenizer(text)`, at most `max_length`, special tokens included.

    Two differences from transformers. A special token that the text itself has at that end, as the output of a chat
    template does, is not added twice; the ids are then those of `apply_chat_template(tokenize=True)`. And where cutting
    removes such a token from the text, the tokenizer's own takes its place. Cutting keeps the special tokens that the
    tokenizer adds, and takes from the tokenizer's `truncation_side`. Of a text that is much too long only the part that
    can remain is tokenised.
    """
    encoded: Any = {}
    for part in _parts(text, max_length, tokenizer.truncation_side):
        encoded = tokenizer(part, return_special_tokens_mask=True)
        if len(encoded["input_ids"]) - sum(encoded["special_tokens_mask"]) >= max_length + SPARE_TOKENS:
            break
    ids, added = encoded["input_ids"], encoded["special_tokens_mask"]  # in a text's own special tokens the mask is 0
    if 0 not in added or len(added) != len(ids):  # nothing of the text is left; T5, which adds no second </s> itself
        return ids[:max_length]
    start, end = added.index(0), len(ids) - added[::-1].index(0)
    before, content, after = ids[:start], ids[start:end], ids[end:]
    keeps_start = len(content) <= max_length or tokenizer.truncation_side == "right"
    keeps_end = len(content) <= max_length or tokenizer.truncation_side == "left"
    if keeps_start and text.lstrip().startswith(_literal(tokenizer, before)):
        before = []
    if keeps_end and text.rstrip().endswith(_literal(tokenizer, after)):
        after = []
    excess = max(0, len(before) + len(content) + len(after) - max_length)
    content = content[excess:] if tokenizer.truncation_side == "left" else content[: max(0, len(content) - excess)]
    return [*before, *content, *after]


def encode_bare_text(tokenizer: Any, text: str, max_length: int) -> list[int]:
    """Return the first `max_length` ids of the text, no special tokens added."""
    return _first_ids(lambda part: tokenizer(part, add_special_tokens=False)["input_ids"], text, max_length)


def _first_ids(encode: Callable[[str], list[int]], text: str, max_length: int) -> list[int]:
    ids: list[int] = []
    for part in _parts(text, max_length, "right"):
        ids = encode(part)
        if len(ids) >= max_length + SPARE_TOKENS:
            break
    return ids[:max_length]


def _parts(text: str, max_length: int, truncation_side: str) -> Iterator[str]:
    """Yield longer and longer parts of the text, the text itself last; each begins or ends with it.

    A part is cut between two words where it has any, so that its tokens are those of the whole text; only of one that
    is cut within a word the tokens next to the cut may differ, and those are not used (`SPARE_TOKENS`).
    """
    size = CHARACTERS_PER_TOKEN * (max_length + SPARE_TOKENS)
    while size < len(text):
        if truncation_side == "left":
            yield text[_word_end(text, range(len(text) - size, len(text) - size + LONGEST_WORD)) :]
        else:
            yield text[: _word_end(text, range(size, size - LONGEST_WORD, -1))]
        size *= 2
    yield text


def _word_end(text: str, positions: range) -> int:
    """The first of the positions where a word ends and white space begins; the first of all if there is none."""
    ends = (i for i in positions if text[i].isspace() and not text[i - 1].isspace())
    return next(ends, positions[0])


def _literal(tokenizer: Any, special_ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(special_ids))


def fingerprint(tokenizer: Any) -> str:
    """Hash of the vocabulary (token -> id, added tokens included): equal means that token ids mean the same."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


@dataclass(frozen=True)
class SpecialTokens:
    """Ids with a role in generation."""

    eos_ids: list[int]  # ascending; each ends a response
    pad_id: int
    banned_ids: list[int]  # ascending; never sampled: padding and begin of sequence, where they do not end one


def special_tokens(tokenizer: Any, eos: int | list[int] | None, *, vocab_size: int | None = None) -> SpecialTokens:
    """The special tokens of a language model.

    Args:
        eos: what its generation config says of the end of sequence.
        vocab_size: rows of its embedding table. A tokenizer may name tokens beyond them, which the model can neither
            write nor read: those are not banned, and another id takes the place of such a padding token.

    Raises:
        CheckpointError: neither names an end-of-sequence token.
    """
    ids = eos if isinstance(eos, list) else [eos]
    eos_ids = sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
    if not eos_ids:
        raise CheckpointError("the policy's tokenizer and generation config name no end-of-sequence token")

    def known(token: int | None) -> bool:
        return token is not None and (vocab_size is None or token < vocab_size)

    pad_id = next(i for i in (tokenizer.pad_token_id, *eos_ids, 0) if known(i))
    banned = {i for i in (tokenizer.pad_token_id, tokenizer.bos_token_id) if known(i)} - set(eos_ids)
    return SpecialTokens(eos_ids, pad_id, sorted(banned))


def end_of_sequence(folder: Path) -> int | list[int] | None:
    """What the generation config of the language model in `folder` says of the end of sequence.

    Raises:
        CheckpointError: the folder holds no model configuration.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return GenerationConfig.from_model_config(config).eos_token_id
    except OSError as error:
        raise CheckpointError(f"{folder} holds no model configuration: {error}") from error


class TextCodec:
    """Text of token ids and back; by the bare `tokenizers` where it can: transformers costs seconds to import."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the folder has no tokenizer."""
        file = folder / "tokenizer.json"
        self._fast: Any = None
        if file.is_file():
            from tokenizers import Tokenizer

            self._fast = Tokenizer.from_file(str(file))
            self._fast.no_truncation()  # either may have been saved with the tokenizer
            self._fast.no_padding()
        else:
            self._slow = load_tokenizer(folder)

    def decode(self, ids: list[int]) -> str:
        """The text, special tokens left out; ids that the vocabulary has not are left out too."""
        codec = self._slow if self._fast is None else self._fast
        return codec.decode(ids, skip_special_tokens=True)

    def encode(self, text: str, max_length: int) -> list[int]:
        """The first `max_length` ids, no special tokens added."""
        if self._fast is None:
            return encode_bare_text(self._slow, text, max_length)
        # Unlike `encode`, `encode_batch` releases the GIL.
        return _first_ids(
            lambda part: self._fast.encode_batch([part], add_special_tokens=False)[0].ids, text, max_length
        )
