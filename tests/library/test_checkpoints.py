"""Tests of `rlhf_triton.checkpoints`: inspection of a folder, refusals, fingerprints, special tokens."""

import json
import math
import re
import shutil
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from random_models import word_tokenizer
from safetensors.torch import load_file, save_file
from tiny_checkpoints import change_config, save_tiny
from tiny_tokenizers import CHATS, PLAIN_CHAT, save_chat_policy, save_text_reward
from tokenizers import Tokenizer
from tokenizers.normalizers import Lowercase
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from rlhf_triton.checkpoints.inspection import (
    NUM_PIECES,
    PIECE_BYTES,
    CheckpointError,
    Constants,
    fingerprint_model,
    inspect_checkpoint,
    is_same_model,
    read_config,
)
from rlhf_triton.checkpoints.safetensors_header import read_header
from rlhf_triton.checkpoints.special_tokens import end_of_sequence, special_tokens, special_tokens_in
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer


def refused(*parts):
    return pytest.raises(CheckpointError, match=".*".join(re.escape(str(part)) for part in parts))


# ---- everything else ----


def test_sharded_checkpoint_is_inspected_like_a_single_file(tmp_path):
    model = save_tiny(tmp_path / "one", "llama", "reward")
    model.save_pretrained(tmp_path / "many", max_shard_size="3KB")
    one = inspect_checkpoint(tmp_path / "one")
    many = inspect_checkpoint(tmp_path / "many")
    assert len(many.files) > 2
    assert (many.num_parameters, many.num_bytes, many.head) == (one.num_parameters, one.num_bytes, one.head)
    first = many.files[0]
    last = many.files[-1]
    shutil.copy(first, stored := tmp_path / "stored")
    save_file({**load_file(first), **load_file(last)}, first)  # as a file of an older checkpoint
    with refused(tmp_path / "many", f"is in {first.name} and in {last.name}; remove one of the files"):
        inspect_checkpoint(tmp_path / "many")
    stored.replace(first)
    many.files[1].unlink()
    with refused(tmp_path / "many", f"names {many.files[1].name}, which is no file"):
        inspect_checkpoint(tmp_path / "many")


WRONG = "reward_standardization.*std above 0"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"normalize_reward": True, "mean": 0.5, "std": 3.0}, Constants(0.5, 3.0)),
        ({"normalize_reward": False, "mean": 0.5, "std": 3.0}, None),
        (
            {"reward_standardization": {"mean": 1, "std": 2}, "normalize_reward": True, "mean": 0, "std": 1},
            Constants(1.0, 2.0),
        ),
        ({"reward_standardization": {"mean": 0, "std": 0}}, WRONG),
        ({"reward_standardization": {"mean": float("nan"), "std": 1}}, WRONG),
    ],
)
def test_inspection_finds_standardization_constants_in_config_json(tmp_path, config, found):
    save_tiny(tmp_path, "llama", "reward")
    change_config(tmp_path, **config)
    if isinstance(found, str):
        with pytest.raises(CheckpointError, match=found):
            inspect_checkpoint(tmp_path)
    else:
        assert inspect_checkpoint(tmp_path).constants == found


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    LlamaConfig(longest=math.inf).save_pretrained(tmp_path)
    assert read_config(tmp_path)["longest"] == math.inf


# ---- what is no checkpoint ----


def test_folder_that_is_not_a_checkpoint_is_refused_with_the_reason(tmp_path):
    with refused(tmp_path / "none", "does not exist or is not a folder"):
        inspect_checkpoint(tmp_path / "none")
    for name, content, *message in (
        ("file", "", "is not a Hugging Face model: it has no config.json"),
        ("config.json", "{}", "has no model.safetensors: it contains no weights"),
        ("pytorch_model.bin", "", "only pickled weights (pytorch_model.bin)", "--convert NEW_FOLDER"),
    ):
        (tmp_path / name).write_text(content)
        with refused(tmp_path, *message):
            inspect_checkpoint(tmp_path)


