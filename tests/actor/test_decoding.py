"""Our own decoding: the same texts as `generate` writes, whatever the model, the slots and the order rows end in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from actor.generation import engine, slots
from actor.generation.cache import SlotCache, cache_layers
from actor.generation.engine import Generation, uniform_draws
from actor.generation.slots import Decoder, Response, Rules, draw
from python_backend.config import GenerationSection
from tests.support.settings import actor_section

VOCAB, EOS = 64, 2
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE: dict[str, Any] = {**SMALL, "intermediate_size": 64, "max_position_embeddings": 256}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", WIDE),
    "grouped heads": ("Qwen2Config", {**WIDE, "num_key_value_heads": 2}),
    "learned positions": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    ),
    "offset positions": (
        "OPTConfig",
        {**SMALL, "ffn_dim": 64, "max_position_embeddings": 256, "word_embed_proj_dim": 32},
    ),
    "distances in the mask": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "half rotated": ("GPTNeoXConfig", WIDE),
    "sliding window": ("MistralConfig", {**WIDE, "num_key_value_heads": 2, "sliding_window": 8}),
    "every other layer slides": (
        "Gemma2Config",
        {**WIDE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
    ),
}


def make_model(family: str, *, eos_bias: float = 0.0) -> Any:
    """Random weights, large enough that logits differ; `eos_bias` makes responses end."""
    name, settings = FAMILIES[family]
    torch.manual_seed(5)
    settings = {**settings, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.3}
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).eval()
    if eos_bias:
        model.lm_head.register_forward_hook(lambda _, __, logits: biased(logits, eos_bias))
    return model


def biased(logits: torch.Tensor, by: float) -> torch.Tensor:
    logits[..., EOS] += by
    return logits


def make_prompts(count: int, *, longest: int = 20) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, rng.integers(1, longest + 1)) for _ in range(count)]


def generation(model: Any, **settings: Any) -> Generation:
    given = {"max_new_tokens": 16, "generation_batch_size": 4, **settings}
    return Generation(model, None, actor_section(**given).generation, eos_ids=[EOS], pad_id=0, banned_ids=[0, 1])


def texts(written_by: Generation, prompts: list[np.ndarray], *, seed: int = 0, greedy: bool = False) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    written_by.run(prompts, lambda i, response: found.update({i: response.tokens}), seed=seed, greedy=greedy)
    assert len(found) == len(prompts)
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_are_those_of_generate(family: str) -> None:
    model, prompts = make_model(family, eos_bias=2.0), make_prompts(11)
    ours = generation(model)
    written = texts(ours, prompts, greedy=True)
    assert ours._decodes, "it was not our decoding that wrote them"
    assert written == texts(generation(model, engine="transformers"), prompts, greedy=True)


@pytest.mark.parametrize("slots", [1, 2, 5, 11, 40])
def test_a_response_does_not_depend_on_the_rows_beside_it(slots: int) -> None:
    model, prompts = make_model("llama", eos_bias=2.0), make_prompts(11)
    alone = texts(generation(model, generation_batch_size=3), prompts, seed=7)
    assert texts(generation(model, generation_batch_size=slots), prompts, seed=7) == alone
    assert texts(generation(model, generation_batch_size=slots), prompts, seed=8) != alone


def test_the_cache_is_allocated_once_and_has_room_for_any_number_of_rows() -> None:
    """Rows that go on for long: the columns are used up again and again."""
    model = make_model("llama", eos_bias=1.0)
    sizes, shifts = set(), []
    shift = SlotCache.shift

    class Watched(Decoder):
        def _write_on(self, cache: SlotCache, *args: Any) -> None:
            sizes.add(tuple(tensor.data_ptr() for layer in cache.layers for tensor in layer.tensors()))
            super()._write_on(cache, *args)

    prompts = make_prompts(60, longest=4)
    found: dict[int, list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotCache, "shift", lambda self, *args: (shifts.append(1), shift(self, *args)))
        Watched(model, Rules(24, [EOS], [0, 1]), slots=4).run(
            prompts, None, lambda i, response: found.update({i: response.tokens})
        )
    assert len(sizes) == 1
    assert len(shifts) > 3
    plain = generation(model, engine="transformers", max_new_tokens=24, generation_batch_size=60)
    assert [found[i] for i in range(60)] == texts(plain, prompts, greedy=True)


def test_draws_follow_the_probabilities() -> None:
    """20,000 draws of five tokens: each share within four standard deviations of its probability."""
    torch.manual_seed(0)
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    count = 20_000
    drawn = draw(probabilities.log().expand(count, -1), torch.rand(count, dtype=torch.float64))
    for token, probability in enumerate(probabilities.tolist()):
        share = float((drawn == token).float().mean())
        assert abs(share - probability) <= 4 * math.sqrt(probability * (1 - probability) / count)
    edges = torch.tensor([0.0, 0.5 - 1e-6, 0.5 + 1e-6, 1 - 2**-53], dtype=torch.float64)
    assert draw(probabilities.log().expand(4, -1), edges).tolist() == [0, 0, 2, 4]


def test_a_penalty_counts_each_token_once_and_no_padding() -> None:
    """Against the published rule: logits of seen tokens are divided by it where positive, multiplied where not."""
    model, prompts = make_model("llama", eos_bias=2.0), [*make_prompts(5), *make_prompts(2)]  # some share their prompt
    written = texts(generation(model, repetition_penalty=3.0), prompts, greedy=True)
    assert len({len(response) for response in written}) > 2  # rows change their slots
    for prompt, response in zip(prompts, written, strict=True):
        for i, chosen in enumerate(response):
            row = torch.tensor([*prompt.tolist(), *response[:i]])
            with torch.no_grad():
                logits = model(row[None]).logits[0, -1]
            for token in set(row.tolist()):
                logits[token] = logits[token] * 3.0 if logits[token] < 0 else logits[token] / 3.0
            logits[[0, 1]] = -torch.inf
            assert chosen == int(logits.argmax())


def test_a_penalty_does_not_read_a_rows_tokens_again_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            read.append(len(self))
            return super().__iter__()

    def counted(index: int, start: int, tokens: list[int], *more: Any) -> Any:
        return row(index, start, Counted(tokens), *more)

    row = slots._Row
    monkeypatch.setattr(slots, "_Row", counted)
    prompts = make_prompts(5)
    texts(generation(make_model("llama"), repetition_penalty=3.0), prompts, greedy=True)
    assert len(read) <= len(prompts)


def test_draws_depend_on_seed_and_prompt_alone_and_are_made_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [list(islice(uniform_draws(7, index), 200)) for index in range(3)]
    assert whole == [list(islice(uniform_draws(7, index), 200)) for index in range(3)]
    assert len({value for row in [*whole, list(islice(uniform_draws(8, 0), 200))] for value in row}) == 800
    assert 0.45 < np.mean(whole) < 0.55
    asked: list[int] = []

    def counted(seed: int, index: int) -> Iterator[float]:
        for value in uniform_draws(seed, index):
            asked.append(index)
            yield value

    monkeypatch.setattr(engine, "uniform_draws", counted)
    monkeypatch.setattr(torch, "rand", None)  # no matrix of all draws that could be needed
    model, prompts = make_model("llama", eos_bias=2.0), make_prompts(5)
    written = texts(generation(model), prompts, seed=7)
    assert [asked.count(i) for i in range(5)] == [len(text) for text in written]
    ranked: dict[int, list[int]] = {}
    for rows in (range(3, 5), range(3)):
        generation(model).run_rows(rows, prompts, lambda i, r: ranked.update({i: r.tokens}), seed=7, greedy=False)
    assert [ranked[i] for i in range(5)] == written


def test_a_model_with_a_recurrent_state_is_written_by_transformers(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, pad_token_id=0, eos_token_id=EOS
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    assert cache_layers(model) == 0
    written_by = generation(model, max_new_tokens=3)
    assert all(1 <= len(text) <= 3 for text in texts(written_by, make_prompts(3)))
    assert "caches more than keys and values" in caplog.text
    assert not written_by._decodes


def by_column(model: Any) -> Any:
    """A model that takes its positions from the number of columns, as none should: padding shifts them."""
    forward = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda ids: forward(torch.arange(ids.shape[-1]).expand_as(ids) * 5 % 256)
    return model


@pytest.mark.parametrize("lengths", [[3, 8, 20], [7, 7, 7, 7], [9], [1, 1], [2, 30, 30, 30]], ids=str)
def test_a_model_that_our_decoding_would_misread_is_found_out(
    lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the first prompts are: those of equal length need no padding, later ones will."""
    written_by = generation(by_column(make_model("learned positions")))
    rng = np.random.default_rng(0)
    texts(written_by, [rng.integers(3, VOCAB, length) for length in lengths])
    assert not written_by._decodes
    assert "different distribution than plain forward passes" in caplog.text


