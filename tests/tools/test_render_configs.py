"""`rlhf_triton.tools.render_configs`: the files are readable by Triton's own protobuf, complete and up to date."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from run_checkpoints import make_checkpoint, make_tokenizer
from run_yaml import FUNCTION, every_combination, write_yaml
from settings import nested
from tiny_checkpoints import save_tiny
from triton_rules import check_rules
from tritonclient.grpc.model_config_pb2 import DataType
from versions import reseal

from rlhf_triton.checkpoints.inspection import CheckpointError, fingerprint_model
from rlhf_triton.checkpoints.tokenization import fingerprint
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.required_files import check_critic, check_files
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.store.weights import Origin, WeightsStore
from rlhf_triton.tools import render_configs as render
from rlhf_triton.tools.server.model_loading import compile_ahead, load_order
from rlhf_triton.tools.server.starting import ensure_first_version
from rlhf_triton.wire.contract import REFERENCE

MODELS = {"reward_model", "critic", "critic_infer", "critic_train", "critic_save"}
SCORING = "tokens:INT64[-1] sequence_lengths:INT64[1] sentences:STRING[1] metadata:STRING[1]"
VALUES = "values:FP32[-1] weights_version:INT64[1]"
TRAINING = "returns:FP32[-1,-1] prev_values:FP32[-1,-1] mask:FP32[-1,-1]"
IDENTITY = "run_id:STRING[1] step:INT64[1]"
TENSORS = {  # inputs and outputs
    "reward_model": (
        f"{SCORING} text_pairs:STRING[1] after_critic:INT64[1]",
        "rewards:FP32[1] probabilities:FP32[-1] no_outputs_named:INT64[1]",
    ),
    "critic": (f"{SCORING} prompt_lengths:INT64[1]", f"{VALUES} after_critic:INT64[1]"),
    "critic_infer": (f"{SCORING} prompt_lengths:INT64[1]", f"rewards:FP32[1] {VALUES}"),
    "critic_train": (
        f"tokens:INT64[-1,-1] sequence_lengths:INT64[-1,1] {TRAINING} {IDENTITY}",
        "loss_mean:FP32[1] weights_version:INT64[1]",
    ),
    "critic_save": (
        f"dummy_var:INT64[1] {IDENTITY} keep_steps:INT64[-1] rewind_to:INT64[1]",
        "status:INT64[1] weights_version:INT64[1]",
    ),
    "reference": ("tokens:INT64[-1] sequence_lengths:INT64[1]", "logprobs:FP32[-1]"),
}


def parsed(**sections):
    texts = render.render_configs(RunConfig.model_validate(sections))
    return {model: render.parse_pbtxt(model, text) for model, text in texts.items()}


def parameters(config):
    return {key: value.string_value for key, value in config.parameters.items()}


def described(tensors):
    """Return name, type and shape of each tensor."""
    return " ".join(f"{t.name}:{DataType.Name(t.data_type)[5:]}{list(t.dims)}".replace(" ", "") for t in tensors)


def test_rendered_models_have_the_contracts_names_dtypes_and_shapes():
    configs = parsed(actor={"kl": {"reference": "triton"}})
    assert set(configs) == set(TENSORS) == {config.name for config in configs.values()}
    assert configs["critic_infer"].platform == "ensemble"
    assert {config.backend for config in configs.values()} == {"python", ""}
    batches = {name: config.max_batch_size for name, config in configs.items()}
    assert batches == dict.fromkeys(configs, 8192) | {"critic_train": 0, "critic_save": 0}
    for model, config in configs.items():
        assert (described(config.input), described(config.output)) == TENSORS[model], model
        assert all(tensor.optional for tensor in config.input), model  # the model says what is missing, by name
        is_scoring = model in ("reward_model", "critic", "reference")
        assert config.HasField("dynamic_batching") == is_scoring
        assert [t.name for t in config.input if t.allow_ragged_batch] == ["tokens"] * is_scoring


def test_settings_reach_the_rendered_configs():
    configs = parsed(
        critic={
            "instances": 3,
            "device": "cuda:1",
            "threads": 5,
            "token_budget": 99,
            "max_length": 33,
            "dtype": "bfloat16",
            "reload": "triton",
        },
        server={"max_request_tokens": 6000, "queue_timeout_s": 1.5},
        reward={"standardization": {"mean": 1.5, "std": 2}, "device": "cuda"},
        run={"dir": "runs/x", "run_id": "name"},
    )
    critic = configs["critic"]
    reward = configs["reward_model"]
    train = configs["critic_train"]
    group = critic.instance_group[0]
    assert (group.count, group.kind, list(group.gpus)) == (3, group.KIND_GPU, [1])
    policy = critic.dynamic_batching.default_queue_policy
    assert policy.default_timeout_microseconds == 1_500_000
    assert (policy.timeout_action, policy.allow_timeout_override) == (policy.REJECT, True)
    # A policy that is not configured costs much: with a default timeout, requests that cannot merge trickle.
    assert not parsed()["reward_model"].dynamic_batching.HasField("default_queue_policy")
    everywhere = reward.instance_group[0]  # on every GPU that the server sees
    assert (everywhere.count, everywhere.kind, list(everywhere.gpus)) == (1, everywhere.KIND_GPU, [])
    store = str(Path("runs/x/weights/critic").absolute())
    sent = {"store": store, "device": "cuda:1", "threads": "5", "token_budget": "99", "max_length": "33"}
    assert parameters(critic).items() >= {**sent, "reload": "triton", "max_request_tokens": "6000"}.items()
    assert json.loads(parameters(reward)["standardization"]) == {"mean": 1.5, "std": 2.0}
    expected = {"store": store, "run_id": "name"}
    assert parameters(train).items() >= expected.items()
    assert parameters(configs["critic_save"])["run_id"] == "name"


@pytest.mark.parametrize(
    ("critic", "threads", "token_budget"),
    [
        ({}, "1/2", "1024"),  # the reward model has the other half of the cores
        ({"instances": 3}, "1/6", "1024"),
        ({"threads": 5, "token_budget": 7}, "5", "7"),
        ({"device": "cuda"}, "1", "16384"),
        ({"tensor_parallel": 2}, "1/4", "1024"),
    ],
)
def test_machine_dependent_settings_are_resolved_at_load(critic, threads, token_budget):
    found = parameters(parsed(critic=critic, reward={})["critic"])
    assert (found["threads"], found["token_budget"]) == (threads, token_budget)


def test_tensor_parallel_model_is_rendered_as_one_instance():
    for device, kind in (("cpu", "KIND_CPU"), ("cuda:4", "KIND_MODEL")):
        config = parsed(critic={"tensor_parallel": 4, "device": device})["critic"]
        (group,) = config.instance_group
        assert (group.count, group.kind, list(group.gpus)) == (1, getattr(group, kind), [])
        assert parameters(config)["tensor_parallel"] == "4"


def test_rendered_paths_survive_quoting(tmp_path):
    odd = tmp_path / 'a "quoted" \\ bäckslash, {{ jinja }} and a\ttab'
    configs = parsed(run={"dir": str(odd)}, critic={"model": str(odd)})
    assert parameters(configs["critic"])["model"] == str(odd)
    assert parameters(configs["critic_train"])["journal"] == str(odd / "journal")


def test_the_training_key_is_rendered_as_its_hash(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    texts = render.render_configs(RunConfig.model_validate({"server": {"training_key_env": "MY_KEY"}}))
    assert hashlib.sha256(b"secret").hexdigest() in texts["critic_train"]
    assert not any("secret" in text for text in texts.values())
    for value in ("", None):
        monkeypatch.setenv("MY_KEY", value) if value is not None else monkeypatch.delenv("MY_KEY")
        with pytest.raises(ConfigError, match=r"server\.training_key_env names MY_KEY, but"):
            render.render_configs(RunConfig.model_validate({"server": {"training_key_env": "MY_KEY"}}))


REWARDS = {"model": {"weight": 1.0}, "length": {"function": f"{__file__}:parsed"}}
PROCESS = {"process": {"granularity": "step", "separator": ". "}}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"reward": {"store": True}},
        {"reward": {"attribute_weights": "separate"}, "actor": {"kl": {"reference": "triton"}}},
        {"reward": PROCESS},
        {"reward": {"process": {"granularity": "token"}}},
        {"rewards": REWARDS},
        {"rewards": {"length": REWARDS["length"]}},
        {"rewards": REWARDS, "reward": {"store": True}},
        {"rewards": REWARDS, "reward": PROCESS},
        {"rewards": REWARDS, "actor": {"algorithm": {"name": "reinforce++"}}},
    ],
)
def test_rendered_repositories_are_consistent(sections):
    check_rules(parsed(**sections))


def test_invalid_pbtxt_and_a_missing_tokenizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"critic_train/config.pbtxt is not valid for Triton"):
        render.parse_pbtxt("critic_train", 'backand: "python"')
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path} has no tokenizer")):
        parsed(critic={"model": str(tmp_path)})


def test_rendering_removes_foreign_version_folders(tmp_path):
    """Triton takes each for a version; one of 20 digits ends it at the next load, and at every start."""
    config = RunConfig()
    render.render_repository(config, tmp_path)
    for name in ("99999999999999999999", "5.tmp", "notes"):
        (tmp_path / "critic" / name).mkdir()
    assert {drift.path.name for drift in render.check_repository(config, tmp_path)} == {"99999999999999999999", "5.tmp"}
    render.render_repository(config, tmp_path)
    assert {path.name for path in (tmp_path / "critic").iterdir()} == {"1", "config.pbtxt", "notes"}
    assert (tmp_path / "critic_infer" / "1").is_dir()


def test_render_command_writes_and_checks_the_repository(tmp_path, capsys):
    out = ["--out", str(tmp_path / "repository")]
    assert render.main([*out, "--check"]) == 1
    assert "is not up to date" in capsys.readouterr().err
    assert render.main([*out, "critic.instances=2"]) == 0
    assert render.main([*out, "critic.instances=2", "--check"]) == 0
    assert render.main([*out, "--check"]) == 1
    assert "-instance_group { count: 2" in capsys.readouterr().err
    assert render.main([*out, "critic.instance=2"]) == 2
    assert "did you mean critic.instances?" in capsys.readouterr().err


# ---- the reference ----


def load(tmp_path, **sections):
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({**sections, "actor": nested(ActorSection, sections.get("actor", {}))}))
    return load_config(path)


def rendered(config):
    return render.parse_pbtxt(REFERENCE, render.render_configs(config)[REFERENCE])


def test_reference_config_follows_the_actors_sampling(tmp_path):
    policy, other = (
        make_checkpoint(tmp_path / name, "policy", make_tokenizer(), seed=seed)
        for name, seed in (("policy", 3), ("other", 4))
    )
    assert fingerprint_model(policy) != fingerprint_model(other)
    settings = {"kl_reference": "triton", "model": str(policy), "temperature": 0.7, "precision": "bfloat16"}
    for section, checkpoint in (({}, policy), ({"model": str(other)}, other)):
        found = parameters(rendered(load(tmp_path, actor=settings, reference=section)))
        assert (found["model"], found["dtype"]) == (str(checkpoint), "bfloat16")
        assert (float(found["temperature"]), json.loads(found["banned_token_ids"])) == (0.7, [0, 2])
        assert found["checkpoint_fingerprint"] == fingerprint_model(checkpoint)
        assert found["tokenizer_fingerprint"] == fingerprint(make_tokenizer())
    (tmp_path / "policy" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"reference\.model: .* has no model\.safetensors"):
        rendered(load(tmp_path, actor=settings))


# ---- rewards ----

LENGTH = {"function": "rewards/length.py:penalty", "weight": -0.01, "timeout_s": 0.5, "workers": 3}
LABEL = {"function": "package.verifiers:label"}


def steps(config):
    return {s.model_name: (dict(s.input_map), dict(s.output_map)) for s in config.ensemble_scheduling.step}


@pytest.mark.parametrize("model", ["reward_model", "critic", "reference"])
def test_servers_may_differ_only_in_parameters_that_change_no_score(model):
    harmless = {
        "device",
        "max_request_tokens",
        "model",
        "queue_timeout_s",
        "tensor_parallel",
        "threads",
        "token_budget",
    }
    declared = parameters(parsed(actor={"kl": {"reference": "triton"}}, reward={"store": True})[model])
    followed = set() if model == "reference" else {"reload", "store"}
    assert declared.keys() - ServedModel.of(declared).meaning.keys() == harmless | followed


def test_declared_fingerprints_differ_for_different_rewards(tmp_path):
    """A client sends its rows only to servers that declare the same."""
    make_checkpoint(tmp_path / "reward", "reward", make_tokenizer(), seed=3)
    file = tmp_path / "mine.py"
    file.write_text("def length(sample): return 1.0")

    def declared(rewards, **reward):
        section = {"model": str(tmp_path / "reward"), **reward}
        return parameters(parsed(rewards=rewards, reward=section)["reward_model"])

    function = {"function": f"{file}:length"}
    cases = [{"rewards": None}, {"rewards": {"length": function, "model": {}}}]
    before = [declared(**case) for case in cases]
    assert declared({"length": {**function, "options": {"n": 1}}, "model": {}}) != before[1]
    groupwise = {**function, "groupwise": True}
    assert declared({"a": function, "b": groupwise}) != declared({"a": groupwise, "b": function})
    assert all(declared(**case, pooling="last") != found for case, found in zip(cases, before, strict=True))
    file.write_text("def length(sample): return 2.0")
    assert [declared(**case) == found for case, found in zip(cases, before, strict=True)] == [True, False]
    config = tmp_path / "reward" / "config.json"
    as_saved = config.read_text()
    config.write_text(json.dumps({**json.loads(as_saved), "reward_standardization": {"mean": 5, "std": 9}}))
    assert [declared(**case) == found for case, found in zip(cases, before, strict=True)] == [False, False]
    config.write_text(as_saved)
    make_checkpoint(tmp_path / "reward", "reward", make_tokenizer(), seed=4)
    assert [declared(**case) == found for case, found in zip(cases, before, strict=True)] == [False, False]


@pytest.mark.parametrize("rewards", [None, {"length": LABEL, "model": {}}])
def test_models_of_two_stores_differ_and_models_of_a_copy_do_not(tmp_path, rewards):
    """Version 1 of one store is not that of the other, although both begin with the same weights."""

    def declared(run):
        configs = parsed(run={"dir": str(run), "run_id": "run"}, reward={"store": True}, critic={}, rewards=rewards)
        return [ServedModel.of(parameters(configs[model])).meaning for model in ("critic", "reward_model")]

    def write(folder):
        (folder / "model.safetensors").write_bytes(b"weights")

    for name in ("one", "other"):
        for model in ("critic", "reward"):
            WeightsStore(tmp_path / name / "weights" / model).add(write, Origin(run_id="run"))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    one, other, copy = (declared(tmp_path / name) for name in ("one", "other", "copy"))
    assert [mine == theirs for mine, theirs in zip(one, other, strict=True)] == [False, False]
    assert one == copy
    WeightsStore(tmp_path / "copy" / "weights" / "critic").add(write, Origin(run_id="run", step=1, parent=0, epoch=1))
    assert declared(tmp_path / "copy") == copy
    for folder in (
        tmp_path / name / "weights" / model / "0" for name in ("one", "other") for model in ("critic", "reward")
    ):
        reseal(folder, store_id=None)  # as made before stores had ids
    assert declared(tmp_path / "one") == declared(tmp_path / "other") != one
    reseal(tmp_path / "other" / "weights" / "critic" / "0", files={})
    assert declared(tmp_path / "one")[0] != declared(tmp_path / "other")[0]
    (tmp_path / "one" / "weights" / "critic" / "0" / "manifest.json").write_text("{")
    declared(tmp_path / "one")  # serving a later version does not need version 0


def test_model_and_function_rewards_render_as_an_ensemble():
    rewards = {"length": LENGTH, "model": {"weight": 2}, "label": LABEL}
    configs = parsed(rewards=rewards, critic={})
    functions = {"reward_function_length", "reward_function_label"}
    assert set(configs) == MODELS | functions | {"reward_checkpoint", "reward_mixture"}
    assert parameters(configs["reward_function_length"]) == {
        "function": f"{Path('rewards/length.py').absolute()}:penalty",
        "tokenizer": str(Path("checkpoints/reward").absolute()),
        "hidden_variables": '["TRAINING_KEY", "TRITON_CONTROL_KEY"]',
        "timeout_s": "0.5",
        "workers": "3",
        "max_waiting_rows": "100000",
        "max_request_tokens": "4000000",
    }
    assert parameters(configs["reward_function_label"])["function"] == "package.verifiers:label"
    for model in ("reward_mixture", "reward_model"):
        mixture = {key: json.loads(parameters(configs[model])[f"reward_{key}"]) for key in ("components", "weights")}
        assert mixture == {"components": ["length", "model", "label"], "weights": [-0.01, 2, 1]}
    # One after the other: each takes what the step before it gives, the checkpoint is the first.
    parts = steps(configs["reward_model"])
    order = ["reward_checkpoint", *sorted(functions, reverse=True)]
    assert list(parts) == [*order, "reward_mixture"]
    assert all("text_pairs" in parts[name][0] for name in order)
    after = [parts[name][0].get("after_component") for name in order]
    assert after == [None, "component_model", "component_length"]
    mixed = {"component_length", "error_length", "component_model", "component_label", "error_label"}
    assert set(parts["reward_mixture"][0]) == mixed == {tensor.name for tensor in configs["reward_mixture"].input}
    both = steps(configs["critic_infer"])  # without an ensemble within the ensemble
    assert list(both) == ["critic", *parts]
    assert "after_critic" not in parts["reward_checkpoint"][0]
    assert both["reward_checkpoint"][0]["after_critic"] == "after_critic"
    assert both["reward_mixture"] == parts["reward_mixture"]


def test_labels_are_declared_only_with_probabilities(tmp_path):
    """The gateway requests the probabilities of a model with labels."""
    save_tiny(tmp_path, "llama", "critic", num_labels=2)
    make_tokenizer().save_pretrained(tmp_path)
    for more in ({"attribute_weights": [1, 1]}, {"process": {}}):
        config = parsed(reward={"model": str(tmp_path), **more})["reward_model"]
        has_probabilities = "probabilities" in {output.name for output in config.output}
        assert has_probabilities == (parameters(config)["labels"] != "[]") == ("process" not in more)


def test_a_reward_term_sees_only_its_own_key(monkeypatch):
    monkeypatch.setenv("MINE", "secret")
    judges = {name: {**LABEL, "options": {"api_key_env": name}} for name in ("one", "two")}
    sections = {
        "server": {"training_key_env": "MINE"},
        "gateway": {"key_env": "GATE"},
        "rewards": {"l": LENGTH, **judges},
    }
    configs = parsed(**sections, critic={})
    hidden = {
        name: set(json.loads(parameters(configs[f"reward_function_{name}"])["hidden_variables"]))
        for name in ("l", "one", "two")
    }
    always = {"TRITON_CONTROL_KEY", "TRAINING_KEY", "MINE", "GATE"}
    assert hidden == {"l": always | {"one", "two"}, "one": always | {"two"}, "two": always | {"one"}}


def test_function_rewards_without_a_model_use_the_policys_tokenizer(tmp_path):
    """If another trainer has the policy, the critic's tokenizer is used, or the one that the reward names."""
    sections = {role: {"model": str(tmp_path / role)} for role in ("reward", "critic")}
    sections["actor"] = {"policy": {"model": str(tmp_path / "actor")}}
    for role in sections:
        make_tokenizer().save_pretrained(tmp_path / role)
        configs = parsed(rewards={"label": LABEL}, **sections)
        assert "reward_checkpoint" not in configs
        assert parameters(configs["reward_function_label"])["tokenizer"] == str(tmp_path / role)


