"""Tokenizers of checkpoints: loading one, and the fingerprint by which two are compared.
Given: a checkpoint folder. Returns: a tokenizer; or the sha256 of its vocabulary.
"""

from __future__ import annotations

import hashlib
import json
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