def test_a_model_that_it_would_misread_a_little_is_found_out() -> None:
    """The likeliest tokens are the same, their probabilities are not."""
    model = make_model("learned positions")
    with torch.no_grad():
        model.transformer.wpe.weight *= 0.005
    written_by = generation(by_column(model))
    texts(written_by, make_prompts(4))
    assert not written_by._decodes


def test_a_model_with_room_for_no_more_than_prompt_and_response_is_written_by_us() -> None:
    model = make_model("learned positions")
    prompts = [np.full(length, 5) for length in (255, 9)]
    written_by = generation(model, max_new_tokens=1)
    written = texts(written_by, prompts, greedy=True)
    assert written_by._decodes
    assert written == texts(generation(model, max_new_tokens=1, engine="transformers"), prompts, greedy=True)


def test_logits_that_are_no_numbers_are_an_error_that_says_so() -> None:
    model = make_model("llama")
    written_by = generation(model)
    texts(written_by, make_prompts(3))
    with torch.no_grad():
        model.lm_head.weight[5] = torch.nan
    for greedy in (True, False):
        with pytest.raises(FloatingPointError, match=r"logits are not finite.* lower actor\.optimizer\.lr"):
            texts(written_by, make_prompts(3), greedy=greedy)


def test_an_end_of_sequence_that_the_model_does_not_know_is_left_out() -> None:
    model, prompts = make_model("llama", eos_bias=2.0), make_prompts(3)
    settings = GenerationSection(max_new_tokens=6, min_new_tokens=4)
    written_by = Generation(model, None, settings, eos_ids=[EOS, VOCAB + 3], pad_id=0, banned_ids=[0, 1])
    assert all(4 <= len(text) <= 6 for text in texts(written_by, prompts))


