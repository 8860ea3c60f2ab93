"""Rotary tables that transformers makes by the longest row of a forward: here no row depends on the rows beside it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_tokenizer
from tiny_checkpoints import POSITIONS, VOCAB, save_tiny
from transformers import AutoModel, Gemma3TextConfig

from actor.data.prompts import PromptError, PromptReader, read_prompts
from actor.data.rollout import Prompt
from actor.policy.policy import Policy
from python_backend.checkpoints.inspection import CheckpointError, inspect_checkpoint
from python_backend.checkpoints.positions import fix_forward, max_positions, stable_length
from python_backend.models.batching import padded_width
from python_backend.models.modeling import quiet_transformers, save_critic
from python_backend.wire.contract import ContractError, scoring_rows
from tests.support.loaders import load_critic, load_language_model, load_reward
from tests.support.settings import actor_section
from tools.render import reference as render_reference

LIMIT = POSITIONS // 2  # of the rows that leave the rotary table as it is
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": LIMIT,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 5.0, 9.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT}),
}
models = pytest.mark.parametrize("model", MODELS)
TOLERANCE = 1e-5
quiet_transformers()


def save(folder: Path, model: str, head: str) -> Path:
    family, settings = MODELS[model]
    save_tiny(folder, family, head, **settings)
    return folder


def rows(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, VOCAB, length) for length in lengths]


MIXED = rows(3, LIMIT, 9, LIMIT + 4, LIMIT - 1, POSITIONS, 5)  # some longer than what is served
ROLES: dict[str, tuple[str, Callable[[Path], Callable[[list[np.ndarray]], Any]]]] = {
    "reward": ("reward", lambda folder: load_reward(folder).score),
    "critic": ("critic", lambda folder: load_critic(folder).values),
    "reference": ("language", lambda folder: load_language_model(folder).logprobs),
}
roles = pytest.mark.parametrize("role", ROLES)


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE)


@models
@roles
def test_a_row_scores_as_it_does_alone_in_a_fresh_model(tmp_path: Path, model: str, role: str):
    head, load = ROLES[role]
    folder = save(tmp_path, model, head)
    alone = [load(folder)([row])[0] for row in MIXED]
    score = load(folder)
    assert_close(score(MIXED), alone)
    assert_close(score(MIXED[::-1]), alone[::-1])
    for i in (5, 1, 3, 0, 1):  # a long row before each short one
        assert_close(score([MIXED[i]]), [alone[i]])


@models
@roles
def test_rows_that_are_served_score_as_transformers_scores_them(tmp_path: Path, model: str, role: str):
    head, load = ROLES[role]
    family, settings = MODELS[model]
    theirs = save_tiny(tmp_path, family, head, **settings)
    served = [row for row in MIXED if row.size <= LIMIT]
    with torch.no_grad():
        logits = [theirs(input_ids=torch.from_numpy(row)[None]).logits[0] for row in served]
    if role == "reference":
        steps = [
            each[:-1].log_softmax(-1)[range(row.size - 1), row[1:]] for each, row in zip(logits, served, strict=True)
        ]
        expected = [np.append(step.numpy(), np.float32(0)) for step in steps]
    else:
        expected = [each.reshape(-1).numpy() for each in logits]
    assert_close(load(tmp_path)(served), expected)


@models
def test_workers_that_share_a_model_write_nothing_of_it(tmp_path: Path, model: str):
    critic = load_critic(save(tmp_path, model, "critic"))
    alone = [critic.values([row])[0] for row in MIXED]
    swapped = critic.with_weights(tmp_path)  # shares the table with the version before it
    before = [(id(buffer), buffer._version) for buffer in critic.model.buffers()]
    with ThreadPoolExecutor(3) as workers:
        for i, found in enumerate(workers.map(lambda i: (critic, swapped)[i % 2].values([MIXED[i % 7]])[0], range(70))):
            np.testing.assert_allclose(found, alone[i % 7], atol=TOLERANCE)
    assert [(id(buffer), buffer._version) for buffer in critic.model.buffers()] == before
    assert critic._token_head.lean is None


@torch.no_grad()
def test_a_table_for_each_kind_of_layer():
    kinds = ["full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=LIMIT,
        layer_types=kinds,
        rope_parameters={kinds[0]: DYNAMIC, kinds[1]: {"rope_type": "default", "rope_theta": 10000.0}},
    )
    body = AutoModel.from_config(config).eval()
    fix_forward(body)
    row, longer = (torch.from_numpy(each)[None] for each in rows(LIMIT, POSITIONS))
    before = body(input_ids=row)[0]
    body(input_ids=longer)
    torch.testing.assert_close(body(input_ids=row)[0], before, atol=TOLERANCE, rtol=0)


# ---- longer rows are refused ----


@models
def test_longer_rows_are_refused_and_padding_stops_before(tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture):
    folder = save(tmp_path / "0", model, "critic")
    with caplog.at_level(logging.WARNING):
        critic = load_critic(folder)
    assert ("rows are limited to 16 tokens, not max" in caplog.text) == (model != "dynamic")
    (tmp_path / "1").mkdir()
    save_critic(critic, tmp_path / "1")
    published = json.loads((tmp_path / "1" / "config.json").read_text())
    assert critic.limits.max_length == LIMIT
    assert inspect_checkpoint(folder).max_positions == LIMIT
    assert max_positions(published) == LIMIT  # what critic_train reads
    assert padded_width(LIMIT - 1, 64, critic.limits.max_length) == LIMIT
    with pytest.raises(ContractError, match=r"tokens\[0\]: 17 tokens, the model has 16 positions"):
        scoring_rows(np.ones((1, LIMIT + 1), np.int64), None, limits=critic.limits)


@pytest.mark.parametrize(
    ("config", "limit", "positions"),
    [
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,  # Phi-3 128k on the hub
                "rope_scaling": {"type": "su", "short_factor": [1.05], "long_factor": [1.3]},
            },
            4096,
            4096,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                    "short_mscale": 1.1,
                    "long_mscale": 1.2,  # Phi-3.5-MoE scales by length, too
                },
            },
            4096,
            4096,
        ),
        ({"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rope_scaling": None}, None, 4096),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2048, 2048),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}},
            },
            LIMIT,
            LIMIT,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            None,
            131072,
        ),
        ({"text_config": {"max_position_embeddings": 64, "rope_parameters": LONGROPE}}, LIMIT, LIMIT),
        ({"n_positions": 1024}, None, 1024),
        ({"max_seq_len": 2048}, None, 2048),  # MPT
        ({}, None, None),
    ],
)
def test_what_a_config_says(config: dict[str, Any], limit: int | None, positions: int | None):
    assert stable_length(config) == limit
    assert max_positions(config) == positions


def test_one_table_for_all_lengths_serves_all_of_them(tmp_path: Path):
    one = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
    theirs = save_tiny(tmp_path, "phi3", "critic", rope_parameters=one, original_max_position_embeddings=LIMIT)
    critic = load_critic(tmp_path)
    assert critic.limits.max_length == POSITIONS
    with torch.no_grad():
        expected = [theirs(input_ids=torch.from_numpy(row)[None]).logits[0, :, 0].numpy() for row in MIXED]
    assert_close(critic.values(MIXED), expected)


# ---- the policy ----


def policy(folder: Path, model: str, **settings: Any) -> Policy:
    tokenizer = make_tokenizer()
    family, sizes = MODELS[model]
    save_tiny(folder, family, "language", vocab_size=len(tokenizer), **sizes)
    tokenizer.save_pretrained(folder)
    limits = {"prompts_max_tokens": 6, "max_new_tokens": LIMIT - 6}
    return Policy.of(actor_section(**{"checkpoint": folder, "precision": "float32", **limits, **settings}))


@models
def test_a_policy_that_rows_may_outgrow_is_refused(tmp_path: Path, model: str):
    message = r"actor.prompts.max_tokens \(6\) \+ actor.generation.max_new_tokens \(11\) is above 16"
    with pytest.raises(CheckpointError, match=message):
        policy(tmp_path, model, max_new_tokens=LIMIT - 5)


@models
@pytest.mark.parametrize("decoding", ["slots", "transformers"])
def test_a_policy_writes_rows_up_to_there(tmp_path: Path, model: str, decoding: str):
    writer = policy(tmp_path, model, engine=decoding, min_new_tokens=LIMIT - 6)
    prompts = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((6, 1, 3))]
    rollout = writer.generate(prompts, seed=0, greedy=True)
    assert rollout.lengths.tolist() == [LIMIT, LIMIT - 5, LIMIT - 3]
    together = writer.logprobs(rollout)
    for i, length in enumerate(rollout.lengths.tolist()):
        row = rollout.tokens[i : i + 1, :length]
        start = int(rollout.prompt_lengths[i])
        mask = torch.arange(length - 1)[None] >= start - 1
        alone, _ = writer.token_logprobs(writer.model, row, torch.tensor([length]), mask)
        torch.testing.assert_close(together[i : i + 1, : length - 1], alone.cpu(), atol=TOLERANCE, rtol=0)
        logits = writer.model(input_ids=row.to(writer.model.device), use_cache=False).logits.cpu()
        written = logits[0, start - 1 : -1].index_fill(-1, torch.tensor([*writer.banned_ids, *writer.eos_ids]), -1e9)
        assert written.argmax(-1).tolist() == row[0, start:].tolist()


LEARNED = {  # or a table of fixed size
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {}),
    "gptj": ("gptj", {"n_positions": POSITIONS}),
}
COMPUTED = ("llama", "qwen2", "phi3")


def policy_of(folder: Path, family: str, **sizes: Any) -> Policy:
    """One whose rows may have one token more than it has positions."""
    tokenizer = make_tokenizer()
    save_tiny(folder, family, "language", vocab_size=len(tokenizer), **sizes)
    tokenizer.save_pretrained(folder)
    return Policy.of(actor_section(checkpoint=folder, prompts_max_tokens=6, max_new_tokens=POSITIONS - 5))


@pytest.mark.parametrize("model", LEARNED)
def test_a_policy_whose_positions_end_is_refused_at_the_start(tmp_path: Path, model: str):
    """It would end with an IndexError in the first step that writes a response as long."""
    family, sizes = LEARNED[model]
    with pytest.raises(CheckpointError) as caught:
        policy_of(tmp_path, family, **sizes)
    message = str(caught.value)
    assert "actor.prompts.max_tokens (6) + actor.generation.max_new_tokens (27) is above 32" in message
    assert message.endswith("the number of positions that the model has embeddings for; lower them")
    save_tiny(tmp_path, family, "language", vocab_size=len(make_tokenizer()), **sizes)
    Policy.of(actor_section(checkpoint=tmp_path, prompts_max_tokens=6, max_new_tokens=POSITIONS - 6))


@pytest.mark.parametrize("family", COMPUTED)
def test_positions_that_are_computed_have_no_end(tmp_path: Path, family: str):
    policy = policy_of(tmp_path, family)
    rollout = policy.generate([Prompt("0", "", np.arange(5, 11))], seed=0)
    assert torch.isfinite(policy.logprobs(rollout)).all()


# ---- tokens that the model has no embedding for ----


@pytest.mark.parametrize("decoding", ["slots", "transformers"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padding_token_beyond_the_embeddings_is_not_used(tmp_path: Path, family: str, decoding: str):
    """Such as one that was added to a tokenizer, and not to its model."""
    tokenizer = make_tokenizer()
    save_tiny(tmp_path, family, "language", vocab_size=len(tokenizer), pad_token_id=None, eos_token_id=1)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "bos_token": "[BOS]"})
    tokenizer.save_pretrained(tmp_path)
    policy = Policy.of(actor_section(checkpoint=tmp_path, prompts_max_tokens=6, max_new_tokens=8, engine=decoding))
    assert (tokenizer.pad_token_id, policy.pad_id, policy.banned_ids) == (policy.vocab_size, 1, [])
    prompts = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((6, 1, 3))]
    rollout = policy.generate(prompts, seed=0)
    assert torch.isfinite(policy.logprobs(rollout)).all()
    assert render_reference._banned_token_ids(tmp_path) == "[]"  # or the actor refuses the served reference


def test_a_prompt_of_tokens_beyond_the_embeddings_is_refused(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    (tmp_path / "prompts.jsonl").write_text('{"text": "Open the file"}\n{"text": "Open <tool>"}\n')
    size = len(tokenizer) - 1
    with pytest.raises(
        PromptError, match=rf"prompts\.jsonl:2: token {size} \('<tool>'\) is outside the policy's {size} embedd"
    ):
        read_prompts(tmp_path / "prompts.jsonl", PromptReader(tokenizer, 20, vocab_size=size))
    assert len(read_prompts(tmp_path / "prompts.jsonl", PromptReader(tokenizer, 20, vocab_size=size + 1))) == 2
