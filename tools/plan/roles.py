"""What each role of a run needs, in bytes: the policy, the critic in training, and the models that tritonserver serves.

And on which machines (nodes) and GPUs the roles run.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from actor.generation.cache import SlotCache, cache_layers
from actor.generation.slots import draw
from python_backend.checkpoints.inspection import CheckpointError, inspect_checkpoint
from python_backend.checkpoints.tensor_parallel import plan_key
from python_backend.config import ActorSection, ModelSection, PolicySection, RunConfig, TrainerSection
from python_backend.config.live_models import live_models
from python_backend.models.adapters import Lora, with_adapters, with_merged_layers
from python_backend.models.collation import limits_of
from python_backend.models.placement import Place, devices_of
from python_backend.models.precision import FLASH_ATTENTION, computing, use_bfloat16
from python_backend.training.model import checkpoint_gradients, freeze, recomputing, use_attention
from python_backend.training.sharding import MOST_UNREDUCED
from tools.plan.models import (
    CPU,
    causal_model,
    counting,
    has_linear_head,
    logprobs_of,
    model_bytes,
    num_bytes,
    placed,
    token_model,
    values_of,
)
from trainer.trained_critic import prepare_for_training

GIB = 1 << 30
# glibc's heap keeps gaps between the blocks of a forward and backward pass, and kernels use scratch memory. Measured
# on a policy and a critic of 10 million parameters; docs/benchmarks.md has the ratios of other sizes.
CPU_HEAP = 1.45
# Estimates for a GPU, beside the tensors: none of them was measured on one.
CONTEXT = int(0.6 * GIB)  # of each process on each GPU: the CUDA context, kernels and cuBLAS's workspaces
NCCL_BUFFERS = GIB // 2  # of each rank of a group
FRAGMENTATION = 0.05  # of the tensors: gaps between the allocator's blocks
VLLM = "actor.generation.vllm.cuda_devices"
SMALLEST_8BIT, BLOCK_8BIT = 4096, 256  # defaults of bitsandbytes, in elements
STORED = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Sizes:
    """Memory of one role on each of its devices, in bytes."""

    weights: int = 0
    copies: int = 0
    """Further weights: the reference, the sampler, a version that is about to be served or verified."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Largest working memory of a forward and backward pass."""
    cache: int = 0
    """Keys and values of generation."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Role:
    """A model of the run, in one use."""

    key: str
    """Section of the configuration."""
    sizes: Sizes
    model: str = ""
    parameters: int = 0
    trained: int = 0
    """Number of parameters that are trained."""
    precision: str = ""
    devices: tuple[str, ...] = ("cpu",)
    """Those of one node. Each of them needs `sizes`; `cpu` may occur several times."""
    processes: int = 1
    """On all nodes."""
    nodes: int = 1
    node: str = ""
    """Name of its nodes, if the roles of the run have nodes of their own."""
    contexts: int = 1
    """Most processes at the same time that use each device."""
    has_group: bool = False
    """Its processes exchange tensors."""
    notes: tuple[str, ...] = ()

    def at(self, device: str) -> str:
        """Return the name of a device of its node in the whole plan."""
        return f"{self.node} {device}".strip()


def on_heap(sizes: Sizes, device: str) -> Sizes:
    """Return `sizes` with the memory that activations occupy on this device."""
    return replace(sizes, activations=int(sizes.activations * CPU_HEAP)) if device == "cpu" else sizes


def policy_role(config: RunConfig) -> Role:
    """Return the policy with its copies, its training and its generation."""
    actor = config.actor
    trained = policy_training(config)
    generating, whole = generation_sizes(config)
    if actor.generation.engine == "vllm":
        generating = Sizes()
    update = trained.sizes
    # Update and generation take turns, unless one_step_off_policy lets them overlap.
    needs = (update.gradients + update.activations, generating.cache + generating.activations)
    both = sum(needs) if actor.one_step_off_policy else max(needs)
    activations = max(0, both - update.gradients - generating.cache)
    has_reference = actor.kl.uses_reference and not actor.kl.serves_reference and not actor.policy.lora_rank
    copies = (has_reference + _has_sampler(actor)) * whole
    return replace(trained, sizes=replace(update, copies=copies, cache=generating.cache, activations=activations))


def policy_training(config: RunConfig) -> Role:
    """Return the policy with its training alone."""
    actor, settings, responses = config.actor, config.actor.policy, _most_sampled(config)
    causal = causal_model(settings.model)
    parameters = causal.num_parameters()

    def outputs(ids: Tensor) -> Tensor:
        with computing(CPU, settings.precision):
            is_linear = has_linear_head(causal)
        return logprobs_of(causal, ids, responses, settings.precision, is_linear=is_linear, with_entropy=True)

    return _training(
        "actor",
        _policy_model(causal, settings),
        settings,
        outputs,
        parameters=parameters,
        longest=config.longest_row[0],
        batch=min(actor.update.minibatch_size, actor.rollout_size),
        ranks=actor.ranks,
        optimizer=actor.optimizer.kind,
    )


def _policy_model(causal: Any, settings: PolicySection) -> Any:
    """Return the policy's model as `actor.policy.policy` prepares it, with its adapters around it if it has any."""
    head, model = causal.get_output_embeddings(), causal
    if settings.lora_rank:
        lora = Lora("actor.policy", settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        model = with_adapters(causal, lora, head, task="CAUSAL_LM")
    freeze(causal, settings.freeze, "actor.policy.freeze")
    use_attention(causal, _planned(settings.attention), "actor.policy.attention")
    if settings.precision == "bfloat16":
        use_bfloat16(causal, head)
    if settings.gradient_checkpointing:
        checkpoint_gradients(causal, "actor.policy.gradient_checkpointing")
    return model


def trainer_role(config: RunConfig) -> Role:
    """Return the critic in training, with the copy that verifies a version."""
    settings = config.trainer
    model = token_model(config.critic.model)
    parameters = model.num_parameters()
    prepare_for_training(model, settings.model_copy(update={"attention": _planned(settings.attention)}))

    def outputs(ids: Tensor) -> Tensor:
        with computing(CPU, settings.precision):
            return values_of(model, ids).float()

    role = _training(
        "trainer",
        model,
        settings,
        outputs,
        parameters=parameters,
        longest=config.longest_row[0],
        batch=min(settings.global_batch_size, config.actor.rollout_size),
        ranks=settings.ranks,
        optimizer=settings.optimizer.kind,
    )
    return replace(role, sizes=replace(role.sizes, copies=_verified_bytes(settings, role)))


def _training(
    key: str,
    model: Any,
    settings: PolicySection | TrainerSection,
    outputs: Callable[[Tensor], Tensor],
    *,
    parameters: int,
    longest: int,
    batch: int,
    ranks: int,
    optimizer: str,
) -> Role:
    """Return a model in training, with what an update needs from its second optimizer step on.

    Args:
        outputs: of rows of token ids; the loss is their sum.
        longest: tokens of each row.
        batch: rows of an optimizer step, on all `ranks` together.
    """
    share = -(-batch // ranks)
    rows = _rows(settings.token_budget, longest, share)
    accumulates = rows < share  # several micro-batches: gradients exist during a forward pass
    weights, gathered = _as_gathered(model, settings) if ranks > 1 else (model_bytes(model), 0)
    with counting(settings.device) as live:
        placed(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        num_trained = sum(p.numel() for p in trained)
        if ranks == 1 and accumulates:  # the gradients of the micro-batches before
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        elif ranks > 1:  # each layer's gradients are added up over the ranks, and freed, when its backward pass ends
            for parameter in {p for layer in _layers(model) for p in layer.parameters() if p.requires_grad}:
                parameter.register_post_accumulate_grad_hook(_free)
        before = live.live
        live.reset()
        with recomputing(model):
            outputs(torch.zeros(rows, longest, dtype=torch.int64)).sum().backward()
        peak = live.peak
    # Trained weights, their gradients and both moments are in float32; each tensor has a step count.
    gradients = 4 * num_trained
    states = 2 * gradients + 4 * len(trained)
    if optimizer == "adamw_8bit":
        states = sum(_moments_8bit(p.numel()) for p in trained)
    activations = peak - before + gathered if ranks > 1 else max(0, peak - weights - gradients)
    sizes = Sizes(weights=weights, gradients=gradients, optimizer=states, activations=activations)
    return Role(
        key,
        on_heap(_sharded(sizes, ranks, waits=accumulates and settings.device != "cpu"), settings.device),
        model.config.model_type,
        parameters,
        num_trained,
        settings.precision,
        devices_of(settings.device, ranks),
        ranks,
        has_group=ranks > 1,
        notes=(f"update of {rows} rows x {longest} tokens",),
    )


def _moments_8bit(count: int) -> int:
    """Return the bytes of bitsandbytes' moments of one tensor: a byte and a share of a block's scale for each."""
    return 8 * count if count < SMALLEST_8BIT else 2 * (count + 4 * -(-count // BLOCK_8BIT))


def _planned(attention: str) -> str:
    """Return an attention that keeps the same tensors and runs on a CPU."""
    return "sdpa" if attention == FLASH_ATTENTION else attention


def _most_sampled(config: RunConfig) -> int:
    """Return the most tokens of a row that the policy samples."""
    turns = 1 if config.environment is None else config.environment.max_turns
    return min(config.longest_row[0] - 1, turns * config.actor.generation.max_new_tokens)


def generation_sizes(config: RunConfig) -> tuple[Sizes, int]:
    """Return the cache and the working memory of generation and log-probs, and the bytes of the model when frozen."""
    actor, (span, _) = config.actor, config.longest_row
    settings, generation, width = actor.policy, actor.generation, actor.prompts.max_tokens
    slots = min(generation.batch_size, -(-max(actor.rollout_size, actor.validation.size) // actor.ranks))
    distinct = min(-(-slots // actor.algorithm.responses_per_prompt), max(1, settings.token_budget // width))
    copied, model = causal_model(settings.model), causal_model(settings.model)
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
        logprobs_of(model, ids, _most_sampled(config), settings.precision, is_linear=is_linear)
        activations = max(0, live.peak - before - stored)
        return on_heap(Sizes(cache=stored, activations=activations), settings.device), whole


def _next_logits(model: Any, ids: Tensor, seen: int, cache: Any) -> Tensor:
    mask = torch.ones(len(ids), seen, dtype=torch.int64)
    output = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[:, -1].float()


def _verified_bytes(settings: TrainerSection, role: Role) -> int:
    """Return the bytes of the second critic that verifies a version; ranks verify their own tensors instead."""
    served = 4 * role.parameters
    if settings.ranks > 1:
        return 0
    if settings.device == "cpu":  # the heap of a process keeps the memory of gradients and activations
        return served
    # The critic of a prepared model is verified on the CPU, any other one when gradients and activations are freed.
    return 0 if settings.changes_the_model else max(0, served - role.sizes.gradients - role.sizes.activations)


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
    return replace(sizes, **{name: -(-getattr(sizes, name) // ranks) for name in names})


def _as_gathered(model: Any, settings: PolicySection | TrainerSection) -> tuple[int, int]:
    """Give layers the dtype in which FSDP2 gathers them; return the bytes of the stored weights, and of what is
    gathered at the same time: the weights outside the layers, and two layers (one computes, the next is prefetched)."""
    stored = model_bytes(model)
    if settings.device != "cpu" and settings.precision == "bfloat16":
        for layer in _layers(model):
            layer.bfloat16()
    layers = [model_bytes(layer) for layer in _layers(model)]
    return stored, model_bytes(model) - sum(layers) + 2 * max(layers, default=0)


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _free(parameter: Tensor) -> None:
    parameter.grad = None


def served_role(config: RunConfig, key: str) -> Role:
    """Return the served model of the section `key`."""
    section = config.served_sections[key]
    workers = section.workers
    notes: tuple[str, ...] = ()
    is_reference = key == "reference"
    with counting(section.device) as live, torch.no_grad():
        if is_reference:
            model = placed(causal_model(section.model).requires_grad_(False))
        else:
            model = placed(token_model(section.model, getattr(torch, section.dtype)))
        parameters = model.num_parameters()
        # The server refuses longer rows.
        longest = min(filter(None, (config.longest_row[0], limits_of(model).max_length)))
        ids_shape = (max(1, section.token_budget // longest), longest)
        if is_reference and section.dtype == "bfloat16":
            use_bfloat16(model, model.get_output_embeddings())
        _cut(model, section.tensor_parallel, gathers=False)
        live.reset()
        before = live.live
        ids = torch.zeros(ids_shape, dtype=torch.int64)
        if is_reference:
            logprobs_of(model, ids, longest - 1, section.dtype)
        else:
            values_of(model, ids, lean=section.device == "cpu")
        working = live.peak - before
        _cut(model, section.tensor_parallel, gathers=True)
        weights = model_bytes(model)
    devices = devices_of(section.device, section.tensor_parallel)
    processes = section.instances * section.tensor_parallel
    # On a CPU, instances share the pages of the checkpoint's file if it stores what is served.
    shared = section.device == "cpu" and _is_mapped(key, section)
    weights = weights * (1 if shared else section.instances)
    sizes = on_heap(Sizes(weights=weights, activations=working * workers * section.instances), section.device)
    contexts = section.instances
    if (versions := {model.name: model for model in live_models(config)}.get(key)) is not None:
        swaps, reloads = versions.reload == "swap", key == "critic" and config.trainer.reload_on_save == "triton"
        reloads = section.device != "cpu" and (reloads or not swaps)
        # The next version is loaded beside the served one, or by a second process. If both happen, the allocator of the
        # first process still has the memory of the version before.
        sizes = replace(sizes, copies=weights * max(1, swaps + reloads))
        contexts *= 1 + reloads
        if swaps and reloads:
            notes += ("trainer.reload_on_save: triton loads a third copy; `none` saves it",)
    if shared and section.instances > 1:
        notes += (f"{section.instances} instances share the weights",)
    return Role(
        key,
        sizes,
        model.config.model_type,
        parameters,
        0,
        section.dtype,
        devices,
        processes,
        contexts=contexts,
        has_group=section.tensor_parallel > 1,
        notes=(f"forward passes of {ids_shape[0]} rows x {longest} tokens, {workers} at a time", *notes),
    )


def _cut(model: Any, ranks: int, *, gathers: bool) -> None:
    """Cut the weights of the layers that tensor parallelism splits down to one rank's part; not embeddings and heads.

    Args:
        gathers: cut the layers whose inputs or outputs are whole on every rank, or only the others.
    """
    plan = {name: style for name, style in (model.tp_plan or {}).items() if ".*." in name and "wise" in style}
    for name, parameter in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        style = plan.get(plan_key(name), plan.get(plan_key(path), ""))
        is_row = style.startswith("rowwise")
        if ranks > 1 and style and ("gather" in style or "split" in style) == gathers and parameter.ndim > is_row:
            dimension = -1 if is_row or parameter.ndim == 1 else -2
            part = parameter.narrow(dimension, 0, -(-parameter.shape[dimension] // ranks))
            setattr(model.get_submodule(path), leaf, torch.nn.Parameter(torch.empty_like(part), False))


def _is_mapped(key: str, section: ModelSection) -> bool:
    """Return whether the weights stay in the pages of a file; a critic's versions are stored in float32."""
    if key == "critic":
        return section.dtype == "float32"
    try:
        return set(inspect_checkpoint(section.model).dtypes) == {STORED[section.dtype]}
    except CheckpointError:
        return False


def placed_on_nodes(config: RunConfig, roles: Mapping[str, Role], num_devices: int | None) -> dict[str, Role]:
    """Return the roles with their nodes and the devices of one node, and tritonserver if it is on a node with GPUs.

    Ranks beyond the GPUs of a node are on further nodes.

    Args:
        roles: each on as many GPUs as it has processes, or for a model served on every GPU on the first.
        num_devices: GPUs of each node; None: as many as the roles use.
    """
    places = {place.key: place for place in config.places}
    num = num_devices or max(_end(device) for role in roles.values() for device in role.devices)
    placed = {}
    for key, role in roles.items():
        place = places.get("actor.policy.device" if key == "actor" else f"{key}.device", Place(key, role.devices))
        devices, processes = role.devices, role.processes
        if place.every:
            devices = tuple(f"cuda:{i}" for i in range(num))
            processes *= num
        elif role.has_group:
            devices = tuple(device for device in devices if _end(device) <= num) or devices[:1]
        nodes = -(-len(role.devices) // len(devices)) if role.has_group else 1
        placed[key] = replace(role, node=place.machine, devices=devices, processes=processes, nodes=nodes)
    if num:  # tritonserver opens a context on every GPU that it sees
        every = tuple(f"cuda:{i}" for i in range(num))
        node = "server" if any(place.machine for place in places.values()) else ""
        placed["tritonserver"] = Role("tritonserver", Sizes(), devices=every, processes=0, node=node)
    return placed


def vllm_devices(config: RunConfig) -> list[str]:
    """Return the devices, in the whole plan, of the vLLM server that `tools run` starts."""
    return [f"{place.machine} {card}".strip() for place in config.places if place.key == VLLM for card in place.cards]


def _end(device: str) -> int:
    """Return the number of GPUs that a node needs to have `device`."""
    return 0 if device == "cpu" else int(device.partition(":")[2]) + 1
