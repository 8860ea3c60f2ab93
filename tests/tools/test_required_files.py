"""Checks before a run starts: only what the run uses is rendered, loaded and checked."""

import asyncio
import functools
import json
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import reward_functions
import yaml
from live_system import make_run
from run_checkpoints import TEXTS, make_checkpoint, make_tokenizer
from settings import nested
from tiny_checkpoints import change_config, save_tiny

import rlhf_triton.actor.__main__
import rlhf_triton.tools.run
import rlhf_triton.tools.serve
import rlhf_triton.tools.server.starting
import rlhf_triton.trainer.__main__
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.scoring.reference import ServedReference
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.checkpoints.tokenization import load_tokenizer
from rlhf_triton.client.errors import UNKNOWN_MODEL, RequestFailed
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.required_files import check_critic, check_files
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.weights import Origin, WeightsStore
from rlhf_triton.tools import render_configs
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.checks.findings import Level
from rlhf_triton.tools.checks.prompt_rows import check_prompts
from rlhf_triton.trainer.publish import copy_checkpoint

ALGORITHMS = ("ppo", "rloo")  # with a critic, and without one
FUNCTION = {"verdict": {"function": f"{reward_functions.__file__}:token_sum", "workers": 1}}
REWARDS = {"model": None, "functions": FUNCTION, "both": {"model": {}, **FUNCTION}}
OF_THE_CRITIC = {"critic", "critic_infer", "critic_train", "critic_save"}
OF_THE_REWARD = {
    "model": {"reward_model"},
    "functions": {"reward_model", "reward_mixture", "reward_function_verdict"},
    "both": {"reward_model", "reward_mixture", "reward_function_verdict", "reward_checkpoint"},
}
every_combination = pytest.mark.parametrize(
    ("algorithm", "reward"), [(algorithm, reward) for algorithm in ALGORITHMS for reward in REWARDS]
)


def models_of(algorithm, reward):
    return OF_THE_REWARD[reward] | (OF_THE_CRITIC if algorithm == "ppo" else set())


def checkpoints_of(algorithm, reward):
    """Return the sections of the served models that are read from a checkpoint."""
    return [*(["reward"] if reward != "functions" else []), *(["critic"] if algorithm == "ppo" else [])]


def write_yaml(folder, algorithm, reward, checkpoints):
    """Write a YAML that names only what this run uses; return its path."""
    data = {
        "run": {"dir": str(folder / "run")},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "actor": nested(
            ActorSection,
            {
                "model": str(checkpoints.policy),
                "prompts_path": str(checkpoints.prompts),
                "algorithm_name": algorithm,
                "steps": 2,
                "rollout_size": 4,
                "responses_per_prompt": 2,
                "minibatch_size": 4,
                "max_new_tokens": 3,
                "prompts_max_tokens": 64,
                "mask_unfinished": False,
            },
        ),
    }
    for section in checkpoints_of(algorithm, reward):
        data[section] = {"model": str(getattr(checkpoints, section))}
    if REWARDS[reward] is not None:
        data["rewards"] = REWARDS[reward]
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


@every_combination
def test_rendered_models_and_version_0_per_algorithm(algorithm, reward, tmp_path, checkpoints, monkeypatch, capsys):
    path = write_yaml(tmp_path, algorithm, reward, checkpoints)
    config = load_config(path, ["server.training_key_env=RLHF_TEST_ABSENT"] if algorithm != "ppo" else [])
    check_files(config, server=True, actor=True)
    rendered = render_configs.render_configs(config)
    assert set(rendered) == models_of(algorithm, reward)
    assert parameters_of(rendered["reward_model"])["tokenizer_fingerprint"], (
        "the reward model has no fingerprint to compare with the policy's"
    )

    started = mock.Mock(return_value=mock.Mock(returncode=0))
    monkeypatch.setattr("subprocess.run", started)
    rlhf_triton.tools.server.starting.ensure_first_version(config, path, [])
    assert started.called == (algorithm == "ppo")
    said = capsys.readouterr().out
    assert said == ("creating version 0 of the critic's weights\n" if algorithm == "ppo" else "")


