"""Our own decoding when memory is short, in bfloat16, and with an attention that it does not support."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from test_decoding import EOS, generation, make_model, make_prompts, texts

from actor.generation.cache import SlotCache
from actor.generation.engine import Generation
from actor.generation.slots import Decoder, Rules


@pytest.mark.parametrize("engine_name", ["slots", "transformers"])
def test_rows_that_lack_of_memory_interrupts_start_again_with_the_same_draws(
    engine_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = make_model("llama", eos_bias=2.0), make_prompts(11)
    expected = texts(generation(model, engine=engine_name, generation_batch_size=8), prompts, seed=7)
    written_by = generation(model, engine=engine_name, generation_batch_size=8)
    texts(written_by, prompts[:1])
    passes, forward = [], model.forward

    def limited(input_ids: torch.Tensor, **others: Any) -> Any:
        passes.append(1)
        if len(input_ids) > 3 and len(passes) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return forward(input_ids=input_ids, **others)

    monkeypatch.setattr(model, "forward", functools.wraps(forward)(limited))
    found: list[tuple[int, list[int]]] = []
    written_by.run(prompts, lambda i, response: found.append((i, response.tokens)), seed=7)
    assert sorted(found) == list(enumerate(expected))  # each once
    assert (written_by.memory.count, written_by.memory.size) == (2, 2)
    assert "actor.generation.batch_size" in caplog.text


@pytest.mark.parametrize(("off", "decodes"), [(0.1, True), (0.5, False)])
def test_decoding_is_proven_once_more_in_the_precision_that_it_runs_in(
    off: float, decodes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written_by = generation(make_model("llama"))
    monkeypatch.setattr(
        Generation, "_distance", lambda *_: off if torch.is_autocast_enabled("cpu") else 0.0
    )  # another kernel in bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        texts(written_by, make_prompts(3))
    assert written_by._decodes == decodes
    assert ("different distribution" in caplog.text) != decodes


def test_keys_are_cached_in_the_dtype_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, rotary embeddings make keys float32."""
    dtypes: set[torch.dtype] = set()
    update = SlotCache.update

    def watched(self: SlotCache, *args: Any, **others: Any) -> Any:
        dtypes.update(tensor.dtype for tensor in update(self, *args, **others))
        dtypes.update(tensor.dtype for layer in self.layers for tensor in layer.tensors())
        return update(self, *args, **others)

    decoder = Decoder(make_model("llama"), Rules(4, [EOS]), slots=2)
    monkeypatch.setattr(SlotCache, "update", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoder.run(make_prompts(3), None, lambda *_: None)
    assert dtypes == {torch.bfloat16}


def test_flash_attention_is_not_used_for_slots(caplog: pytest.LogCaptureFixture) -> None:
    """It would copy the whole cache for each token."""
    written_by = generation(make_model("llama"))
    written_by._model.config._attn_implementation_internal = "flash_attention_2"
    assert not written_by._is_proven(make_prompts(3))
    assert "set actor.policy.attention to auto" in caplog.text
