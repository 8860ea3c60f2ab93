"""Memory of policy and critic training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from actor.generation.cache import SlotCache, cache_layers
from actor.generation.slots import draw
from actor.policy.adapters import with_adapters
from python_backend.config import ActorSection, RunConfig
from python_backend.models.adamw import make_adamw
from python_backend.models.precision import computing, use_bfloat16
from tools.plan.live_bytes import LiveBytes, counting, model_bytes, num_bytes
from tools.plan.models import (
    CPU,
    causal_model,
    has_linear_head,
    logprobs_of,
    placed,
    recompute_activations,
    token_model,
    values_of,
)
from tools.plan.role import Role, Sizes, devices_of, setting

# glibc's heap keeps gaps between the blocks of a training step: measured about 1.0 to 1.45 times the live bytes.
# A compromise chosen from the measurements in docs/benchmarks.md, not derived.
CPU_HEAP = 1.2


def policy_role(config: RunConfig) -> Role:
    """Return the policy with its copies, its training and its generation."""
    actor, settings = config.actor, config.actor.policy
    trained = policy_training(actor)
    generating, frozen = generation_sizes(actor)
    update, ranks = trained.sizes, trained.processes
    copies = _num_copies(actor, ranks) * (update.weights if settings.lora_rank else frozen)
    # Update and generation take turns, unless one_step_off_policy lets them overlap.
    needs = (update.gradients + update.activations, generating.cache + generating.activations)
    both = sum(needs) if actor.one_step_off_policy else max(needs)
    activations = max(0, both - update.gradients - generating.cache)
    sizes = dataclasses.replace(update, copies=copies, cache=generating.cache, activations=activations)
    return dataclasses.replace(trained, sizes=sizes)


def policy_training(actor: ActorSection) -> Role:
    """Return the policy with its training alone."""
    settings = actor.policy
    longest = actor.prompts.max_tokens + actor.generation.max_new_tokens
    rows = _rows(settings.token_budget, longest, actor.update.minibatch_size)
    wrapped = causal = causal_model(settings.checkpoint)
    parameters = causal.num_parameters()
    if settings.lora_rank:
        wrapped = with_adapters(causal, settings)
    with counting() as live:
        placed(wrapped)
        is_linear = has_linear_head(causal)
        if settings.precision == "bfloat16":
            use_bfloat16(causal)
        if settings.gradient_checkpointing:
            recompute_activations(causal)
        ids = torch.zeros(rows, longest, dtype=torch.int64)

        def loss() -> Tensor:
            return logprobs_of(
                causal, ids, actor.generation.max_new_tokens, settings.precision, is_linear=is_linear,
                with_entropy=actor.algorithm.entropy_bonus > 0,
            ).sum()  # fmt: skip

        sizes = _trained(live, wrapped, loss, accumulates=rows < min(actor.update.minibatch_size, actor.rollout_size))
        trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
        gathered, ranks = _gathered_bytes(causal), setting(actor, "ranks", 1)
    return Role(
        "actor", _on_heap(_sharded(sizes, ranks, gathered), settings.device), causal.config.model_type, parameters,
        trained, settings.precision, devices_of(settings.device, ranks), ranks,
        (f"update of {rows} rows x {longest} tokens",),
    )  # fmt: skip


def trainer_role(config: RunConfig) -> Role:
    """Return the critic in training, with the copy that verifies a version."""
    settings = config.trainer
    longest = config.actor.prompts.max_tokens + config.actor.generation.max_new_tokens
    rows = _rows(settings.token_budget, longest, settings.global_batch_size)
    with counting() as live:
        model = placed(token_model(config.critic.checkpoint))
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        sizes = _trained(
            live, model, lambda: values_of(model, ids).sum(),
            accumulates=rows < min(settings.global_batch_size, config.actor.rollout_size),
        )  # fmt: skip
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        parameters, gathered, ranks = model.num_parameters(), _gathered_bytes(model), setting(settings, "ranks", 1)
    sizes = _sharded(dataclasses.replace(sizes, copies=_verified_bytes(sizes, settings.device, ranks)), ranks, gathered)
    return Role(
        "trainer", _on_heap(sizes, settings.device), model.config.model_type, parameters, trained, "float32",
        devices_of(settings.device, ranks), ranks, (f"update of {rows} rows x {longest} tokens",),
    )  # fmt: skip


def _trained(live: LiveBytes, model: Any, loss: Callable[[], Tensor], *, accumulates: bool) -> Sizes:
    """Return what an update needs, from its second optimizer step on.

    Args:
        accumulates: an optimizer step has several micro-batches, so that gradients exist during a forward pass.
    """
    # fused: needs no value of the step count, which does not exist here; its state is the same.
    optimizer = make_adamw(dict(model.named_parameters()), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    loss().backward()
    optimizer.step()
    gradients = num_bytes(p.grad for p in model.parameters() if p.grad is not None)
    states = num_bytes(value for state in optimizer.state.values() for value in state.values())
    weights = model_bytes(model)
    if not accumulates:
        optimizer.zero_grad(set_to_none=True)
    live.reset()
    loss().backward()
    optimizer.step()
    return Sizes(
        weights=weights, gradients=gradients, optimizer=states,
        activations=max(0, live.peak - weights - gradients - states),
    )  # fmt: skip


def generation_sizes(actor: ActorSection) -> tuple[Sizes, int]:
    """Return the cache and the working memory of generation, and the bytes of the model when it is frozen."""
    settings, generation, width = actor.policy, actor.generation, actor.prompts.max_tokens
    slots = min(generation.batch_size, max(actor.rollout_size, actor.validation.size))
    distinct = -(-slots // actor.algorithm.responses_per_prompt)
    span = width + generation.max_new_tokens
    with counting() as live, torch.no_grad(), computing(CPU, settings.precision):
        model = placed(causal_model(settings.checkpoint)).requires_grad_(False)
        if settings.precision == "bfloat16":
            use_bfloat16(model)
        weights = model_bytes(model)
        columns = span + span // 2  # as in actor.generation.slots
        cache = SlotCache(slots, columns, cache_layers(model)) if cache_layers(model) else None
        live.reset()
        before = live.live
        if cache is not None:
            cache.look_at(0, distinct, 0, 0)
        logits = _next_logits(model, torch.zeros(distinct, width, dtype=torch.int64), width, cache)
        if cache is not None:
            cache.look_at(0, slots, 0, span - 1)
            logits = _next_logits(model, torch.zeros(slots, 1, dtype=torch.int64), span, cache)
        draw(logits, torch.zeros(len(logits), dtype=torch.float64))
        stored = num_bytes(t for layer in cache.layers for t in layer.tensors()) if cache is not None else 0
        return Sizes(cache=stored, activations=live.peak - before - stored), weights


def _next_logits(model: Any, ids: Tensor, seen: int, cache: Any) -> Tensor:
    mask = torch.ones(len(ids), seen, dtype=torch.int64)
    output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1].float()


def _verified_bytes(sizes: Sizes, device: str, ranks: int) -> int:
    """Return the bytes of the second critic that verifies a version; ranks verify their own tensors instead."""
    if ranks > 1:
        return 0
    # A GPU's memory of gradients and activations is free again by then; the heap of a process keeps it.
    return sizes.weights if device == "cpu" else max(0, sizes.weights - sizes.gradients - sizes.activations)


def _num_copies(actor: ActorSection, ranks: int) -> int:
    has_reference = actor.kl.uses_reference and not actor.kl.serves_reference and not actor.policy.lora_rank
    return int(has_reference) + int(actor.one_step_off_policy or ranks > 1)  # each rank generates with a whole copy


def _rows(token_budget: int, longest: int, most: int) -> int:
    """Return the rows of the longest length in one micro-batch; a row above the budget is one of its own."""
    return max(1, min(token_budget // longest, most))


def _sharded(sizes: Sizes, ranks: int, gathered: int) -> Sizes:
    """Return what each of `ranks` needs; `gathered`: bytes of the weights that FSDP2 gathers at the same time."""
    if ranks == 1:
        return sizes
    parts = {name: -(-getattr(sizes, name) // ranks) for name in ("weights", "gradients", "optimizer")}
    return dataclasses.replace(sizes, **parts, activations=sizes.activations + gathered)


def _gathered_bytes(model: Any) -> int:
    """Return the bytes of the weights outside the layers, and of two layers: one computes, the next is prefetched."""
    layers = [model_bytes(module) for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return model_bytes(model) - sum(layers) + 2 * max(layers, default=0)


def _on_heap(sizes: Sizes, device: str) -> Sizes:
    if device != "cpu":
        return sizes
    return dataclasses.replace(sizes, activations=int(sizes.activations * CPU_HEAP))
