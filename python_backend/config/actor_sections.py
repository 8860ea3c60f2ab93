"""The actor's sections of the YAML: algorithm, generation, update, and how it talks to the server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from python_backend.config.addresses import Address
from python_backend.config.sections import Beta, Count, CountOrZero, Device, Fraction, Seconds, Section
from python_backend.models.lr_schedule import scheduled_lr


class ClientSection(Section):
    """How the actor talks to the server, or the servers."""

    servers: tuple[Address, ...] = ()
    """HTTP addresses of all servers, `host:port`, or `dns:name:port` for every address that the name has, looked up
    again when one fails; default: the one of `server`. Each serves all models, from one weights store and journal."""
    max_outage_s: Annotated[float, Field(ge=0)] = 600.0
    """Longest wait for a server where none answers, except at the start; 0: requests fail as if it were busy."""
    deadline_s: Seconds = 60.0
    """Longest wait for one scoring attempt."""
    train_deadline_s: Seconds = 600.0
    """Longest wait for one critic_train or critic_save attempt."""
    retries: CountOrZero = 6
    """Further attempts after 503, a time-out or a broken connection."""
    train_retries: CountOrZero = 3
    """The same for critic_train and critic_save, which wait 3 s for a missing sidecar each time; at most `retries`."""
    backoff_s: Seconds = 0.25
    """First pause between attempts, and before a lost server is asked again; doubles up to 8 s, with jitter."""
    retry_budget: Fraction = 0.2
    """Further attempts that each request earns for all of them: where every request fails, few are repeated."""
    retry_reserve: CountOrZero = 100
    """Further attempts that all requests together begin with, and the most that they can save up; critic_train and
    critic_save have the same once more, apart from scoring."""
    max_in_flight: Count = 256
    """Most requests under way at once, at all servers together."""
    rows_per_request: Count = 1
    """Most rows in one scoring request: responses that end at the same time share one, which costs less per row; but a
    request that fails masks all its rows."""


class ActorSection(Section):
    """The PPO loop."""

    checkpoint: Path = Path("checkpoints/policy")
    """Hugging Face causal LM folder; also the frozen reference."""
    reference: Literal["actor", "triton"] = "actor"
    """Who gives the log-probs of the frozen start: the actor, from a second copy of the policy (under LoRA from the
    policy without its adapters), or the model of the `reference` section in tritonserver, without a copy here."""
    prompts: Path = Path("data/prompts.jsonl")
    """JSONL, Parquet (`.parquet`), Arrow (`.arrow`), or a folder that `datasets` wrote with `save_to_disk`. Each row
    has a `text`, chat `messages` ([{"role": …, "content": …}, …]), or a `prompt` that is either of them; other columns
    are metadata for reward functions, plain JSON types only."""
    validation_prompts: Path | None = None
    """Held-out prompts in one of the same formats, sampled and scored before and after."""
    validation_size: CountOrZero = 256
    """Prompts taken from `validation_prompts`."""
    validate_every: CountOrZero = 0
    """Steps between validations; 0: before the first step and after the last only."""
    validation_greedy: bool = False
    """Take the likeliest token in validations, instead of sampling."""
    algorithm: Literal["ppo", "reinforce++", "rloo", "grpo"] = "ppo"
    """How advantages are made, see docs/algorithms.md; all but `ppo` do without the critic."""
    steps: Count = 100
    """Steps: a rollout and its update each."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """End after the step in which so much time has passed, with a checkpoint; the next start goes on from there."""
    rollout_size: Count = 128
    """Responses of one step."""
    responses_per_prompt: Count = 1
    """Responses to each prompt, which are compared with each other; `rloo` and `grpo` need two or more."""
    generation_batch: Count = 64
    """Responses written at the same time; when one ends the next prompt takes its place, and its scoring begins."""
    decoding: Literal["slots", "transformers"] = "slots"
    """Who writes them: our own loop over slots, or plain `generate()` for `generation_batch` prompts at a time, which
    is slower. Models that keep more than keys and values (recurrent ones) are always written by the latter."""
    max_prompt_tokens: Count = 512
    """Longest prompt."""
    long_prompts: Literal["error", "skip", "truncate"] = "error"
    """What becomes of a longer one: the run does not start, it is left out, or cut to its last tokens."""
    max_new_tokens: Count = 128
    """Longest response."""
    min_new_tokens: CountOrZero = 0
    """Responses do not end before so many tokens; a stop string within them is text like any other."""
    stop_strings: tuple[str, ...] = ()
    """A response ends with the first of these that it contains, as with an end-of-sequence token."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Logits of tokens that were there already are divided by it (multiplied where negative); no part of log-probs."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; log-probs are taken under it."""
    top_k: CountOrZero = 0
    """Sample among the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    ppo_epochs: Count = 1
    """Passes over one rollout."""
    max_update_kl: Annotated[float, Field(gt=0)] | None = None
    """End the update of a step when a minibatch has moved further than this from the policy that sampled, nats per
    token."""
    minibatch_size: Count = Field(default_factory=lambda given: min(32, given.get("rollout_size", 32)))
    """Rows per policy optimizer step; default: 32, or all of a smaller `rollout_size`."""
    token_budget: Count = 4096
    """Most tokens, padding included, in one forward of an update; never changes the result."""
    lr: Annotated[float, Field(gt=0)] = 9e-7
    """Peak learning rate of the policy."""
    min_lr: Annotated[float, Field(ge=0)] | None = None
    """Learning rate at the end of the cosine; default: `lr`, which stays constant after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps of linear warm-up; a step of the run makes `ppo_epochs` * `rollout_size` / `minibatch_size`."""
    constant_steps: CountOrZero = 0
    """Optimizer steps at `min_lr` after the cosine."""
    max_steps: Count | None = None
    """Optimizer steps of the whole schedule: warm-up, cosine and constant end; default: those of all `steps`."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's weight decay, on matrices only."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """PPO's clip range."""
    clip_ratio_high: Annotated[float, Field(gt=0)] | None = None
    """Its upper end, where that is another one: clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Most that a probability ratio counts where the advantage is negative: dual clip."""
    loss_mean: Literal["auto", "token", "sequence"] = "auto"
    """Of all tokens of a minibatch, or of its sequences' means; `auto`: `sequence` for grpo, `token` otherwise."""
    whiten_advantages: bool | None = None
    """Shift and scale the rollout's advantages to mean 0 and variance 1; default: for ppo and reinforce++."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy in the loss."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the KL penalty. With 0 there is no reference: no copy of the policy and no forward."""
    kl_every: CountOrZero = 0
    """With `kl_coef: 0`: measure the KL to the reference at every n-th step and in validations; 0: never."""
    kl_in: Literal["auto", "reward", "loss"] = "auto"
    """Where the penalty is: in the rewards, or in the policy's loss; `auto`: `loss` for grpo, `reward` otherwise."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Nats per sequence that `kl_coef` is adapted to hold; default: it stays as it is."""
    kl_horizon: Count = 10_000
    """Responses over which an adapted `kl_coef` follows; fewer: faster."""
    kl_estimator: Literal["auto", "k1", "abs", "k2", "k3"] = "auto"
    """Per-token KL estimate; `auto`: `k3` where the penalty is in the loss, `abs` (NeMo-Aligner's) in the rewards."""
    gamma: Fraction = 1.0
    """Discount."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    reward_normalization: Literal["none", "static", "running", "batch"] = "none"
    """Of the scores: by `reward_mean` and `reward_std`, by those of all scores so far, or by those of the rollout."""
    reward_mean: float = 0.0
    """Mean of the scores, for `static`."""
    reward_std: Annotated[float, Field(gt=0)] = 1.0
    """Their standard deviation, for `static`."""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Largest size of a score, after normalisation."""
    missing_eos_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Taken from the score of a response that did not end by itself; without a critic only if not `mask_unfinished`."""
    overlong_tokens: CountOrZero = 0
    """Over the last so many tokens before `max_new_tokens` a response loses up to `overlong_penalty`, linearly."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Taken from the score of a response of `max_new_tokens`, where `overlong_tokens` is set."""
    critic_warmup_steps: CountOrZero = 0
    """First steps, which train the critic alone."""
    mask_unfinished: bool = True
    """Give responses that did not end no policy gradient."""
    max_staleness: CountOrZero = 1
    """Most critic updates that were sent before a row is scored and are not in the weights that score it; 0 where
    `run.deterministic` is set."""
    one_step_off_policy: bool = False
    """Write the responses of the next step while the policy is updated: they come from the policy before that update,
    never from an older one. Takes a second copy of the policy."""
    max_failed_fraction: Fraction = 0.1
    """Largest share of a rollout whose reward or reference log-probs may be missing (masked) before the run stops."""
    checkpoint_every: Count = 50
    """Steps between checkpoints of policy and critic."""
    stop_grace_s: Seconds = 25.0
    """After SIGTERM or Ctrl-C: longest time to finish the update that has begun and to write a checkpoint of the last
    whole step, policy and critic; then the actor ends without. Kubernetes kills after 30 s by default: raise its
    `terminationGracePeriodSeconds` with this, to more than one update of the policy takes."""
    keep_checkpoints: Count = 2
    """Newest policy checkpoints kept."""
    threads: Count = 1
    """Torch threads."""
    device: Device = "cpu"
    """Where the policy runs."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What forwards compute in (autocast); weights, log-probs and the optimizer stay in float32."""
    lora_rank: CountOrZero = 0
    """Train adapters of this rank on `lora_targets`, and nothing else."""
    lora_alpha: Count = 16
    """What adapters add is multiplied by `lora_alpha / lora_rank`."""
    lora_targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Linear layers that get adapters: all but the output, or those of these names, such as [q_proj, v_proj]; a name is
    the last part of a layer's path, or more of it."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input, in the forwards of an update alone: generation, log-probs and validations have
    none. Unless a rollout is one minibatch used once, ratios then hold the dropout's noise, which counts against
    `clip_ratio`."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time, the same result."""
    logged_texts: CountOrZero = 1
    """Responses of each step in rollouts.jsonl and in the trackers' table of (step, prompt, response, reward)."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Where metrics go besides metrics.jsonl and TensorBoard; each must be installed, and is set up by its own
    environment variables."""
    client: ClientSection = ClientSection()
    """Requests to the server."""

    @property
    def uses_reference(self) -> bool:
        """Whether the KL to the initial policy is charged or measured."""
        return self.kl_coef > 0 or self.kl_every > 0

    @property
    def serves_reference(self) -> bool:
        """Whether tritonserver needs the reference model."""
        return self.reference == "triton" and self.uses_reference

    @property
    def is_one_update(self) -> bool:
        """Whether each rollout is one minibatch, used once, of the policy that sampled it: probability ratios are 1."""
        return self.ppo_epochs == 1 and self.minibatch_size == self.rollout_size and not self.one_step_off_policy

    def measures_kl(self, step: int) -> bool:
        """Whether the rollout of `step` needs the reference's log-probs."""
        return self.kl_coef > 0 or (self.kl_every > 0 and step % self.kl_every == 0)

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm needs the critic's values, and so the sidecar."""
        return self.algorithm == "ppo"

    def learning_rate(self, optimizer_step: int) -> float:
        """Return the policy's learning rate at `optimizer_step`, counted from 0."""
        each = self.ppo_epochs * math.ceil(self.rollout_size / self.minibatch_size)
        return scheduled_lr(
            optimizer_step, lr=self.lr, min_lr=self.lr if self.min_lr is None else self.min_lr,
            warmup_steps=self.warmup_steps, constant_steps=self.constant_steps,
            max_steps=self.max_steps or each * (self.steps - self.critic_warmup_steps),
        )  # fmt: skip


