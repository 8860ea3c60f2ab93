"""Only what a run uses is rendered, loaded, measured and demanded: every algorithm with every kind of reward."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import reward_functions
import yaml
from live_system import Checkpoints
from tiny_checkpoints import save_tiny
from tiny_models import regions

import actor.__main__
import tools.run
import tools.serve
import trainer.__main__
from actor.scoring.scorer import Scorer
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.client.errors import RequestFailed
from python_backend.client.served import ServedModel
from python_backend.config import ActorSection, ConfigError, RunConfig, load_config
from python_backend.config.required_files import check_files
from python_backend.config.sections import UNMEASURED
from python_backend.errors import RlhfError
from tests.support.settings import nested
from tools import render_configs
from tools.calibrate import calibration
from tools.server.model_loading import load_order

ALGORITHMS = ("ppo", "reinforce++", "rloo", "grpo")
FUNCTION = {"verdict": {"function": f"{reward_functions.__file__}:token_sum", "workers": 1}}
REWARDS: dict[str, dict[str, Any] | None] = {"model": None, "functions": FUNCTION, "both": {"model": {}, **FUNCTION}}
OF_THE_CRITIC = {"critic", "critic_infer", "critic_train", "critic_save"}
OF_THE_REWARD = {
    "model": {"reward_model"},
    "functions": {"reward_model", "reward_mixture", "reward_function_verdict"},
    "both": {"reward_model", "reward_mixture", "reward_function_verdict", "reward_checkpoint"},
}
every_combination = pytest.mark.parametrize(
    ("algorithm", "reward"), [(algorithm, reward) for algorithm in ALGORITHMS for reward in REWARDS]
)


def models_of(algorithm: str, reward: str) -> set[str]:
    return OF_THE_REWARD[reward] | (OF_THE_CRITIC if algorithm == "ppo" else set())


def checkpoints_of(algorithm: str, reward: str) -> list[str]:
    """Sections of the served models that are read from a checkpoint."""
    return [*(["reward"] if reward != "functions" else []), *(["critic"] if algorithm == "ppo" else [])]


def write_yaml(folder: Path, algorithm: str, reward: str, checkpoints: Checkpoints) -> Path:
    """The YAML that names nothing beyond what this run uses."""
    data: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "exit_timeout_s": 0},
        "actor": nested(
            ActorSection,
            {
                "checkpoint": str(checkpoints.policy),
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
        data[section] = {"checkpoint": str(getattr(checkpoints, section)), **UNMEASURED}
    if algorithm == "ppo":
        data["trainer"] = {"nice": 0}  # on a busy machine the run would wait for it
    if REWARDS[reward] is not None:
        data["rewards"] = REWARDS[reward]
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


@every_combination
def test_what_is_rendered_loaded_measured_and_demanded(
    algorithm: str, reward: str, tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_yaml(tmp_path, algorithm, reward, checkpoints)
    config = load_config(path, ["server.training_key_env=RLHF_TEST_ABSENT"] if algorithm != "ppo" else [])
    check_files(config, server=True, actor=True)

    out = config.run.repository_dir
    render_configs.render_repository(
        load_config(path, ["actor.algorithm.name=ppo"]), out
    )  # another run stood here before
    render_configs.render_repository(config, out)
    assert {folder.name for folder in out.iterdir()} == models_of(algorithm, reward)
    assert set().union(*load_order(models_of(algorithm, reward))) == models_of(algorithm, reward)
    text = (out / "reward_model" / "config.pbtxt").read_text()
    (fingerprint,) = re.findall(r'"tokenizer_fingerprint" value \{ string_value: "(\w+)"', text)
    assert fingerprint, "the actor compares it with the policy's"

    measured = []
    unsettled = [f"{role}.threads=auto" for role in ("reward", "critic", "reference")]
    settled = calibration.Settled(1, 1, 256, 8, 1.0)
    monkeypatch.setattr(calibration, "_remembered", lambda role, *_: measured.append(role) or settled)
    calibration.settle(load_config(path, unsettled), lambda _: None)
    assert measured == checkpoints_of(algorithm, reward)

    made: list[str] = []
    monkeypatch.setattr(tools.serve, "_run_module", lambda what, arguments: made.append(what))
    tools.serve.ensure_first_version(config, path, [])
    assert made == (["creating version 0 of the critic's weights"] if algorithm == "ppo" else [])


def test_a_family_that_cannot_be_split_is_named_before_anything_starts(
    tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path, "ppo", "model", checkpoints)
    save_tiny(tmp_path / "gpt2", "gpt2", "critic")
    overrides = [f"critic.checkpoint={tmp_path / 'gpt2'}", "critic.tensor_parallel=2", "reward.tensor_parallel=3"]
    for command in (tools.run, tools.serve):
        assert command.main(["--config", str(path), *overrides]) == 2
        critic, reward = sorted(capsys.readouterr().err.removeprefix("error: ").splitlines())
        assert critic.startswith("critic.checkpoint: ")
        assert "no tensor-parallel plan for gpt2 models" in critic
        assert reward.startswith("reward.checkpoint: ")
        assert "tensor_parallel (3) does not divide" in reward


@every_combination
def test_what_is_missing_is_named_before_anything_starts(
    algorithm: str, reward: str, tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it at once, a line each, and nothing that the run does without."""
    path = write_yaml(tmp_path, algorithm, reward, checkpoints)
    missing = [f"{role}.checkpoint={tmp_path / role}" for role in ("reward", "critic", "actor.policy")]
    overrides = [*missing, f"actor.prompts.path={tmp_path / 'none'}"]
    assert tools.run.main(["--fresh", "--config", str(path), *overrides]) == 2
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    expected = [*(f"{role}.checkpoint" for role in checkpoints_of(algorithm, reward)), "actor.policy.checkpoint"]
    expected.append("actor.prompts.path")
    assert sorted(line.partition(": ")[0] for line in lines) == sorted(expected)
    for line in lines:
        role = line.partition(".")[0]
        assert str(tmp_path / ("none" if "prompts" in line else role)) in line
        assert "give " in line, "what to do"
    assert not (tmp_path / "run").exists()