@every_combination
def test_missing_files_are_listed_before_anything_starts(algorithm, reward, tmp_path, checkpoints, capsys):
    """All missing files are listed at once, a line for each, and only those that the run uses."""
    path = write_yaml(tmp_path, algorithm, reward, checkpoints)
    unused = ["reward"] if reward == "functions" else []  # which would be refused by itself
    missing = [f"{role}.model={tmp_path / role}" for role in ("reward", "critic", "actor.policy") if role not in unused]
    overrides = [*missing, f"actor.prompts.path={tmp_path / 'none'}"]
    assert rlhf_triton.tools.run.main(["--fresh", "--config", str(path), *overrides]) == 2
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


@pytest.mark.parametrize(
    ("command", "roles"),
    [
        (rlhf_triton.tools.run, ("reward", "critic", "reference", "trainer", "actor.policy")),
        (rlhf_triton.tools.serve, ("reward", "critic", "reference")),
        (rlhf_triton.trainer.__main__, ("trainer",)),
        (rlhf_triton.actor.__main__, ("actor.policy",)),
    ],
)
def test_commands_refuse_a_missing_gpu_before_loading_a_model(
    command, roles, tmp_path, checkpoints, capsys, monkeypatch
):
    """torch and Triton report it in their own words, or with a traceback."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = write_yaml(tmp_path, "ppo", "model", checkpoints)
    for role in roles:
        overrides = [f"{role}.device=cuda:98", "actor.kl.reference=triton"]
        assert command.main(["--config", str(path), *overrides]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {role}.device: cuda:98 needs 99 GPUs; "), error
        assert error.endswith(", or set it to cpu")


def test_ppo_on_a_server_without_a_critic_is_refused(checkpoints):
    async def describe(model):
        if model == "critic":
            raise RequestFailed("critic refused", "Request for unknown model: 'critic' is not found")
        return ServedModel.of({"tokenizer_fingerprint": "known"})

    client = SimpleNamespace(describe=describe)
    ppo, other = (
        Scorer(client, load_tokenizer(checkpoints.policy), with_critic=with_critic) for with_critic in (True, False)
    )
    asyncio.run(other.compare_tokenizers())
    with pytest.raises(RlhfError, match=r"the server has no critic, which actor\.algorithm\.name needs"):
        asyncio.run(ppo.compare_tokenizers())


def test_reference_on_a_server_with_other_settings_is_refused(tmp_path, checkpoints):
    """Banned tokens may differ under the same vocabulary and weights if a token has another role."""
    run = make_run(tmp_path / "run", checkpoints, actor={"kl_reference": "triton"})
    served = ServedModel.of(parameters_of(render_configs.render_configs(run.config)["reference"]))
    client = SimpleNamespace(describe=mock.AsyncMock(return_value=served))

    def compare(*overrides):
        config = load_config(run.path, overrides)
        policy = Policy(config.actor)
        assert policy.reference is None, "the actor holds a reference although it is served"
        asyncio.run(ServedReference(client, policy, config.reference.model).compare())

    other_roles = make_tokenizer()
    other_roles.bos_token = "</s>"
    roles = make_checkpoint(tmp_path / "roles", "policy", other_roles, seed=3)
    weights = make_checkpoint(tmp_path / "weights", "policy", make_tokenizer(), seed=33)
    compare()
    compare(f"reference.model={tmp_path / 'on the server only'}")  # cannot be seen from here
    for override, message in {
        "generation.temperature=0.7": r"rendered with temperature 1\.0, the actor has 0\.7",
        "policy.precision=bfloat16": r"computes in float32, the actor in bfloat16.*set reference\.dtype and",
        f"policy.model={checkpoints.other_policy}": r"the reference's tokenizer differs from the policy's \(",
        f"policy.model={roles}": r"rendered with banned_token_ids \[0, 2\], the actor has \[2\]",
        f"policy.model={weights}": r"whose weights, config\.json or tokenizer differ from reference\.model \(",
    }.items():
        with pytest.raises(RlhfError, match=message):
            compare(f"actor.{override}")
    client.describe.side_effect = RequestFailed("refused", UNKNOWN_MODEL)
    with pytest.raises(RlhfError, match=r"the server has no model reference \(.*actor\.kl\.reference to"):
        compare()


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
        rendered = render_configs.render_configs(config)
        assert set(rendered) == served
        ensemble = rendered.get("critic_infer", "")
        assert ('output { name: "rewards"' in ensemble) == ("critic" in sections and len(sections) > 1)
    if "critic" not in sections:
        with pytest.raises(ConfigError, match="the YAML has no section `critic`, so there is nothing to train"):
            check_critic(config)


FUNCTIONS = """
import time


