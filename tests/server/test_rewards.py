"""Rewards on the real server: functions, groups, a judge and models of other kinds, and what an actor makes of them."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import reward_functions
import torch
from bad_requests import Request, array_tensor, grpc_sender, send_http
from bare_client import Refused, ask, ask_all
from chat_server import ChatServer
from google.protobuf import json_format
from live_system import (
    TEXTS,
    Checkpoints,
    FinishedRun,
    LlamaForSequenceClassification,
    System,
    direct_rewards,
    direct_values,
    make_run,
    make_tokenizer,
    random_rows,
    reload_model,
    run_actor,
    scoring_inputs,
    start_system,
)
from settled import settled_statistics
from tiny_checkpoints import save_tiny
from tiny_models import tiny_server
from tiny_tokenizers import save_text_reward
from transformers import AutoModelForCausalLM, LlamaForTokenClassification, pipeline

from rlhf_triton.actor.data.prompt_files import PromptError
from rlhf_triton.actor.data.prompt_reader import check_columns
from rlhf_triton.actor.data.rollout import Prompt, Rollout, Scores
from rlhf_triton.actor.scoring.scorer import Scorer, row_metadata
from rlhf_triton.checkpoints.tokenization import load_tokenizer
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.served import ServedModel
from rlhf_triton.config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.rewards.judge import Judge, NoVerdict
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.tools.render_configs import parse_config, render_configs, render_repository
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.healthcheck import check as healthcheck
from rlhf_triton.tools.server.ports import free_port
from rlhf_triton.tools.server.tritonserver import TritonServer, probe
from rlhf_triton.trainer.control_plane import ControlPlane
from rlhf_triton.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_MODEL,
    REWARDS,
    VALUES,
    texts_array,
)

TOLERANCE = 1e-5
FUNCTIONS = Path(reward_functions.__file__)
OUTPUTS = (REWARDS, REWARD_COMPONENTS, REWARD_ERRORS)
SECRET = "sk-live-secret"


def errors_of(answer: Mapping[str, np.ndarray]) -> list[str]:
    return [item.decode() for item in answer[REWARD_ERRORS][:, 0]]


# ---- functions alone ----


def judge_terms(url: str, timeout_s: float, **options: Any) -> dict[str, Any]:
    """The LLM judge at half weight."""
    options = {"base_url": url, "max_retries": 1, **options}
    function = {"function": "rlhf_triton.rewards.judge:Judge", "options": options, "workers": 4}
    return {"judge": {**function, "timeout_s": timeout_s, "weight": 0.5}}


def functions_alone(folder: Path, terms: dict[str, Any]) -> None:
    """A repository of the reward side only: nothing in it imports torch. The tokenizer is the critic's."""
    make_tokenizer().save_pretrained(folder / "critic")
    critic, reward = {"model": str(folder / "critic")}, {"model": str(folder / "nothing")}
    config = RunConfig.model_validate({"critic": critic, "reward": reward, "rewards": terms})
    render_repository(config, folder / "repository")
    for model in ("critic", "critic_infer", "critic_train", "critic_save"):
        shutil.rmtree(folder / "repository" / model)


def terms_of(endpoint: ChatServer) -> dict[str, Any]:
    options = {
        "model": "m",
        "rubric": "{{ response }}\n{{ metadata.say | default('Score: 7') }}",
        "api_key_env": "JUDGE_KEY",
        "request_timeout_s": 1.0,
    }
    return {
        "length": {"function": f"{FUNCTIONS}:num_tokens", "weight": -0.5},
        "verdict": {"function": f"{FUNCTIONS}:label_or_trouble", "weight": 2.0, "timeout_s": 1.0},
        "peers": {"function": f"{FUNCTIONS}:by_group", "groupwise": True, "timeout_s": 2.0},
        **judge_terms(endpoint.url, 10.0, **options),
    }


WEIGHTS = np.asarray([-0.5, 2.0, 1.0, 0.5])
NUM_WORKERS = 10


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    if server.stop_after is None:
        server.stop()


