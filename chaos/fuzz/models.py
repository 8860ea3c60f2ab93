"""Tiny random models of the fuzz test, with a byte-level tokenizer, and the test's two configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.children import free_ports
from benchmarks.support.random_models import random_llama, train_bpe
from chaos.fuzz.gateway import KEY_VARIABLE as GATEWAY_KEY_VARIABLE
from chaos.fuzz.requests import POSITIONS, VOCAB_SIZE
from python_backend.config import RunConfig, load_config
from python_backend.config.sections import UNMEASURED

KEY_VARIABLE, KEY = "FUZZ_TRAINING_KEY", "open sesame"
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "guarded": {
        "rewards": {"model": {}, "length": {"function": "chaos.fuzz.requests:num_tokens", "weight": 0.1}},
        "reward": {"text": "pair"},
        "server": {"training_key_env": KEY_VARIABLE},
        "actor": {"kl": {"reference": "triton"}},
    },
    "gateway": {
        "rewards": {"model": {}, "length": {"function": "chaos.fuzz.requests:num_tokens", "weight": 0.1}},
        "reward": {"text": "pair"},
        "gateway": {"port": 0, "key_env": GATEWAY_KEY_VARIABLE},
    },
}


def write_config(out: Path, stage: str) -> RunConfig:
    """Return the configuration of a stage, on free ports; version 0 is written here, so no sidecar is needed."""
    from python_backend.store.weights import WeightsStore
    from trainer.publish import initialise_store  # torch: not for --help

    folder, checkpoints = out / stage, out / "checkpoints"
    data: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "server": {**free_ports(), "exit_timeout_s": 1},
        **{name: {"checkpoint": str(checkpoints / name), **UNMEASURED} for name in ("reward", "critic")},
        "reference": dict(UNMEASURED),
        "actor": {"policy": {"checkpoint": str(checkpoints / "policy")}},
    }
    for section, values in STAGES[stage].items():
        data[section] = {**data.get(section, {}), **values}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fuzz.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    config = load_config(path)
    initialise_store(WeightsStore(config.run.weights_dir), config.critic, run_id=config.run.identity)
    return config


def make_models(folder: Path) -> None:
    """Write tiny random checkpoints with a byte-level tokenizer and a chat template, unless they exist."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_bpe([]),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}",
    )
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": POSITIONS, "initializer_range": 0.2}
    for name in ("reward", "critic", "policy"):
        if not (folder / name / "config.json").is_file():
            random_llama(name, seed=len(name), **sizes).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