def test_load_order_puts_reward_terms_before_their_sum():
    parts = {"reward_checkpoint", "reward_mixture", "reward_function_a"}
    others = [{"critic_infer"}, {"critic_train"}, {"critic_save"}]
    assert load_order(MODELS) == [{"reward_model", "critic"}, *others]
    order = [parts | {"critic"}, {"reward_model"}, *others, {"another"}]
    assert load_order(MODELS | parts | {"another"}) == order


LAYOUTS = [
    {},
    {"reward": {}},  # no actor, no critic
    {"critic": {}},
    {"rewards": {"label": LABEL}},
    {"rewards": {"model": {}, "length": LENGTH}},
    {"actor": {"kl": {"reference": "triton"}, "algorithm": {"name": "reinforce++"}}},
]


@pytest.mark.parametrize("after", LAYOUTS, ids=json.dumps)
@pytest.mark.parametrize("before", LAYOUTS, ids=json.dumps)
def test_rerendering_equals_a_fresh_folder(tmp_path, before, after):
    """A model.py left beside an ensemble once made the supervisor restart the server in an endless loop."""

    def render_into(folder, sections):
        config = RunConfig.model_validate(sections)
        render.render_repository(config, folder)
        compile_ahead(folder)
        assert not render.check_repository(config, folder)
        return {path.relative_to(folder) for path in folder.rglob("*")}

    render_into(tmp_path / "used", before)
    own = tmp_path / "used" / "reward_of_mine" / "config.pbtxt"
    own.parent.mkdir()
    own.write_text('name: "reward_of_mine"')
    added = {Path("reward_of_mine"), Path("reward_of_mine/config.pbtxt")}
    assert render_into(tmp_path / "used", after) - added == render_into(tmp_path / "fresh", after)
    assert own.is_file()