def header(text, data=b""):
    return struct.pack("<Q", len(text)) + text.encode() + data


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", b"{}", ("contains only a PEFT adapter", "merge_and_unload", "docs/your-models.md")),
        *(
            ("config.json", text, ("config.json is damaged: ", where, "; copy it again"))
            for text, where in ((b"{", "line 1 column 2"), (b"", "line 1 column 1"), (b'{"a": "\xff"}', "(byte 7)"))
        ),
        ("config.json", b"[]", ("config.json is not a JSON object; copy it again",)),
        *(
            (
                "config.json",
                f'{{"{key}": {value}}}'.encode(),
                (f"config.json: {key} is ", "must be an object; correct or"),
            )
            for key in ("text_config", "vision_config", "quantization_config", "rope_parameters", "id2label")
            for value in ("5", '"a"', "[]")
        ),
        *(
            ("model.safetensors", content, ("cannot be loaded: model.safetensors is damaged", "copy it again"))
            for content in (
                b"",
                struct.pack("<Q", 2**40) + b"{}",
                header("[]"),
                header(json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), b"1234"),
                header(json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}}), b"12345678"),
                header(json.dumps({"a": {"dtype": "WORDS", "shape": [2], "data_offsets": [0, 8]}}), b"12345678"),
            )
        ),
        *(
            ("model.safetensors.index.json", index, ("cannot be loaded: model.safetensors.index.json",))
            for index in (b"{}", b'{"weight_map": {"a": "../elsewhere.safetensors"}}')
        ),
    ],
)
def test_damaged_checkpoint_file_is_refused_by_name(tmp_path, file, content, message):
    if file in ("config.json", "model.safetensors"):
        save_tiny(tmp_path, "llama", "reward")
    elif "index" in file:
        (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(content)
    with refused(tmp_path, *message):
        inspect_checkpoint(tmp_path)


def test_inspect_checkpoint_does_not_import_torch(tmp_path):
    save_tiny(tmp_path, "llama", "reward")
    script = (
        "import sys, pathlib; from rlhf_triton.checkpoints.inspection import inspect_checkpoint;"
        "inspect_checkpoint(pathlib.Path(sys.argv[1])); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


# ---- fingerprints ----


def test_fingerprint_differs_for_different_weights(tmp_path):
    model = save_tiny(tmp_path / "one", "llama", "language")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "trained")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    model.save_pretrained(tmp_path / "parts", max_shard_size="2KB")
    found = {path.name: fingerprint_model(path) for path in tmp_path.iterdir()}
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert {len(each) for each in found.values()} == {129}
    assert found.pop("copy") == found["one"]
    assert len(set(found.values())) == 4


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_fingerprint_samples_the_whole_file(tmp_path, name):
    """The weights of an 8 MiB file change as little as in one update."""
    model = save_tiny(tmp_path, "llama", "language", vocab_size=65_536)
    known = fingerprint_model(tmp_path)
    with torch.no_grad():
        model.get_parameter(name).add_(1e-4)
    model.save_pretrained(tmp_path)
    assert fingerprint_model(tmp_path) != known


def test_fingerprint_contains_every_tensor_and_key_of_the_config_that_decide_a_score(tmp_path):
    model = save_tiny(tmp_path, "gpt2", "reward", n_layer=8, vocab_size=65_536)
    known = fingerprint_model(tmp_path)
    head = read_header(tmp_path / "model.safetensors")["score.weight"]
    assert head.start > PIECE_BYTES  # behind the header, and before the second piece
    assert head.start + head.num_bytes < (tmp_path / "model.safetensors").stat().st_size // NUM_PIECES
    with torch.no_grad():
        model.score.weight.add_(1e-4)
    model.save_pretrained(tmp_path)
    trained = fingerprint_model(tmp_path)
    assert trained != known
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, same in (
        ({"layer_norm_epsilon": 0.5}, False),
        ({"reward_standardization": {"mean": 5, "std": 9}}, False),
        ({"text_config": {"rope_theta": 1e6, "dtype": "float32"}}, False),
        (
            {"transformers_version": "4.0", "torch_dtype": "bfloat16", "_name_or_path": "there", "use_cache": False},
            True,
        ),
        (dict(reversed(config.items())), True),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        assert (fingerprint_model(tmp_path) == trained) == same, changes
        weights, _ = trained.split(".")
        assert is_same_model(weights, fingerprint_model(tmp_path))  # stored by 0.1.0


def test_fingerprint_contains_the_tokenizer_and_its_chat_templates(tmp_path):
    save_tiny(tmp_path, "llama", "reward")
    without = fingerprint_model(tmp_path)
    seen = [without]
    (tmp_path / "additional_chat_templates").mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "tokenizer.json",
    ):
        with (tmp_path / name).open("a") as file:
            file.write(" ")
        assert is_same_model(without, fingerprint_model(tmp_path)), (
            "a version in a store is not recognised as the model's"
        )
        assert fingerprint_model(tmp_path) not in seen
        seen.append(fingerprint_model(tmp_path))
    (tmp_path / "README.md").write_text("A model.")
    assert fingerprint_model(tmp_path) == seen[-1]


# ---- special tokens ----


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("has_file", [True, False])
def test_end_of_sequence_matches_the_loaded_models_eos_ids(tmp_path, family, has_file):
    save_tiny(tmp_path, family, "language")
    assert (tmp_path / "generation_config.json").is_file()
    if not has_file:
        (tmp_path / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path))
    assert end_of_sequence(tmp_path) == model.generation_config.eos_token_id is not None
    if not has_file:  # a class that transformers does not know, whose tokenizer decodes for reward functions
        change_config(tmp_path, model_type="unknown", eos_token_id=[1, 2])
        assert end_of_sequence(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("ids", "eos", "vocab_size", "expected"),
    [
        ((1, 2, 0), None, None, ([1], 2, [0, 2])),
        ((1, 1, 1), 5, None, ([1, 5], 1, [])),  # one token for all three, as GPT-2 has it
        ((1, 10, 11), None, 10, ([1], 1, [])),  # added to the tokenizer alone
        ((10, None, 0), 3, 10, ([3, 10], 3, [0])),
        ((None, 0, 0), None, None, None),
    ],
)
def test_special_tokens_gives_eos_pad_and_banned_ids(ids, eos, vocab_size, expected):
    tokenizer = SimpleNamespace(**dict(zip(("eos_token_id", "pad_token_id", "bos_token_id"), ids, strict=True)))
    tokenizer.get_vocab = lambda: {str(i): i for i in range(13)}
    if expected is None:
        with pytest.raises(ValueError, match="define no end-of-sequence token"):
            special_tokens(tokenizer, eos)
    else:
        special = special_tokens(tokenizer, eos, vocab_size=vocab_size)
        assert (special.eos_ids, special.pad_id, special.banned_ids) == expected


