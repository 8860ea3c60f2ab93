"""Tokenizers of checkpoints: loading one, the fingerprint by which two are compared, and tokens with a role.
Given: a checkpoint folder. Returns: a tokenizer; the sha256 of its vocabulary; ids.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def load_tokenizer(folder: Path | str) -> Any:
    """The checkpoint's own tokenizer. Raises ValueError if the folder has none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no tokenizer that transformers can load: {error}") from error


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


def special_tokens(tokenizer: Any, eos: int | list[int] | None) -> SpecialTokens:
    """The special tokens of a language model; `eos` is what its generation config says of the end of sequence.

    Raises:
        ValueError: neither names an end-of-sequence token.
    """
    ids = eos if isinstance(eos, list) else [eos]
    eos_ids = sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
    if not eos_ids:
        raise ValueError("the policy's tokenizer and generation config name no end-of-sequence token")
    pad_id = eos_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    banned = {i for i in (pad_id, tokenizer.bos_token_id) if i is not None} - set(eos_ids)
    return SpecialTokens(eos_ids, pad_id, sorted(banned))


def end_of_sequence(folder: Path) -> int | list[int] | None:
    """What the generation config of the language model in `folder` says of the end of sequence.

    Raises:
        ValueError: the folder holds no model configuration.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        if (folder / "generation_config.json").is_file():
            return GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return GenerationConfig.from_model_config(config).eos_token_id
    except OSError as error:
        raise ValueError(f"{folder} holds no model configuration: {error}") from error


class TextCodec:
    """Text of token ids and back; by the bare `tokenizers` where it can: transformers costs seconds to import."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder has no tokenizer."""
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

    def encode(self, text: str) -> list[int]:
        """The ids, no special tokens added."""
        if self._fast is None:
            return self._slow(text, add_special_tokens=False)["input_ids"]
        return self._fast.encode(text, add_special_tokens=False).ids