def test_rendering_completes_an_interrupted_removal(tmp_path, monkeypatch):
    before, after = (
        RunConfig.model_validate({"rewards": rewards}) for rewards in ({"length": LENGTH}, {"label": LABEL})
    )
    render.render_repository(before, tmp_path)
    removed = []

    def remove(path):
        if removed:
            raise KeyboardInterrupt
        shutil.rmtree(path)
        removed.append(path)

    monkeypatch.setattr(render, "shutil", SimpleNamespace(rmtree=remove))
    with pytest.raises(KeyboardInterrupt):
        render.render_repository(after, tmp_path)
    monkeypatch.undo()
    render.render_repository(after, tmp_path)
    assert not (tmp_path / "reward_function_length").exists()


OF_THE_CRITIC = {"critic", "critic_infer", "critic_train", "critic_save"}
OF_THE_REWARD = {
    "model": {"reward_model"},
    "functions": {"reward_model", "reward_mixture", "reward_function_verdict"},
    "both": {"reward_model", "reward_mixture", "reward_function_verdict", "reward_checkpoint"},
}


def models_of(algorithm, reward):
    return OF_THE_REWARD[reward] | (OF_THE_CRITIC if algorithm == "ppo" else set())


@every_combination
def test_rendered_models_and_version_0_per_algorithm(algorithm, reward, tmp_path, checkpoints, monkeypatch, capsys):
    path = write_yaml(tmp_path, algorithm, reward, checkpoints)
    config = load_config(path, ["server.training_key_env=RLHF_TEST_ABSENT"] if algorithm != "ppo" else [])
    check_files(config, server=True, actor=True)
    rendered = render.render_configs(config)
    assert set(rendered) == models_of(algorithm, reward)
    reward_model = render.parse_pbtxt("reward_model", rendered["reward_model"])
    assert parameters(reward_model)["tokenizer_fingerprint"], (
        "the reward model has no fingerprint to compare with the policy's"
    )

    started = mock.Mock(return_value=mock.Mock(returncode=0))
    monkeypatch.setattr("subprocess.run", started)
    ensure_first_version(config, path, [])
    assert started.called == (algorithm == "ppo")
    said = capsys.readouterr().out
    assert said == ("creating version 0 of the critic's weights\n" if algorithm == "ppo" else "")


