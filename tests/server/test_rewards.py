"""Rewards on the real server: functions next to a model, process rewards, and an actor that trains on them."""

import dataclasses
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import reward_functions
from bad_requests import Request, array_tensor, grpc_sender, send_http
from bare_client import ask
from google.protobuf import json_format
from live_system import make_run, reload_model, run_actor, start_system
from model_inputs import random_rows, scoring_inputs
from run_checkpoints import TEXTS, make_tokenizer
from tiny_checkpoints import save_tiny
from transformers import AutoModelForCausalLM

from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl
from rlhf_triton.tools.render_configs import parse_pbtxt, render_configs
from rlhf_triton.wire.contract import (
    CRITIC_INFER,
    REWARD_ERRORS,
    REWARD_MODEL,
    REWARDS,
    VALUES,
)

FUNCTIONS = Path(reward_functions.__file__)


def errors_of(answer):
    return [item.decode() for item in answer[REWARD_ERRORS][:, 0]]


# ---- functions beside a model, and an actor of mixtures of experts ----


TEMPLATES = {"default": "{{ messages[0].content }}", "tool_use": "{{ messages[0].role }}"}
TERMS = {
    "model": {"weight": 1.0},
    "texts": {"function": f"{FUNCTIONS}:texts_fit", "weight": 10.0},
    "verdict": {"function": f"{FUNCTIONS}:label_or_trouble", "weight": 0.5, "timeout_s": 1.0},
    "peers": {"function": f"{FUNCTIONS}:by_group", "groupwise": True, "weight": 0.0},
}
NUM_BAD = 4_000
NUM_SENDERS = 16
LABELS = (1, 2, "raise", 3, "loop", 0, 4, 5)


def mixture(folder, family, *, seed):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = dict(TEMPLATES)
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 128}
    save_tiny(folder, family, "language", seed=seed, **tokens)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, checkpoints):
    folder = tmp_path_factory.mktemp("mixed")
    prompts = folder / "prompts.jsonl"
    lines = [{"text": " ".join(text.split()[:3]), "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
    write_jsonl(prompts, lines)
    actor = {"prompts_path": str(prompts), "validation_prompts": str(prompts), "steps": 2, "max_failed_fraction": 0.25}
    ours = dataclasses.replace(
        checkpoints,
        policy=mixture(folder / "policy", "granitemoe", seed=1),
        critic=mixture(folder / "critic", "qwen3-moe", seed=2),
    )
    system = start_system(make_run(folder / "run", ours, rewards=TERMS, actor=actor, reward={"store": True}))
    yield system
    system.stop()


@pytest.mark.slow
def test_run_logs_reward_components_and_masks_failed_rows(mixed):
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
    assert "; verdict: took longer than 1 s and was killed; raise rewards.verdict.timeout_s, or " in log
    assert json.loads((folder / "actor_summary.json").read_text())["critic_updates"] == 2
    AutoModelForCausalLM.from_pretrained(str(folder / "policy"))
    assert load_tokenizer(folder / "policy").chat_template == TEMPLATES


@pytest.mark.slow
def test_text_sequence_id_does_not_crash_the_server(mixed):
    """It kills tritonserver 2.51 where a step of an ensemble is an ensemble itself."""
    tokens = array_tensor("tokens", np.stack(random_rows([5, 5], seed=3)))
    for model, sequence_id in itertools.product((REWARD_MODEL, CRITIC_INFER), ("x", "x" * 100)):
        request = Request(model, [tokens], parameters={"sequence_id": sequence_id})
        assert send_http(mixed.run.url, request).status == "200"


@pytest.mark.slow
def test_bad_rows_over_grpc_do_not_lock_the_server_up(mixed):
    """tritonserver 2.51 deadlocks if a step fails over gRPC while another step of its request is running."""
    at = mixed.run.config.server
    bad = [Request(model, [array_tensor("tokens", np.full((1, 5), 4711))]) for model in (REWARD_MODEL, CRITIC_INFER)]

    def send():
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
        probed = control.probe(CRITIC_INFER, 120.0, (REWARDS, VALUES, REWARD_ERRORS))
    assert errors_of(probed) == [""], "the function missed the label"


# ---- other models ----


@pytest.fixture
def serve_reward(live):
    """Return a function that loads another reward model into the live server, rendered from the configuration."""
    config = live.run.config

    def serve(**settings):
        data = {**config.reward.model_dump(exclude_unset=True), **settings}
        rendered = render_configs(config.model_copy(update={"reward": type(config.reward).model_validate(data)}))
        for model in (REWARD_MODEL, CRITIC_INFER):  # Triton refuses an ensemble that does not fit its models
            message = parse_pbtxt(model, rendered[model])
            new = json_format.MessageToDict(message, preserving_proto_field_name=True)
            reload_model(live.run, model, lambda config, new=new: (config.clear(), config.update(new)))

    yield serve
    serve()


@pytest.mark.slow
def test_a_process_reward_is_served_alone_and_beside_the_values(serve_reward, live, tmp_path):
    """A token classifier with two labels, as TRL trains them; its steps are tested in test_text_rewards.py."""
    tokenizer = make_tokenizer()
    save_tiny(tmp_path, "llama", "critic", num_labels=2, vocab_size=len(tokenizer), max_position_embeddings=128)
    tokenizer.save_pretrained(tmp_path)
    serve_reward(model=tmp_path, process={"separator": " "}, store=False)
    row = np.asarray(tokenizer("Open the file, read it")["input_ids"])
    inputs = {**scoring_inputs([row, row[:3]]), "prompt_lengths": np.asarray([[1], [1]])}
    alone, beside_values = (ask(live.run.url, model, inputs) for model in (REWARD_MODEL, CRITIC_INFER))
    for name in ("rewards", "token_rewards", "step_rewards", "step_ends"):
        np.testing.assert_allclose(alone[name], beside_values[name], atol=1e-5, rtol=0)
