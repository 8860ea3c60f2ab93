"""`rlhf-triton weights --model reward`: a published version is verified, passes the gate, and survives a crash."""

import json
import shutil

import numpy as np
import pytest
import torch
from run_checkpoints import OTHER_TEXTS, TEXTS, make_checkpoint, make_tokenizer
from sidecar_rig import Instance
from tiny_checkpoints import change_tensors
from versions import flip

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.models.modeling import load_reward, quiet_transformers
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.weights import main
from rlhf_triton.trainer.publish import initialise_stores

REPLIES = [" ".join(text.split()[:count]) for text in TEXTS for count in (2, 4, 6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    quiet_transformers()
    return make_checkpoint(tmp_path_factory.mktemp("reward"), "reward", make_tokenizer(), seed=1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, checkpoint):
    """Return pairs that the checkpoint ranks without a mistake."""
    reward = load_reward(checkpoint)
    tokenizer = make_tokenizer()

    def score(text):
        return float(reward.score([np.asarray(tokenizer(text)["input_ids"])])[0, 0])

    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    ranked = [sorted(pair, key=score) for pair in zip(REPLIES[::2], REPLIES[1::2], strict=True)]
    path.write_text("".join(json.dumps({"chosen": chosen, "rejected": worse}) + "\n" for worse, chosen in ranked))
    return path


class Run:
    """The folder of a run with a live reward model, whose single instance is simulated."""

    def __init__(self, folder, checkpoint, pairs):
        self.folder = folder
        self.config = RunConfig.model_validate(
            {
                "run": {"dir": folder / "run", "run_id": "run"},
                "actor": {"algorithm": {"name": "grpo", "responses_per_prompt": 2}},
                "reward": {"model": checkpoint, "store": True, "gate": pairs},
                "server": {"grpc_port": 1},
            }
        )
        initialise_stores(self.config)
        self.store = WeightsStore(self.config.run.reward_weights_dir)
        self.instance = Instance(self.store, "reward_model_0")
        self.instance.start()

    def tool(self, action, *arguments, **changes):
        path = self.folder / "run.yaml"
        data = json.loads(self.config.model_dump_json(exclude_none=True))
        data["reward"] |= changes
        path.write_text(json.dumps(data))
        return main([action, "--model", "reward", "--config", str(path), *arguments])

    def close(self):
        self.instance.close()


@pytest.fixture
def run(tmp_path, checkpoint, pairs):
    run = Run(tmp_path, checkpoint, pairs)
    yield run
    run.close()


def changed(run, change):
    """Return a copy of the served checkpoint with other weights."""
    folder = run.folder / "new"
    shutil.copytree(run.config.reward.model, folder, dirs_exist_ok=True)
    change_tensors(folder, change)
    return folder


def better(tensors):
    tensors["score.weight"].mul_(1.5)


@pytest.mark.device
def test_a_checkpoint_becomes_a_version_that_can_be_listed_verified_and_rolled_back(run, capsys):
    new = changed(run, better)
    assert run.tool("publish", str(new)) == 0
    told = capsys.readouterr().out
    assert "accuracy on 12 pairs: 1.0000, served version 0: 1.0000" in told
    assert f"version 1 is served, with the weights of {new}" in told
    assert (run.store.current(), run.instance.served) == (1, [0, 1])
    assert (run.store.folder(1) / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()
    assert run.tool("rollback") == 0
    assert "version 2 is served, with the weights of version 0" in capsys.readouterr().out
    assert run.store.manifest(2).digest == run.store.manifest(0).digest
    assert run.tool("verify") == 0
    assert capsys.readouterr().out.count("good") == 3
    assert run.tool("list") == 0
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()[1:]]
    first = str(run.config.reward.model)
    published = str(new)
    assert lines == [["0", "0", "-", first], ["1", "0", "0", published], ["2", "0", "0", "-"]]


def nan(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")


def permuted(tensors):
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(tensors["score.weight"].shape[1], generator=generator)
    tensors["score.weight"] = tensors["score.weight"][:, order].contiguous()


POISON = {
    "not finite": (nan, r"up_proj\.weight has values that are not finite"),
    "a permuted head": (permuted, "not published: its accuracy on reward.gate, 0."),
    "a head of zeros": (
        lambda tensors: tensors["score.weight"].zero_(),
        "not published: its accuracy on reward.gate, 0.0000, is more than",
    ),
}


@pytest.mark.parametrize("kind", POISON)
def test_publish_refuses_a_poisoned_reward_version(run, capsys, kind):
    change, message = POISON[kind]
    before = run.config.reward.model
    assert run.tool("publish", str(changed(run, change))) == 2
    told = capsys.readouterr()
    assert message.replace("\\", "") in told.err
    assert (run.store.current(), run.store.versions(), run.instance.served) == (0, [0], [0])
    assert run.tool("publish", str(before)) == 0, "a rejected version blocks the next one"
    if kind == "a permuted head":  # without a gate, only the weights are checked
        capsys.readouterr()
        assert run.tool("publish", str(changed(run, change)), gate=None) == 0
        assert "accuracy" not in capsys.readouterr().out


def test_publish_refuses_to_compare_with_a_damaged_version(run, capsys):
    """A worse checkpoint would pass the gate."""
    flip(run.store.folder(0) / "model.safetensors")
    assert run.tool("publish", str(changed(run, better))) == 2
    assert "version 0: model.safetensors has digest" in capsys.readouterr().err
    assert run.store.versions() == [0]


def test_publish_refuses_other_tokenizers_templates_and_unversioned_models(run, tmp_path, capsys):
    theirs = make_tokenizer(TEXTS + OTHER_TEXTS, vocab_size=200)
    other = make_checkpoint(tmp_path / "other", "reward", theirs, seed=4)
    assert run.tool("publish", str(other)) == 2
    assert "has another tokenizer or chat template than reward.model" in capsys.readouterr().err
    theirs = make_tokenizer()
    theirs.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    assert run.tool("publish", str(make_checkpoint(tmp_path / "template", "reward", theirs, seed=4))) == 2
    assert "has another tokenizer or chat template than reward.model" in capsys.readouterr().err
    assert run.store.versions() == [0]
    for action, *arguments in (["publish", "somewhere"], ["list"]):  # not live
        assert run.tool(action, *arguments, f"run.dir={tmp_path / 'other'}", store=False, gate=None) == 2
        assert "reward.store is false, so the reward model has no versions; set it to true" in capsys.readouterr().err
    shutil.copytree(run.store.root, run.config.run.weights_dir)
    with_critic = ["actor.algorithm.name=ppo", f"critic.model={run.config.reward.model}"]
    assert main(["publish", "--config", str(run.folder / "run.yaml"), "somewhere", *with_critic]) == 2
    assert "give --model reward" in capsys.readouterr().err  # only the sidecar publishes the critic


BAD_PAIRS = {
    "": "has no pair",
    "{": "line 1 is not JSON in UTF-8",
    '{"chosen": "a"}': 'line 1: rejected: must be a list of {"role": …, "content": …}, got None; it and `prompt`, if',
    '{"prompt": "q", "chosen": [{"role": "assistant", "content": "a"}], "rejected": "b"}': "must both be texts or both",
    '{"chosen": [{"role": "stranger", "content": "a"}], "rejected": []}': "the chat template rejects the messages",
    '{"chosen": "", "rejected": "b"}': "line 1: chosen: '' has no tokens",
    '{"prompt": "[{\\"role\\": \\"user\\"}]", "chosen": "a", "rejected": "b"}': "chosen: is a text that contains",
    '{"chosen": "a\\ud800", "rejected": "b"}': "line 1 is not JSON in UTF-8: 'utf-8' codec can't encode",
}


@pytest.mark.parametrize("line", BAD_PAIRS)
def test_publish_gate_errors_name_the_line(run, tmp_path, capsys, line):
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    gate = str(tmp_path / "bad.jsonl")
    assert run.tool("publish", str(run.config.reward.model), gate=gate) == 2
    told = capsys.readouterr().err
    assert BAD_PAIRS[line] in told
    assert run.store.versions() == [0]


def test_reward_version_0_is_created_once_and_must_be_finite(run, tmp_path):
    initialise_stores(run.config)
    assert run.store.versions() == [0]
    bad = run.config.reward.model_copy(update={"model": changed(run, nan)})
    with pytest.raises(ValueError, match=r"up_proj\.weight has values that are not finite"):
        initialise_stores(
            run.config.model_copy(
                update={"reward": bad, "run": run.config.run.model_copy(update={"dir": tmp_path / "other"})}
            )
        )