NEEDS_GROUPS = ("rloo", "grpo")


def check_actor(actor: ActorSection) -> None:
    """What one field cannot know of another. Raises ValueError naming fields and values."""
    each, size = actor.responses_per_prompt, actor.rollout_size
    if actor.minibatch_size > size:
        raise ValueError(
            f"actor.minibatch_size ({actor.minibatch_size}) is larger than actor.rollout_size ({size}); set it to "
            f"{size} or less"
        )
    if size % each:
        above = size - size % each + each
        near = f"{above - each} or {above}" if above > each else above
        raise ValueError(
            f"actor.rollout_size ({size}) is no multiple of actor.responses_per_prompt ({each}); take {near}"
        )
    if actor.algorithm in NEEDS_GROUPS and each < 2:
        raise ValueError(
            f"actor.algorithm: {actor.algorithm} compares the responses to a prompt; set actor.responses_per_prompt "
            f"to 2 or more (it is {each})"
        )
    if actor.algorithm == "rloo":
        _check_on_policy(actor)
    if actor.critic_warmup_steps and not actor.uses_critic:
        raise ValueError(
            f"actor.critic_warmup_steps ({actor.critic_warmup_steps}): {actor.algorithm} has no critic; leave it out"
        )
    if actor.critic_warmup_steps >= actor.steps:
        raise ValueError(
            f"actor.critic_warmup_steps ({actor.critic_warmup_steps}) leaves the policy none of actor.steps "
            f"({actor.steps})"
        )
    if actor.min_new_tokens > actor.max_new_tokens:
        raise ValueError(
            f"actor.min_new_tokens ({actor.min_new_tokens}) is above actor.max_new_tokens ({actor.max_new_tokens})"
        )
    _check_update(actor)
    _check_rewards(actor)
    if "" in actor.stop_strings:
        raise ValueError("actor.stop_strings holds an empty string, which every response contains")
    if actor.overlong_tokens >= actor.max_new_tokens:
        raise ValueError(
            f"actor.overlong_tokens ({actor.overlong_tokens}) is not below actor.max_new_tokens "
            f"({actor.max_new_tokens})"
        )


