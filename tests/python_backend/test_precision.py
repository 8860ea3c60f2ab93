"""bfloat16: frozen matrices are held in it, the result is that of autocast over float32 weights, logits are float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import make_tokenizer
from tiny_checkpoints import save_tiny

from actor.data.rollout import Prompt, Rollout
from actor.policy.policy import Policy
from python_backend.config import ConfigError, load_config
from python_backend.models.language_model import load_language_model
from python_backend.models.logprobs import target_logprobs
from python_backend.models.modeling import quiet_transformers
from python_backend.models.precision import in_float32
from tests.support.settings import actor_section

PROMPTS = [Prompt(str(i), "", np.arange(5, 5 + length)) for i, length in enumerate((3, 6, 2, 9))]
LORA_COPY = {"lora_rank": 2, "one_step_off_policy": True}
EXACT = ("norm", "ln_", "lm_head", "embed_tokens", "wte", "wpe", ".gate.", ".experts.", "lora_")
CARD_BOUND = 2e-5  # nats: a card multiplies the output layer as sums of bfloat16 terms
FAMILIES = ("llama", "gpt2", "mixtral")
quiet_transformers()


def save_policy(folder: Path, family: str = "llama") -> Path:
    tokenizer = make_tokenizer()
    save_tiny(folder, family, "language", vocab_size=len(tokenizer), pad_token_id=2, eos_token_id=1)
    tokenizer.save_pretrained(folder)
    return folder


def make_policy(folder: Path, **settings: Any) -> Policy:
    limits = {"checkpoint": folder, "max_new_tokens": 8, "prompts_max_tokens": 12, "precision": "bfloat16"}
    torch.manual_seed(0)
    return Policy.of(actor_section(**{**limits, **settings}))


def by_hand(model: Any, rollout: Rollout, banned: list[int]) -> torch.Tensor:
    """Log-probs `[B, S-1]` of the whole rows: a float32 model under autocast, its head in float32."""
    tokens = rollout.tokens.to(model.device)
    attention = (torch.arange(tokens.shape[1]) < rollout.lengths[:, None]).long().to(model.device)
    with torch.no_grad(), torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.base_model(input_ids=tokens, attention_mask=attention, use_cache=False)[0][:, :-1]
    with torch.no_grad():
        logits = torch.nn.functional.linear(hidden.float(), model.lm_head.weight)
        return target_logprobs(logits, tokens[:, 1:], temperature=1.0, banned_token_ids=banned).cpu()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{"lora_rank": 2}, {"one_step_off_policy": True}, LORA_COPY, {}], ids=str)
def test_frozen_matrices_are_held_in_bfloat16_and_nothing_else_changes(
    tmp_path: Path, family: str, settings: dict[str, Any]
):
    exact = make_policy(save_policy(tmp_path, family), precision="float32", kl_coef=0)
    policy = make_policy(tmp_path, **settings)
    rollout = policy.generate(PROMPTS, seed=1)
    expected = by_hand(exact.model, rollout, policy.banned_ids)
    for reference in (False, True):
        found = policy.logprobs(rollout, reference=reference)
        bound = 0 if policy.model.device.type == "cpu" else CARD_BOUND
        torch.testing.assert_close(found[found != 0], expected[found != 0], rtol=0, atol=bound)
    for model in (policy.model, policy.sampler, policy.reference):
        for name, parameter in [] if model is None else model.named_parameters():
            is_float32 = parameter.requires_grad or any(part in name for part in EXACT)
            assert parameter.dtype == (torch.float32 if is_float32 else torch.bfloat16), name


@pytest.mark.parametrize("settings", [{"lora_rank": 2}, {}], ids=str)
def test_logits_are_float32(tmp_path: Path, settings: dict[str, Any]):
    """What a token is drawn from is what its log-prob is taken under."""
    policy = make_policy(save_policy(tmp_path), **settings)
    causal = policy.model.get_base_model() if settings else policy.model
    ids = torch.arange(4, 16, device=policy.model.device)[None]
    with torch.no_grad(), policy.computing():
        logits = causal(input_ids=ids).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    rollout = policy.generate(PROMPTS, seed=1)
    assert rollout.logprobs is not None
    torch.testing.assert_close(rollout.logprobs, policy.logprobs(rollout), atol=0.02, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{"lora_rank": 2}, LORA_COPY], ids=str)
def test_our_decoding_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, settings: dict[str, Any]):
    make_policy(save_policy(tmp_path, family), **settings).generate(PROMPTS, seed=1)
    assert not caplog.text


def test_ways_to_compute_are_compared_in_float32(tmp_path: Path):
    policy = make_policy(save_policy(tmp_path), lora_rank=2)
    exact = make_policy(tmp_path, lora_rank=2, precision="float32")
    ids = torch.arange(4, 16, device=policy.model.device)[None]
    for name, parameter in exact.model.named_parameters():
        if parameter.ndim == 2 and "lora" not in name and "embed" not in name and "lm_head" not in name:
            parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad(), policy.computing(), in_float32(policy.model):
        found = policy.model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(found, exact.model(input_ids=ids).logits)
    assert {p.dtype for n, p in policy.model.named_parameters() if "base_layer" in n} == {torch.bfloat16}


def test_an_update_reaches_a_bfloat16_sampler(tmp_path: Path):
    policy = make_policy(save_policy(tmp_path), one_step_off_policy=True, kl_coef=0)
    rollout = policy.generate(PROMPTS, seed=1)
    before = policy.logprobs(rollout)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter *= 1.5
    assert torch.equal(policy.logprobs(rollout), before)
    policy.renew_sampler()
    exact = make_policy(tmp_path, kl_coef=0)
    exact.model.load_state_dict(policy.model.state_dict())
    assert torch.equal(policy.logprobs(rollout), exact.logprobs(rollout))


@pytest.mark.parametrize("settings", [{"lora_rank": 2}, {}], ids=str)
@pytest.mark.parametrize(
    ("family", "stored"), [("llama", "bfloat16"), ("llama", "float32"), ("gpt2", "float32"), ("mixtral", "bfloat16")]
)
def test_a_served_reference_computes_as_the_actor_does(
    tmp_path: Path, settings: dict[str, Any], family: str, stored: str
):
    """So that the KL begins at 0."""
    folder = save_policy(tmp_path, family)
    if stored == "bfloat16":
        model = make_policy(folder, precision="float32", kl_coef=0).model
        model.bfloat16().save_pretrained(folder)
    policy = make_policy(folder, **settings)
    served = load_language_model(
        folder, device=policy.settings.device, dtype="bfloat16", banned_token_ids=policy.banned_ids
    )
    rollout = policy.generate(PROMPTS, seed=1)
    for i, row in enumerate(rollout.rows()):
        one = rollout.select(torch.tensor([i]))
        found, start = torch.from_numpy(served.logprobs([row])[0]), PROMPTS[i].tokens.size - 1
        expected = policy.logprobs(one)[0]
        torch.testing.assert_close(found[start : len(row) - 1], expected[start : len(row) - 1], atol=1e-5, rtol=0)


def test_the_reference_takes_the_actors_precision(tmp_path: Path):
    path = tmp_path / "my.yaml"
    path.write_text("actor: {policy: {precision: bfloat16}, kl: {reference: triton}}")
    assert load_config(path).reference.dtype == "bfloat16"
    assert load_config(path, ["actor.policy.precision=float32"]).reference.dtype == "float32"
    with pytest.raises(ConfigError, match=r"dtype \(float32\) differs from actor\.policy\.precision \(bfloat16\)"):
        load_config(path, ["reference.dtype=float32"])
    load_config(path, ["reference.dtype=float32", "actor.kl.reference=actor"])
