"""`python -m tools run --dry-run`: prints what a run needs, and refuses one that does not fit."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import psutil
import torch

from python_backend.config import ConfigError, RunConfig
from python_backend.errors import RlhfError
from python_backend.training.sharding import MOST_UNREDUCED
from tools.plan.roles import (
    CONTEXT,
    FRAGMENTATION,
    GIB,
    NCCL_BUFFERS,
    Role,
    Sizes,
    placed_on_nodes,
    policy_role,
    served_role,
    trainer_role,
    vllm_devices,
)
from tools.server.vllm import memory_share

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CATEGORIES = [field.name for field in fields(Sizes)]
VLLM = "vLLM"
FLOAT = 4
HASHED_PER_S = {"xxh3": 20e9, "sha256": 1e9}  # bytes in memory, one core
TRAINING_TOKEN = 8 + 3 * FLOAT  # token id, return, previous value, mask
HEADINGS = {"cache": "KV cache"}
REMEDIES = {  # section -> {largest part: settings that make it smaller}
    "actor": {
        "weights": "actor.policy.lora_rank with actor.policy.precision: bfloat16, or actor.ranks",
        "copies": "actor.policy.lora_rank, actor.kl.reference: triton, or actor.one_step_off_policy: false",
        "gradients": "actor.policy.lora_rank or actor.ranks",
        "optimizer": "actor.policy.lora_rank or actor.ranks",
        "activations": "actor.policy.gradient_checkpointing, actor.policy.token_budget or actor.generation.batch_size",
        "cache": "actor.generation.batch_size, actor.generation.max_new_tokens or actor.prompts.max_tokens, with an "
        "environment environment.max_tokens",
    },
    "trainer": {
        "weights": "trainer.lora_rank with trainer.precision: bfloat16, or trainer.ranks",
        "copies": "trainer.ranks",
        "gradients": "trainer.lora_rank or trainer.ranks",
        "optimizer": "trainer.lora_rank or trainer.ranks",
        "activations": "trainer.gradient_checkpointing or trainer.token_budget",
    },
}


class PlanError(RlhfError):
    """The run does not fit a device; the message names the device, the largest role and the setting to change."""


def dry_run(
    config: RunConfig,
    *,
    num_devices: int | None = None,
    device_gib: float | None,
    host_gib: float | None,
    say: Callable[[str], None] = print,
) -> None:
    """Print the memory and traffic of a run, and check that it fits. Starts and writes nothing.

    Args:
        num_devices: GPUs of each machine to plan for; None: those of this machine, or with `device_gib` as many as the
            run needs.
        device_gib: memory of each of them; None: that of this machine's.
        host_gib: memory of its CPU; None: that of this machine.

    Raises:
        PlanError: a device is too small, or is not on this machine.
        ConfigError: a checkpoint has no usable config.json.
    """
    interpreter = psutil.Process().memory_info().rss  # torch and transformers are loaded: as large as each process
    if num_devices is None and device_gib is None:
        num_devices = torch.cuda.device_count() or None
    roles = roles_of(config, num_devices)
    for line in [*table(list(roles.values())), "", *traffic_lines(config, roles)]:
        say(line)
    server = config.server
    names = ("http", "grpc", "metrics")
    ports = (f"{name} {getattr(server, f'{name}_port') or 'any free port'}" for name in names)
    say(f"ports on {server.host}: {', '.join(ports)}")
    say("")
    needs = needs_of(roles.values(), interpreter)
    for device in vllm_devices(config):
        needs.setdefault(device, {})[VLLM] = 0
    for device in needs:
        if num_devices is not None and int(device.partition(":")[2] or 0) >= num_devices:
            raise PlanError(f"{device} is not on a machine with {num_devices} GPUs; change it, or --num-devices")
    capacities = {device: _capacity(device, host_gib if device.endswith("cpu") else device_gib) for device in needs}
    for device in vllm_devices(config):
        needs[device][VLLM] = int(memory_share(config) * capacities[device])
    fill = {device: f"{shown(sum(parts.values()))} of {shown(capacities[device])}" for device, parts in needs.items()}
    for line in device_lines(fill):
        say(line)
    check(needs, capacities, roles)


def roles_of(config: RunConfig, num_devices: int | None = None) -> dict[str, Role]:
    """Return every role of the run by its section.

    Args:
        num_devices: GPUs of each machine; None: as many as the run needs.
    """
    makers: dict[str, tuple[Path, Callable[[], Role]]] = {
        "actor": (config.actor.policy.model, lambda: policy_role(config))
    }
    if config.serves_critic:
        makers["trainer"] = (config.critic.model, lambda: trainer_role(config))
    for key, section in config.served_sections.items():
        makers[key] = (section.model, functools.partial(served_role, config, key))
    return placed_on_nodes(config, {key: _role(key, *maker) for key, maker in makers.items()}, num_devices)


def _role(key: str, folder: Path, make: Callable[[], Role]) -> Role:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}: {folder} has no config.json, so the size of its model is unknown")
    try:
        return make()
    except (OSError, ValueError, KeyError) as error:  # raised by transformers for a config.json that it cannot use
        raise ConfigError(f"{key}: the model in {folder} cannot be planned: {error}") from error


def table(roles: Sequence[Role]) -> list[str]:
    """Return the lines of a table with a row for each role, and the notes below it."""
    rows = [["role", "model", "parameters", "precision", "device", *(HEADINGS.get(c, c) for c in CATEGORIES), "total"]]
    for role in roles:
        if not role.model:
            continue
        model = [role.key, role.model, f"{role.parameters / 1e6:,.1f} M", role.precision, _places(role)]
        sizes = [getattr(role.sizes, category) for category in CATEGORIES]
        rows.append([*model, *(shown(size) if size else "-" for size in (*sizes, role.sizes.total))])
    rows = [row + [""] * (len(rows[0]) - len(row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, "", *(f"{role.key}: {note}" for role in roles for note in role.notes)]


def _places(role: Role) -> str:
    first, count = role.devices[0], len(role.devices)
    return first if count == 1 else f"{count} x {first}" if first == "cpu" else f"{first}-{role.devices[-1][5:]}"


def needs_of(roles: Iterable[Role], interpreter: int) -> dict[str, dict[str, int]]:
    """Return the bytes that each role needs on each device; `interpreter`: of each process itself, on the CPU."""
    needs: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for role in roles:
        needs[role.at("cpu")]["processes"] += -(-role.processes // role.nodes) * interpreter
        for device in role.devices:
            parts = needs[role.at(device)]
            if role.processes:
                parts[role.key] += role.sizes.total
            if device != "cpu":
                parts["contexts"] += role.contexts * CONTEXT + role.has_group * NCCL_BUFFERS
                parts["fragmentation"] += round(FRAGMENTATION * role.sizes.total)
    return {device: dict(parts) for device, parts in needs.items()}


def device_lines(texts: Mapping[str, str]) -> list[str]:
    """Return a line for each device, and one for consecutive GPUs of a node with equal texts."""
    lines = []
    devices = sorted(texts, key=lambda device: (device.partition(":")[0], int(device.partition(":")[2] or 0)))
    for text, group in itertools.groupby(devices, key=lambda device: (device.partition(":")[0], texts[device])):
        first, *others = group
        last = f"-{others[-1].rpartition(':')[2]}" if others else ""
        lines.append(f"{first}{last}: {text[1]}{' each' if others else ''}")
    return lines


def check(needs: Mapping[str, Mapping[str, int]], capacities: Mapping[str, int], roles: Mapping[str, Role]) -> None:
    """Raise PlanError unless every device has what the roles need on it."""
    problems = []
    for device, parts in needs.items():
        need = sum(parts.values())
        if need > capacities[device]:
            key = max((key for key in parts if key in roles or key == VLLM), key=lambda key: parts[key], default="")
            problems.append(
                f"{device} needs {shown(need)} of {shown(capacities[device])}: "
                f"{', '.join(f'{k} {shown(v)}' for k, v in sorted(parts.items(), key=lambda part: -part[1]))}; "
                f"{_remedy(key, roles)}"
            )
    if problems:
        raise PlanError("\n".join(problems))


def _remedy(key: str, roles: Mapping[str, Role]) -> str:
    if not key:
        return "use a larger machine"
    if key == VLLM:
        return (
            f"most of it is that of {VLLM}: change actor.generation.vllm.cuda_devices, or add --gpu-memory-utilization "
            "to actor.generation.vllm.arguments"
        )
    largest = max(CATEGORIES, key=lambda category: getattr(roles[key].sizes, category))
    served = {
        "weights": f"{key}.dtype: bfloat16, {key}.tensor_parallel or another {key}.device",
        "copies": f"{key}.dtype: bfloat16, {key}.tensor_parallel or another {key}.device",
        "activations": f"{key}.token_budget, {key}.workers or {key}.instances",
    }
    return f"most of it are the {HEADINGS.get(largest, largest)} of {key}: change {REMEDIES.get(key, served)[largest]}"


def _capacity(device: str, given_gib: float | None) -> int:
    """Return the memory of a device in bytes. Raises PlanError if it is not on this machine."""
    if given_gib is not None:
        return int(given_gib * GIB)
    if device.endswith("cpu"):
        total = psutil.virtual_memory().total
        limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
        return total if limit == "max" else min(total, int(limit))
    index = int(device.partition(":")[2])
    if index >= torch.cuda.device_count():
        raise PlanError(f"{device} is not on this machine; --device-gib N plans for GPUs of N GiB")
    return torch.cuda.get_device_properties(index).total_memory


def traffic_lines(config: RunConfig, roles: Mapping[str, Role]) -> list[str]:
    """Return what a step, a publish and a checkpoint move over network and disk at the longest rows, a line each."""
    actor, publish, has_critic = config.actor, config.trainer.publish, config.serves_critic
    tokens = actor.rollout_size * config.longest_row[0]
    token_bytes = 8 if config.server.tokens_dtype == "INT64" else 4
    asked = tokens * token_bytes * (1 + actor.kl.serves_reference)
    answered = actor.rollout_size * FLOAT + tokens * FLOAT * (has_critic + actor.kl.serves_reference)
    lines = [f"each step, network: {shown(asked)} of requests, {shown(answered)} of replies"]
    trained = {"actor": actor.checkpoint_every}
    if has_critic:
        trained["trainer"] = config.trainer.checkpoint_every
        sent, critic = tokens * TRAINING_TOKEN, roles["trainer"]
        width = FLOAT if publish.dtype != "bfloat16" else FLOAT // 2
        size = FLOAT * critic.trained if publish.format == "adapter" else width * critic.parameters
        # One process hashes a version while it writes and once more to verify it, of several each its own file once.
        hashed = 2 * size if critic.processes == 1 else size / critic.processes
        lines += [
            f"each step, critic_train: {shown(sent)} over the network, and as much into the journal on disk",
            f"each publish (every {publish.every} steps): {shown(size)} written to the weights store, read once to "
            f"verify it and once by each of {roles['critic'].processes} serving processes; {publish.keep} versions "
            f"stay on disk; {hashed / HASHED_PER_S[config.run.integrity]:.1f} s of hashing ({config.run.integrity})",
        ]
    for key, every in trained.items():
        role = roles[key]
        size = role.trained * FLOAT + role.sizes.optimizer * role.processes
        lines.append(f"each checkpoint of {key} (every {every} steps): {shown(size)} written to disk")
    lines += [_exchange(key, role) for key in trained if (role := roles[key]).processes > 1]
    return lines


def _exchange(key: str, role: Role) -> str:
    ranks, gradients = role.processes, FLOAT * role.trained
    weights, on_card = role.sizes.weights * ranks, role.devices[0] != "cpu"
    if on_card and role.precision == "bfloat16":
        weights = min(weights, role.parameters * FLOAT // 2)
    once = on_card and gradients <= MOST_UNREDUCED
    each = (2 * weights + (0 if once else gradients)) * (ranks - 1) // ranks
    return f"each micro-batch, {key}: {shown(each)} per rank between the ranks (weights twice" + (
        f"); gradients once in a minibatch: {shown(gradients * (ranks - 1) // ranks)}" if once else ", gradients)"
    )


def shown(number: float) -> str:
    """Return bytes as text, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:,.3g} GiB" if number < 100 else f"{number:,.0f} GiB"