def _check_update(actor: ActorSection) -> None:
    """What the fields of the learning rate and of LoRA cannot know of each other."""
    if not actor.lora_rank and (actor.lora_targets != "all-linear" or actor.lora_dropout):
        raise ValueError(
            f"actor.lora_targets ({actor.lora_targets}) and actor.lora_dropout ({actor.lora_dropout:g}) need "
            "actor.lora_rank above 0; set it, or leave them out"
        )
    if actor.min_lr is not None and actor.min_lr > actor.lr:
        raise ValueError(f"actor.min_lr ({actor.min_lr:g}) is above actor.lr ({actor.lr:g}); lower it, or leave it out")
    if actor.max_steps is not None and actor.warmup_steps + actor.constant_steps > actor.max_steps:
        raise ValueError(
            f"actor.warmup_steps ({actor.warmup_steps}) + actor.constant_steps ({actor.constant_steps}) is larger than "
            f"actor.max_steps ({actor.max_steps})"
        )


def _check_rewards(actor: ActorSection) -> None:
    """What a penalty needs to have an effect."""
    if actor.missing_eos_penalty and actor.mask_unfinished and not actor.uses_critic:
        raise ValueError(
            f"actor.missing_eos_penalty ({actor.missing_eos_penalty:g}) changes nothing under {actor.algorithm} with "
            "actor.mask_unfinished: true, which leaves the responses that it is taken from out of the update; set "
            "actor.mask_unfinished to false, or leave the penalty out"
        )
    if actor.kl_target is not None and not actor.kl_coef:
        raise ValueError(
            f"actor.kl_target ({actor.kl_target:g}) multiplies actor.kl_coef, which stays 0 then; set actor.kl_coef "
            "above 0, or leave kl_target out"
        )


def _check_on_policy(actor: ActorSection) -> None:
    """What an algorithm without probability ratios asks for."""
    law = "rloo's loss is that of samples from the policy itself"
    way_out = "or take another algorithm"
    if actor.ppo_epochs > 1:
        raise ValueError(f"actor.ppo_epochs ({actor.ppo_epochs}): {law}, so each is used once; set it to 1, {way_out}")
    if actor.one_step_off_policy:
        raise ValueError(
            f"actor.one_step_off_policy: {law}, and these would come from the one before; leave it out, {way_out}"
        )
