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
