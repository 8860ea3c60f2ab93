"""Log-probs from hidden states: the same numbers and gradients as from whole logits, a part at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from python_backend.models import output_head
from python_backend.models.logprobs import sampling_entropy, target_logprobs
from python_backend.models.output_head import head_logprobs, linear_head

VOCAB, WIDTH, POSITIONS = 11, 4, 7
SAMPLING: dict[str, Any] = {"temperature": 0.7, "banned_token_ids": [3, 9]}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def example(*, bias: bool) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states, a head and targets in float64."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=bias, dtype=torch.float64)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=torch.float64, requires_grad=True)
    return hidden, head, torch.tensor([0, 1, 2, 4, 5, 10, 4])


@pytest.mark.parametrize("rows_at_once", [1, 3, POSITIONS])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_equals_whole_logits(
    rows_at_once: int, bias: bool, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_head, "MAX_LOGITS", rows_at_once * VOCAB)
    weights = torch.randn(2, POSITIONS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for whole in (True, False):
        hidden, head, targets = example(bias=bias)
        if whole:
            logits = head(hidden)
            logprobs, entropies = target_logprobs(logits, targets, **SAMPLING), sampling_entropy(logits, **SAMPLING)
        else:
            logprobs, entropies = head_logprobs(hidden, head, targets, with_entropy=with_entropy, **SAMPLING)
        loss = (logprobs * weights[0]).sum()
        if with_entropy:
            loss = loss + (entropies * weights[1]).sum()
        loss.backward()
        gradients = [hidden.grad, *(parameter.grad for parameter in head.parameters())]
        results.append([logprobs.detach(), entropies.detach() if with_entropy else None, *gradients])
    torch.testing.assert_close(results[1], results[0])


def test_frozen_heads_get_no_gradient() -> None:
    hidden, head, targets = example(bias=True)
    head.requires_grad_(False)
    head_logprobs(hidden, head, targets, **SAMPLING)[0].sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.any()
    assert head.weight.grad is None


def test_logits_never_exist_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_head, "MAX_LOGITS", 2 * VOCAB)
    sizes: list[int] = []
    logits_of = output_head._logits

    def watched(*args: Any) -> Tensor:
        logits = logits_of(*args)
        sizes.append(len(logits))
        return logits

    monkeypatch.setattr(output_head, "_logits", watched)
    hidden, head, targets = example(bias=False)
    kept: list[int] = []  # what the backward pass needs
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        logprobs, _ = head_logprobs(hidden, head, targets, **SAMPLING)
    logprobs.sum().backward()
    assert sizes == [2, 2, 2, 1] * 2  # forward, and again backward
    assert sum(kept) == hidden.numel() + head.weight.numel() + targets.numel()


@pytest.mark.parametrize(("temperature", "banned"), [(0.0, []), (1.0, [VOCAB])])
def test_sampling_settings_are_checked(temperature: float, banned: list[int]) -> None:
    hidden, head, targets = example(bias=False)
    with pytest.raises(ValueError, match=r"temperature|banned_token_ids"):
        head_logprobs(hidden, head, targets, temperature=temperature, banned_token_ids=banned)


def test_models_that_change_their_logits_after_the_head_are_found_out() -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    assert linear_head(plain) is plain.lm_head
    capped = Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=0.01)).eval()
    assert linear_head(capped) is None
    scaled = CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.5)).eval()
    assert linear_head(scaled) is None


def test_a_cap_that_random_weights_never_reach_is_found_out() -> None:
    """Training makes logits larger: what a cap does to them shows later."""
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(Gemma2Config(**SMALL, final_logit_softcapping=30.0)).eval()
    assert capped(input_ids=torch.arange(4)[None]).logits.abs().max() < 1
    assert linear_head(capped) is None


def test_models_whose_body_transformers_does_not_name_have_none() -> None:
    config = Llama4TextConfig(**SMALL, intermediate_size_mlp=16, num_local_experts=1)
    model = Llama4ForCausalLM(config).eval()
    assert model.base_model is model
    assert linear_head(model) is None
