"""Finds keys that the user set but that have no effect in this run. They are logged, not refused, because a YAML may
serve several runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf_triton.config.actor import ActorSection
from rlhf_triton.config.algorithms import LOSSES

if TYPE_CHECKING:
    from rlhf_triton.config.run_config import RunConfig

Rule = tuple[bool, str, tuple[str, ...]]
"""Whether the rule applies, why its keys then have no effect, and its keys or sections."""
DISCOUNTING = (
    "rlhf_triton.actor.algorithms.ppo:advantage",
    "rlhf_triton.actor.algorithms.reinforce_plus_plus:advantage",
)


def effect_line(config: RunConfig) -> str:
    """Return `without_effect` as a log line; "" if every setting has an effect."""
    unused = without_effect(config)
    return f"settings without effect in this run: {'; '.join(unused)}" if unused else ""


def without_effect(config: RunConfig) -> list[str]:
    """Return the keys that the YAML or the command line sets without effect, as one text `keys (why)` per reason.

    Contradictory settings are refused when the configuration is loaded. Settings without effect are harmless, unless
    the user meant something else, such as the policy by `trainer.optimizer.lr`.
    """
    remaining = sorted(config.written)
    unused = []
    for applies, why, keys in (*_serving_rules(config), *(_actor_rules(config) if config.has_actor else ())):
        named = [key for key in remaining if applies and any(f"{key}.".startswith(f"{each}.") for each in keys)]
        if named:
            unused.append(f"{', '.join(named)} ({why})")
            remaining = [key for key in remaining if key not in named]
    return unused


def _serving_rules(config: RunConfig) -> Iterator[Rule]:
    """Yield the rules for models, servers and sidecar."""
    algorithm = config.actor.algorithm
    reward = config.reward
    monitoring = config.monitoring
    why = f"{algorithm.name} has no critic" if config.has_actor else "no critic is served"
    keys = ("critic", "trainer", "monitoring.trainer_port", "server.training_key_env")
    yield not config.serves_critic, why, keys
    why += "; actor.max_off_policy_steps bounds the age of responses"
    yield not config.serves_critic, why, ("actor.max_staleness",)
    yield not config.uses_reward_model, "no reward model is served", ("reward",)
    why = "actor.kl.reference is actor: the initial policy" if config.actor.kl.uses_reference else "no KL is measured"
    # Not `reference`'s other keys: settings about speed cannot be meant for anything else.
    yield not config.actor.kl.serves_reference, why, ("reference.model", "reference.dtype")
    is_token = reward.process is not None and reward.process.granularity == "token"
    yield is_token, "reward.process.granularity is token", ("reward.process.separator",)
    trainer = config.trainer
    yield not trainer.lora_rank, "trainer.lora_rank is 0", ("trainer.lora_alpha",)
    why = "without trainer.optimizer.min_lr, the rate is constant after the warm-up"
    yield trainer.optimizer.min_lr == trainer.optimizer.lr, why, ("trainer.optimizer.max_steps",)
    has_port = monitoring.actor_port is not None or monitoring.trainer_port is not None
    yield not has_port, "neither monitoring.actor_port nor trainer_port is set", ("monitoring.host",)
    yield not config.has_actor, "no policy is trained", ("monitoring.actor_port",)
    rows = tuple(f"{role}.token_budget" for role in ("reward", "critic", "reference"))
    yield config.run.deterministic, "with run.deterministic, each row is scored alone", rows


def _actor_rules(config: RunConfig) -> Iterator[Rule]:
    """Yield the rules for the training loop."""
    actor = config.actor
    kl = actor.kl
    rewards = actor.rewards
    validation = actor.validation
    generation = actor.generation
    keys = _in("actor.kl", "reference", "penalty_in", "estimator")
    yield not kl.uses_reference, "actor.kl.coef is 0", keys
    yield from _algorithm_rules(actor)
    yield not rewards.overlong_tokens, "actor.rewards.overlong_tokens is 0", ("actor.rewards.overlong_penalty",)
    keys = _in("actor.validation", "every", "greedy", "prompts", "size")
    yield not validation.size, "actor.validation.size is 0", keys[:3]
    yield validation.prompts is None and validation.size > 0, "actor.validation.prompts is not set", keys
    has_vllm = generation.engine == "vllm"
    yield not has_vllm, f"actor.generation.engine is {generation.engine}", ("actor.generation.vllm",)
    yield not actor.policy.lora_rank, "actor.policy.lora_rank is 0", ("actor.policy.lora_alpha",)


def _algorithm_rules(actor: ActorSection) -> Iterator[Rule]:
    """Yield the rules for `actor.algorithm`; a user's own advantage function or loss may use every setting."""
    algorithm = actor.algorithm
    advantage = algorithm.defaults.advantage
    name = algorithm.name
    is_ours = algorithm.advantage == "auto"
    bootstraps = algorithm.uses_critic  # with an environment, the values of truncated conversations are discounted
    keys = _in("actor.algorithm", "lam")
    yield is_ours and not algorithm.defaults.needs_critic, f"{name}'s advantages have no lambda", keys
    is_undiscounted = is_ours and advantage not in DISCOUNTING and not bootstraps
    yield is_undiscounted, f"{name}'s advantages are not discounted", ("actor.algorithm.gamma",)
    keys = _in("actor.algorithm", "clip_ratio", "clip_ratio_high")
    loss = LOSSES.get(algorithm.loss_name)
    yield loss is not None and loss.is_on_policy, f"the loss {algorithm.loss_name} has no probability ratio", keys
    yield loss is not None and loss.is_gate, f"the loss {algorithm.loss_name} has only an upper bound", keys[:1]
    why = (
        "a rollout is one minibatch, used once by the policy that sampled it, so every probability ratio is 1; set "
        f"actor.update.minibatch_size below actor.rollout_size ({actor.rollout_size}), or actor.update.epochs above 1"
    )
    has_factors = algorithm.correction is None or algorithm.correction.mode != "none"
    of_factors = _in("actor.algorithm.correction", "level", "low", "high")
    yield not has_factors, "actor.algorithm.correction.mode is none", of_factors
    ours = ("actor.algorithm.loss", *keys) if loss is not None else ()
    yield actor.is_one_update, why, (*ours, "actor.update.max_kl")


def _in(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)
