"""The reference model's own parameters in config.pbtxt, which the actor compares with its settings when it starts."""

from __future__ import annotations

import json
from pathlib import Path

from python_backend.checkpoints.inspection import CheckpointError, fingerprint_weights
from python_backend.config import ConfigError, RunConfig
from python_backend.store.durable import read_json
from python_backend.wire.contract import BANNED_TOKEN_IDS, CHECKPOINT_FINGERPRINT, TEMPERATURE


def reference_parameters(config: RunConfig) -> dict[str, str]:
    """Return temperature and banned token ids of the actor's sampling, and the fingerprint of the reference's weights.

    If a checkpoint does not exist yet, its parameter is empty, with which the model refuses to load.

    Raises:
        ConfigError: a checkpoint exists but cannot be read, or has no end-of-sequence token.
    """
    return {
        TEMPERATURE: repr(config.actor.generation.temperature),
        BANNED_TOKEN_IDS: _banned_token_ids(config.actor.policy.checkpoint),
        CHECKPOINT_FINGERPRINT: _fingerprint(config.reference.checkpoint),
    }


def _banned_token_ids(policy: Path) -> str:
    if not (policy / "config.json").is_file():
        return ""
    from python_backend.checkpoints.tokenization import end_of_sequence, load_tokenizer, special_tokens

    folder = policy.absolute()
    try:
        config = read_json(folder / "config.json") or {}
        size = (config.get("text_config") or config).get("vocab_size")
        return json.dumps(special_tokens(load_tokenizer(folder), end_of_sequence(folder), vocab_size=size).banned_ids)
    except ValueError as error:
        raise ConfigError(f"actor.policy.checkpoint: {error}") from error


def _fingerprint(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        return ""
    try:
        return fingerprint_weights(folder)
    except CheckpointError as error:
        raise ConfigError(f"reference.checkpoint: {error}") from error
