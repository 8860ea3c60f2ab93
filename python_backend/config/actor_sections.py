"""The actor's sections of the YAML: algorithm, generation, update, and requests to the servers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from python_backend.config.addresses import Address
from python_backend.config.sections import Beta, Count, CountOrZero, Device, Fraction, Seconds, Section
from python_backend.models.lr_schedule import scheduled_lr


class ClientSection(Section):
    """Requests of the actor to the servers."""

    servers: tuple[Address, ...] = ()
    """HTTP addresses of all servers: `host:port`, or `dns:name:port` for every address of the name, which is resolved
    again when a server fails; default: that of `server`. All servers serve all models and share one weights store and
    one journal."""
    max_outage_s: Annotated[float, Field(ge=0)] = 600.0
    """How long to wait for a healthy server once the run has started; 0: only retry, as after a 503."""
    deadline_s: Seconds = 60.0
    """Timeout of one scoring attempt."""
    train_deadline_s: Seconds = 600.0
    """Timeout of one critic_train or critic_save attempt."""
    retries: CountOrZero = 6
    """Maximum retries of a request after a 503, a timeout or a lost connection."""
    train_retries: CountOrZero = 3
    """Maximum retries of critic_train and critic_save, at most `retries`; without a sidecar each attempt takes 3 s."""
    backoff_s: Seconds = 0.25
    """First pause between attempts, and before a lost server is tried again; doubles up to 8 s, with jitter."""
    retry_budget: Fraction = 0.2
    """Retries that each request adds to a budget shared by all requests: if every request fails, few are retried. It
    holds at most 100, and as many at the start. critic_train and critic_save have a budget of their own."""
    max_in_flight: Count = 256
    """Maximum requests in flight, over all servers."""
    rows_per_request: Count = 1
    """Maximum rows in one scoring request. Responses that end at the same time share a request, which costs less per
    row, but if the request fails, all its rows are masked."""


class ActorSection(Section):
    """The training loop of the policy."""

    checkpoint: Path = Path("checkpoints/policy")
    """Hugging Face causal LM folder: the initial policy and, by default, the frozen reference."""
    reference: Literal["actor", "triton"] = "actor"
    """Where reference log-probs are computed. `actor`: in the actor, by a second copy of the policy (with LoRA: by the
    policy without its adapters); `triton`: in tritonserver, by the model of the `reference` section."""
    prompts: Path = Path("data/prompts.jsonl")
    """Training prompts: JSONL, Parquet (`.parquet`), Arrow (`.arrow`), or a folder written by `save_to_disk` of
    `datasets`. Each row has a `text`, chat `messages` ([{"role": …, "content": …}, …]), or a `prompt` that is either of
    them. Other columns are metadata for reward functions and must have plain JSON types."""
    validation_prompts: Path | None = None
    """Held-out prompts in the same formats, used for validation before the first step and after the last."""
    validation_size: CountOrZero = 256
    """Number of prompts to use from `validation_prompts`."""
    validate_every: CountOrZero = 0
    """Steps between validations; 0: only before the first step and after the last."""
    validation_greedy: bool = False
    """Greedy decoding in validations, instead of sampling."""
    algorithm: Literal["ppo", "reinforce++", "rloo", "grpo"] = "ppo"
    """Advantage function and loss, see docs/algorithms.md. Only `ppo` uses the critic."""
    steps: Count = 100
    """Number of steps; each is a rollout and its update."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Time limit: the run ends with a checkpoint after the step that exceeds it; the next start resumes from there."""
    rollout_size: Count = 128
    """Responses per step."""
    responses_per_prompt: Count = 1
    """Responses to each prompt; `rloo` and `grpo` compare their scores and need at least 2."""
    generation_batch: Count = 64
    """Responses generated at the same time. When one ends, it is scored and the next prompt takes its slot."""
    decoding: Literal["slots", "transformers"] = "slots"
    """How responses are generated. `slots`: continuous batching over `generation_batch` slots; `transformers`: plain
    `generate()` for `generation_batch` prompts at a time, which is slower. Models with other state than keys and values
    (recurrent ones) always use `transformers`."""
    max_prompt_tokens: Count = 512
    """Maximum prompt length."""
    long_prompts: Literal["error", "skip", "truncate"] = "error"
    """Handling of longer prompts. `error`: the run does not start; `skip`: they are left out; `truncate`: only their
    last `max_prompt_tokens` tokens are kept."""
    max_new_tokens: Count = 128
    """Maximum response length."""
    min_new_tokens: CountOrZero = 0
    """Minimum response length; a stop string within these tokens does not end the response."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a response, like an end-of-sequence token."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divisor of the logits of tokens that already occurred (factor of negative ones); does not affect log-probs."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; also applied to log-probs."""
    top_k: CountOrZero = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1: from all."""
    ppo_epochs: Count = 1
    """Passes over one rollout."""
    max_update_kl: Annotated[float, Field(gt=0)] | None = None
    """Stop the update of a step before the first minibatch whose KL from the policy that sampled exceeds this, in nats
    per token; default: no limit."""
    minibatch_size: Count = Field(default_factory=lambda given: min(32, given.get("rollout_size", 32)))
    """Rows per optimizer step of the policy; default: 32, or `rollout_size` if that is smaller."""
    token_budget: Count = 4096
    """Maximum tokens in one forward pass of an update, padding included; does not change the result."""
    lr: Annotated[float, Field(gt=0)] = 9e-7
    """Peak learning rate of the policy."""
    min_lr: Annotated[float, Field(ge=0)] | None = None
    """Learning rate at the end of the cosine; default: `lr`, so that it is constant after the warm-up."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps of linear warm-up; a step of the run takes `ppo_epochs` * `rollout_size` / `minibatch_size`."""
    constant_steps: CountOrZero = 0
    """Optimizer steps at `min_lr` after the cosine."""
    max_steps: Count | None = None
    """Optimizer steps of the whole schedule (warm-up, cosine, constant end); default: those of all `steps`."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's weight decay, on matrices only."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum gradient norm."""
    clip_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """PPO's clip range."""
    clip_ratio_high: Annotated[float, Field(gt=0)] | None = None
    """Upper clip range (clip-higher); default: `clip_ratio`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: upper bound on the ratio for negative advantages; default: none."""
    loss_mean: Literal["auto", "token", "sequence"] = "auto"
    """Mean of the loss over all tokens of a minibatch, or over the means of its sequences; `auto`: `sequence` for grpo,
    otherwise `token`."""
    whiten_advantages: bool | None = None
    """Normalise the rollout's advantages to mean 0 and variance 1; default: for ppo and reinforce++ only."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the entropy bonus in the loss."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.01
    """Coefficient of the KL penalty. With 0 there is no reference: no copy of the policy and no forward pass."""
    kl_every: CountOrZero = 0
    """With `kl_coef: 0`: measure the KL to the reference in every n-th step and in validations; 0: never."""
    kl_in: Literal["auto", "reward", "loss"] = "auto"
    """Where the KL penalty applies: in the rewards or in the loss; `auto`: `loss` for grpo, otherwise `reward`."""
    kl_target: Annotated[float, Field(gt=0)] | None = None
    """Target KL for adapting `kl_coef`, in nats per sequence; default: `kl_coef` is fixed."""
    kl_horizon: Count = 10_000
    """Horizon of the adaptive `kl_coef`, in responses; a smaller one adapts faster."""
    kl_estimator: Literal["auto", "k1", "abs", "k2", "k3"] = "auto"
    """Estimator of the per-token KL; `auto`: `k3` for a penalty in the loss, `abs` (NeMo-Aligner's) in the rewards."""
    gamma: Fraction = 1.0
    """Discount factor."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    reward_normalization: Literal["none", "static", "running", "batch"] = "none"
    """Normalisation of the scores: `static`, by `reward_mean` and `reward_std`; `running`, by the statistics of all
    scores so far; `batch`, by those of the rollout."""
    reward_mean: float = 0.0
    """Mean of the scores, for `reward_normalization: static`."""
    reward_std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the scores, for `reward_normalization: static`."""
    reward_clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum absolute value of a score after normalisation; larger ones are clipped."""
    missing_eos_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from the score of a response that did not end; without a critic it needs `mask_unfinished: false`."""
    overlong_tokens: CountOrZero = 0
    """Number of tokens before `max_new_tokens` over which the penalty rises linearly to `overlong_penalty`; 0: none."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Subtracted from the score of a response of `max_new_tokens` tokens, if `overlong_tokens` is set."""
    critic_warmup_steps: CountOrZero = 0
    """Number of steps at the start of the run that train only the critic."""
    mask_unfinished: bool = True
    """Exclude responses that did not end from the policy gradient."""
    max_staleness: CountOrZero = 1
    """Maximum critic updates that were sent before a row is scored but are not in the weights that score it; 0 with
    `run.deterministic`."""
    one_step_off_policy: bool = False
    """Generate the responses of the next step while the policy is updated. They come from the policy before that
    update, never from an older one. Needs a second copy of the policy."""
    max_failed_fraction: Fraction = 0.1
    """Maximum share of rows without reward or reference log-probs (masked) in a rollout; above it the run stops."""
    checkpoint_every: Count = 50
    """Steps between checkpoints of policy and critic."""
    stop_grace_s: Seconds = 25.0
    """Time limit after SIGTERM or Ctrl-C to finish the current update and write a checkpoint of the last whole step,
    policy and critic; after it the actor exits without that checkpoint. Kubernetes kills after 30 s by default: raise
    its `terminationGracePeriodSeconds` together with this, and both above the duration of a policy update."""
    keep_checkpoints: Count = 2
    """Newest policy checkpoints to keep."""
    threads: Count = 1
    """Torch threads."""
    device: Device = "cpu"
    """Device of the policy."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Compute type of forward passes (autocast); weights, log-probs and the optimizer stay in float32."""
    lora_rank: CountOrZero = 0
    """Train only LoRA adapters of this rank, on `lora_targets`; 0: train all weights."""
    lora_alpha: Count = 16
    """The adapters' output is scaled by `lora_alpha / lora_rank`."""
    lora_targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Linear layers with adapters: all except the output layer, or those with these names, such as [q_proj, v_proj]. A
    name matches the last part or parts of a layer's path."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input, only in the forward passes of an update, not in generation, log-probs or
    validations. Unless a rollout is a single minibatch used once, the probability ratios contain the dropout noise,
    which counts against `clip_ratio`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same result."""
    logged_texts: CountOrZero = 1
    """Responses per step logged to rollouts.jsonl and to the trackers' table of (step, prompt, response, reward)."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Experiment trackers that get the metrics in addition to metrics.jsonl and TensorBoard. Each must be installed and
    is configured by its own environment variables."""
    client: ClientSection = ClientSection()
    """Requests to the servers."""

    @property
    def uses_reference(self) -> bool:
        """Whether the KL to the reference is penalised or measured."""
        return self.kl_coef > 0 or self.kl_every > 0

    @property
    def serves_reference(self) -> bool:
        """Whether tritonserver needs the reference model."""
        return self.reference == "triton" and self.uses_reference

    @property
    def is_one_update(self) -> bool:
        """Whether each rollout is one minibatch, used once by the policy that sampled it: probability ratios are 1."""
        return self.ppo_epochs == 1 and self.minibatch_size == self.rollout_size and not self.one_step_off_policy

    def measures_kl(self, step: int) -> bool:
        """Return whether the rollout of `step` needs reference log-probs."""
        return self.kl_coef > 0 or (self.kl_every > 0 and step % self.kl_every == 0)

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm needs the critic's values and therefore the sidecar."""
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
    """Check constraints between fields. Raises ValueError with the fields and their values."""
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
    """Check constraints between the learning-rate and LoRA fields."""
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
    """Reject penalties that would have no effect."""
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
    """Reject off-policy settings for an algorithm without probability ratios."""
    law = "rloo's loss is that of samples from the policy itself"
    way_out = "or take another algorithm"
    if actor.ppo_epochs > 1:
        raise ValueError(f"actor.ppo_epochs ({actor.ppo_epochs}): {law}, so each is used once; set it to 1, {way_out}")
    if actor.one_step_off_policy:
        raise ValueError(
            f"actor.one_step_off_policy: {law}, and these would come from the one before; leave it out, {way_out}"
        )
