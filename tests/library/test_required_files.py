"""`rlhf_triton.config.required_files`: each file that a run uses is checked before it starts, and no other."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
from live_system import make_run
from run_checkpoints import make_tokenizer
from run_yaml import FUNCTION, checkpoints_of, every_combination, write_yaml
from settings import nested
from tiny_checkpoints import change_config, save_tiny

from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.required_files import check_files
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.store.weights import Origin, WeightsStore
from rlhf_triton.tools import render_configs
from rlhf_triton.tools.run import main as run
from rlhf_triton.trainer.publish import copy_checkpoint


@every_combination
def test_missing_files_are_listed_before_anything_starts(algorithm, reward, tmp_path, checkpoints, capsys):
    """All missing files are listed at once, a line for each, and only those that the run uses."""
    path = write_yaml(tmp_path, algorithm, reward, checkpoints)
    unused = ["reward"] if reward == "functions" else []  # which would be refused by itself
    missing = [f"{role}.model={tmp_path / role}" for role in ("reward", "critic", "actor.policy") if role not in unused]
    overrides = [*missing, f"actor.prompts.path={tmp_path / 'none'}"]
    assert run(["--fresh", "--config", str(path), *overrides]) == 2
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    expected = [*(f"{role}.model" for role in checkpoints_of(algorithm, reward)), "actor.policy.model"]
    expected.append("actor.prompts.path")
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(expected)
    for line in lines:
        role = line.partition(".")[0]
        assert str(tmp_path / ("none" if "prompts" in line else role)) in line
        assert "give " in line, "the message does not say what to do"
    assert not (tmp_path / "run").exists()


def test_missing_checkpoint_error_says_how_to_fix_it(tmp_path):
    def missing(config, **of):
        with pytest.raises(ConfigError) as caught:
            check_files(
                RunConfig.model_validate({**config, "actor": nested(ActorSection, config.get("actor", {}))}), **of
            )
        return str(caught.value)

    start = f" (relative paths start at {Path.cwd()})"
    assert missing({}, server=True).splitlines() == [
        "reward.model: checkpoints/reward does not exist or is not a folder; give the folder of a Hugging Face "
        f"checkpoint{start}, or use only functions in `rewards`",
        "critic.model: checkpoints/critic does not exist or is not a folder; give the folder of a Hugging Face "
        f"checkpoint{start}, or choose an actor.algorithm.name without a critic: grpo, rloo or reinforce++",
    ]
    hub = missing({"reward": {"model": "org/some-model"}}, server=True)
    assert "`hf download org/some-model --local-dir models/some-model`, then give that folder" in hub.splitlines()[0]
    no_critic = {"algorithm_name": "reinforce++"}
    functions = {"verdict": {"function": "rewards/math.py:verify"}, "other": {"function": "package.module:name"}}
    assert missing({"actor": no_critic, "rewards": functions}, server=True).splitlines() == [
        "actor.policy.model: checkpoints/policy has no tokenizer to decode the policy's tokens for reward "
        "functions; give the folder of the policy's model",
        f"rewards.verdict.function: rewards/math.py does not exist; give the path of a Python file{start}",
    ]
    check_files(
        RunConfig.model_validate({"rewards": FUNCTION}), server=True
    )  # another trainer sends texts, so no tokenizer is needed
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    trackers = {"trackers": ["comet_ml", "mlflow"]}
    told = missing({"actor": {"model": str(tmp_path), "validation_prompts": "held-out.jsonl", **trackers}}, actor=True)
    assert "actor.trackers: comet_ml and mlflow are not installed; pip install comet_ml mlflow 'numpy<2' " in told
    assert f"actor.policy.model: {tmp_path} has no model.safetensors: it contains only pickled weights" in told
    assert "actor.validation.prompts: held-out.jsonl does not exist; give a file of prompts" in told
    assert "reference.model: none" in missing(
        {"actor": {**no_critic, "kl_reference": "triton"}, "reference": {"model": "none"}}, server=True
    )


def test_checkpoint_without_a_tokenizer_or_head_is_refused(tmp_path, checkpoints):
    for role in ("policy", "reward"):
        shutil.copytree(getattr(checkpoints, role), tmp_path / role, ignore=shutil.ignore_patterns("*token*"))
    (tmp_path / "prompts.jsonl").touch()
    for policy, reward, told in (
        (tmp_path / "policy", checkpoints.reward, f"actor.policy.model: {tmp_path}/policy has no tokenizer; save"),
        (checkpoints.policy, checkpoints.policy, f"reward.model: {checkpoints.policy} is not a trained reward"),
        (checkpoints.policy, tmp_path / "reward", f"reward.model: {tmp_path}/reward has no tokenizer.json, nor"),
    ):
        actor = {"policy": {"model": policy}, "prompts": {"path": tmp_path / "prompts.jsonl"}}
        sections = {"actor": actor, "reward": {"model": reward}}
        with pytest.raises(ConfigError, match=re.escape(told)):
            check_files(RunConfig.model_validate(sections), server=True, actor=True)
    (tmp_path / "policy" / "tokenizer.model").touch()
    actor["policy"]["model"] = tmp_path / "policy"
    check_files(RunConfig.model_validate(sections), actor=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"config.json": {"model_type": "mine"}}, "transformers has no mine models, and the checkpoint's own code is"),
        (
            {"config.json": {"hidden_size": "x"}},
            "its tokenizer cannot be loaded: config.json: hidden_size is 'x', which transformers rejects (TypeErr",
        ),
        ({"config.json": {"text_config": "a"}}, "config.json: text_config is 'a', must be an object; "),
        ({"tokenizer.json": None}, "its tokenizer cannot be loaded: Expecting value"),
        ("https://huggingface.co/org/name/tree/main", "`hf download org/name --local-dir models/name`, then give that"),
        ("https://huggingface.co/org/name", "reward.model: https://huggingface.co/org/name does not exist"),
        ("$HOME/name", "without variables, which only a shell expands"),
        ("~/no-such-model", f"{Path.home()}/no-such-model does not exist"),
        ({}, "reward.max_length: 100000 exceeds the "),
    ],
)
def test_unservable_reward_folder_is_refused_in_one_line(change, told, tmp_path, checkpoints):
    """Only the reason of transformers' own message is shown."""
    folder = tmp_path / "reward"
    shutil.copytree(checkpoints.reward, folder)
    for name, keys in change.items() if isinstance(change, dict) else ():
        known = json.loads((folder / name).read_text())
        (folder / name).write_text("" if keys is None else json.dumps({**known, **keys}))
    length = {"max_length": 100_000} if change == {} else {}
    model = change if isinstance(change, str) else str(folder)
    config = RunConfig.model_validate({"reward": {"model": model, **length}})
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        check_files(config, server=True)
    assert len(str(caught.value).splitlines()) == 1