def good(sample):
    assert sample.metadata["text"] is not None if "text" in sample.metadata else sample.prompt
    return float(sample.response in sample.text and len(sample.tokens) > 0)


def peeks(sample):
    import os
    raise OSError([name for name in ("TRAINING_KEY", "WANDB_API_KEY", "SOME_SETTING") if name in os.environ])


def slow(sample):
    time.sleep(60)


def group(samples):
    return [1.0] * len(samples)


def trl(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


async def needs(completions, answer):
    return [0.0] * len(completions)


class Game:
    def __init__(self, highest=9): ...
    def reset(self, row): ...
    def step(self, action): return "more", 0.0, False


class Untold(Game):
    def step(self, action): return "only an observation"


class Strict(Game):
    def reset(self, row): self.moves = {"left": -1}
    def step(self, action): return self.moves[action.strip()], 0.0, False


class Choosy(Game):
    def reset(self, row): raise ValueError("no such game")


class Sleepy(Game):
    def reset(self, row): time.sleep(60)


class Hasty(Game):
    def reset(self, row): self.row = row
    def step(self, action): return self.row["answr"], 0.0, True


def run(base_url, task): ...
"""
LONGEST = "environment.max_tokens=100"
PLAYED = (LONGEST, "environment.class={file}:Game")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([], ""),
        (["rewards.mine.function={file}:trl"], ""),
        (
            ["rewards.mine.function={file}:needs"],
            "{file}:needs: answer is not a column of the prompts (columns: none); rena",
        ),
        (["rewards.mine.function={file}:peeks"], "OSError: ['SOME_SETTING']"),
        (
            ["rewards.mine.function={file}:slow", "rewards.mine.timeout_s=0.1"],
            "took longer than 0.1 s and was killed; raise rewards.mine.timeout_s, or ",
        ),
        (["rewards.mine.function={file}:group"], "TypeError: object of type 'Sample' has no len()"),
        (["rewards.mine.options={{margin: 2}}"], "margin"),
        ([*PLAYED, "environment.reward={file}:trl"], ""),
        ([LONGEST, "environment.agent={file}:run"], ""),
        ([LONGEST, "environment.class={file}:Untold"], "Untold: step: returned 'only an observation'; return a tuple"),
        ([LONGEST, "environment.class={file}:Strict"], ""),  # it may refuse a reply
        ([LONGEST, "environment.class={file}:Hasty"], "Hasty: step: KeyError: 'answr'"),
        (
            [LONGEST, "environment.class={file}:Gam"],
            "environment.class {file}:Gam: {file}:Gam cannot be imported: {file} has no",
        ),
        ([*PLAYED, "environment.options={{lowest: 1}}"], "Game.__init__() got an unexpected keyword argument 'lowest'"),
        (["critic.model={other_policy}"], "critic.model: the tokenizer of {other_policy} differs"),
        (
            ["actor.policy.lora_rank=2", "actor.policy.lora_targets=[v_proj,q_porj]"],
            "actor.policy.lora_targets: 'q_porj' matches no linear layer of {policy} that supports adapters "
            "(did you mean q_proj?); choose from down_proj, ",
        ),
        (
            ["trainer.lora_rank=2", "trainer.lora_targets=[score]"],
            "trainer.lora_targets: 'score' matches no linear layer of {critic} that supports adapters; choose from ",
        ),
    ],
)
def test_check_run_refuses_each_problem_with_one_line(settings, problem, tmp_path, checkpoints, monkeypatch):
    for name in ("TRAINING_KEY", "WANDB_API_KEY", "SOME_SETTING"):
        monkeypatch.setenv(name, "1")
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    names = {**vars(checkpoints), "file": file}
    run = make_run(tmp_path, checkpoints)
    given = [
        "rewards.model={}",
        f"rewards.mine.function={file}:good",
        *(setting.format(**names) for setting in settings),
    ]
    config = load_config(run.path, given)
    if not problem:
        preflight.check(config, "run")
        return
    with pytest.raises(ConfigError) as caught:
        preflight.check(config, "run")
    (line,) = str(caught.value).splitlines()
    assert problem.format(**names) in line
    if "rewards.mine" in " ".join(settings):
        assert line.startswith("rewards.mine.function: ")


@pytest.mark.parametrize(
    ("name", "limit", "problem"),
    [
        ("Choosy", 60, "ValueError: no such game (mine.py:{line})"),
        ("Sleepy", 0.5, "took longer than 0.5 s and was killed; raise environment.timeout_s, or "),
    ],
)
def test_environment_that_refuses_the_first_prompt_gets_a_warning(name, limit, problem, tmp_path, checkpoints):
    file = tmp_path / "mine.py"
    file.write_text(FUNCTIONS)
    run = make_run(tmp_path, checkpoints)
    given = ["rewards.model={}", LONGEST, f"environment.class={file}:{name}", f"environment.timeout_s={limit}"]
    config = load_config(run.path, given)
    (found,) = preflight.environment(preflight.CheckedRun(config))
    assert found.level is Level.WARNING
    line = FUNCTIONS[: FUNCTIONS.index("no such game")].count("\n") + 1
    assert found.text.startswith("fails on the first prompt (")
    assert f"mine.py:{name}: reset: " in found.text
    assert problem.format(line=line) in found.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "{} has no prompts"),
        (
            '{"text": "a"}\n{"text": "' + "a " * 2000 + '"}\n',
            "{}:2: 2001 tokens, but a prompt must have 1 to 512 (actor.prompts.max_tokens); "
            "set actor.prompts.too_long: skip to leave out longer prompts",
        ),
    ],
)
def test_empty_and_too_long_prompts_are_refused(text, words, tmp_path, checkpoints):
    prompts = tmp_path / "empty.jsonl"
    prompts.write_text(text)
    config = load_config(
        write_yaml(tmp_path, "rloo", "functions", checkpoints),
        [f"actor.prompts.path={prompts}", "actor.prompts.max_tokens=512"],
    )
    with pytest.raises(ConfigError) as caught:
        check_prompts(config)
    assert str(caught.value) == f"actor.prompts.path: {words.format(prompts)}"


CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
SHOP = '''
class Shop:
    def reset(self, **columns): ...

    def buy(self, item: str) -> str:
        """
        Buy something.

        Args:
            item: What to buy.
        """
'''


def test_chat_prompts_need_chat_templates_of_policy_and_reward(tmp_path):
    """The policy's, and the reward model's, which renders them itself whatever its vocabulary."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    for name in ("policy", "same"):
        tokenizer.save_pretrained(tmp_path / name)
    tokenizer.add_tokens(["unheard"])
    tokenizer.save_pretrained(tmp_path / "other")
    prompts = tmp_path / "prompts.jsonl"
    actor = {"policy": {"model": tmp_path / "policy"}, "prompts": {"path": prompts}}

    def check(reward, prompt, **settings):
        prompts.write_text(json.dumps({"text": "first"}) + "\n" + json.dumps({"prompt": prompt}) + "\n")
        config = {"actor": actor, "reward": {"model": str(tmp_path / reward), **settings}}
        check_prompts(RunConfig.model_validate(config))

    check("other", "a text")
    (tmp_path / "empty.jsonl").touch()
    actor["validation"] = {"prompts": tmp_path / "empty.jsonl", "size": 0}
    check("other", "a text")  # they would not be read
    conversation = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ConfigError, match=r"actor\.policy\.model: .*policy has no chat template, but actor"):
        check("same", conversation)
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("same", "other"):
        for settings in ({}, {"text": "pair"}, {"process": {"separator": ".", "mark": "!"}}):
            with pytest.raises(ConfigError, match=rf"reward\.model: .*{name} has no chat template.*'content'"):
                check(name, conversation, **settings)
    check("same", conversation, logit={"tokens": [1]}, template="{{ response }}")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    check("other", conversation)
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[1].role) }}")
    refused = r"jsonl:2: reward\.model: messages: the chat template rejects the messages: no assistant"
    with pytest.raises(ConfigError, match=refused):
        check("other", conversation)
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    left_out = (
        r"jsonl:2: reward\.model: messages\[1\]: the reward model's chat template omits messages of the role 'assi"
    )
    with pytest.raises(ConfigError, match=left_out):
        check("other", conversation)
    check("other", conversation, process={"separator": ".", "mark": "!"})  # which reads the reply without the template
    (tmp_path / "other" / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ (tools or []) | length }}" + CHAT)
    (tmp_path / "shop.py").write_text(SHOP)
    environment = {"class": f"{tmp_path / 'shop.py'}:Shop", "max_tokens": 600}
    for settings, problems in (({}, 1), ({"template": "{{ response }}"}, 0)):
        prompts.write_text(json.dumps({"prompt": conversation}))
        reward = {"model": str(tmp_path / "other"), **settings}
        sections = {"actor": actor, "reward": reward, "rewards": {"model": {}}, "environment": environment}
        config = RunConfig.model_validate(sections)
        found = [*preflight.environment(preflight.CheckedRun(config))]
        refused = [one.text for one in found if one.level is Level.FAILED]
        assert all("reward.model: messages: the reward model's chat template omits the tools" in one for one in refused)
        assert len(refused) == problems
    undefined = r"jsonl:1: reward\.model: reward\.template cannot be rendered: .* has no attribute 'hint'"
    with pytest.raises(ConfigError, match=undefined):
        check("other", conversation, logit={"tokens": [1]}, template="{{ response }}{{ metadata.hint }}")


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


