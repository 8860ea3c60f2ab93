"""`rlhf-triton init models`: what it prints, writes and refuses."""

import json
import os
import pickle
import re
import resource
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from random_models import word_tokenizer
from safetensors.torch import load_file, save_file
from tiny_checkpoints import add_tensors, change_config, save_tiny, save_with_value_head
from tiny_tokenizers import VOCAB, make_text_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
)

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.labels import attribute_weights
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.sections import RewardSection, Standardization
from rlhf_triton.models.modeling import load_reward
from rlhf_triton.tools import init, unpickle

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # from peft
    pytest.mark.filterwarnings("ignore:(Unsupported layer type|Setting `save_embedding):UserWarning"),
]
ROWS = [np.asarray([5, 9, 7]), np.asarray([11, 4, 8, 6, 3])]


def main(arguments):
    return init.main(["models", *arguments])


def save_tokenizer(folder, *words):
    word_tokenizer(words, unknown=words[0], special={"unk_token": words[0]}).save_pretrained(folder)


def test_init_models_applies_section_overrides_to_trial_and_yaml(tmp_path, capsys):
    save_with_value_head(tmp_path / "reward", "bert", prefix="score")
    out = tmp_path / "my.yaml"
    arguments = ["--reward", str(tmp_path / "reward")]
    assert main(arguments) == 2
    assert "set pooling: last or mean" in capsys.readouterr().err
    scores = []
    for pooling in ("last", "mean"):
        out.unlink(missing_ok=True)
        assert main([*arguments, f"reward.pooling={pooling}", "--out", str(out), "reward.append_eos=true"]) == 0
        scores += re.findall(r"trial +loads; .* scores (\S+)", capsys.readouterr().out)
        assert (load_config(out).reward.pooling, load_config(out).reward.append_eos) == (pooling, True)
    assert len({*scores}) == 2
    save_tiny(tmp_path / "labels", "llama", "reward", num_labels=2, id2label={0: "bad", 1: "good"})
    arguments = ["--reward", str(tmp_path / "labels")]
    assert main([*arguments, "reward.attribute_weights={bad: -1, good: 1}"]) == 0
    said = capsys.readouterr().out
    assert "# choose" not in said
    assert re.search(r"scores -?[\d.]+\n", said)


