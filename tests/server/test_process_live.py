"""A process reward on the real server: its outputs, alone and beside the critic's, and a GRPO run on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reward_functions
import torch
from bare_client import Refused, ask
from google.protobuf import json_format
from live_system import (
    TEXTS,
    Checkpoints,
    FinishedRun,
    make_run,
    make_tokenizer,
    reload_model,
    run_actor,
    scoring_inputs,
    start_system,
)
from test_two_tokenizers import compare_and_score, written
from tiny_checkpoints import save_tiny
from transformers import LlamaForTokenClassification

from critic_client import CriticClient
from python_backend.store.jsonl import read_jsonl
from python_backend.wire.contract import CRITIC_INFER, REWARD_CHECKPOINT, REWARD_MODEL, texts_array
from tools.render_configs import parse_config, render_configs

FUNCTIONS = Path(reward_functions.__file__)
PROCESS = {"separator": " ", "aggregate": "mean"}
OUTPUTS = {"rewards", "token_rewards", "step_rewards", "step_ends"}


@pytest.fixture
def prm(finished: FinishedRun, tmp_path: Path) -> Iterator[LlamaForTokenClassification]:
    """A token classifier with two labels, as TRL trains them, in place of the finished run's reward model."""
    tokenizer, config = make_tokenizer(), finished.run.config
    save_tiny(tmp_path, "llama", "critic", num_labels=2, vocab_size=len(tokenizer), max_position_embeddings=128)
    tokenizer.save_pretrained(tmp_path)
    data = {**config.reward.model_dump(exclude_unset=True), "checkpoint": tmp_path, "process": PROCESS}
    reward = type(config.reward).model_validate(data)
    rendered = render_configs(config.model_copy(update={"reward": reward}))

    def replace(model: str, by: dict[str, Any]) -> None:
        reload_model(finished.run, model, lambda config: (config.clear(), config.update(by)))

    def parsed(model: str, text: str) -> dict[str, Any]:
        return json_format.MessageToDict(parse_config(model, text), preserving_proto_field_name=True)

    own = render_configs(config)
    try:
        for model in (REWARD_MODEL, CRITIC_INFER):
            replace(model, parsed(model, rendered[model]))
        yield LlamaForTokenClassification.from_pretrained(str(tmp_path)).eval()
    finally:
        for model in (CRITIC_INFER, REWARD_MODEL):
            replace(model, parsed(model, own[model]))


@pytest.mark.slow
def test_a_process_reward_is_served_and_trained_on(
    finished: FinishedRun, prm: LlamaForTokenClassification, tmp_path: Path
) -> None:
    url, tokenizer = finished.run.url, make_tokenizer()
    row = np.asarray(tokenizer("Open the file, read it")["input_ids"])
    ends = [i for i, token in enumerate(row) if tokenizer.decode([int(token)]).startswith(" ")]
    inputs = {**scoring_inputs([row, row[:3]]), "prompt_lengths": np.asarray([[1], [1]])}
    with torch.no_grad():
        right = prm(torch.from_numpy(row)[None]).logits[0].softmax(-1)[:, 1].numpy()
    for model in (REWARD_MODEL, CRITIC_INFER):
        found = ask(url, model, inputs)
        assert found.keys() >= OUTPUTS
        steps = [end for end in found["step_ends"][0].tolist() if end >= 0]
        assert steps == [*ends[1:-1], row.size - 1]  # no step before the first word; the last ends with the row
        np.testing.assert_allclose(found["step_rewards"][0, : len(steps) - 1], right[steps[:-1]], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(found["token_rewards"][0, steps], found["step_rewards"][0, : len(steps)])
        assert found["rewards"][0, 0] == pytest.approx(float(found["step_rewards"][0, : len(steps)].mean()), abs=1e-6)
    with CriticClient(url, run_id="test") as client:
        scores = client.score([row.tolist()], prompt_lengths=[1])
    assert scores.rewards[0] == pytest.approx(float(found["rewards"][0, 0]), abs=1e-6)
    metadata = texts_array([json.dumps({"step_ends": [9, 4]})])
    with pytest.raises(Refused, match=r"metadata\[0\]\.step_ends: 4, must be between"):
        ask(url, REWARD_MODEL, {"sentences": texts_array(["Open the file"]), "metadata": metadata})
    grpo = {"name": "grpo", "responses_per_prompt": 2}
    settings = [f"actor.algorithm.{key}={value}" for key, value in grpo.items()]
    code, log = run_actor(finished.run, "actor-process", f"run.dir={tmp_path / 'run'}", "actor.steps=2", *settings)
    assert code == 0, log
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert 0 < line["train_rollouts/process_rewards"] < 1
        assert line["train_rollouts/steps_per_response"] >= 1
        assert line["train_rollouts/masked_samples"] == 0
        assert line["train_optim/grad_norm"] > 0
    validation = read_jsonl(tmp_path / "run" / "validations.jsonl")[-1]
    assert validation["reward"] != validation["process_rewards"]
    assert 0 < validation["process_rewards"] < 1
    sample = read_jsonl(tmp_path / "run" / "samples.jsonl")[0]
    assert sample["reward"] == pytest.approx(np.mean(sample["step_rewards"]), abs=1e-5)
    summary = json.loads((tmp_path / "run" / "actor_summary.json").read_text())
    assert summary["process_reward_after"] == validation["process_rewards"]


@pytest.mark.slow
def test_a_process_reward_in_a_weighted_sum(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Steps count times the model's weight; what the functions give is the outcome, at the response's end."""
    tokenizer, folder = make_tokenizer(), tmp_path / "prm"
    save_tiny(folder, "llama", "critic", num_labels=2, vocab_size=len(tokenizer), max_position_embeddings=128)
    tokenizer.save_pretrained(folder)
    rewards = {"model": {"weight": 2.0}, "length": {"function": f"{FUNCTIONS}:num_tokens", "weight": -0.5}}
    reward = {"checkpoint": str(folder), "process": PROCESS}
    run = make_run(tmp_path / "run", checkpoints, reward=reward, rewards=rewards)
    system, rollout = start_system(run), written(tokenizer, list(TEXTS))
    try:
        scores = asyncio.run(compare_and_score(system, tokenizer, rollout))[1]
        sent = {**scoring_inputs(rollout.rows()), "prompt_lengths": rollout.prompt_lengths.numpy()[:, None]}
        found = ask(run.url, REWARD_CHECKPOINT, sent)
    finally:
        system.stop()
    assert scores.process is not None
    assert scores.scored.all()
    lengths = rollout.lengths.numpy().astype(np.float32)
    for i, ends in enumerate(found["step_ends"]):
        steps = ends[ends >= 0]
        assert scores.process.ends[i].nonzero()[:, 0].tolist() == sorted(set(steps.tolist()))
        given = scores.process.rewards[i, : found["token_rewards"].shape[1]].numpy()
        np.testing.assert_allclose(given[steps], 2 * found["step_rewards"][i, : steps.size], atol=1e-5, rtol=0)
        assert scores.process.rewards[i].sum() == pytest.approx(float(given[steps].sum()), abs=1e-5)
    np.testing.assert_allclose(scores.process.outcome, -0.5 * lengths, atol=1e-5, rtol=0)
    np.testing.assert_allclose(scores.rewards, 2 * found["rewards"][:, 0] - 0.5 * lengths, atol=1e-5, rtol=0)
