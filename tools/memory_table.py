"""The memory that a run's models need on each device, for `--dry-run`: computed from config.json, without weights.

Weights, gradients, optimizer moments, and the keys and values of generation; of optimizers in 8 bits without the
scales. Activations come on top: the token budgets bound them.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
)

from rlhf_triton.actor.generation.cache import SlotCache, cache_layers
from rlhf_triton.actor.policy.loading import empty_causal_lm
from rlhf_triton.checkpoints.tensor_parallel import plan_key
from rlhf_triton.config.live_models import live_models
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.models.adapters import Lora, with_adapters
from rlhf_triton.models.heads import ModelHead
from rlhf_triton.models.precision import use_bfloat16
from rlhf_triton.trainer.trained_critic import prepare_for_training
from rlhf_triton.training_engine.preparation import freeze
from rlhf_triton.training_engine.sharding import MAX_UNREDUCED_BYTES

COLUMNS = ("weights", "copies", "gradients", "moments", "KV cache")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Held:
    """Bytes that a role holds on each of its devices, in the order of `COLUMNS`."""

    weights: int
    copies: int = 0
    """Further weights: the reference, the policy that generates, a version that is loaded while another serves."""
    gradients: int = 0
    moments: int = 0
    cache: int = 0


def memory_lines(config: RunConfig, *, served_only: bool = False) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and a sentence for each device of this machine whose free memory is too small.

    Args:
        served_only: only the models that tritonserver serves.

    Raises:
        ConfigError: a config.json that transformers cannot use. A folder without one has no line.
    """
    places = {place.key.removesuffix(".policy.device").removesuffix(".device"): place for place in config.places}
    rows = [["role", "device", *COLUMNS, "sum"]]
    parts: dict[str, dict[str, int]] = {}  # device -> role -> bytes
    for role, held in _roles(config, served_only):
        place = places[role]
        gpus = {gpu for other in config.places for gpu in other.gpus if other.machine == place.machine}
        gpus |= {f"cuda:{index}" for index in range(torch.cuda.device_count())}
        devices = sorted(gpus, key=_number) if place.every else list(dict.fromkeys(place.devices))
        count = 1 if place.every else len(place.devices) // len(devices)  # ranks on the CPU
        sizes = [count * size for size in astuple(held)]
        where = f"{place.machine} {devices[0]}".strip() + (f" to {devices[-1]}, each" if len(devices) > 1 else "")
        rows.append([role, where, *(format_bytes(size) if size else "-" for size in sizes), format_bytes(sum(sizes))])
        for device in devices:
            parts.setdefault(f"{place.machine} {device}".strip(), {})[role] = sum(sizes)
    problems = []
    for device in sorted(parts, key=_number):
        size = sum(parts[device].values())
        free = _free(device)
        free_text = "" if free is None else f"{format_bytes(free)} free"
        rows.append(["all", device, *[""] * len(COLUMNS), format_bytes(size), free_text])
        if free is not None and size > free:
            by_role = ", ".join(f"{role} {format_bytes(part)}" for role, part in parts[device].items())
            problems.append(
                f"{device} has {format_bytes(free)} free and the models need {format_bytes(size)} ({by_role}): set "
                "another device, dtype or precision bfloat16, lora_rank, more ranks or tensor_parallel"
            )
    widths = [max(map(len, column)) for column in zip(*(row[: len(rows[0])] for row in rows), strict=True)]
    lines = ["  ".join(map(str.ljust, row, [*widths, 0])).rstrip() for row in rows]
    lines.append("Activations are not counted; token_budget bounds them, and gradient_checkpointing lowers them.")
    return lines, problems


def _number(device: str) -> tuple[str, int]:
    name, _, index = device.partition(":")
    return name, int(index or 0)


def _roles(config: RunConfig, served_only: bool) -> Iterator[tuple[str, Held]]:
    makers = {key: (section.model, _served) for key, section in config.served_sections.items()}
    if config.serves_critic and not served_only:
        makers["trainer"] = (config.critic.model, _trained_critic)
    if config.has_actor and not served_only:
        makers["actor"] = (config.actor.policy.model, _policy)
    for role, (folder, make) in makers.items():
        if not (folder / "config.json").is_file():  # which the checks of `--dry-run` report
            continue
        try:
            yield role, make(config, role)
        except (OSError, ValueError, KeyError) as error:  # raised by transformers for a config.json that it cannot use
            raise ConfigError(f"{role}: the model in {folder} cannot be built: {error}") from error