@pytest.fixture(scope="module")
def server(endpoint: ChatServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("functions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", SECRET)
        patch.setenv("NO_PROXY", "127.0.0.1")
        functions_alone(folder, terms_of(endpoint))
        with tiny_server(folder) as server:
            server.wait_ready()
            workers = worker_processes(server)
            assert len(workers) == 2 * NUM_WORKERS
            assert not endpoint.requests  # the probe at the start costs nothing
            yield server
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert not alive, [(worker.status(), worker.ppid()) for worker in alive]
    assert SECRET not in (folder / "logs" / "tritonserver.log").read_text()


def worker_processes(server: TritonServer) -> list[psutil.Process]:
    """With each worker a process that watches the server for it."""
    children = psutil.Process(server.pid).children(recursive=True)
    return [child for child in children if "rlhf_triton.rewards.worker" in child.cmdline()]


def asked(*metadata: Any) -> dict[str, np.ndarray]:
    """One row for each: the i-th has i + 1 tokens."""
    rows = random_rows(range(1, len(metadata) + 1), seed=0)
    texts = [json.dumps({"label": 0, "group": i, "response": "a", **each}) for i, each in enumerate(metadata)]
    return {**scoring_inputs(rows), "metadata": texts_array(texts)}


def counters(server: TritonServer, model: str) -> dict[str, float]:
    """A function's own counters in the server's metrics."""
    family = rf'^rlhf_reward_function_total\{{(?=.*model="reward_function_{model}").*counter="(\w+)".*\}} (\S+)$'
    found = re.findall(family, get_page(server.section.metrics_url, "/metrics"), re.MULTILINE)
    return {name: float(value) for name, value in found}


@pytest.mark.slow
def test_the_sum_and_what_fails_costs_its_own_row(server: TritonServer) -> None:
    """In one request, and in the requests that share its batch; 0 is a score and stays one."""
    labels = [1, "raise", 3, "loop", "die", "nan", 0]
    troubled = asked(*({"label": label, "group": i // 2} for i, label in enumerate(labels)))
    answer, *others = ask_all(
        server.section.http_url,
        [(REWARD_MODEL, troubled, OUTPUTS), *[(REWARD_MODEL, asked({"label": i}), OUTPUTS) for i in range(20)]],
    )
    assert not isinstance(answer, Refused)
    line = next(i for i, text in enumerate(FUNCTIONS.read_text().splitlines(), 1) if "raise RuntimeError" in text)
    assert errors_of(answer) == [
        "",
        f"verdict: RuntimeError: no verdict on 'raise' (reward_functions.py:{line})",
        "",
        "verdict: took longer than 1 s (its timeout_s) and was killed",
        "verdict: the worker process ended with exit code 3",
        "verdict: returned nan, must be finite",
        "",
    ]
    nan = np.nan
    expected = np.asarray([[1, 2, 3, 4, 5, 6, 7], [1, nan, 3, nan, nan, nan, 0], [2, 2, 2, 2, 2, 2, 1], [7] * 7]).T
    np.testing.assert_array_equal(answer[REWARD_COMPONENTS], expected)
    np.testing.assert_array_equal(answer[REWARDS][:, 0], expected @ WEIGHTS)  # NaN wherever a term is
    assert answer[REWARDS].dtype == np.float32
    assert [float(other[REWARDS][0, 0]) for other in others] == [2.0 * i - 0.5 + 1 + 3.5 for i in range(20)]


@pytest.mark.slow
def test_sentences_tokens_and_metadata_reach_the_functions_or_are_a_cause(server: TritonServer) -> None:
    """No error of the request: many steps of an ensemble that failed at once have crashed tritonserver."""
    url, tokenizer = server.section.http_url, make_tokenizer()
    sent = {"metadata": texts_array([json.dumps({"label": 1, "prompt": text, "response": "a"}) for text in TEXTS])}
    by_text = ask(url, REWARD_MODEL, {"sentences": texts_array([*TEXTS]), **sent}, OUTPUTS)
    halves = {"sentences": [text[:4] for text in TEXTS], "text_pairs": [text[4:] for text in TEXTS]}
    by_pair = ask(url, REWARD_MODEL, {**{k: texts_array(v) for k, v in halves.items()}, **sent}, OUTPUTS)
    lengths = [len(tokenizer(text)["input_ids"]) for text in TEXTS]  # no special tokens are added
    np.testing.assert_array_equal(by_text[REWARD_COMPONENTS], [[length, 1, 1, 7] for length in lengths])
    np.testing.assert_array_equal(by_pair[REWARD_COMPONENTS], by_text[REWARD_COMPONENTS])
    alone = ask(url, REWARD_MODEL, scoring_inputs(random_rows([3], seed=0)), [REWARDS])
    assert (set(alone), bool(np.isnan(alone[REWARDS]).all())) == ({REWARDS}, True)  # a missing label is no zero
    wrong = {**asked({}), "metadata": texts_array(["[1]"])}
    for answer in ask_all(url, [(REWARD_MODEL, wrong)] * 64):
        assert not isinstance(answer, Refused), answer
        assert np.isnan(answer[REWARDS]).all()
        assert errors_of(answer)[0].startswith("length: metadata[0]: ")


@pytest.mark.slow
def test_health_checks_and_probes_run_no_function(server: TritonServer, endpoint: ChatServer) -> None:
    """They reach every model of the sum nevertheless. The only calls are those of the last request."""
    before, num_judged = counters(server, "verdict")["calls"], len(endpoint.requests)
    with server.control() as control:
        for model in (REWARD_MODEL, "reward_function_verdict"):
            probe(control, model, 120.0)
        executed = settled_statistics(control, "reward_function_verdict").execution_count
        assert healthcheck(server.repository, f"http://{server.section.http_url}") == 0
        assert settled_statistics(control, "reward_function_verdict").execution_count == executed + 1
    ask(server.section.http_url, REWARD_MODEL, asked({}, {}), OUTPUTS)
    assert counters(server, "verdict")["calls"] == before + 2
    assert len(endpoint.requests) == num_judged + 2


@pytest.mark.slow
def test_the_judge_and_its_counters(server: TritonServer) -> None:
    before = counters(server, "judge")
    says = ["Score: 3", "no idea", "busy once", "wrong", "hang", "echo the key", "Score: 99"]
    answer = ask(server.section.http_url, REWARD_MODEL, asked(*({"say": text} for text in says)), OUTPUTS)
    np.testing.assert_equal(answer[REWARD_COMPONENTS][:, 3].tolist(), [3, math.nan, 7, *[math.nan] * 4])
    patterns = [
        "",
        "judge: the judge's answer has no number: 'no idea'",
        "",
        "judge: http://.*: Error code: 400 - .*max_tokens is too large.*",
        "judge: .*Request timed out.*",
        "judge: .*Error code: 401 - .*Incorrect API key: Bearer \\*\\*\\*.*",
        "judge: the judge's score 99 is outside 1 to 10: 'Score: 99'",
    ]
    for pattern, error in zip(patterns, errors_of(answer), strict=True):
        assert re.fullmatch(pattern, error), error
    added = {name: value - before.get(name, 0.0) for name, value in counters(server, "judge").items()}
    assert added.pop("request_seconds") > 1.5
    numbers = {"retries": 2, "failures": 5, "prompt_tokens": 400, "completion_tokens": 40}
    assert added == {"requests": 9, **numbers}


@pytest.mark.slow
def test_grpo_until_the_endpoint_dies(
    server: TritonServer, endpoint: ChatServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Groups arrive whole; a row that the judge fails on is masked; when all fail, the run stops. No reward is 0."""
    prompts = tmp_path / "prompts.jsonl"
    says = {"Return the": "Score: 4", "A": "Score: 4", "The": "no idea", "Open the": "Score: 4"}
    lines = [{"text": text, "say": say, "label": 0} for text, say in says.items()]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    actor = {
        "prompts_path": str(prompts),
        "validation_size": 0,
        "rollout_size": 16,
        "max_failed_fraction": 0.25,
        "client": {"servers": [server.section.http_url], "rows_per_request": 3},
        "algorithm": {"name": "grpo", "responses_per_prompt": 4},
    }
    run = make_run(tmp_path / "run", checkpoints, rewards=terms_of(endpoint), actor=actor)
    endpoint.stop_after = len(endpoint.requests) + 16 + 6
    code, log = run_actor(run, "actor")
    assert code != 0
    (line,) = read_jsonl(run.config.run.dir / "metrics.jsonl")
    assert line["train_rollouts/reward_peers"] == line["train_rollouts/reward_judge"] == 4.0
    assert line["train_rollouts/masked_samples"] == 4
    assert "step 1: 4 of 16 rewards are unavailable (prompts " in log
    assert "): judge: the judge's answer has no number: 'no idea'" in log
    assert "Connection error." in log
    assert "actor.rewards.max_failed_fraction" in log


@pytest.mark.slow
def test_a_reload_waits_for_a_running_function_and_no_worker_outlives_its_server(server: TritonServer) -> None:
    """The last test of this server: its model and then all of it are killed."""
    replaced = [worker for worker in worker_processes(server) if f"{FUNCTIONS}:label_or_trouble" in worker.cmdline()]
    with ThreadPoolExecutor(1) as executor, server.control() as control:
        before = control.statistics("reward_function_verdict").execution_count
        running = executor.submit(
            ask, server.section.http_url, "reward_function_verdict", asked({}, {"label": "sleep"})
        )
        while control.statistics("reward_function_verdict").execution_count == before:
            pass
        control.load("reward_function_verdict", parameters={"workers": "3"}, timeout_s=120)
        errors = [item.decode() for array in running.result().values() if array.dtype == object for item in array.flat]
    assert "took longer than 1 s (its timeout_s) and was killed" in "".join(errors)
    _, alive = psutil.wait_procs(replaced, timeout=120)
    assert not alive
    workers = worker_processes(server)
    assert len(workers) == 2 * (NUM_WORKERS + 1)
    its_own = [worker for worker in workers if f"{FUNCTIONS}:label_or_trouble" in worker.cmdline()]
    assert len(its_own) == 2 * 3
    (stub,) = {*its_own[0].parents()} & {*psutil.Process(server.pid).children()}
    stub.kill()
    _, alive = psutil.wait_procs(its_own, timeout=120)
    assert not alive
    psutil.Process(server.pid).kill()
    _, alive = psutil.wait_procs(workers, timeout=120)
    assert not alive


# ---- functions beside a model, and an actor of mixtures of experts ----


TEMPLATES = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[0].role }}"}
TERMS = {
    "model": {"weight": 1.0},
    "texts": {"function": f"{FUNCTIONS}:texts_fit", "weight": 10.0},
    "verdict": {"function": f"{FUNCTIONS}:label_or_trouble", "weight": 0.5, "timeout_s": 1.0},
    "peers": {"function": f"{FUNCTIONS}:by_group", "groupwise": True, "weight": 0.0},
}
NUM_BAD, NUM_SENDERS = 4_000, 16
LABELS = (1, 2, "raise", 3, "loop", 0, 4, 5)
FAILED = [2, 4]


def mixture(folder: Path, family: str, *, seed: int) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = dict(TEMPLATES)
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 128}
    save_tiny(folder, family, "language", seed=seed, **tokens)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("mixed")
    prompts = folder / "prompts.jsonl"
    lines = [{"text": " ".join(text.split()[:3]), "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    actor = {"prompts_path": str(prompts), "validation_prompts": str(prompts), "steps": 2, "max_failed_fraction": 0.25}
    ours = dataclasses.replace(
        checkpoints,
        policy=mixture(folder / "policy", "granitemoe", seed=1),
        critic=mixture(folder / "critic", "qwen3-moe", seed=2),
    )
    system = start_system(make_run(folder / "run", ours, rewards=TERMS, actor=actor, reward={"store": True}))
    yield system
    system.stop()


def written(tokenizer: Any, texts: list[str]) -> Rollout:
    """Texts as a policy would have written them, with its end-of-sequence token; prompts of two tokens."""
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    prompts = [Prompt(str(i), tokenizer.decode(row[:2]), np.asarray(row[:2])) for i, row in enumerate(rows)]
    lengths = torch.tensor([len(row) for row in rows])
    return Rollout(prompts, tokens, lengths, torch.full((len(rows),), 2), torch.ones(len(rows), dtype=torch.bool))


def labelled(tokenizer: Any) -> Rollout:
    """TEXTS as responses to their first two tokens, each with its label."""
    rollout = written(tokenizer, list(TEXTS))
    prompts = [
        dataclasses.replace(prompt, metadata={"label": label})
        for prompt, label in zip(rollout.prompts, LABELS, strict=True)
    ]
    return dataclasses.replace(rollout, prompts=prompts)


def scored(system: System, rollout: Rollout, *, rows: int = 2, group_size: int = 1) -> tuple[Scorer, Scores]:
    """Score as an actor does, after it has compared the tokenizers."""

    async def ask() -> tuple[Scorer, Scores]:
        async with TritonClient(system.run.url, system.run.config.actor.client) as client:
            scorer = Scorer(client, tokenizer_of(system), rows_per_request=rows)
            await scorer.compare_tokenizers()
            return scorer, await scorer.score(rollout, group_size)

    return asyncio.run(ask())


def tokenizer_of(system: System) -> Any:
    """The policy's."""
    return load_tokenizer(system.run.config.actor.policy.model)


@pytest.mark.slow
def test_components_reach_the_actor_and_failures_are_marked(mixed: System, checkpoints: Checkpoints) -> None:
    """Groups stay whole beside the reward model and the critic."""
    rollout = labelled(tokenizer_of(mixed))
    scorer, scores = scored(mixed, rollout, rows=3, group_size=2)
    assert (scorer.reward.components, scorer.sends_sentences) == (("model", "texts", "verdict", "peers"), True)
    assert scores.has_values
    assert np.flatnonzero(~scores.scored.numpy()).tolist() == FAILED
    direct = direct_rewards(checkpoints.reward, [row[:-1] for row in rollout.rows()])  # of the text, without its end
    np.testing.assert_allclose(scores.components["model"], direct, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(scores.components["texts"], np.ones(len(TEXTS)))
    np.testing.assert_array_equal(scores.components["peers"], np.full(len(TEXTS), 2))
    np.testing.assert_array_equal(scores.components["verdict"], [1, 2, np.nan, 3, np.nan, 0, 4, 5])
    assert scores.reward_versions is not None
    assert scores.reward_versions.tolist() == [0] * len(TEXTS)
    fine = [i for i in range(len(TEXTS)) if i not in FAILED]
    labels = np.asarray([float(LABELS[i]) for i in fine])
    np.testing.assert_allclose(scores.rewards[fine], direct[fine] + 10 + 0.5 * labels, atol=1e-4, rtol=0)
    raised, killed = scores.failures
    assert raised.startswith("verdict: RuntimeError: no verdict on 'raise' (reward_functions.py:")
    assert killed == "verdict: took longer than 1 s (its timeout_s) and was killed"


@pytest.mark.slow
def test_the_run_logs_every_component_masks_what_failed_and_keeps_its_templates(mixed: System) -> None:
    """A policy and a critic with experts are trained; tests/actor and tests/trainer have the files of all families."""
    code, log = run_actor(mixed.run, "actor")
    assert code == 0
    folder = mixed.run.config.run.dir
    lines = read_jsonl(folder / "metrics.jsonl")
    assert [line["train_rollouts/masked_samples"] for line in lines] == [2, 2]
    for line in lines:
        assert line["train_rollouts/reward_version"] == 0
        assert line["train_rollouts/reward_texts"] == line["train_rollouts/reward_peers"] == 1.0
        assert line["train_rollouts/reward_verdict"] == pytest.approx(15 / 6)
        assert np.isfinite(line["train_rollouts/reward_model"])
    assert "step 1: 2 of 8 rewards are unavailable (prompts " in log
    assert "): verdict: RuntimeError: no verdict on 'raise'" in log
    assert "; verdict: took longer than 1 s (its timeout_s) and was killed" in log
    assert json.loads((folder / "actor_summary.json").read_text())["critic_updates"] == 2
    AutoModelForCausalLM.from_pretrained(str(folder / "policy"))
    assert load_tokenizer(folder / "policy").chat_template == TEMPLATES


def test_columns_that_the_actor_adds_are_free_with_the_reward_model_alone() -> None:
    prompt = Prompt("1", "a", np.asarray([1]), {"prompt": "p", "response": "r"})
    check_columns(ServedModel(), [prompt])
    assert row_metadata(ServedModel(), prompt, "b", 0) == {"response": "b"}
    with pytest.raises(PromptError, match="the column 'prompt' has the name"):
        check_columns(ServedModel(components=("model",)), [prompt])


@pytest.mark.slow
def test_a_text_as_sequence_id_changes_nothing(mixed: System) -> None:
    """It kills tritonserver 2.51 where a step of an ensemble is an ensemble itself."""
    tokens = array_tensor("tokens", np.stack(random_rows([5, 5], seed=3)))
    for model, sequence_id in itertools.product((REWARD_MODEL, CRITIC_INFER), ("x", "x" * 100)):
        request = Request(model, [tokens], parameters={"sequence_id": sequence_id})
        assert send_http(mixed.run.url, request).status == "200"


@pytest.mark.slow
def test_bad_rows_over_grpc_do_not_lock_the_server_up(mixed: System) -> None:
    """tritonserver 2.51 deadlocks when a step fails over gRPC while another one of its request is running."""
    at = mixed.run.config.server
    bad = [Request(model, [array_tensor("tokens", np.full((1, 5), 4711))]) for model in (REWARD_MODEL, CRITIC_INFER)]

    def send() -> set[str | None]:
        statuses = set()
        with grpc_sender(at.grpc_url) as send_grpc:
            for request in bad * (NUM_BAD // NUM_SENDERS):
                statuses.add(send_grpc(request).status)
                if statuses != {"INVALID_ARGUMENT"}:
                    break
        return statuses

    with ThreadPoolExecutor(NUM_SENDERS) as executor:
        found = [executor.submit(send) for _ in range(NUM_SENDERS)]
    assert set.union(*(each.result() for each in found)) == {"INVALID_ARGUMENT"}
    with ControlPlane(at.grpc_url) as control:
        assert control.answers_inference(120.0)
        probed = control.probe_scoring(CRITIC_INFER, (REWARDS, VALUES, REWARD_ERRORS), 120.0)
    assert errors_of(probed) == [""], "a function would miss the label"


# ---- other models ----


@pytest.fixture
def serve_reward(finished: FinishedRun) -> Iterator[Callable[..., None]]:
    """Loads another reward model into the finished run's server, rendered as the configuration would."""
    config = finished.run.config

    def serve(**settings: Any) -> None:
        data = {**config.reward.model_dump(exclude_unset=True), **settings}
        rendered = render_configs(config.model_copy(update={"reward": type(config.reward).model_validate(data)}))
        for model in (REWARD_MODEL, CRITIC_INFER):  # Triton refuses an ensemble that does not fit its models
            message = parse_config(model, rendered[model])
            new = json_format.MessageToDict(message, preserving_proto_field_name=True)
            reload_model(finished.run, model, lambda config, new=new: (config.clear(), config.update(new)))

    yield serve
    serve()


@pytest.mark.slow
def test_a_reward_model_with_any_tokenizer_or_a_template_is_sent_sentences(
    serve_reward: Callable[..., None], finished: FinishedRun, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    chats = written(tokenizer_of(finished), list(TEXTS))
    messages = [{"role": "user", "content": "Open it."}]
    chats.prompts[:] = [dataclasses.replace(prompt, metadata={"messages": messages}) for prompt in chats.prompts]
    template = "{% for m in messages %}{{ m.content }}</s> {% endfor %}"  # the policy's has no end behind the last </s>
    own = make_tokenizer()
    own.chat_template = template
    for name, tokenizer in (("same", make_tokenizer()), ("own", own)):
        shutil.copytree(checkpoints.reward, tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        serve_reward(model=tmp_path / name)
        replies = [tokenizer.decode(row[2:-1].tolist()) for row in chats.rows()]
        said = [[*messages, {"role": "assistant", "content": reply}] for reply in replies]
        ids = [np.asarray(tokenizer(tokenizer.apply_chat_template(each, tokenize=False))["input_ids"]) for each in said]
        found = scored(finished, chats)[1].rewards
        np.testing.assert_allclose(found, direct_rewards(checkpoints.reward, ids), atol=TOLERANCE, rtol=0)

    serve_reward(model=checkpoints.other_reward)
    ours, theirs = tokenizer_of(finished), load_tokenizer(checkpoints.other_reward)
    rollout = written(ours, list(TEXTS))
    scorer, scores = scored(finished, rollout)
    assert scorer.sends_sentences
    assert scores.scored.all()
    their_rows = [np.asarray(theirs(text)["input_ids"]) for text in TEXTS]
    assert {row[0] for row in their_rows} == {theirs.bos_token_id}
    assert [row.tolist()[1:] for row in their_rows] != [row.tolist()[:-1] for row in rollout.rows()]
    direct = direct_rewards(checkpoints.other_reward, their_rows)
    np.testing.assert_allclose(scores.rewards, direct, atol=TOLERANCE, rtol=0)
    # The values still belong to the policy's own tokens.
    folder = finished.run.store.folder(int(scores.versions[0]))
    for row, values, expected in zip(rollout.rows(), scores.values, direct_values(folder, rollout.rows()), strict=True):
        np.testing.assert_allclose(values[: row.size], expected, atol=TOLERANCE, rtol=0)

    serve_reward(template="{{ response }}, said {{ prompt }}")
    scorer, scores = scored(finished, rollout)
    assert scorer.sends_sentences
    texts = [f"{scorer._said(rollout, i)[1]}, said {prompt.text}" for i, prompt in enumerate(rollout.prompts)]
    rows = [np.asarray(ours(text)["input_ids"]) for text in texts]
    np.testing.assert_allclose(scores.rewards, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE, rtol=0)
    with ControlPlane(finished.run.config.server.grpc_url) as control:  # its refusal of tokens is a sign of life
        assert control.probe_scoring(REWARD_MODEL, ("rewards",), 30.0) == {}
        assert control.probe_scoring(CRITIC, ("values",), 30.0)


@pytest.mark.slow
def test_a_classifier_of_text_pairs(serve_reward: Callable[..., None], finished: FinishedRun, tmp_path: Path) -> None:
    """From the actor and from any client; with probabilities and times, if requested."""
    save_text_reward(tmp_path, "bert", num_labels=3, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    serve_reward(model=tmp_path, text="pair", attribute_weights=[1.0, 0.0, -2.0])
    ours = tokenizer_of(finished)
    rollout = written(ours, list(TEXTS[:4]))
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    rollout.prompts[1] = dataclasses.replace(rollout.prompts[1], metadata=chat)
    prompts = [ours.decode(row[:2], skip_special_tokens=True) for row in rollout.rows()]
    prompts[1] = "Hi"
    responses = [ours.decode(row[2:], skip_special_tokens=True) for row in rollout.rows()]
    classifier = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    given = [{"text": prompt, "text_pair": response} for prompt, response in zip(prompts, responses, strict=True)]

    def by_label(**settings: Any) -> np.ndarray:
        found = [sorted(items, key=lambda item: item["label"]) for items in classifier(given, **settings)]
        return np.asarray([[item["score"] for item in items] for items in found])

    rewards = by_label(function_to_apply="none") @ [1.0, 0.0, -2.0]
    np.testing.assert_allclose(scored(finished, rollout)[1].rewards, rewards, atol=TOLERANCE, rtol=0)
    url, inputs = finished.run.url, {"sentences": texts_array(prompts), "text_pairs": texts_array(responses)}
    assert set(ask(url, REWARD_MODEL, inputs)) == {"rewards"}
    answer = ask(url, REWARD_MODEL, inputs, ["probabilities", "rewards", "queue_us", "compute_us"])
    np.testing.assert_allclose(answer["rewards"][:, 0], rewards, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(answer["probabilities"], by_label(), atol=TOLERANCE, rtol=0)
    assert min(answer["queue_us"].min(), answer["compute_us"].min()) > 0


@pytest.mark.slow
def test_a_critic_with_another_tokenizer_stops_the_actor_at_its_start(live: System, checkpoints: Checkpoints) -> None:
    last = live.run.journal.last_step()
    code, log = run_actor(live.run, "actor-other", f"actor.policy.model={checkpoints.other_policy}")
    assert code == 2
    (sentence,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert "the critic's tokenizer differs from the policy's" in sentence
    assert str(checkpoints.critic) in sentence
    assert "Traceback" not in log
    assert live.run.journal.last_step() == last
    assert not [entry for entry in live.run.journal.entries() if entry.kind == "rewind"]


def test_a_model_rendered_without_a_fingerprint_is_named(live: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fingerprint is missing when a config was rendered far from its checkpoint; only the answer can say so."""
    describe = TritonClient.describe

    async def forgetful(client: TritonClient, name: str) -> ServedModel:
        found = await describe(client, name)
        return ServedModel() if name == CRITIC else found

    monkeypatch.setattr(TritonClient, "describe", forgetful)
    with pytest.raises(RlhfError, match=f"^{CRITIC} was rendered without its checkpoint's tokenizer"):
        scored(live, written(tokenizer_of(live), list(TEXTS)))


@pytest.mark.slow
def test_a_process_reward_is_served_and_trained_on(
    serve_reward: Callable[..., None], finished: FinishedRun, tmp_path: Path
) -> None:
    """A token classifier with two labels, as TRL trains them."""
    url, tokenizer, folder = finished.run.url, make_tokenizer(), tmp_path / "run"
    save_tiny(tmp_path, "llama", "critic", num_labels=2, vocab_size=len(tokenizer), max_position_embeddings=128)
    tokenizer.save_pretrained(tmp_path)
    serve_reward(model=tmp_path, process={"separator": " ", "aggregate": "mean"})
    prm = LlamaForTokenClassification.from_pretrained(str(tmp_path)).eval()
    row = np.asarray(tokenizer("Open the file, read it")["input_ids"])
    ends = [i for i, token in enumerate(row) if tokenizer.decode([int(token)]).startswith(" ")]
    inputs = {**scoring_inputs([row, row[:3]]), "prompt_lengths": np.asarray([[1], [1]])}
    with torch.no_grad():
        right = prm(torch.from_numpy(row)[None]).logits[0].softmax(-1)[:, 1].numpy()
    for model in (REWARD_MODEL, CRITIC_INFER):
        found = ask(url, model, inputs)
        steps = [end for end in found["step_ends"][0].tolist() if end >= 0]
        assert steps == [*ends[1:-1], row.size - 1]  # no step before the first word; the last ends with the row
        np.testing.assert_allclose(found["step_rewards"][0, : len(steps) - 1], right[steps[:-1]], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(found["token_rewards"][0, steps], found["step_rewards"][0, : len(steps)])
        assert found["rewards"][0, 0] == pytest.approx(float(found["step_rewards"][0, : len(steps)].mean()), abs=1e-6)
    settings = ["actor.steps=2", "actor.algorithm.name=grpo", "actor.algorithm.responses_per_prompt=2"]
    code, log = run_actor(finished.run, "actor-process", f"run.dir={folder}", *settings)
    assert code == 0, log
    for line in read_jsonl(folder / "metrics.jsonl"):
        assert 0 < line["train_rollouts/process_rewards"] < 1
        assert line["train_rollouts/steps_per_response"] >= 1
        assert line["train_rollouts/masked_samples"] == 0
        assert line["train_optim/grad_norm"] > 0
    validation, sample = (read_jsonl(folder / f"{name}.jsonl")[-1] for name in ("validations", "samples"))
    assert validation["reward"] != validation["process_rewards"]
    assert 0 < validation["process_rewards"] < 1
    num_steps = np.sum(sample["step_rewards"]) / sample["reward"]  # several may end in one of the policy's tokens
    assert num_steps == pytest.approx(round(num_steps), abs=1e-4)
    assert num_steps >= len(sample["step_rewards"]) - 1e-4
    summary = json.loads((folder / "actor_summary.json").read_text())
    assert summary["process_reward_after"] == validation["process_rewards"]


@pytest.mark.slow
def test_attributes_that_are_not_merged(
    serve_reward: Callable[..., None], finished: FinishedRun, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    model = LlamaForSequenceClassification.from_pretrained(
        str(checkpoints.reward), num_labels=3, ignore_mismatched_sizes=True
    )
    torch.nn.init.normal_(model.score.weight, 0.0, 0.3)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    serve_reward(model=tmp_path, merge_attributes=False, standardization="off")
    (row,) = random_rows([19], seed=1)
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(row)[None]).logits.numpy()
    for name in (REWARD_MODEL, CRITIC_INFER):
        found = ask(finished.run.url, name, scoring_inputs([row]))["rewards"]
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    code, log = run_actor(finished.run, "actor", f"run.dir={tmp_path / 'run'}")
    assert code == 2
    assert log.splitlines()[-1].startswith("error: reward_model returns 3 rewards per row, but the actor needs one")


# ---- a real judge: only in `make test-judge` ----


RUBRIC = """Question: {{ prompt }}
Answer: {{ response }}
How good is the answer, from 1 to 10? Reply with one number, nothing else."""
MAX_TOKENS = 16
ROWS = [
    ("What is the capital of France?", "Paris"),
    ("What is 2 + 2?", "Banana"),
    ("Name a color.", "Blue is a color."),
    ("Name a color.", ""),
    ("Who wrote Hamlet?", "Shakespeare wrote it."),
    ("Open the", "w1 blah the the"),
]


@pytest.fixture
def judge() -> Iterator[tuple[str, Path]]:
    """`transformers serve` with SmolLM2."""
    folder = Path(os.environ["JUDGE_ENVIRONMENT"]).absolute()
    model = Path(os.environ.get("JUDGE_MODEL", folder / "model")).absolute()
    if not (model / "tokenizer.json").is_file():
        shutil.rmtree(model, ignore_errors=True)
        subprocess.run(
            [sys.executable, "-m", "examples.demo.pretrained", str(model)], cwd=Path(__file__).parents[2], check=True
        )
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    options = ["--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32"]
    with subprocess.Popen([*command, *options], env=environment) as process:
        address = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.2)
        yield f"{address}/v1", model
        process.kill()


def verdicts(model: Path) -> list[float | None]:
    """The scores of `ROWS` by transformers' own greedy generation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    reader = Judge(model="m", base_url="http://h/v1", timeout_s=1.0)
    found: list[float | None] = []
    for prompt, response in ROWS:
        text = RUBRIC.replace("{{ prompt }}", prompt).replace("{{ response }}", response)
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = judge.generate(**given, do_sample=False, max_new_tokens=MAX_TOKENS)[0, given["input_ids"].shape[1] :]
        answer = tokenizer.decode(out, skip_special_tokens=True)
        print(repr(answer), len(out))
        try:
            found.append(reader.read(answer) if len(out) < MAX_TOKENS else None)
        except NoVerdict:
            found.append(None)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("JUDGE_ENVIRONMENT" not in os.environ, reason="opt-in: `make test-judge`")
def test_a_real_judge_gives_the_verdicts_of_transformers_own_generation(
    judge: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url, model = judge
    functions_alone(tmp_path, judge_terms(url, 50.0, model=str(model), rubric=RUBRIC, max_tokens=MAX_TOKENS))
    with tiny_server(tmp_path) as server:
        server.wait_ready()
        metadata = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in ROWS]
        rows = {"sentences": texts_array([f"{p} {r}" for p, r in ROWS]), "metadata": texts_array(metadata)}
        answer = ask(server.section.http_url, REWARD_MODEL, rows, (REWARDS, REWARD_ERRORS))
    expected = [np.nan if score is None else 0.5 * score for score in verdicts(model)]
    np.testing.assert_array_equal(answer[REWARDS][:, 0], expected)
    assert np.isfinite(expected).sum() >= 2
    assert [bool(error) for error in errors_of(answer)] == np.isnan(expected).tolist()
