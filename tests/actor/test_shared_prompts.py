"""Hidden states of responses with shared prompts: those of a plain forward, and so are the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_decoding import FAMILIES, make_model
from torch import Tensor

from actor.generation import shared_prompts
from actor.generation.shared_prompts import can_share, response_hidden, shared_passes

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [5, 6, 7]]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Three prompts with four responses each, of different lengths, in mixed order."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        [*prompt, *torch.randint(5, 60, (size,), generator=generator).tolist()]
        for size in (4, 1, 6, 3)
        for prompt in PROMPTS
    ]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    inside = torch.zeros(len(rows), int(lengths.max()) - 1, dtype=torch.bool)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        inside[i, len(PROMPTS[i % 3]) - 1 : len(row) - 1] = True
    inside[5, 7] = False  # a gap within a response
    return tokens, lengths, inside


def plain(body: Any, tokens: Tensor, lengths: Tensor, inside: Tensor) -> Tensor:
    attention = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long()
    return body(input_ids=tokens, attention_mask=attention, use_cache=False)[0][:, :-1][inside]


def shared(body: Any, tokens: Tensor, lengths: Tensor, inside: Tensor) -> Tensor | None:
    passes = shared_passes(tokens, lengths, inside)
    return None if passes is None else response_hidden(body, *passes)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_a_plain_forward_and_its_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prompts, "WORTH_IT", 10.0)
    model = make_model(family)
    assert can_share(model)
    results = []
    for function in (plain, shared):
        model.zero_grad()
        hidden = function(model.base_model, *batch())
        assert hidden is not None
        weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        (hidden * weights).sum().backward()
        results.append(
            [hidden.detach(), *(p.grad.clone() for p in model.base_model.parameters() if p.grad is not None)]
        )
    torch.testing.assert_close(results[1], results[0], atol=1e-3, rtol=1e-3)


def test_each_prompt_goes_through_once() -> None:
    model = make_model("llama")
    sizes: list[tuple[int, ...]] = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, __: sizes.append(tuple(inputs[0].shape)))
    assert shared(model.model, *batch()) is not None
    assert sizes == [(3, 5), (12, 6)]  # a prompt's last token predicts the response's first: it is in the rows


def test_prompts_of_their_own_take_a_plain_forward() -> None:
    tokens, lengths, inside = batch()
    tokens[:, 0] = torch.arange(len(tokens)) + 5
    assert shared(make_model("llama").model, tokens, lengths, inside) is None


def test_a_model_whose_cache_changes_its_answers_is_found_out() -> None:
    model = make_model("llama")
    forward = model.model.forward

    def odd(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        output = forward(*args, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None:
            output.last_hidden_state = output.last_hidden_state * 1.01
        return output

    model.model.forward = odd
    assert not can_share(model)
