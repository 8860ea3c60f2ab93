"""What a policy in bfloat16 holds and casts: frozen matrices are cast neither per token nor per forward pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from actor.policy.policy import Policy
from python_backend.models.adapters import plain_tensors
from tests.python_backend.test_precision import FAMILIES, PROMPTS, make_policy, save_policy


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16 by the address of the tensor that is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))

    def of(self, model: Any) -> dict[str, int]:
        """Return how often each parameter was cast, without those that never were."""
        counts = {name: self.counts[parameter.data_ptr()] for name, parameter in model.named_parameters()}
        return {name: count for name, count in counts.items() if count}


def split_on_cards(model: Any) -> set[str]:
    """Return the float32 weights of the output layer, which a card multiplies as the sum of two bfloat16 terms."""
    head = model.get_output_embeddings().weight
    return {name for name, each in model.named_parameters() if each.is_cuda and each.data_ptr() == head.data_ptr()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_under_adapters_is_never_cast(tmp_path: Path, family: str):
    """The adapters themselves are cast once for all tokens of a rollout; a router is small and may be cast."""
    policy = make_policy(save_policy(tmp_path, family), lora_rank=2)
    with Casts() as casts:
        rollout = policy.generate(PROMPTS, seed=1)
    assert rollout.tokens.shape[1] > 9  # several decoding steps
    found = casts.of(policy.model)
    assert found or policy.model.device.type == "cuda"  # where they are merged for decoding
    assert all("lora_" in name for name in found), found
    assert set(found.values()) <= {1}
    for reference in (False, True):
        with Casts() as casts:
            policy.logprobs(rollout, reference=reference)
        found = casts.of(policy.model).keys() - split_on_cards(policy.model)
        assert all("lora_" in name or "mlp.gate." in name for name in found), found


@pytest.mark.parametrize("settings", [{}, {"one_step_off_policy": True}], ids=str)
def test_a_full_policy_is_cast_once_a_rollout_and_its_copies_never(tmp_path: Path, settings: dict[str, Any]):
    policy = make_policy(save_policy(tmp_path), **settings)
    with Casts() as casts:
        rollout = policy.generate(PROMPTS, seed=1)
        policy.logprobs(rollout, reference=True)
    assert policy.reference is not None
    assert not casts.of(policy.reference).keys() - split_on_cards(policy.reference)
    assert set(casts.of(policy.sampler).values()) <= ({1} if policy.sampler is policy.model else set())


# ---- loading ----


def save_bfloat16(folder: Path, family: str) -> Path:
    """Save a checkpoint in bfloat16, as most large models are."""
    save_policy(folder, family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_checkpoint_is_not_widened_while_it_is_loaded(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
):
    """It has the weights of one that was loaded in float32, and no matrix was float32 in between."""
    folder = save_bfloat16(tmp_path, family)
    dtypes = loaded_dtypes(monkeypatch)
    policy = make_policy(folder, lora_rank=2)
    monkeypatch.setattr("actor.policy.loading.stored_dtypes", lambda _: {"F32"})
    widened = make_policy(folder, lora_rank=2)
    assert dtypes == [torch.bfloat16, torch.float32]
    found, expected = (plain_tensors(each.model) for each in (policy, widened))
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    buffers = dict(widened.model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in policy.model.named_buffers())


@pytest.mark.parametrize("settings", [{"lora_rank": 0}, {"lora_rank": 2, "precision": "float32"}], ids=str)
def test_weights_that_are_trained_are_loaded_in_float32(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    folder = save_bfloat16(tmp_path, "llama")
    dtypes = loaded_dtypes(monkeypatch)
    policy = make_policy(folder, **settings)
    assert dtypes == [torch.float32]
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}


def test_a_table_in_bfloat16_is_loaded_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A family that computes a table in the dtype of its weights would lose digits."""
    folder = save_bfloat16(tmp_path, "llama")
    dtypes = loaded_dtypes(monkeypatch, add_table=True)
    make_policy(folder, lora_rank=2)
    assert dtypes == [torch.bfloat16, torch.float32]


def loaded_dtypes(monkeypatch: pytest.MonkeyPatch, *, add_table: bool = False) -> list[torch.dtype]:
    """Record the dtype of each load of a policy's model; `add_table`: add a buffer in it."""
    original, dtypes = AutoModelForCausalLM.from_pretrained, []

    def recording(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Any:
        dtypes.append(dtype)
        model = original(*args, dtype=dtype, **kwargs)
        if add_table:
            model.register_buffer("table", torch.zeros(1, dtype=dtype))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recording)
    return dtypes


# ---- attention ----


def test_checks_in_float32_do_without_flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has no float32 kernels; everything else uses it. A stand-in under its name, because it needs CUDA."""
    from transformers import AttentionInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    default = make_policy(save_policy(tmp_path), lora_rank=2)
    calls: list[Any] = []

    def flash(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(module)
        assert torch.is_autocast_enabled(query.device.type)  # under which FlashAttention casts its inputs
        return sdpa_attention_forward(module, query, *args, **kwargs)

    for interface, function in ((AttentionInterface, flash), (AttentionMaskInterface, sdpa_mask)):
        monkeypatch.setitem(interface._global_mapping, "flash_attention_2", function)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True, raising=False)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda _, name, **__: name)
    policy = chosen(tmp_path, "flash_attention_2", lora_rank=2)
    assert policy.model.config._attn_implementation == "flash_attention_2"
    rollout = policy.generate(PROMPTS, seed=1)
    assert calls
    assert torch.equal(rollout.tokens, default.generate(PROMPTS, seed=1).tokens)


def chosen(folder: Path, attention: str, **settings: Any) -> Policy:
    precision = "bfloat16" if attention == "flash_attention_2" else "float32"
    return make_policy(folder, policy_attention=attention, precision=precision, **settings)