NO_EOS = {"eos_token": "<|endoftext|>"}  # which pads, too; the template ends turns with <|im_end|>
BY_PLACE = CHATS["qwen2"].replace("<|im_end|>", "{{ '<|endoftext|>' if loop.last else '<|im_end|>' }}")


@pytest.mark.parametrize(
    ("settings", "ends", "banned", "template_end"),
    [
        ({}, [2], [0, 1], None),
        ({"more": 16}, [2], [0, 1, *range(160, 176)], None),
        ({"more": -8}, [2], [0, 1], None),  # its last entries cannot be embedded
        (NO_EOS, [0, 2], [1], 2),
        ({**NO_EOS, "ends": [0, 2]}, [0, 2], [1], None),
        ({**NO_EOS, "ends": 2}, [0, 2], [1], None),
        ({**NO_EOS, "chat_template": None}, [0], [1], None),  # a base model
        ({**NO_EOS, "chat_template": PLAIN_CHAT}, [0], [1], None),  # no token ends a turn
        ({**NO_EOS, "chat_template": "{{ raise_exception('no') }}"}, [0], [1], None),
        ({**NO_EOS, "chat_template": BY_PLACE}, [0], [1], None),  # <|im_end|> may end a part of a reply
        ({"more": 2, "ends": [2, 161]}, [2, 161], [0, 1, 160, 161], None),  # an end that no text has
    ],
    ids=str,
)
def test_special_tokens_combine_tokenizer_embeddings_generation_config_and_template(
    tmp_path, settings, ends, banned, template_end
):
    tokenizer = save_chat_policy(tmp_path, **settings)
    special = special_tokens_in(tmp_path)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (special.eos_ids, special.banned_ids, special.template_end) == (ends, banned, template_end)