def test_reward_model_is_refused_as_policy_reference_and_logit_reward(tmp_path, checkpoints):
    (tmp_path / "prompts.jsonl").touch()
    models = {"policy": {"model": checkpoints.reward}, "prompts": {"path": tmp_path / "prompts.jsonl"}}
    sections = {
        "actor": {**models, "kl": {"reference": "triton"}},
        "reference": {"model": checkpoints.reward},
        "reward": {"model": checkpoints.reward, "logit": {"tokens": [0]}},
        "critic": {"model": checkpoints.policy},  # a value head starts at 0
    }
    with pytest.raises(ConfigError) as caught:
        check_files(RunConfig.model_validate(sections), server=True, actor=True)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["reward.model", "reference.model", "actor.policy.model"]
    assert all(
        "have no output layer such as lm_head.weight, and it does not use score.weight" in line for line in lines
    )
    sections |= {"actor": {}, "reward": {"model": checkpoints.reward}}
    check_files(RunConfig.model_validate(sections), server=True)
    critic = shutil.copytree(checkpoints.policy, tmp_path / "critic")
    (critic / "value_head.bin").touch()
    with pytest.raises(ConfigError, match=r"critic\.model: \S+: value_head\.bin is not read, but may contain a part"):
        check_files(RunConfig.model_validate({**sections, "critic": {"model": critic}}), server=True)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("def length(sample): ...\nasync def other(sample): ...", "has no 'lenght'; it defines length, other"),
        ("x = 1", "has no 'lenght'; it defines no functions"),
        ("def lenght(sample:", "is not valid Python: '(' was never closed"),
        ("from elsewhere import lenght", None),
        ("from elsewhere import *", None),
        ("if True:\n    lenght = len", None),
    ],
)
def test_missing_reward_function_is_refused_before_anything_starts(tmp_path, code, told):
    (tmp_path / "mine.py").write_text(code)
    config = RunConfig.model_validate({"rewards": {"length": {"function": f"{tmp_path / 'mine.py'}:lenght"}}})
    if told is None:
        check_files(config, server=True)
        return
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_files(config, server=True)