@pytest.mark.parametrize(("slots", "token_budget"), [(3, None), (8, None), (16, None), (16, 40), (16, 1)])
def test_prompts_of_a_group_go_through_one_forward(slots: int, token_budget: int | None) -> None:
    """Fewer rows in the forwards over prompts, within the budget, and the same responses as without the others."""
    model, distinct = make_model("llama", eos_bias=2.0), make_prompts(3)
    prompts = [prompt for prompt in distinct for _ in range(4)]
    draws = torch.rand(len(prompts), 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows_in: list[int] = []

    class Watched(Decoder):
        def _take_in(self, *args: Any) -> list[Any]:
            rows_in.append(0)
            return super()._take_in(*args)

        def _logits(self, cache: SlotCache, ids: torch.Tensor, *window: Any) -> torch.Tensor:
            if not rows_in[-1]:
                rows_in[-1] = len(ids)
                assert len(ids) == 1 or ids.numel() <= (token_budget or math.inf)
            return super()._logits(cache, ids, *window)

    def written(order: list[int]) -> list[list[int]]:
        found: dict[int, Response] = {}
        rules = Rules(16, [EOS], [0, 1], repetition_penalty=1.3)
        Watched(model, rules, slots=slots, token_budget=token_budget).run(
            [prompts[i] for i in order],
            lambda i: iter(draws[order[i]].tolist()),
            lambda i, response: found.update({i: response}),
        )
        return [found[i].tokens for i in range(len(order))]

    together = written(list(range(len(prompts))))
    assert sum(rows_in) < len(prompts)
    if slots >= len(prompts):
        assert rows_in == {None: [3], 40: [2, 1], 1: [1, 1, 1]}[token_budget]
    alone = [written([i])[0] for i in range(len(prompts))]
    assert together == alone
