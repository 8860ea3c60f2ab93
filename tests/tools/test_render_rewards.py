"""`rewards` of the YAML: what is rendered of it, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from live_system import make_tokenizer
from test_render_configs import MODELS, parameters, parsed
from tiny_checkpoints import save_tiny

from python_backend.config import ConfigError, RunConfig, load_config
from tools import render_configs as render
from tools.server.model_loading import load_order

LENGTH = {"function": "rewards/length.py:penalty", "weight": -0.01, "timeout_s": 0.5, "workers": 3, "memory_mib": 99}
LABEL = {"function": "package.verifiers:label"}


def steps(config: object) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    return {s.model_name: (dict(s.input_map), dict(s.output_map)) for s in config.ensemble_scheduling.step}


def test_model_and_functions() -> None:
    rewards = {"length": LENGTH, "model": {"weight": 2}, "label": LABEL}
    configs = parsed(rewards=rewards, reward={"max_batch_size": 8}, critic={})
    functions = {"reward_function_length", "reward_function_label"}
    assert set(configs) == MODELS | functions | {"reward_checkpoint", "reward_mixture"}
    found = parameters(configs["reward_function_length"])
    assert found.pop("function") == f"{Path('rewards/length.py').absolute()}:penalty"
    assert found.pop("tokenizer") == str(Path("checkpoints/reward").absolute())
    assert found == {
        "hidden_variables": '["TRAINING_KEY", "TRITON_CONTROL_KEY"]',
        "timeout_s": "0.5",
        "workers": "3",
        "memory_mib": "99",
        "max_waiting_rows": "100000",
        "max_sentence_bytes": "1000000",
        "max_request_tokens": "4000000",
        "max_request_bytes": "4000000",
    }
    assert parameters(configs["reward_function_label"])["function"] == "package.verifiers:label"
    for model in ("reward_mixture", "reward_model"):
        assert json.loads(parameters(configs[model])["reward_components"]) == ["length", "model", "label"]
        assert json.loads(parameters(configs[model])["reward_weights"]) == [-0.01, 2, 1]
    assert parameters(configs["reward_checkpoint"])["standardization"] == "checkpoint"
    assert {config.max_batch_size for name, config in configs.items() if name.startswith("reward")} == {8}
    assert configs["reward_model"].platform == configs["critic_infer"].platform == "ensemble"
    parts = steps(configs["reward_model"])
    assert parts["reward_checkpoint"][1] == {"rewards": "component_model"}
    assert all("text_pairs" in part[0] for name, part in parts.items() if name != "reward_mixture")
    assert parts["reward_function_label"][1] == {"reward_component": "component_label", "reward_error": "error_label"}
    mixed = {"component_length", "error_length", "component_model", "component_label", "error_label"}
    assert set(parts["reward_mixture"][0]) == mixed == {tensor.name for tensor in configs["reward_mixture"].input}
    # One after the other: each takes what the step before it gives, the checkpoint is the first.
    order = ["reward_checkpoint", "reward_function_length", "reward_function_label", "reward_mixture"]
    assert list(parts) == order
    assert "after_critic" not in parts["reward_checkpoint"][0]
    assert parts["reward_function_length"][0]["after_component"] == "component_model"
    assert parts["reward_function_label"][0]["after_component"] == "component_length"
    both = steps(configs["critic_infer"])  # without an ensemble within the ensemble
    assert list(both) == ["critic", *order]
    assert both["reward_checkpoint"][0]["after_critic"] == "after_critic"
    assert both["reward_mixture"] == parts["reward_mixture"]
    assert set(both["reward_mixture"][1]) == {"rewards", "reward_components", "reward_errors"}
    (components,) = [t for t in configs["critic_infer"].output if t.name == "reward_components"]
    assert list(components.dims) == [3]


def test_yes_and_no_without_quotes_are_refused(tmp_path: Path) -> None:
    """YAML reads them as true and false, which must not become the token ids 1 and 0."""
    path = tmp_path / "run.yaml"
    path.write_text("reward: {logit: {tokens: [yes], against: [no]}}")
    with pytest.raises(ConfigError, match=r"reward\.logit\.tokens: True is not a token; .* in quotes"):
        load_config(path)
    path.write_text("reward: {logit: {tokens: ['yes', 7], against: ['no']}}")
    assert load_config(path).reward.logit.model_dump() == {"tokens": ["yes", 7], "against": ["no"]}


def test_labels_are_declared_only_with_probabilities(tmp_path: Path) -> None:
    """The gateway requests the probabilities of a model with labels."""
    save_tiny(tmp_path, "llama", "critic", num_labels=2)
    make_tokenizer().save_pretrained(tmp_path)
    for more in ({}, {"process": {}}):
        config = parsed(reward={"checkpoint": str(tmp_path), **more})["reward_model"]
        has_probabilities = "probabilities" in {output.name for output in config.output}
        assert has_probabilities == (parameters(config)["labels"] != "[]") == (not more)


def test_a_term_sees_no_key_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_functions_alone_serve_no_checkpoint_and_take_the_policys_tokenizer(tmp_path: Path) -> None:
    """Where the policy is another trainer's, the critic's, or what the reward names."""
    sections: dict[str, Any] = {role: {"checkpoint": str(tmp_path / role)} for role in ("reward", "critic")}
    sections["actor"] = {"policy": {"checkpoint": str(tmp_path / "actor")}}
    for role in sections:
        make_tokenizer().save_pretrained(tmp_path / role)
        configs = parsed(rewards={"label": LABEL}, **sections)
        assert "reward_checkpoint" not in configs
        assert parameters(configs["reward_function_label"])["tokenizer"] == str(tmp_path / role)


def test_parts_are_loaded_before_their_sum() -> None:
    assert load_order(MODELS) == [
        {"reward_model", "critic"},
        {"critic_infer"},
        {"critic_train"},
        {"critic_save"},
    ]
    parts = {"reward_checkpoint", "reward_mixture", "reward_function_a"}
    order = load_order(MODELS | parts | {"somebody_elses"})
    assert order[:3] == [parts | {"critic"}, {"reward_model"}, {"critic_infer"}]
    assert order[-1] == {"somebody_elses"}


def test_a_reward_that_is_gone_from_the_yaml_is_gone_from_the_repository(tmp_path: Path) -> None:
    before = RunConfig.model_validate({"rewards": {"model": {}, "length": LENGTH, "label": LABEL}})
    render.render_repository(before, tmp_path)
    (tmp_path / "reward_of_mine").mkdir()
    (tmp_path / "reward_of_mine" / "config.pbtxt").write_text('name: "reward_of_mine"')
    assert not render.check_repository(before, tmp_path)
    after = RunConfig.model_validate({"rewards": {"label": LABEL}})
    gone = {tmp_path / "reward_function_length", tmp_path / "reward_checkpoint"}
    assert gone < {drift.path for drift in render.check_repository(after, tmp_path)}
    render.render_repository(after, tmp_path)
    assert not render.check_repository(after, tmp_path)
    assert not any(path.exists() for path in gone)
    render.render_repository(RunConfig(), tmp_path)
    assert not render.check_repository(RunConfig(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*MODELS, "reward_of_mine"}
    assert (tmp_path / "reward_model" / "1" / "model.py").is_file()


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("{}", "rewards: Dictionary should have at least 1 item"),
        ("{Length: {function: 'a:b'}}", "rewards.Length: a name has 1 to 40 characters from a-z, 0-9 and _"),
        ("{model: {timeout_s: 1}}", "rewards.model.timeout_s: 'model' is the checkpoint of the reward section"),
        ("{model: {function: 'a:b'}}", "rewards.model.function: 'model' is the checkpoint of the reward section"),
        ("{length: {weight: 1}}", "rewards.length.function is missing: only 'model'"),
        (
            "{length: {function: nonsense}}",
            "'nonsense' does not name a function; write path/to/file.py:name or package",
        ),
        ("{length: {function: 'a:b', weight: .nan}}", "rewards.length.weight: Input should be a finite number"),
        ("{length: {function: 'a:b', timeout_s: 0}}", "rewards.length.timeout_s: Input should be greater than 0"),
        ("{length: {function: 'a:b', workers: 0}}", "rewards.length.workers: Input should be greater than or equal"),
        ("{length: {function: 'a:b', wieght: 2}}", "unknown key rewards.length.wieght; did you mean rewards.length.we"),
        (
            "{length: {function: 'a:b', timeout_s: 90}}",
            "rewards.length.timeout_s (90) must be below actor.client.deadl",
        ),
    ],
)
def test_what_is_wrong_is_said_by_key_and_value(tmp_path: Path, rewards: str, message: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"rewards: {rewards}\n")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(path)
    print(caught.value)
