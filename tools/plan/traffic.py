"""Bytes that a step and a publish move over the network and the disk, at the longest rows."""

from __future__ import annotations

from collections.abc import Mapping

from python_backend.config import RunConfig
from python_backend.training.sharding import MOST_UNREDUCED
from tools.plan.role import Role

FLOAT = 4
TRAINING_TOKEN = 8 + 3 * FLOAT  # token id, return, previous value, mask


def traffic_lines(config: RunConfig, roles: Mapping[str, Role]) -> list[str]:
    """Return one line of text per transfer."""
    actor = config.actor
    tokens = actor.rollout_size * (actor.prompts.max_tokens + actor.generation.max_new_tokens)
    has_critic = config.serves_critic
    token_bytes = 8 if config.server.tokens_dtype == "INT64" else 4
    asked = tokens * token_bytes * (1 + actor.kl.serves_reference)
    answered = actor.rollout_size * FLOAT + tokens * FLOAT * (has_critic + actor.kl.serves_reference)
    lines = [f"each step, network: {shown(asked)} of requests, {shown(answered)} of replies"]
    if has_critic:
        sent = tokens * TRAINING_TOKEN
        lines.append(f"each step, critic_train: {shown(sent)} over the network, and as much into the journal on disk")
        lines += _publish(config, roles["trainer"], roles["critic"])
    lines += _checkpoint("actor", roles["actor"], actor.checkpoint_every)
    if has_critic:
        lines += _checkpoint("trainer", roles["trainer"], config.trainer.checkpoint_every)
    for key, ranks in (("actor", actor.ranks), ("trainer", config.trainer.ranks)):
        role = roles.get(key)
        if ranks > 1 and role is not None:
            weights, gradients = role.sizes.weights * ranks, FLOAT * role.trained
            on_card = role.devices[0] != "cpu"
            if on_card and role.precision == "bfloat16":
                weights = min(weights, role.parameters * FLOAT // 2)
            once = on_card and gradients <= MOST_UNREDUCED
            each = (2 * weights + (0 if once else gradients)) * (ranks - 1) // ranks
            lines.append(
                f"each micro-batch, {key}: {shown(each)} per rank between the ranks (weights twice"
                f"{')' if once else ', gradients)'}"
                + (f"; gradients once in a minibatch: {shown(gradients * (ranks - 1) // ranks)}" if once else "")
            )
    return lines


def shown(number: float) -> str:
    """Return bytes as text, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:,.3g} GiB" if number < 100 else f"{number:,.0f} GiB"


def _publish(config: RunConfig, trainer: Role, critic: Role) -> list[str]:
    publish = config.trainer.publish
    width = FLOAT if publish.dtype != "bfloat16" else FLOAT // 2
    size = FLOAT * trainer.trained if publish.format == "adapter" else width * trainer.parameters
    return [
        f"each publish (every {publish.every} steps): {shown(size)} written to the weights store, read once to verify "
        f"it and once by each of {critic.processes} serving processes; {publish.keep} versions stay on disk"
    ]


def _checkpoint(key: str, role: Role, every: int) -> list[str]:
    is_adapter = role.trained < role.parameters
    ranks = role.processes
    size = (role.trained if is_adapter else role.parameters) * FLOAT + role.sizes.optimizer * ranks
    return [f"each checkpoint of {key} (every {every} steps): {shown(size)} written to disk"]