def test_a_missing_folder_is_one_sentence_with_the_way_out(tmp_path: Path) -> None:
    def missing(config: dict[str, Any], **of: bool) -> str:
        with pytest.raises(ConfigError) as caught:
            check_files(
                RunConfig.model_validate({**config, "actor": nested(ActorSection, config.get("actor", {}))}), **of
            )
        print(caught.value)
        return str(caught.value)

    start = f" (relative paths start at {Path.cwd()})"
    assert missing({}, server=True).splitlines() == [
        "reward.checkpoint: checkpoints/reward does not exist or is not a folder; give the folder of a Hugging Face "
        f"checkpoint{start}, or use only functions in `rewards`",
        "critic.checkpoint: checkpoints/critic does not exist or is not a folder; give the folder of a Hugging Face "
        f"checkpoint{start}, or choose an actor.algorithm.name without a critic: grpo, rloo or reinforce++",
    ]
    hub = missing({"reward": {"checkpoint": "org/some-model"}}, server=True)
    assert "`hf download org/some-model --local-dir models/some-model`, then give that folder" in hub.splitlines()[0]
    no_critic = {"algorithm_name": "reinforce++"}
    functions = {"verdict": {"function": "rewards/math.py:verify"}, "other": {"function": "package.module:name"}}
    assert missing({"actor": no_critic, "rewards": functions}, server=True).splitlines() == [
        "actor.policy.checkpoint: checkpoints/policy has no tokenizer to decode the policy's tokens for reward "
        "functions; give the folder of the policy's checkpoint",
        f"rewards.verdict.function: rewards/math.py does not exist; give the path of a Python file{start}",
    ]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    told = missing({"actor": {"checkpoint": str(tmp_path), "validation_prompts": "held-out.jsonl"}}, actor=True)
    assert f"actor.policy.checkpoint: {tmp_path} has no model.safetensors: it contains only pickled weights" in told
    assert "actor.validation.prompts: held-out.jsonl does not exist; give a file of prompts" in told
    assert "reference.checkpoint: none" in missing(
        {"actor": {**no_critic, "kl_reference": "triton"}, "reference": {"checkpoint": "none"}}, server=True
    )