def test_init_models_writes_reward_and_critic_sections(tmp_path, capsys):
    save_tiny(tmp_path / "reward", "bert", "reward", reward_standardization={"mean": 0.5, "std": 2.0})
    save_tokenizer(tmp_path / "reward", "a", "b")
    save_with_value_head(tmp_path / "critic", "gpt2", prefix="v_head.summary", bias=True)
    save_tokenizer(tmp_path / "critic", "b", "a")
    out = tmp_path / "my.yaml"
    arguments = ["--reward", str(tmp_path / "reward"), "--critic", str(tmp_path / "critic"), "--out", str(out)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    for part in (
        "BertForSequenceClassification (bert)",
        "sequence classification `classifier`: 1 output(s), the model's own pooling",
        "value head `v_head.summary`: 1 output(s), on each token",
        "(score - 0.5) / 2",
        "fast (tokenizer.json)",
        "none: chats cannot be scored until chat_template.jinja is saved there",
        "suggested: float32",
        "the value head is v_head.summary",
        "tokenizers: reward and critic DIFFER",
    ):
        assert part in said, part
    assert re.search(r"trial +loads; the row of tokens 1 to 8 scores -?\d", said)
    config = load_config(out)
    assert config.reward.model == tmp_path / "reward"
    assert config.critic.model == tmp_path / "critic"
    assert config.critic.standardization == Standardization(mean=0.5, std=2.0)  # the rewards' own
    with pytest.raises(SystemExit, match="2"):
        main(arguments)  # never writes over a file
    assert "already exists" in capsys.readouterr().err


def test_init_models_lists_label_choices_for_a_reward_and_its_critic(tmp_path, capsys):
    names = {0: "helpfulness", 1: "verbosity"}
    save_tiny(tmp_path, "llama", "reward", num_labels=2)
    change_config(tmp_path, id2label=names)
    assert main(["--reward", str(tmp_path), "--critic", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "labels        helpfulness, verbosity" in said
    assert "its 2 outputs merged into one" in said
    text = said[said.index("\nreward:\n") :]
    text, _, told = text.partition("not yet usable")
    assert "choose one of the lines" in told
    sections = yaml.safe_load(text)
    assert sections["critic"]["model"] == sections["reward"]["model"] == str(tmp_path)
    assert "attribute_weights" not in sections["reward"], "a label is chosen for the user"
    chosen = text.replace(
        "# attribute_weights: {helpfulness: -1, verbosity: 1}", "attribute_weights: {helpfulness: -1, verbosity: 1}"
    )
    assert attribute_weights(RewardSection.model_validate(yaml.safe_load(chosen)["reward"])) == [-1, 1]
    assert text.count("\n  # attribute_weights: ") == 3
    assert re.search(r"tokens 1 to 8 scores helpfulness -?\d\S+, verbosity -?\d", said)


def test_init_models_refuses_untrained_rewards_and_models_that_fail_to_load(tmp_path, capsys):
    body = tmp_path / "body"
    reward = tmp_path / "reward"
    save_tiny(body, "qwen2", "body")
    assert main(["--critic", str(body)]) == 0
    assert "the value head starts at 0" in capsys.readouterr().out
    assert main(["--reward", str(body)]) == 2
    assert "is not a trained reward model" in capsys.readouterr().err
    save_tiny(reward, "llama", "reward")
    add_tensors(reward, {"score.weight": torch.full((1, 16), torch.nan)})
    assert main(["--reward", str(reward)]) == 2
    assert "its weights are damaged" in capsys.readouterr().err
    assert main(["--reward", str(reward), "--no-load"]) == 0
    assert "loads;" not in capsys.readouterr().out


@pytest.mark.slow
def test_documented_adapter_merge_scores_as_in_peft(tmp_path, monkeypatch, capsys):
    """The adapter is saved as by TRL, with the head among its `modules_to_save`."""
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    adapter = Path("out/final")
    save_tiny(base, "qwen2", "language", vocab_size=VOCAB)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    settings = LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained(adapter)
    make_text_tokenizer("qwen2").save_pretrained(adapter)
    assert convert(adapter, tmp_path / "new") == 2
    assert "contains only a PEFT adapter" in capsys.readouterr().err
    page = (Path(__file__).parents[2] / "docs" / "your-models.md").read_text()
    exec(next(block for block in page.split("```") if "merge_and_unload" in block).removeprefix("py\n"), {})
    assert main(["--reward", "out/merged"]) == 0
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1).eval()
    with torch.no_grad():
        expected = [theirs(input_ids=torch.from_numpy(row)[None]).logits[0].numpy() for row in ROWS]
    np.testing.assert_allclose(load_reward(Path("out/merged")).score(ROWS), expected, atol=1e-5, rtol=0)


class Danger:
    """Creates a folder when it is unpickled without precautions."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (f"{self.file}-made",)


def save_pickled(folder, name, change=dict, *, family="llama", **how):
    """Save a reward model with its weights in a pickle, modified by `change`; return the original weights."""
    save_tiny(folder, family, "reward")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(change(tensors), folder / name, **how)
    return tensors


def convert(folder, out, role="--reward"):
    return main([role, str(folder), "--convert", str(out), "--no-load"])


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize(
    ("name", "change", "how"),
    [
        ("pytorch_model.bin", dict, {}),
        ("pytorch_model.bin", dict, {"_use_new_zipfile_serialization": False}),
        ("model.pt", lambda own: {"module": {f"module.{name}": own[name] for name in own}, "epoch": 3}, {}),
        (
            "a.pth",
            lambda own: {
                "state_dict": own,
                "optimizer": {"state": [own]},
                "lr_schedulers": [own],
                "scaler": {"scale": 65536.0, "growth_factor": 2.0},
                "rng_state": torch.zeros(8, dtype=torch.uint8),
                "hyper_parameters": {"init_std": 0.02},
            },
            {},
        ),
    ],
    ids=["zip", "legacy", "module", "training"],
)
def test_init_models_converts_a_pickled_checkpoint(tmp_path, capsys, signals_kept, name, change, how):
    source = tmp_path / "source"
    out = tmp_path / "out"
    own = save_pickled(source, name, change, **how)
    save_tokenizer(source, "a", "b")
    torch.save({}, source / "training_args.bin")
    torch.save({}, source / "optimizer.pt")
    linked = tmp_path / "linked"  # as in the cache of the Hub
    linked.mkdir()
    for file in source.iterdir():
        (linked / file.name).symlink_to(file)
    assert convert(linked / name if name == "a.pth" else linked, out) == 0
    assert_same(tensors_of(out), own)
    assert {file.name for file in out.iterdir()} == {
        *(file.name for file in source.iterdir() if file.suffix == ".json"),
        "model.safetensors",
    }
    assert not any(file.is_symlink() for file in out.iterdir())
    said = capsys.readouterr().out
    assert f"reading {name}" in said
    assert ("left out epoch (int)" in said) == (name == "model.pt")
    assert ("left out optimizer, lr_schedulers, scaler, rng_state, hyper_parameters" in said) == (name == "a.pth")
    assert str(out) in said[said.index("\nreward:\n") :]


def test_converted_shards_have_an_index_and_all_tied_names(tmp_path):
    wide = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "embed": wide,
        "head": wide,
        "turned": wide.T,
        "slice": wide[1:3],
        **{str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)},
        "ids": torch.arange(5),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
    }
    torch.save(tensors, tmp_path / "a.bin")
    torch.save({"layers.0.weight": torch.ones(2)}, tmp_path / "head.pt")
    unpickle.write_safetensors({tmp_path / "a.bin": "", tmp_path / "head.pt": "head."}, tmp_path)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert_same(tensors_of(tmp_path), {**tensors, "head.layers.0.weight": torch.ones(2)})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {name: load_file(tmp_path / file).keys() & {name} for name, file in index["weight_map"].items()} == {
        name: {name} for name in tensors_of(tmp_path)
    }
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(tmp_path).values())


T = torch.ones(2)
REFUSED = {
    "code": (lambda file: torch.save({"a": T, "b": Danger(file)}, file), r"calls posix\.mkdir, which is no part"),
    "code, legacy": (
        lambda file: torch.save([Danger(file)], file, _use_new_zipfile_serialization=False),
        r"calls posix\.mkdir",
    ),
    "numpy": (lambda file: torch.save({"a": T, "loss": np.float64(1)}, file), r"calls numpy\..*multiarray\.scalar"),
    "noise": (lambda file: file.write_bytes(b"hello world"), "no file of tensors"),
    "a list": (lambda file: torch.save({"model": {"a": [T, T]}}, file), "a is a list of tensors"),
    "twice": (lambda file: torch.save({"model": {"a": T}, "module": {"a": T}}, file), "it has the tensor a twice"),
    "expanded": (lambda file: torch.save({"a": torch.ones(1).expand(10**10)}, file), "a claims 40,000,000,000 bytes"),
    "no data": (lambda file: torch.save({"a": torch.ones(2, device="meta")}, file), "tensor a is not a dense tensor"),
    "reserved": (lambda file: torch.save({"__metadata__": T}, file), "tensor __metadata__ .* cannot be stored"),
    "a mean": (lambda file: torch.save({"model": {"a": T}, "mean": 0.5}, file), r"mean is 0\.5, no tensor"),
    "a scaler": (
        lambda file: torch.save({"a": T, "reward_scaler": {"mean": 1, "count": 7}}, file),
        r"reward_scaler\.mean is 1, no tensor",
    ),
    "a scaler like a trainer's": (lambda file: torch.save({"a": T, "scaler": {"std": 2.0}}, file), r"scaler\.std is 2"),
    "NaN": (lambda file: torch.save({"a": T, "b": torch.tensor([1, torch.nan])}, file), "tensor b .* not a number"),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and torch.load warns about an archive of it
@pytest.mark.parametrize("content", REFUSED)
def test_pickle_with_anything_but_tensors_is_refused(tmp_path, content):
    save, told = REFUSED[content]
    file = tmp_path / "weights.bin"
    save(file)
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(file))}.*{told}") as caught:
        unpickle.write_safetensors({file: ""}, tmp_path)
    assert "weights_only" not in str(caught.value), "the message has torch's advice to load the file anyway"
    assert file.is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["weights.bin"]


def test_a_failed_conversion_leaves_no_files_and_no_limit(tmp_path, capsys, monkeypatch, signals_kept):
    source = tmp_path / "source"
    out = tmp_path / "out"
    save_pickled(source, "pytorch_model.bin", lambda own: {"a": T}, _use_new_zipfile_serialization=False)
    file = source / "pytorch_model.bin"
    # elements of the storage
    small = pickle.dumps(2, 2)[2:-1]
    huge = pickle.dumps(2 * 10**9, 2)[2:-1]
    assert file.read_bytes().count(b"cpuq\x06" + small) == 1
    good = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    file.write_bytes(good.replace(b"cpuq\x06" + small, b"cpuq\x06" + huge))

    assert convert(source, out) == 2
    told = r"pytorch_model\.bin is no file of tensors that .* in [\d,]+ MB of memory: .*allocate"
    assert re.search(told, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    file.write_bytes(good)
    monkeypatch.setattr(unpickle, "say", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(source, out)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def write_index(folder, weight_map):
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_conversion_refuses_invalid_folders_with_the_reason(tmp_path, capsys):
    source = tmp_path / "source"
    out = tmp_path / "out"
    own = save_pickled(source, "a.pt")

    def refused(told, folder=source):
        assert convert(folder, out) == 2
        said = capsys.readouterr().err
        assert re.search(told, said), said
        assert not out.exists()

    refused("none does not exist; give the folder", tmp_path / "none")
    torch.save(own, source / "b.pt")
    refused(r"has a\.pt, b\.pt, not one file to convert; give the path of the weights' file")
    write_index(source, {"x": "../a.pt"})
    refused(r"index\.json names \.\./a\.pt, which is no file in this folder")
    write_index(source, {"x": "missing.bin"})
    refused(r"names missing\.bin, which is no file")
    write_index(source, {"x": "a.pt", "y": "b.pt"})
    refused(r"b\.pt: \S+ is in a\.pt as well")
    write_index(source, {"x": "a.pt", "model.norm.weight": "a.pt"})
    (source / "b.pt").unlink()
    refused(r"index\.json lists x, which no file contains")
    (source / "pytorch_model.bin.index.json").write_text("{}")
    refused(r"index\.json has no weight_map")
    (source / "pytorch_model.bin.index.json").unlink()
    with mock.patch("shutil.disk_usage", return_value=mock.Mock(free=10)):
        refused("0.0 GB are free; make room")
    (source / "config.json").unlink()
    refused(r"has no config\.json; copy it and the tokenizer's files there")
    save_tiny(source, "llama", "reward")
    (source / "a.pt").unlink()
    refused("nothing to convert: its weights are safetensors")
    out.mkdir()
    assert convert(source, out) == 2
    assert "already exists" in capsys.readouterr().err


def test_heads_in_separate_pickles_are_converted(tmp_path, capsys, signals_kept):
    source = tmp_path / "source"
    save_tiny(source, "llama", "body")
    own = load_file(source / "model.safetensors")
    head = {"network.0.weight": torch.ones(10, 16), "network.0.bias": torch.zeros(10)}
    torch.save(head, source / "regression_layer.pt")
    torch.save({"scale": torch.ones(2)}, source / "pytorch_model_head.bin")
    torch.save(torch.ones(3), source / "calibration.pth")
    save_file({"v_head.weight": torch.ones(1, 16)}, source / "model_value_head.safetensors")
    assert main(["--reward", str(source)]) == 2
    told = "calibration.pth, pytorch_model_head.bin, regression_layer.pt is not read, but may contain a part"
    assert told in capsys.readouterr().err
    (source / "model_value_head.safetensors").rename(tmp_path / "head.safetensors")
    torch.save({"v_head.summary.weight": torch.ones(1, 16)}, source / "value_head.bin")
    assert main(["--reward", str(source)]) == 2
    assert "regression_layer.pt, value_head.bin may contain one; convert it" in capsys.readouterr().err
    (tmp_path / "head.safetensors").rename(source / "model_extra.safetensors")
    assert convert(source, tmp_path / "out") == 2
    assert "it has 2 heads, v_head.summary, v_head; set value_head_prefix" in capsys.readouterr().err
    convert(source / "value_head.bin", tmp_path / "one")
    assert "left out, since value_head.bin alone was given: calibration.pth, pytorch_model" in capsys.readouterr().out
    renamed = {f"regression_layer.{name}": tensor for name, tensor in head.items()}
    more = {"pytorch_model_head.scale": torch.ones(2), "calibration": torch.ones(3), "v_head.weight": torch.ones(1, 16)}
    assert_same(tensors_of(tmp_path / "out"), {**own, **renamed, **more, "v_head.summary.weight": torch.ones(1, 16)})


def test_init_models_inspects_and_converts_a_policy(tmp_path, capsys, signals_kept):
    source = tmp_path / "source"
    out = tmp_path / "out"
    save_tiny(source, "gpt2", "language")
    own = load_file(source / "model.safetensors")
    own["lm_head.weight"] = own["transformer.wte.weight"]  # tied: in a pickle it has both names
    torch.save(own, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    yaml_file = tmp_path / "my.yaml"
    assert main(["--policy", str(source), "--convert", str(out), "--out", str(yaml_file)]) == 0
    assert re.search(r"trial +loads; the log-prob of token 2 after token 1 is -\d", capsys.readouterr().out)
    assert load_config(yaml_file).actor.policy.model == out
    assert_same(tensors_of(out), own)
    save_pickled(tmp_path / "reward", "pytorch_model.bin")
    assert convert(tmp_path / "reward", tmp_path / "converted", role="--policy") == 2
    assert "does not use score.weight" in capsys.readouterr().err