def test_ids_missing_from_the_vocabulary_are_banned_and_duplicates_are_not():
    words = {"a": 0, "</s>": 1, "b": 3, "c": 7}
    tokenizer = word_tokenizer(words, unknown="a", special={"eos_token": "</s>"})
    assert special_tokens(tokenizer, None, vocab_size=10).banned_ids == [2, 4, 5, 6, 8, 9]
    tokenizer.get_vocab = lambda: {"a": 0, "</s>": 1}  # as one in Python whose pieces have equal texts
    assert special_tokens(tokenizer, None, vocab_size=10).banned_ids == [2, 4, 5, 6, 8, 9]


@pytest.mark.parametrize("named", ["Qwen2Tokenizer", "TokenizersBackend"])
def test_tokenizer_that_differs_from_its_file_causes_a_warning_or_is_read_from_the_file(tmp_path, named, caplog):
    save_text_reward(tmp_path, "qwen2")
    load_tokenizer(tmp_path)
    assert not caplog.messages, "a tokenizer with the same tokens causes a warning"
    stored = Tokenizer.from_file(str(file := tmp_path / "tokenizer.json"))
    stored.normalizer = Lowercase()
    stored.save(str(file))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": named}))
    ids = load_tokenizer(tmp_path)("Good Day")["input_ids"]
    if named == "TokenizersBackend":
        assert ids == stored.encode("Good Day").ids
        assert not caplog.messages
    else:
        assert ids == AutoTokenizer.from_pretrained(tmp_path)("Good Day")["input_ids"] != stored.encode("Good Day").ids
        (message,) = caplog.messages
        assert message.endswith("set tokenizer_class to TokenizersBackend in tokenizer_config.json")


@pytest.mark.parametrize(
    ("named", "added", "expected"),
    [
        ("LlamaTokenizerFast", {}, None),  # as transformers 5 saves it
        ("LlamaTokenizerFast", {"add_bos_token": True, "add_eos_token": False}, None),
        ("LlamaTokenizerFast", {"add_bos_token": True, "add_eos_token": True}, (1, 1)),
        ("LlamaTokenizerFast", {"add_eos_token": True}, (1, 1)),
        ("LlamaTokenizer", {"add_bos_token": False}, (0, 0)),
        ("PreTrainedTokenizerFast", {"add_bos_token": False, "add_eos_token": True}, None),  # 4 read the file, too
    ],
)
def test_special_tokens_that_differ_from_the_settings_cause_a_warning(tmp_path, caplog, named, added, expected):
    save_text_reward(tmp_path, "llama")
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": named, **added}))
    tokenizer = load_tokenizer(tmp_path)
    found = [message for message in caplog.messages if "add_bos_token and add_eos_token" in message]
    assert len(found) == (expected is not None)
    if expected is None:
        return
    caplog.clear()
    tokenizer.add_bos_token = bool(expected[0])  # what the warning advises
    tokenizer.add_eos_token = bool(expected[1])
    tokenizer.save_pretrained(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "TokenizersBackend"}))
    ids = load_tokenizer(tmp_path)("Good Day")["input_ids"]
    before = [tokenizer.bos_token_id] * expected[0]
    assert ids == [
        *before,
        *tokenizer("Good Day", add_special_tokens=False)["input_ids"],
        *[tokenizer.eos_token_id] * expected[1],
    ]
    assert not caplog.messages