def test_a_policy_without_a_tokenizer_is_named(tmp_path: Path, checkpoints: Checkpoints) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoints.policy / name, tmp_path / name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    config = RunConfig.model_validate({"actor": {"policy": {"checkpoint": tmp_path}, "prompts": {"path": prompts}}})
    with pytest.raises(
        ConfigError, match=r"actor\.policy\.checkpoint: .* has no tokenizer; save the policy's tokenizer"
    ):
        check_files(config, actor=True)
    (tmp_path / "tokenizer.model").touch()
    check_files(config, actor=True)


def test_a_reward_without_a_head_or_a_tokenizer_is_named(tmp_path: Path, checkpoints: Checkpoints) -> None:
    def refused(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            check_files(RunConfig.model_validate({"reward": {"checkpoint": str(folder)}}), server=True, actor=True)
        return next(line for line in str(caught.value).splitlines() if line.startswith("reward."))

    assert f"reward.checkpoint: {checkpoints.policy} is not a trained reward model" in refused(checkpoints.policy)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoints.reward / name, tmp_path / name)
    assert f"reward.checkpoint: {tmp_path} has no tokenizer, so it is unknown whether" in refused(tmp_path)


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
def test_a_function_is_looked_for_before_anything_starts(tmp_path: Path, code: str, told: str | None) -> None:
    (tmp_path / "mine.py").write_text(code)
    config = RunConfig.model_validate({"rewards": {"length": {"function": f"{tmp_path / 'mine.py'}:lenght"}}})
    with pytest.raises(ConfigError) as caught:
        check_files(config, server=True)
    assert (told in str(caught.value)) if told else ("rewards." not in str(caught.value))