CHATS = "actor.prompts.path={chats}"
TRUNCATED = (CHATS, "actor.prompts.too_long=truncate")  # for the policy; the reward model reads the whole chat


@pytest.mark.parametrize(
    ("settings", "refused"),  # 100 tokens of a prompt, and as many positions as the models of the tests have: 128
    [
        (["actor.generation.max_new_tokens=28"], ""),
        (["actor.generation.max_new_tokens=29"], "reward 128 critic 128"),
        (["actor.generation.max_new_tokens=9", "critic.max_length=108"], "critic 108"),
        (["actor.generation.max_new_tokens=29", "reward.model={other_reward}"], "critic 128"),  # receives texts
        (["actor.generation.max_new_tokens=29", "reward.text=pair"], "reward 128 critic 128"),
        (["actor.generation.max_new_tokens=28", "reward.append_eos=true"], "reward 128"),  # a cut reply has none
        (["actor.generation.max_new_tokens=27", "reward.append_eos=true"], ""),
        (["actor.generation.max_new_tokens=26", CHATS], "reward 128"),  # `a`, ` ` and `</s>`
        (["actor.generation.max_new_tokens=25", CHATS], ""),
        ([*TRUNCATED, "actor.prompts.max_tokens=9", "actor.generation.max_new_tokens=100"], ""),
        ([*TRUNCATED, "actor.prompts.max_tokens=9", "actor.generation.max_new_tokens=118"], "reward 128"),
        (["actor.generation.max_new_tokens=29", "actor.kl.reference=triton"], "reward 128 critic 128 reference 128"),
    ],
)
def test_rows_must_fit_every_model_that_receives_them(settings, refused, tmp_path, checkpoints):
    """Otherwise reward model and critic refuse the longest responses, and the run masks them."""
    run = make_run(tmp_path, checkpoints, actor={"prompts_max_tokens": 100})
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": TEXTS[0]}]}))
    names = {**vars(checkpoints), "chats": chats}
    config = load_config(run.path, [each.format(**names) for each in settings])
    found = ""
    try:
        check_prompts(config)
    except ConfigError as error:
        found = str(error)
    lines = re.findall(r"(\w+)\.model: takes rows of at most (\d+) tokens", found)
    assert " ".join(f"{role} {limit}" for role, limit in lines) == refused
    assert found.count("\n") == max(0, len(lines) - 1)


@pytest.mark.usefixtures("signals_kept")
@pytest.mark.parametrize(("command", "code"), [("serve", 0), ("run", 130)])
def test_signal_at_the_end_of_the_servers_start_stops_it(command, code, tmp_path, checkpoints, monkeypatch):
    """The server is running, but the caller has not received it yet."""
    path = write_yaml(tmp_path, "grpo", "functions", checkpoints)
    server = mock.Mock()

    def start(*_, **__):
        signal.raise_signal(signal.SIGTERM)
        return server

    module = {"serve": rlhf_triton.tools.serve, "run": rlhf_triton.tools.run}[command]
    monkeypatch.setattr(rlhf_triton.tools.server.starting, "start_server", start)
    monkeypatch.setattr(rlhf_triton.tools.server.starting, "ServerHealth", mock.Mock())
    assert module.main(["--config", str(path)]) == code
    server.stop.assert_called_once_with()