@pytest.mark.parametrize(
    ("sections", "served"),
    [
        ({"critic"}, OF_THE_CRITIC),
        ({"reward"}, OF_THE_REWARD["model"]),
        ({"rewards", "reward"}, OF_THE_REWARD["both"]),
        ({"critic", "reward"}, OF_THE_CRITIC | {"reward_model"}),
        ({"critic", "functions"}, OF_THE_CRITIC | OF_THE_REWARD["functions"]),  # for a policy with its tokenizer
    ],
)
def test_yaml_without_an_actor_serves_the_models_it_names(sections, served, tmp_path, checkpoints, monkeypatch):
    every = {"rewards": {"model": {}, **FUNCTION}, "functions": FUNCTION}
    every |= {name: {"model": str(getattr(checkpoints, name))} for name in ("reward", "critic")}
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "policy").symlink_to(checkpoints.policy)  # the default, so that a run can be planned
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my.yaml"
    given = {"rewards" if name == "functions" else name: every[name] for name in sections}
    path.write_text(yaml.safe_dump({"run": {"dir": str(tmp_path / "run")}, **given}))
    for overrides in ([], ["run.deterministic=true"], ["actor.client.deadline_s=120"]):  # the gateway has that client
        config = load_config(path, overrides)
        check_files(config, server=True)
        rendered = render.render_configs(config)
        assert set(rendered) == served
        ensemble = rendered.get("critic_infer", "")
        assert ('output { name: "rewards"' in ensemble) == ("critic" in sections and len(sections) > 1)
    if "critic" not in sections:
        with pytest.raises(ConfigError, match="the YAML has no section `critic`, so there is nothing to train"):
            check_critic(config)