def test_functions_and_critic_alone_can_be_served_for_another_trainer(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """Its policy is not known here; the critic shares its tokenizer."""
    config = {"critic": {"checkpoint": str(checkpoints.critic)}, "rewards": FUNCTION}
    check_files(RunConfig.model_validate(config), server=True)
    assert set(render_configs.render_configs(RunConfig.model_validate(config))) == models_of("ppo", "functions")


@pytest.mark.parametrize("room", [actor.__main__, trainer.__main__, tools.serve])
def test_each_command_says_what_it_misses(
    room: Any,
    tmp_path: Path,
    checkpoints: Checkpoints,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = write_yaml(tmp_path, "ppo", "model", checkpoints)
    missing = [f"{role}.checkpoint={tmp_path / 'none'}" for role in ("critic", "actor.policy")]
    assert room.main(["--config", str(path), *missing]) == 2
    key = "actor.policy.checkpoint" if room is actor.__main__ else "critic.checkpoint"
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}: {tmp_path / 'none'} does not exist")
    assert len(error.splitlines()) == 1


def test_a_sidecar_without_a_critic_has_nothing_to_do(
    tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path, "rloo", "model", checkpoints)
    assert trainer.__main__.main(["--config", str(path)]) == 2
    assert "actor.algorithm.name: rloo has no critic, so there is nothing to train" in capsys.readouterr().err


class ServesNoCritic:
    """What the client hears from a server that was started for an algorithm without a critic."""

    async def describe(self, model: str) -> ServedModel:
        if model == "critic":
            raise RequestFailed("critic at localhost:8000 refused: Request for unknown model: 'critic' is not found")
        return ServedModel.of({"tokenizer_fingerprint": "known"})


def test_ppo_on_a_server_without_a_critic_is_told_why(checkpoints: Checkpoints) -> None:
    tokenizer = load_tokenizer(checkpoints.policy)

    def compare(*, with_critic: bool) -> None:
        client: Any = ServesNoCritic()
        scorer = Scorer(client, tokenizer, rows_per_request=1, with_critic=with_critic)
        asyncio.run(scorer.compare_tokenizers())

    with pytest.raises(RlhfError, match=r"the server has no critic, which actor\.algorithm\.name: ppo needs"):
        compare(with_critic=True)
    compare(with_critic=False)


@pytest.fixture
def signals_kept() -> Iterator[None]:
    """`tools run` takes the signals of the process it is the main program of."""
    kept = {
        number: tools.run.signal.getsignal(number) for number in (tools.run.signal.SIGINT, tools.run.signal.SIGTERM)
    }
    yield
    for number, handler in kept.items():
        tools.run.signal.signal(number, handler)


@pytest.mark.usefixtures("signals_kept")
@pytest.mark.parametrize(("command", "code"), [("serve", 0), ("run", 130)])
def test_a_signal_in_the_last_moment_of_a_start_stops_the_server(
    command: str, code: int, tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server runs by then, and the caller does not have it yet."""
    path, server = write_yaml(tmp_path, "grpo", "functions", checkpoints), mock.Mock()

    def start(*_: object, **__: object) -> mock.Mock:
        signal.raise_signal(signal.SIGTERM)
        return server

    module = {"serve": tools.serve, "run": tools.run}[command]
    monkeypatch.setattr(module, "start_server", start)
    monkeypatch.setattr("tools.server.supervisor.ServerHealth", mock.Mock())
    assert module.main(["--config", str(path)]) == code
    server.stop.assert_called_once_with()


def run_to_the_end(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of `python -m tools run` in this process, which has loaded the large libraries already."""
    code = tools.run.main(["--config", str(path)])
    if code == 130:  # it was this test that somebody wanted to stop
        raise KeyboardInterrupt
    output = capsys.readouterr()
    print(output.out, output.err)
    logs = {file.name: file.read_text()[-1500:] for file in path.parent.glob("run/logs/*.log")}
    assert code == 0, logs
    return output.out


def check_run(folder: Path, output: str, algorithm: str, reward: str) -> None:
    """Everything that is there, and nothing of what there is not."""
    has_critic = algorithm == "ppo"
    assert {path.name for path in (folder / "model_repository").iterdir()} == models_of(algorithm, reward)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["train_optim/grad_norm"] > 0 for line in lines)
    components = {key for key in lines[0] if key.startswith("train_rollouts/reward_")}
    terms = {f"train_rollouts/reward_{name}" for name in REWARDS[reward] or {}}
    assert components == terms
    summary = json.loads((folder / "summary.json").read_text())
    assert None not in summary.values()
    assert summary["failed_requests"] == summary["server_failures"] == summary["masked_samples"] == 0
    assert ("critic_updates" in summary) == has_critic
    for name in ("journal", "critic_metrics.jsonl", "logs/sidecar.log"):
        assert (folder / name).exists() == has_critic, name
    assert bool(list((folder / "weights").rglob("CURRENT"))) == has_critic  # the control key lies there in every run
    page = (folder / "report.html").read_text()
    words = output + json.dumps(lines) + re.sub(r'src="[^"]*"', "", page)
    assert bool(re.search("critic|weights.version|reload", words)) == has_critic
    assert not re.search("null|NaN|held-out", words)
    assert (folder / "curves.png").is_file()
    assert (folder / "policy" / "model.safetensors").is_file()
    assert f"policy: {folder / 'policy'}, which AutoModelForCausalLM.from_pretrained(" in output


def test_grpo_with_a_function_needs_neither_critic_nor_reward_model(
    tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str], signals_kept: None
) -> None:
    path = write_yaml(tmp_path, "grpo", "functions", checkpoints)
    check_run(tmp_path / "run", run_to_the_end(path, capsys), "grpo", "functions")
    assert not regions(psutil.Process().pid)


@pytest.mark.slow
def test_a_run_without_a_critic_is_resumed(
    tmp_path: Path, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str], signals_kept: None
) -> None:
    path = write_yaml(tmp_path, "rloo", "functions", checkpoints)
    assert "step 2/2" in run_to_the_end(path, capsys)
    path.write_text(path.read_text().replace("steps: 2", "steps: 3"))
    again = run_to_the_end(path, capsys)
    assert "step 3/3" in again
    assert "step 2/3" not in again
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["actor"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "reward"),
    [("ppo", "both"), ("rloo", "model")],
)
def test_every_algorithm_and_reward_through_tools_run(
    algorithm: str,
    reward: str,
    tmp_path: Path,
    checkpoints: Checkpoints,
    capsys: pytest.CaptureFixture[str],
    signals_kept: None,
) -> None:
    path = write_yaml(tmp_path, algorithm, reward, checkpoints)
    check_run(tmp_path / "run", run_to_the_end(path, capsys), algorithm, reward)