def _policy(config: RunConfig, role: str) -> Held:
    actor, settings = config.actor, config.actor.policy
    model = empty_causal_lm(settings.model)
    head = model.get_output_embeddings()
    if settings.lora_rank:
        lora = Lora("actor.policy", settings.lora_rank, settings.lora_alpha, settings.lora_targets)
        with_adapters(model, lora, head, task="CAUSAL_LM")
    freeze(model, settings.freeze, "actor.policy.freeze")
    if settings.precision == "bfloat16":
        use_bfloat16(model, head)
    frozen = _frozen_bytes(settings.model, settings.precision)
    has_reference = actor.kl.uses_reference and not actor.kl.serves_reference and not settings.lora_rank
    has_generator = actor.max_off_policy_steps > 0 or actor.ranks > 1  # each rank generates with a whole copy
    cache = 0 if actor.generation.engine == "vllm" else _cache_bytes(config)
    on_gpu = settings.device != "cpu"
    copies = (has_reference + has_generator) * frozen
    return _training(model, actor.ranks, actor.optimizer.kind, on_gpu, copies=copies, cache=cache)


def _trained_critic(config: RunConfig, role: str) -> Held:
    settings = config.trainer
    model = token_model(config.critic.model)
    prepare_for_training(model, settings.model_copy(update={"attention": "sdpa"}))  # which needs no further package
    return _training(model, settings.ranks, settings.optimizer.kind, settings.device != "cpu")


def _training(model: Any, ranks: int, optimizer: str, on_gpu: bool, **more: int) -> Held:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    moments = sum((2 if optimizer == "adamw_8bit" else 8) * parameter.numel() for parameter in trained)
    waits = on_gpu and gradients <= MAX_UNREDUCED_BYTES  # ranks add up whole gradients once in a minibatch
    return Held(
        weights=-(-model_bytes(model) // ranks),
        gradients=gradients if waits else -(-gradients // ranks),
        moments=-(-moments // ranks),
        **more,
    )


def _served(config: RunConfig, role: str) -> Held:
    section = config.served_sections[role]
    if role == "reference":
        size = _frozen_bytes(section.model, section.dtype, section.tensor_parallel)
    else:
        size = model_bytes(token_model(section.model, getattr(torch, section.dtype)), section.tensor_parallel)
    size *= section.instances
    is_live = role in {model.name for model in live_models(config)}
    return Held(size, copies=size * is_live)


def token_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a body with one output per token, whose head is in float32, on the meta device.

    Not as serving builds it (`empty_token_model`): that needs the weights files, and a table needs config.json alone.
    """
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, num_labels=1)
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    kind = kind or MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    with torch.device("meta"):
        model = kind._from_config(config, dtype=dtype).eval()
    ModelHead(model).keep_exact().float()
    return model


def _frozen_bytes(folder: Path, precision: str, tensor_parallel: int = 1) -> int:
    """Return the bytes of a frozen causal LM: matrices in `precision`, everything else in float32."""
    model = empty_causal_lm(folder).requires_grad_(False)
    if precision == "bfloat16":
        use_bfloat16(model, model.get_output_embeddings())
    return model_bytes(model, tensor_parallel)


def model_bytes(model: Any, tensor_parallel: int = 1) -> int:
    """Return the bytes of parameters and buffers on each rank, which has its part of the layers that are split."""
    plan = {name: style for name, style in (model.tp_plan or {}).items() if ".*." in name and "wise" in style}
    total = sum(buffer.nbytes for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        path, _, _ = name.rpartition(".")
        style = plan.get(plan_key(name), plan.get(plan_key(path), ""))
        is_whole = not style or (style.startswith("rowwise") and parameter.ndim == 1)  # a bias that all ranks add up to
        total += parameter.nbytes if is_whole else -(-parameter.nbytes // tensor_parallel)
    return total


@torch.no_grad()
def _cache_bytes(config: RunConfig) -> int:
    """Return the bytes of keys and values of `actor.generation`'s slots; 0 if the model caches something else."""
    actor = config.actor
    (span, _) = config.longest_row
    model = empty_causal_lm(actor.policy.model, torch.bfloat16)  # the kernels of experts have no other dtype here
    num_layers = cache_layers(model)
    if not num_layers:
        return 0
    model.config.pad_token_id = None  # with one, transformers looks for it in the values
    slots = min(actor.generation.batch_size, -(-max(actor.rollout_size, actor.validation.size) // actor.ranks))
    cache = SlotCache(slots, span + span // 2, num_layers)  # columns as in actor.generation.slots
    cache.set_window(0, 1, 0, 0)
    with torch.device("meta"):
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
    elements = sum(tensor.numel() for layer in cache.layers for tensor in layer.tensors())
    return elements * (2 if actor.policy.precision == "bfloat16" else 4)


def _free(device: str) -> int | None:
    """Return the free bytes of a device; None if this machine does not have it."""
    if device == "cpu":
        limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
        return min([psutil.virtual_memory().available, *([] if limit == "max" else [int(limit)])])
    machine, _, index = device.rpartition("cuda:")
    if machine or int(index) >= torch.cuda.device_count():
        return None
    return torch.cuda.mem_get_info(int(index))[0]


def format_bytes(number: float) -> str:
    """Return bytes as text, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} GiB"
