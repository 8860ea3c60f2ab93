"""Memory of policy and critic training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from actor.generation.cache import SlotCache, cache_layers
from actor.generation.slots import draw
from python_backend.config import ActorSection, PolicySection, RunConfig, TrainerSection
from python_backend.models.adapters import Lora, with_adapters, with_merged_layers
from python_backend.models.card.placement import devices_of
from python_backend.models.precision import FLASH_ATTENTION, computing, use_bfloat16
from python_backend.training.adamw import make_adamw
from python_backend.training.attention import use_attention
from python_backend.training.gradient_checkpointing import checkpoint_gradients, recomputing
from python_backend.training.sharding import MOST_UNREDUCED
from tools.plan.live_bytes import LiveBytes, counting, model_bytes, num_bytes
from tools.plan.models import CPU, causal_model, has_linear_head, logprobs_of, placed, token_model, values_of
from tools.plan.role import Role, Sizes, on_heap
from trainer.trained_critic import prepare_for_training

SMALLEST_8BIT, BLOCK_8BIT = 4096, 256  # defaults of bitsandbytes, in elements


def policy_role(config: RunConfig) -> Role:
    """Return the policy with its copies, its training and its generation."""
    actor = config.actor
    trained = policy_training(actor)
    generating, whole = generation_sizes(actor)
    if actor.generation.engine == "vllm":
        generating = Sizes()
    update = trained.sizes
    # Update and generation take turns, unless one_step_off_policy lets them overlap.
    needs = (update.gradients + update.activations, generating.cache + generating.activations)
    both = sum(needs) if actor.one_step_off_policy else max(needs)
    activations = max(0, both - update.gradients - generating.cache)
    sizes = dataclasses.replace(
        update, copies=_num_copies(actor) * whole, cache=generating.cache, activations=activations
    )
    return dataclasses.replace(trained, sizes=sizes)


def policy_training(actor: ActorSection) -> Role:
    """Return the policy with its training alone."""
    settings = actor.policy
    longest = actor.prompts.max_tokens + actor.generation.max_new_tokens
    share = -(-min(actor.update.minibatch_size, actor.rollout_size) // actor.ranks)
    rows = _rows(settings.token_budget, longest, share)
    causal = causal_model(settings.checkpoint)
    parameters = causal.num_parameters()
    trained = _policy_model(causal, settings)
    gathers = _as_gathered(causal, settings.device, settings.precision) if actor.ranks > 1 else None
    with counting(settings.device) as live:
        placed(trained)
        with computing(CPU, settings.precision):
            is_linear = has_linear_head(causal)
        ids = torch.zeros(rows, longest, dtype=torch.int64)

        def loss() -> Tensor:
            return logprobs_of(
                causal,
                ids,
                actor.generation.max_new_tokens,
                settings.precision,
                is_linear=is_linear,
                with_entropy=actor.algorithm.entropy_bonus > 0,
            ).sum()

        sizes = _trained(
            live,
            trained,
            loss,
            kind=actor.optimizer.kind,
            accumulates=rows < share,
            gathers=gathers,
        )
        num_trained, ranks = _num_trained(trained), actor.ranks
    return Role(
        "actor",
        on_heap(_sharded(sizes, ranks, waits=rows < share and settings.device != "cpu"), settings.device),
        causal.config.model_type,
        parameters,
        num_trained,
        settings.precision,
        devices_of(settings.device, ranks),
        ranks,
        has_group=ranks > 1,
        notes=(f"update of {rows} rows x {longest} tokens",),
    )


def _policy_model(causal: Any, settings: PolicySection) -> Any:
    """Return the policy's model as `actor.policy.policy` prepares it, with its adapters around it if it has any."""
    head, model = causal.get_output_embeddings(), causal
    if settings.lora_rank:
        lora = Lora("actor.policy", settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        model = with_adapters(causal, lora, head, task="CAUSAL_LM")
    use_attention(causal, _planned(settings.attention), "actor.policy.attention")
    if settings.precision == "bfloat16":
        use_bfloat16(causal, head)
    if settings.gradient_checkpointing:
        checkpoint_gradients(causal, "actor.policy.gradient_checkpointing")
    return model


def trainer_role(config: RunConfig) -> Role:
    """Return the critic in training, with the copy that verifies a version."""
    settings = config.trainer
    longest = config.actor.prompts.max_tokens + config.actor.generation.max_new_tokens
    share = -(-min(settings.global_batch_size, config.actor.rollout_size) // settings.ranks)
    rows = _rows(settings.token_budget, longest, share)
    model = token_model(config.critic.checkpoint)
    parameters = model.num_parameters()
    prepare_for_training(model, settings.model_copy(update={"attention": _planned(settings.attention)}))
    gathers = _as_gathered(model, settings.device, settings.precision) if settings.ranks > 1 else None
    with counting(settings.device) as live:
        placed(model)
        ids = torch.zeros(rows, longest, dtype=torch.int64)

        def loss() -> Tensor:
            with computing(CPU, settings.precision):
                return values_of(model, ids).float().sum()

        sizes = _trained(
            live,
            model,
            loss,
            kind=settings.optimizer.kind,
            accumulates=rows < share,
            gathers=gathers,
        )
        num_trained, ranks = _num_trained(model), settings.ranks
    copies = _verified_bytes(settings, parameters, sizes)
    sizes = _sharded(dataclasses.replace(sizes, copies=copies), ranks, waits=rows < share and settings.device != "cpu")
    return Role(
        "trainer",
        on_heap(sizes, settings.device),
        model.config.model_type,
        parameters,
        num_trained,
        settings.precision,
        devices_of(settings.device, ranks),
        ranks,
        has_group=ranks > 1,
        notes=(f"update of {rows} rows x {longest} tokens",),
    )


def _trained(
    live: LiveBytes,
    model: Any,
    loss: Callable[[], Tensor],
    *,
    kind: str,
    accumulates: bool,
    gathers: tuple[int, int] | None,
) -> Sizes:
    """Return what an update needs, from its second optimizer step on.

    Args:
        kind: of the optimizer.
        accumulates: an optimizer step has several micro-batches, so that gradients exist during a forward pass.
        gathers: of several ranks, what `_as_gathered` returned; None: there is one.
    """

    def backward() -> None:
        with recomputing(model):
            loss().backward()

    # fused: needs no value of the step count, which does not exist here. Its state is that of the CPU's loop, whose two
    # temporaries of one weight exist when no activations do.
    optimizer = make_adamw(dict(model.named_parameters()), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    backward()
    if kind == "adamw":
        optimizer.step()
    gradients = num_bytes(p.grad for p in model.parameters() if p.grad is not None)
    states = num_bytes(value for state in optimizer.state.values() for value in state.values())
    weights = model_bytes(model)
    if not accumulates:
        optimizer.zero_grad(set_to_none=True)
    live.reset()
    backward()
    activations = max(0, live.peak - weights - gradients - states)
    if gathers is not None:
        weights, others = gathers
        optimizer.zero_grad(set_to_none=True)
        # Each layer's gradients are added up over the ranks, and freed, when its backward pass ends.
        for layer in _layers(model):
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_free)
        before = live.live
        live.reset()
        backward()
        activations = live.peak - before + others
        gradients = 4 * _num_trained(model)
        states = 2 * gradients + 4 * sum(p.requires_grad for p in model.parameters())  # two moments, and step counts
    if kind == "adamw_8bit":
        states = sum(_moments_8bit(p.numel()) for p in model.parameters() if p.requires_grad)
    return Sizes(weights=weights, gradients=gradients, optimizer=states, activations=activations)


def _moments_8bit(count: int) -> int:
    """Return the bytes of bitsandbytes' moments of one tensor: a byte and a share of a block's scale for each."""
    return 8 * count if count < SMALLEST_8BIT else 2 * (count + 4 * -(-count // BLOCK_8BIT))


def _num_trained(model: Any) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _planned(attention: str) -> str:
    """Return an attention that keeps the same tensors and runs on a CPU."""
    return "sdpa" if attention == FLASH_ATTENTION else attention


def generation_sizes(actor: ActorSection) -> tuple[Sizes, int]:
    """Return the cache and the working memory of generation and log-probs, and the bytes of the model when frozen."""
    settings, generation, width = actor.policy, actor.generation, actor.prompts.max_tokens
    slots = min(generation.batch_size, -(-max(actor.rollout_size, actor.validation.size) // actor.ranks))
    distinct = min(-(-slots // actor.algorithm.responses_per_prompt), max(1, settings.token_budget // width))
    span = width + generation.max_new_tokens
    copied, model = causal_model(settings.checkpoint), causal_model(settings.checkpoint)
    for each in (copied, model):
        _policy_model(each, settings)
    copied.requires_grad_(False)
    if settings.precision == "bfloat16":
        use_bfloat16(copied, copied.get_output_embeddings())
    whole = model_bytes(copied)
    model = copied if _has_sampler(actor) else model
    with counting(settings.device) as live, torch.no_grad(), contextlib.ExitStack() as stack:
        placed(model)
        before = live.live
        live.reset()
        with computing(CPU, settings.precision):
            is_linear = has_linear_head(model)
            if settings.lora_rank and settings.device != "cpu":
                stack.enter_context(with_merged_layers(model))
            columns = span + span // 2  # as in actor.generation.slots
            cache = SlotCache(slots, columns, cache_layers(model)) if cache_layers(model) else None
            if cache is not None:
                cache.look_at(0, distinct, 0, 0)
            logits = _next_logits(model, torch.zeros(distinct, width, dtype=torch.int64), width, cache)
            if cache is not None:
                cache.look_at(0, slots, 0, span - 1)
                logits = _next_logits(model, torch.zeros(slots, 1, dtype=torch.int64), span, cache)
            draw(logits, torch.zeros(len(logits), dtype=torch.float64))
            stored = num_bytes(t for layer in cache.layers for t in layer.tensors()) if cache is not None else 0
        stack.close()
        del cache, logits
        ids = torch.zeros(_rows(settings.token_budget, span, actor.rollout_size), span, dtype=torch.int64)
        logprobs_of(model, ids, generation.max_new_tokens, settings.precision, is_linear=is_linear)
        activations = max(0, live.peak - before - stored)
        return on_heap(Sizes(cache=stored, activations=activations), settings.device), whole


def _next_logits(model: Any, ids: Tensor, seen: int, cache: Any) -> Tensor:
    mask = torch.ones(len(ids), seen, dtype=torch.int64)
    output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1].float()


def _verified_bytes(settings: TrainerSection, parameters: int, sizes: Sizes) -> int:
    """Return the bytes of the second critic that verifies a version; ranks verify their own tensors instead."""
    served = 4 * parameters
    if settings.ranks > 1:
        return 0
    if settings.device == "cpu":  # the heap of a process keeps the memory of gradients and activations
        return served
    # The critic of a prepared model is verified on the CPU, any other one when gradients and activations are freed.
    return 0 if settings.changes_the_model else max(0, served - sizes.gradients - sizes.activations)


def _num_copies(actor: ActorSection) -> int:
    has_reference = actor.kl.uses_reference and not actor.kl.serves_reference and not actor.policy.lora_rank
    return int(has_reference) + int(_has_sampler(actor))


def _has_sampler(actor: ActorSection) -> bool:
    return actor.one_step_off_policy or actor.ranks > 1  # each rank generates with a whole copy


def _rows(token_budget: int, longest: int, most: int) -> int:
    """Return the rows of the longest length in one micro-batch; a row above the budget is one of its own."""
    return max(1, min(token_budget // longest, most))


def _sharded(sizes: Sizes, ranks: int, *, waits: bool) -> Sizes:
    """Return what each of `ranks` needs; `waits`: gradients are whole until the last micro-batch adds them up."""
    if ranks == 1:
        return sizes
    names = ["weights", "optimizer"]
    if not waits or sizes.gradients > MOST_UNREDUCED:
        names.append("gradients")
    return dataclasses.replace(sizes, **{name: -(-getattr(sizes, name) // ranks) for name in names})


def _as_gathered(model: Any, device: str, precision: str) -> tuple[int, int]:
    """Give layers the dtype in which FSDP2 gathers them; return the bytes of the stored weights, and of what is
    gathered at the same time: the weights outside the layers, and two layers (one computes, the next is prefetched)."""
    stored = model_bytes(model)
    if device != "cpu" and precision == "bfloat16":
        for layer in _layers(model):
            layer.bfloat16()
    layers = [model_bytes(layer) for layer in _layers(model)]
    return stored, model_bytes(model) - sum(layers) + 2 * max(layers, default=0)


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _free(parameter: Tensor) -> None:
    parameter.grad = None
