"""The actor's checkpoints: policy, optimizer and the step they stand at; whole or not there at all.
Given: the checkpoints' folder. Returns: what a resumed run starts from. `critic_step` in state.json names the critic's
checkpoint that belongs to it: a resumed actor asks for a rewind to that step.

    <root>/<step>/{Hugging Face folder, optimizer.safetensors, state.json}, under LoRA also adapters.safetensors
"""

from __future__ import annotations

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from actor.adapters import load_trained, trained_tensors
from actor.kl_control import KLControl
from actor.policy import Policy
from actor.reward_shaping import RewardShaper, RunningMoments
from python_backend.checkpoints import CheckpointError
from python_backend.config import ActorSection
from python_backend.durable import remove_folder, sweep, sync_directory, sync_file

STATE_FILE = "state.json"
OPTIMIZER_FILE = "optimizer.safetensors"
ADAPTERS_FILE = "adapters.safetensors"


@dataclass(frozen=True)
class RunState:
    """What a run is made of that changes from step to step, and so goes into its checkpoints."""

    policy: Policy
    shaper: RewardShaper
    kl: KLControl


def saved_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.name.isdigit() and (p / STATE_FILE).is_file())


def critic_steps(root: Path) -> list[int]:
    """The steps of the critic's checkpoints that the checkpoints here belong to."""
    states = (json.loads((root / str(step) / STATE_FILE).read_text()) for step in saved_steps(root))
    return [state["critic_step"] for state in states]


def set_aside(root: Path, step: int) -> None:
    """Keep the checkpoint of `step` under another name, from which no run resumes."""
    aside = root / f"{step}.set-aside"
    shutil.rmtree(aside, ignore_errors=True)
    (root / str(step)).rename(aside)


def save_checkpoint(root: Path, run: RunState, state: dict[str, Any], *, keep: int) -> None:
    """Write the checkpoint of `state["step"]` and delete all but the newest `keep`."""
    policy = run.policy
    state = {
        **state, "optimizer_step": policy.optimizer_step, "kl_coef": run.kl.coef,
        "reward_moments": run.shaper.moments.state(), "lora_alpha": policy.settings.lora_alpha,
    }  # fmt: skip
    root.mkdir(parents=True, exist_ok=True)
    staging = root / f".staging-{uuid.uuid4().hex}"
    staging.mkdir()
    try:
        policy.save(staging)
        if policy.settings.lora_rank:
            save_file(trained_tensors(policy.model), staging / ADAPTERS_FILE)
        save_file(_optimizer_tensors(policy), staging / OPTIMIZER_FILE)
        (staging / STATE_FILE).write_text(json.dumps(state))
        for path in staging.iterdir():
            sync_file(path)
        final = root / str(state["step"])
        if final.exists():
            remove_folder(final)
        staging.rename(final)
        sync_directory(root)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for step in sorted(int(p.name) for p in root.iterdir() if p.name.isdigit())[:-keep]:
        remove_folder(root / str(step))
    sweep(root)


def load_checkpoint(root: Path, step: int, run: RunState) -> dict[str, Any]:
    """Put what was saved at `step` into `run`; returns the saved state.

    Raises:
        CheckpointError: it was saved under other `actor.lora_...` settings.
    """
    folder, policy = root / str(step), run.policy
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    _check_adapters(folder, state, policy.settings)
    _load_weights(folder, policy)
    names = dict(policy.model.named_parameters())
    policy.optimizer.state.clear()
    for full_name, tensor in load_file(folder / OPTIMIZER_FILE).items():
        key, _, name = full_name.partition("/")
        policy.optimizer.state[names[name]][key] = tensor.to(names[name].device)  # the step too: AdamW is fused
    policy.optimizer_step = state["optimizer_step"]
    run.kl.coef = state["kl_coef"]
    run.shaper.moments = RunningMoments(*state["reward_moments"])
    return state


def _check_adapters(folder: Path, state: dict[str, Any], settings: ActorSection) -> None:
    """Raise CheckpointError where the same weights would make another policy now."""
    has_adapters = (folder / ADAPTERS_FILE).is_file()
    if has_adapters != bool(settings.lora_rank):
        was = "adapters" if has_adapters else "a whole policy without adapters"
        raise CheckpointError(
            f"{folder} was saved by a run that trained {was}, and actor.lora_rank is {settings.lora_rank}; set it as "
            "it was, or start a run in another folder (run.dir)"
        )
    alpha = state.get("lora_alpha", settings.lora_alpha)
    if has_adapters and alpha != settings.lora_alpha:
        raise CheckpointError(
            f"{folder} was saved with actor.lora_alpha {alpha}, not {settings.lora_alpha}; set it as it was, or start "
            "a run in another folder (run.dir)"
        )


def _load_weights(folder: Path, policy: Policy) -> None:
    if policy.settings.lora_rank:
        load_trained(policy.model, load_file(folder / ADAPTERS_FILE), folder / ADAPTERS_FILE)
        return
    weights = load_file(folder / "model.safetensors")
    missing, unexpected = policy.model.load_state_dict(weights, strict=False)
    tied = set(policy.model.all_tied_weights_keys)
    if set(missing) - tied or unexpected:
        raise ValueError(f"{folder} does not fit the policy: {sorted({*missing, *unexpected} - tied)[:4]}")


def _optimizer_tensors(policy: Policy) -> dict[str, Any]:
    return {
        f"{key}/{name}": value.detach().cpu().contiguous()
        for name, parameter in policy.model.named_parameters()
        for key, value in policy.optimizer.state.get(parameter, {}).items()
    }
