"""`tools.render_configs`: what is rendered is what Triton's own protobuf reads, complete and up to date."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from triton_rules import check_rules

from python_backend.config import ConfigError, RunConfig
from python_backend.wire import contract
from tools import render_configs as render

MODELS = {"reward_model", "critic", "critic_infer", "critic_train", "critic_save"}


def parsed(**sections: dict) -> dict:
    texts = render.render_configs(RunConfig.model_validate(sections))
    return {model: render.parse_config(model, text) for model, text in texts.items()}


def parameters(config: object) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def test_every_model_is_rendered_under_its_name():
    configs = parsed()
    assert set(configs) == MODELS == {config.name for config in configs.values()}
    assert configs["critic_infer"].platform == "ensemble"
    assert {configs[name].backend for name in MODELS - {"critic_infer"}} == {"python"}


def test_names_dtypes_and_shapes_are_the_contracts():
    from tritonclient.grpc import model_config_pb2 as pb

    scoring = [
        (contract.TOKENS, pb.TYPE_INT64, [-1]),
        (contract.SEQUENCE_LENGTHS, pb.TYPE_INT64, [1]),
        (contract.SENTENCES, pb.TYPE_STRING, [1]),
        (contract.METADATA, pb.TYPE_STRING, [1]),
    ]
    rewards = [(contract.REWARDS, pb.TYPE_FP32, [1])]
    times = [(name, pb.TYPE_INT64, [1]) for name in (contract.QUEUE_US, contract.COMPUTE_US, contract.UNNAMED)]
    pairs, labels = (contract.TEXT_PAIRS, pb.TYPE_STRING, [1]), (contract.PROBABILITIES, pb.TYPE_FP32, [-1])
    values = [(name, pb.TYPE_FP32, [-1]) for name in (contract.VALUES, contract.RESPONSE_VALUES)]
    values += [(contract.WEIGHTS_VERSION, pb.TYPE_INT64, [1])]
    targets = [(name, pb.TYPE_FP32, [-1, -1]) for name in (contract.RETURNS, contract.PREV_VALUES, contract.MASK)]
    version = (contract.WEIGHTS_VERSION, pb.TYPE_INT64, [1])
    run_id = (contract.RUN_ID, pb.TYPE_STRING, [1])
    train = [(contract.TOKENS, pb.TYPE_INT64, [-1, -1]), (contract.SEQUENCE_LENGTHS, pb.TYPE_INT64, [-1, 1])]
    train += [*targets, run_id, (contract.STEP, pb.TYPE_INT64, [1])]
    step = (contract.STEP, pb.TYPE_INT64, [1])
    save = [(contract.DUMMY_VAR, pb.TYPE_INT64, [1]), run_id, step]
    save += [(contract.KEEP_STEPS, pb.TYPE_INT64, [-1]), (contract.REWIND_TO, pb.TYPE_INT64, [1])]
    prompts, after = (contract.PROMPT_LENGTHS, pb.TYPE_INT64, [1]), (contract.AFTER_CRITIC, pb.TYPE_INT64, [1])
    expected = {
        "reward_model": ([*scoring, pairs, after], [*rewards, labels, *times]),
        "critic": ([*scoring, prompts], [*values, after, *times]),
        "critic_infer": ([*scoring, prompts], rewards + values),
        "critic_train": (train, [(contract.LOSS_MEAN, pb.TYPE_FP32, [1]), version]),
        "critic_save": (save, [(contract.STATUS, pb.TYPE_INT64, [1]), version]),
    }
    for model, config in parsed().items():
        found = [[(t.name, t.data_type, list(t.dims)) for t in side] for side in (config.input, config.output)]
        assert found == list(expected[model]), model
        assert all(tensor.optional for tensor in config.input), model  # the model says what is missing, by name


def test_only_scoring_models_batch_and_their_tokens_are_ragged():
    configs = parsed(reward={"max_batch_size": 8}, critic={"max_batch_size": 16})
    sizes = {name: config.max_batch_size for name, config in configs.items()}
    assert sizes == {"reward_model": 8, "critic": 16, "critic_infer": 8, "critic_train": 0, "critic_save": 0}
    for name in ("reward_model", "critic"):
        assert configs[name].HasField("dynamic_batching")
        assert [t.name for t in configs[name].input if t.allow_ragged_batch] == ["tokens"]


def test_settings_reach_the_files():
    configs = parsed(
        critic={
            "instances": 3,
            "device": "cuda:1",
            "queue_delay_us": 17,
            "preferred_batch_size": [4, 8],
            "threads": 5,
            "token_budget": 99,
            "micro_batch_rows": 7,
            "max_length": 33,
            "dtype": "bfloat16",
            "reload": "triton",
            "forward_overhead_tokens": 12,
            "max_sentence_bytes": 5000,
            "max_request_tokens": 6000,
            "max_request_bytes": 7000,
            "strip_sequence_length_to_multiple": 16,
            "max_queue_size": 31,
            "queue_timeout_s": 1.5,
        },
        reward={"preferred_batch_size": 4, "standardization": {"mean": 1.5, "std": 2}, "device": "cuda"},
        trainer={"heartbeat_timeout_s": 2.5},
        run={"dir": "runs/x", "run_id": "name"},
    )
    critic, reward, train = configs["critic"], configs["reward_model"], configs["critic_train"]
    group = critic.instance_group[0]
    assert (group.count, group.kind, list(group.gpus)) == (3, group.KIND_GPU, [1])
    assert critic.dynamic_batching.max_queue_delay_microseconds == 17
    assert list(critic.dynamic_batching.preferred_batch_size) == [4, 8]
    policy = critic.dynamic_batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (31, 1_500_000)
    assert (policy.timeout_action, policy.allow_timeout_override) == (policy.REJECT, True)
    # A policy that is not configured costs much: with a default timeout, requests that cannot merge trickle.
    assert not reward.dynamic_batching.HasField("default_queue_policy")
    assert list(reward.dynamic_batching.preferred_batch_size) == [4]
    everywhere = reward.instance_group[0]  # on every GPU that the server sees
    assert (everywhere.count, everywhere.kind, list(everywhere.gpus)) == (1, everywhere.KIND_GPU, [])
    found = parameters(critic)
    assert found.pop("checkpoint") == str(Path("checkpoints/critic").absolute())
    assert found.pop("store") == str(Path("runs/x/weights/critic").absolute()) == parameters(train)["store"]
    assert found == {
        "device": "cuda:1",
        "dtype": "bfloat16",
        "threads": "5",
        "token_budget": "99",
        "micro_batch_rows": "7",
        "workers": "1",
        "max_length": "33",
        "tokenizer_fingerprint": "",
        "reload": "triton",
        "forward_overhead_tokens": "12",
        "max_sentence_bytes": "5000",
        "strip_sequence_length_to_multiple": "16",
        "queue_timeout_s": "1.5",
        "max_request_tokens": "6000",
        "max_request_bytes": "7000",
        "compile": "false",
        "tensor_parallel": "1",
    }
    assert json.loads(parameters(reward)["standardization"]) == {"mean": 1.5, "std": 2.0}
    assert parameters(train)["heartbeat_timeout_s"] == "2.5"
    assert parameters(train)["run_id"] == parameters(configs["critic_save"])["run_id"] == "name"


@pytest.mark.parametrize(("device", "kind"), [("cpu", "KIND_CPU"), ("cuda:4", "KIND_MODEL")])
def test_a_model_over_several_devices_is_one_instance(device: str, kind: str):
    config = parsed(critic={"tensor_parallel": 4, "device": device})["critic"]
    (group,) = config.instance_group
    assert (group.count, group.kind, list(group.gpus)) == (1, getattr(group, kind), [])
    assert parameters(config)["tensor_parallel"] == "4"
    assert parameters(config)["workers"] == "1"


def test_any_path_survives_the_quoting(tmp_path: Path):
    odd = tmp_path / 'a "quoted" \\ bäckslash, {{ jinja }} and a\ttab'
    configs = parsed(run={"dir": str(odd)}, critic={"checkpoint": str(odd)})
    assert parameters(configs["critic"])["checkpoint"] == str(odd)
    assert parameters(configs["critic_train"])["journal"] == str(odd / "journal")


def test_the_training_key_is_rendered_as_its_hash(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "secret")
    texts = render.render_configs(RunConfig.model_validate({"server": {"training_key_env": "MY_KEY"}}))
    assert hashlib.sha256(b"secret").hexdigest() in texts["critic_train"]
    assert not any("secret" in text for text in texts.values())
    for value in ("", None):
        monkeypatch.setenv("MY_KEY", value) if value is not None else monkeypatch.delenv("MY_KEY")
        with pytest.raises(ConfigError, match=r"server\.training_key_env names MY_KEY, but"):
            render.render_configs(RunConfig.model_validate({"server": {"training_key_env": "MY_KEY"}}))


def test_a_checkpoint_without_tokenizer_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path} has no tokenizer")):
        parsed(critic={"checkpoint": str(tmp_path)})


REWARDS = {"model": {"weight": 1.0}, "length": {"function": f"{__file__}:parsed"}}
PROCESS = {"process": {"granularity": "step", "separator": ". "}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"reward": {"store": True}},
        {"reward": {"merge_attributes": False}, "actor": {"kl": {"reference": "triton"}}},
        {"reward": PROCESS},
        {"reward": {"process": {"granularity": "token"}}},
        {"rewards": REWARDS},
        {"rewards": {"length": REWARDS["length"]}},
        {"rewards": REWARDS, "reward": {"store": True}},
        {"rewards": REWARDS, "reward": PROCESS},
        {"rewards": REWARDS, "actor": {"algorithm": {"name": "reinforce++"}}},
    ],
)
def test_whatever_is_served_keeps_the_rules(sections: dict):
    check_rules(parsed(**sections))


def broken(model: str, old: str, new: str) -> dict:
    texts = render.render_configs(RunConfig())
    assert old in texts[model]
    texts[model] = texts[model].replace(old, new)
    return {name: render.parse_config(name, text) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("model", "old", "new", "message"),
    [
        ("critic", " allow_ragged_batch: true", "", "critic/config.pbtxt: input tokens needs allow_ragged_batch"),
        ("critic_train", 'backend: "python"', "backend: python", "critic_train/config.pbtxt is not valid for Triton"),
        ("critic_train", 'backend: "python"', 'backand: "python"', "critic_train/config.pbtxt is not valid for Triton"),
        ("critic", 'name: "critic"', 'name: "kritic"', "critic/config.pbtxt: name is 'kritic'"),
        ("critic", 'name: "values" data_type: TYPE_FP32', 'name: "values" data_type: TYPE_FP16', "tensor values"),
        (
            "critic_infer",
            'name: "rewards" data_type: TYPE_FP32 dims: [ 1 ]',
            'name: "rewards" data_type: TYPE_FP32 dims: [ 2 ]',
            "reward_model has no tensor rewards of this type",
        ),
        (
            "critic_infer",
            'output_map { key: "response_values" value: "response_values" }',
            "",
            "critic_infer/config.pbtxt: no step produces output response_values",
        ),
        ("critic_infer", 'input_map { key: "tokens"', 'input_map { key: "ids"', "critic has no tensor ids of this"),
        (
            "critic_infer",
            'input { name: "metadata" data_type: TYPE_STRING dims: [ 1 ] optional: true }',
            "",
            "critic takes metadata, which is neither an input nor an output of an earlier step",
        ),
    ],
)
def test_rules_that_the_protobuf_cannot_know(model: str, old: str, new: str, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_rules(broken(model, old, new))


def test_int32_tokens_are_declared_everywhere_or_nowhere():
    from tritonclient.grpc import model_config_pb2 as pb

    for config in parsed(server={"tokens_dtype": "INT32"}).values():
        assert [t.data_type for t in config.input if t.name == "tokens"] in ([], [pb.TYPE_INT32]), config.name


def test_a_preferred_size_beyond_the_largest_is_refused():
    with pytest.raises(ConfigError, match="critic: preferred_batch_size 9 exceeds max_batch_size 8"):
        parsed(critic={"max_batch_size": 8, "preferred_batch_size": [4, 9]})


def test_rendering_twice_writes_once_and_drift_is_shown(tmp_path: Path):
    config = RunConfig()
    assert len(render.render_repository(config, tmp_path)) == 10  # a config and a model.py or .gitkeep each
    assert render.render_repository(config, tmp_path) == []
    assert render.check_repository(config, tmp_path) == []
    path = tmp_path / "critic" / "config.pbtxt"
    path.write_text(path.read_text().replace("count: 1", "count: 2"))
    (tmp_path / "critic_train" / "1" / "model.py").unlink()
    drifts = {drift.path: drift.diff for drift in render.check_repository(config, tmp_path)}
    assert set(drifts) == {path, tmp_path / "critic_train" / "1" / "model.py"}
    assert "-instance_group { count: 2" in drifts[path]
    assert render.render_repository(config, tmp_path) == list(drifts)


def test_versions_that_are_not_ours_are_removed(tmp_path: Path):
    """Triton takes each for a version; one of 20 digits ends it at the next load, and at every start."""
    config = RunConfig()
    render.render_repository(config, tmp_path)
    for name in ("99999999999999999999", "5.tmp", "notes"):
        (tmp_path / "critic" / name).mkdir()
    assert {drift.path.name for drift in render.check_repository(config, tmp_path)} == {"99999999999999999999", "5.tmp"}
    render.render_repository(config, tmp_path)
    assert {path.name for path in (tmp_path / "critic").iterdir()} == {"1", "config.pbtxt", "notes"}
    assert (tmp_path / "critic_infer" / "1").is_dir()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = ["--out", str(tmp_path / "repository")]
    assert render.main([*out, "--check"]) == 1
    assert "is not up to date" in capsys.readouterr().err
    assert render.main([*out, "critic.instances=2"]) == 0
    assert "to serve it here:\nsh -e <<'END'\n" in capsys.readouterr().out
    assert render.main([*out, "critic.instances=2", "--check"]) == 0
    assert render.main([*out, "--check"]) == 1
    assert "-instance_group { count: 2" in capsys.readouterr().err
    assert render.main([*out, "critic.instance=2"]) == 2
    assert "did you mean critic.instances?" in capsys.readouterr().err


def test_models_of_a_checkout_beyond_ascii_do_not_import_it_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for root, first in (("plain", "from"), ("ü", "import sys")):
        monkeypatch.setattr(render, "ROOT", tmp_path / root)
        render.render_repository(RunConfig(), tmp_path / "repository")
        assert (tmp_path / "repository" / "critic" / "1" / "model.py").read_text().startswith(first)
