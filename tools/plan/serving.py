"""Memory of the models that tritonserver serves."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from python_backend.checkpoints.inspection import CheckpointError, inspect_checkpoint
from python_backend.checkpoints.tensor_parallel import plan_key
from python_backend.config import ModelSection, RunConfig
from python_backend.config.live_models import live_models
from python_backend.models.card.placement import devices_of
from python_backend.models.collation import limits_of
from python_backend.models.precision import use_bfloat16
from tools.calibrate.calibration import cached
from tools.plan.live_bytes import counting, model_bytes
from tools.plan.models import causal_model, logprobs_of, placed, token_model, values_of
from tools.plan.role import Role, Sizes, on_heap

STORED = {"float32": "F32", "bfloat16": "BF16"}


def served_role(config: RunConfig, key: str) -> Role:
    """Return the served model of the section `key`."""
    section = config.served_sections[key]
    workers, budget, notes = _batching(config, key, section)
    with counting(section.device) as live, torch.no_grad():
        model = placed(_model(key, section))
        parameters = model.num_parameters()
        longest = config.actor.prompts.max_tokens + config.actor.generation.max_new_tokens
        longest = min(longest, limits_of(model).max_length or longest)  # the server refuses longer rows
        ids_shape = (max(1, min(budget // longest, section.micro_batch_rows)), longest)
        if key == "reference" and section.dtype == "bfloat16":
            use_bfloat16(model, model.get_output_embeddings())
        _cut(model, section.tensor_parallel, gathers=False)
        live.reset()
        before = live.live
        _forward(key, section, model, torch.zeros(ids_shape, dtype=torch.int64))
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
        sizes = dataclasses.replace(sizes, copies=weights * max(1, swaps + reloads))
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


def _batching(config: RunConfig, key: str, section: ModelSection) -> tuple[int, int, tuple[str, ...]]:
    """Return the workers and the token budget, measured before if they are `auto`, and a note if they were not."""
    if "auto" in (section.workers, section.token_budget):
        known = cached(config, key)
        if known is None:
            note = f"{key}.workers and {key}.token_budget are auto: defaults until they are measured"
            return section.settled("workers"), section.settled("token_budget"), (note,)
        measured = {
            name: value for name, value in dataclasses.asdict(known).items() if getattr(section, name, "") == "auto"
        }
        section = section.model_copy(update=measured)
    return int(section.workers), int(section.token_budget), ()


def _model(key: str, section: ModelSection) -> Any:
    if key != "reference":
        return token_model(section.checkpoint, getattr(torch, section.dtype))
    return causal_model(section.checkpoint).requires_grad_(False)


def _forward(key: str, section: ModelSection, model: Any, ids: Tensor) -> None:
    if key == "reference":
        logprobs_of(model, ids, ids.shape[1] - 1, section.dtype)
    else:
        values_of(model, ids, lean=section.device == "cpu")


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
        return set(inspect_checkpoint(section.checkpoint).dtypes) == {STORED[section.dtype]}
    except CheckpointError:
        return False
