"""What the fuzz test serves: tiny random models with a tokenizer of bytes, in two configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from python_backend.config import RunConfig, load_config
from python_backend.sections import UNMEASURED
from tools.fuzz_requests import POSITIONS, VOCAB_SIZE
from tools.ports import with_free_ports

KEY_VARIABLE, KEY = "FUZZ_TRAINING_KEY", "open sesame"
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "guarded": {
        "rewards": {"model": {}, "length": {"function": "tools.fuzz_requests:num_tokens", "weight": 0.1}},
        "server": {"training_key_env": KEY_VARIABLE},
        "actor": {"reference": "triton"},
    },
}


def write_config(out: Path, stage: str) -> RunConfig:
    """The configuration of a stage, on free ports; its server needs no sidecar."""
    from python_backend.weights import WeightsStore
    from trainer.publish import initialise_store  # torch: not for --help

    folder, checkpoints = out / stage, out / "checkpoints"
    data: dict[str, Any] = {
        "run": {"dir": str(folder)},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_s": 1},
        **{name: {"checkpoint": str(checkpoints / name), **UNMEASURED} for name in ("reward", "critic")},
        "reference": dict(UNMEASURED),
        "actor": {"checkpoint": str(checkpoints / "policy")},
    }  # fmt: skip
    for section, values in STAGES[stage].items():
        data[section] = {**data.get(section, {}), **values}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fuzz.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    config = load_config(path)
    store = WeightsStore(config.run.weights_dir)
    if store.current() is None:
        initialise_store(store, config.critic, run_id=config.run.identity)
    return config.model_copy(update={"server": with_free_ports(config.server)})


def make_models(folder: Path) -> None:
    """Tiny random checkpoints with a tokenizer of bytes and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        PreTrainedTokenizerFast,
    )

    from python_backend.modeling import quiet_transformers

    quiet_transformers()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        chat_template="{% for m in messages %}{{ m.role }} {{ m.content }}</s>{% endfor %}",
    )  # fmt: skip
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, num_labels=1, pad_token_id=2, bos_token_id=0,
        eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    kinds = {
        "reward": LlamaForSequenceClassification, "critic": LlamaForTokenClassification, "policy": LlamaForCausalLM,
    }  # fmt: skip
    for name, kind in kinds.items():
        if not (folder / name / "config.json").is_file():
            torch.manual_seed(len(name))
            kind(config).save_pretrained(folder / name)
            saved.save_pretrained(folder / name)
