"""`python_backend.checkpoints.inspection`: what is found in a folder, and how a folder is refused."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, POSITIONS, VOCAB, add_tensors, change_config, save_tiny, save_with_value_head

from python_backend.checkpoints.inspection import CheckpointError, Constants, Head, inspect_checkpoint


def refused(*parts: object):
    return pytest.raises(CheckpointError, match=".*".join(re.escape(str(part)) for part in parts))


# ---- heads ----


@pytest.mark.parametrize(
    ("family", "kind", "head"),
    [
        ("llama", "reward", Head("sequence", "score", 1, False, True)),
        ("qwen2", "reward", Head("sequence", "score", 1, False, True)),
        ("gpt2", "reward", Head("sequence", "score", 1, False, True)),
        ("opt", "reward", Head("sequence", "score", 1, False, True)),
        ("bert", "reward", Head("sequence", "classifier", 1, True, False)),
        ("deberta-v3", "reward", Head("sequence", "classifier", 1, True, False)),
        ("roberta", "reward", Head("sequence", "classifier.out_proj", 1, True, False)),
        ("llama", "critic", Head("token", "score", 1, True, True)),
        ("gpt2", "critic", Head("token", "classifier", 1, True, True)),
        ("bert", "critic", Head("token", "classifier", 1, True, True)),
        *((family, "body", None) for family in CONFIGS),
        *((family, "language", None) for family in ("llama", "qwen2", "gpt2")),
    ],
)
def test_the_head_of_a_huggingface_class(tmp_path: Path, family: str, kind: str, head: Head | None):
    save_tiny(tmp_path, family, kind)
    assert inspect_checkpoint(tmp_path).head == head


@pytest.mark.parametrize(
    ("prefix", "config", "bias"),
    [
        ("v_head.summary", {}, True),
        ("v_head", {}, True),
        ("value_head", {}, False),
        ("value_head", {"value_head_prefix": "value_head"}, False),
        ("my_head", {"value_head_prefix": "my_head"}, False),
        ("score", {"value_head_prefix": "score"}, False),
    ],
)
def test_value_heads(tmp_path: Path, prefix: str, config: dict[str, str], bias: bool):
    save_with_value_head(tmp_path, "llama", prefix=prefix, bias=bias, num_labels=2, **config)
    assert inspect_checkpoint(tmp_path).head == Head("value", prefix, 2, bias, True)


@pytest.mark.parametrize("prefix", ["v_head", "value_head", "score"])
def test_a_head_of_several_layers_is_refused(tmp_path: Path, prefix: str):
    save_tiny(tmp_path, "gpt2", "language")
    add_tensors(tmp_path, {f"{prefix}.0.weight": torch.zeros(32, 16), f"{prefix}.2.weight": torch.zeros(1, 32)})
    with refused(tmp_path, "several layers", f"{prefix}.0.weight", "is not supported"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("family", "kind", "tensor", "shape", "expected"),
    [
        ("llama", "critic", "score.bias", (3,), "[1]"),
        ("llama", "critic", "score.bias", (1, 1), "[1]"),
        ("bert", "reward", "classifier.bias", (2,), "[1]"),
        ("llama", "reward", "score.weight", (16,), "[num_labels, hidden]"),
        ("llama", "reward", "score.weight", (0, 16), "[num_labels, hidden]"),
        ("gpt2", "language", "v_head.summary.weight", (16,), "[num_labels, hidden]"),
    ],
)
def test_a_head_of_the_wrong_shape_is_named(
    tmp_path: Path, family: str, kind: str, tensor: str, shape: tuple[int, ...], expected: str
):
    save_tiny(tmp_path, family, kind)
    add_tensors(tmp_path, {tensor: torch.zeros(shape)})
    with refused(tmp_path, tensor, f"has shape {list(shape)}", expected):
        inspect_checkpoint(tmp_path)


# ---- everything else ----


def test_what_is_found(tmp_path: Path):
    names = {0: "helpfulness", 1: "verbosity"}
    model = save_tiny(tmp_path, "llama", "reward", num_labels=2)
    change_config(tmp_path, id2label=names)
    (tmp_path / "tokenizer.json").write_text("{}")
    info = inspect_checkpoint(tmp_path)
    assert (info.model_type, info.architecture) == ("llama", "LlamaForSequenceClassification")
    assert info.labels == ("helpfulness", "verbosity")
    assert (info.vocab_size, info.max_positions, info.tokenizer) == (VOCAB, POSITIONS, "fast (tokenizer.json)")
    assert info.num_parameters == sum(p.numel() for p in model.parameters())
    assert info.num_bytes == 4 * info.num_parameters
    assert info.dtypes == {"F32": info.num_parameters}
    assert info.files == [tmp_path / "model.safetensors"]
    assert info.constants is None


def test_labels_that_only_count_say_nothing(tmp_path: Path):
    save_tiny(tmp_path, "gpt2", "reward", num_labels=2)
    info = inspect_checkpoint(tmp_path)
    assert info.labels == ()
    assert info.max_positions == POSITIONS
    assert info.tokenizer is None


def test_dtypes_are_counted(tmp_path: Path):
    model = save_tiny(tmp_path, "llama", "reward")
    tensors = load_file(tmp_path / "model.safetensors")
    half = {name: tensor if name == "score.weight" else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(half, tmp_path / "model.safetensors", metadata={"format": "pt"})
    info = inspect_checkpoint(tmp_path)
    head = model.score.weight.numel()
    assert list(info.dtypes.items()) == [("BF16", info.num_parameters - head), ("F32", head)]
    assert info.num_bytes == 2 * (info.num_parameters - head) + 4 * head


def test_shards_are_one_checkpoint(tmp_path: Path):
    model = save_tiny(tmp_path / "one", "llama", "reward")
    model.save_pretrained(tmp_path / "many", max_shard_size="3KB")
    one, many = inspect_checkpoint(tmp_path / "one"), inspect_checkpoint(tmp_path / "many")
    assert len(many.files) > 2
    assert (many.num_parameters, many.num_bytes, many.head) == (one.num_parameters, one.num_bytes, one.head)
    many.files[1].unlink()
    with refused(tmp_path / "many", f"names {many.files[1].name}, which is missing"):
        inspect_checkpoint(tmp_path / "many")


@pytest.mark.parametrize(
    ("config", "constants"),
    [
        ({"reward_standardization": {"mean": 1, "std": 2}}, Constants(1.0, 2.0)),
        ({"normalize_reward": True, "mean": 0.5, "std": 3.0}, Constants(0.5, 3.0)),
        ({"normalize_reward": False, "mean": 0.5, "std": 3.0}, None),
        ({"mean": 0.5, "std": 3.0}, None),
        (
            {"reward_standardization": {"mean": 1, "std": 2}, "normalize_reward": True, "mean": 0, "std": 1},
            Constants(1.0, 2.0),
        ),
    ],
)
def test_constants(tmp_path: Path, config: dict[str, object], constants: Constants | None):
    save_tiny(tmp_path, "llama", "reward")
    change_config(tmp_path, **config)
    assert inspect_checkpoint(tmp_path).constants == constants


@pytest.mark.parametrize("constants", [{"mean": 0, "std": 0}, {"mean": "x"}, [1, 2], {"mean": float("nan"), "std": 1}])
def test_constants_that_are_none(tmp_path: Path, constants: object):
    save_tiny(tmp_path, "llama", "reward")
    change_config(tmp_path, reward_standardization=constants)
    with refused(tmp_path / "config.json", "reward_standardization", "std above 0"):
        inspect_checkpoint(tmp_path)


# ---- what is no checkpoint ----


def test_an_adapter_alone_is_refused(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(tmp_path, "contains only a PEFT adapter", "--merge NEW_FOLDER", "merge_and_unload"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_an_unreadable_config_is_named(tmp_path: Path, text: str):
    save_tiny(tmp_path, "llama", "reward")
    (tmp_path / "config.json").write_text(text)
    with refused(tmp_path, "cannot be loaded", "config.json"):
        inspect_checkpoint(tmp_path)


def header(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 2**40) + b"{}",
        header("no JSON"),
        header("[]"),
        header(json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), b"1234"),
        header(json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}), b"12345678"),
        header(json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}}), b"12345678"),
        header(json.dumps({"a": {"dtype": "F32", "shape": [2]}}), b"12345678"),
        header(json.dumps({"a": {"dtype": "WORDS", "shape": [2], "data_offsets": [0, 8]}}), b"12345678"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes):
    save_tiny(tmp_path, "llama", "reward")
    (tmp_path / "model.safetensors").write_bytes(content)
    with refused(tmp_path, "cannot be loaded: model.safetensors is damaged", "copy it again"):
        inspect_checkpoint(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": {"a": "../elsewhere.safetensors"}}])
def test_a_wrong_index_is_named(tmp_path: Path, index: object):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(tmp_path, "cannot be loaded: model.safetensors.index.json"):
        inspect_checkpoint(tmp_path)


def test_inspecting_imports_no_torch(tmp_path: Path):
    save_tiny(tmp_path, "llama", "reward")
    script = (
        "import sys, pathlib; from python_backend.checkpoints.inspection import inspect_checkpoint;"
        "inspect_checkpoint(pathlib.Path(sys.argv[1])); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