PAIR = "{model} has 2 labels (BAD, GOOD)"
ODDS = "reward.attribute_weights: {{BAD: -1, GOOD: 1}} (the log-odds of GOOD"
LABELS = {  # names; settings; weights, or what the refusal says
    "one": (["LABEL_0"], [], (None,)),
    "two": (["BAD", "GOOD"], [], [PAIR, ODDS, "reward.attribute_weights: separate (a reward for each)"]),
    "three": (["a", "b c", "no"], [], ["3 labels (a, b c, no)", 'weights: {{a: 1, "b c": 1, "no": 1}} (a number for']),
    "both": (["BAD", "GOOD"], ["reward.attribute_weights=separate"], ("separate",)),
    "by name": (["BAD", "GOOD"], ["reward.attribute_weights={{GOOD: 1, BAD: -1}}"], ([-1, 1],)),
    "unknown": (
        ["BAD", "GOOD"],
        ["reward.attribute_weights={{GOOD: 1, WORSE: 1}}"],
        [PAIR, "each of which reward.attribute_weights must name once (unknown: WORSE; missing: BAD)"],
    ),
    "too few": (["BAD", "GOOD"], ["reward.attribute_weights=[1]"], [PAIR, "but reward.attribute_weights has 1 numb"]),
    "steps of two": (["BAD", "GOOD"], ["reward.process={{separator: .}}"], (None,)),
    "steps of three": (
        ["a", "b", "c"],
        ["reward.process={{separator: .}}"],
        ["3 labels (a, b, c), but no setting says", "(a number for each)$"],
    ),
}


@pytest.mark.parametrize(("names", "settings", "expected"), LABELS.values(), ids=LABELS.keys())
def test_reward_labels_must_be_chosen_by_the_user(names, settings, expected, tmp_path):
    model = tmp_path / "reward"
    save_tiny(model, "llama", "reward", num_labels=len(names))
    make_tokenizer().save_pretrained(model)
    change_config(model, id2label=dict(enumerate(names)))
    path = tmp_path / "my.yaml"
    path.write_text(f"reward: {{model: {model}, device: cpu}}\n")
    config = load_config(path, [setting.format() for setting in settings])
    if isinstance(expected, tuple):
        check_files(config, server=True)
        found = parameters_of(render_configs.render_configs(config)["reward_model"])
        assert (json.loads(found["attribute_weights"]),) == expected
        return
    for check in (lambda: check_files(config, server=True), lambda: render_configs.render_configs(config)):
        with pytest.raises(ConfigError) as caught:
            check()
        assert str(caught.value).startswith("reward.model: ")
        for part in expected:
            assert part.format(model=model) in f"{caught.value}$"


def parameters_of(text):
    config = render_configs.parse_pbtxt("reward_model", text)
    return {name: value.string_value for name, value in config.parameters.items()}


def test_run_with_several_rewards_per_row_is_refused_before_the_start(tmp_path, checkpoints):
    save_tiny(tmp_path / "two", "llama", "reward", num_labels=2)
    make_tokenizer().save_pretrained(tmp_path / "two")
    run = make_run(tmp_path / "run", checkpoints)
    config = load_config(run.path, [f"reward.model={tmp_path / 'two'}", "reward.attribute_weights=separate"])
    check_files(config, server=True)
    with pytest.raises(
        ConfigError, match=r"two would return 2 rewards per row, but the run needs one; set reward.attr"
    ):
        check_files(config, server=True, actor=True)


def test_reward_model_that_differs_from_the_store_is_refused(tmp_path, checkpoints):
    """It would not be served."""
    run = make_run(
        tmp_path / "run", checkpoints, reward={"store": True}, actor={"name": "grpo", "responses_per_prompt": 2}
    )
    store = WeightsStore(run.config.run.reward_weights_dir)
    config = load_config(run.path, [f"reward.model={checkpoints.critic}"])
    told = "critic would not be served: .* whose {} other weights"
    for number, folder in enumerate((checkpoints.reward, checkpoints.other_reward)):
        check_files(run.config, server=True)
        store.add(functools.partial(copy_checkpoint, folder), Origin(run_id="run", step=0, parent=None, epoch=0))
        store.set_current(number)
        with pytest.raises(ConfigError, match=told.format(["version 0 has", "versions 0 and 1 have"][number])):
            check_files(config, server=True)
    check_files(run.config, server=True)  # version 0
    check_files(load_config(run.path, [f"reward.model={checkpoints.other_reward}"]), server=True)  # version 1
    shutil.copytree(checkpoints.reward, tmp_path / "scaled")
    edited = tmp_path / "scaled" / "config.json"
    edited.write_text(json.dumps({**json.loads(edited.read_text()), "reward_standardization": {"mean": 5, "std": 9}}))
    with pytest.raises(ConfigError, match=r"scaled would not be served: .* have other weights or another config\.json"):
        check_files(load_config(run.path, [f"reward.model={tmp_path / 'scaled'}"]), server=True)
