"""The YAML's `actor` section, which configures the training loop of the policy."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from rlhf_triton.config.algorithms import (
    ALGORITHMS,
    DIVERGENCES,
    LOSSES,
    AdvantageName,
    Algorithm,
    AlgorithmName,
    EstimatorName,
    LossName,
)
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.config.fields import (
    Address,
    Count,
    CountOrZero,
    Fraction,
    Section,
)
from rlhf_triton.config.optimizer import OptimizerSection
from rlhf_triton.config.trained_model import Resume, TrainedSection

Tracker: TypeAlias = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb"]


class PolicySection(TrainedSection):
    """The policy: its model, how it computes, and which of its weights are trained.

    All weights are trained, unless `lora_rank` or `freeze` is set. docs/scaling.md says what fits which GPU.
    """

    model: Annotated[Path, Resume.FREE] = Path("checkpoints/policy")  # checkpoints compare its weights
    """Hugging Face causal LM folder: the initial policy and, by default, the frozen reference."""


class PromptFileSection(Section):
    """One of several files of training prompts."""

    path: Path
    """The file, in the formats of `actor.prompts.path`."""
    weight: PositiveFloat = 1.0
    """Share of the prompts, relative to the other files."""

    @field_validator("path")
    @classmethod
    def _one_spelling(cls, value: Path) -> Path:
        """Normalise the path, because positions in the files are stored by path."""
        return Path(os.path.normpath(value))


class PromptsSection(Section):
    """The training prompts: their files, and what happens to those that are too long.

    An epoch takes every row once, in an order that depends on `run.seed`.
    """

    path: Path = Path("data/prompts.jsonl")
    """JSONL, Parquet, Arrow, or a folder written by `save_to_disk` of `datasets`; each row has `text`, chat `messages`,
    or `prompt`. See docs/prompts.md."""
    files: tuple[PromptFileSection, ...] = ()
    """Several files instead of `path`, with weights: a list of {path, weight}."""
    max_tokens: Count = 512
    """Maximum prompt length."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """What to do with a longer prompt: `error` ends the run, `skip` takes the next prompt, `truncate` keeps BOS and the
    last tokens."""
    add_special_tokens: bool = True
    """Start a plain-text prompt with the tokens that the tokenizer puts before a text, such as BOS."""

    @property
    def sources(self) -> tuple[PromptFileSection, ...]:
        """The files: `files`, or the single one at `path`."""
        return self.files or (PromptFileSection(path=self.path),)

    @property
    def paths(self) -> dict[str, Path]:
        """Configuration key -> path of each file, for error messages."""
        if self.files:
            return {f"actor.prompts.files.{i}.path": file.path for i, file in enumerate(self.files)}
        return {"actor.prompts.path": self.path}


class VllmSection(Section):
    """vLLM servers that generate the responses, for `actor.generation.engine: vllm`.

    `rlhf-triton run` starts one, unless `servers` names your own. See docs/vllm.md.
    """

    servers: tuple[Address, ...] = ()
    """HTTP addresses of the servers, as in `actor.client.servers`; default: `rlhf-triton run` starts one."""
    command: str = "vllm"
    """Executable of the server that `rlhf-triton run` starts."""
    cuda_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of that server, such as `2,3`; required if the policy is on a GPU."""
    arguments: tuple[str, ...] = ()
    """Further arguments of that server, such as [--tensor-parallel-size, "2"]."""


class GenerationSection(Section):
    """How responses are generated: the engine, where a response ends, and how its tokens are sampled.

    Each token's random draw is fixed by `run.seed` and the positions of prompt and token.
    """

    batch_size: Count = 64
    """Responses generated at the same time; halved when a GPU runs out of memory."""
    engine: Literal["slots", "vllm"] = "slots"
    """`slots`: continuous batching, or transformers' slower `generate()` for recurrent models; `vllm`: vLLM
    servers (docs/vllm.md)."""
    vllm: VllmSection = VllmSection()
    max_new_tokens: Count = 128
    """Maximum response length."""
    min_new_tokens: CountOrZero = 0
    """Minimum response length; a stop string within these tokens does not end the response."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a response, like an end-of-sequence token."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; also applied to log-probs."""
    top_k: CountOrZero = 0
    """Sample from the k most likely tokens; 0: from all tokens."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1: from all tokens."""


class CorrectionSection(Section):
    """Importance correction: factors of the policy loss that account for sampling by another engine or an older policy.

    They are ratios of each sampled token's probability under the policy before the update and under the sampler.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio per token, per response (the product over its tokens), or the geometric mean over a response's tokens."""
    mode: Literal["clip", "mask", "binary_kl", "binary_tv", "none"] = "clip"
    """`clip` ratios outside the range, or `mask` their tokens; `binary_kl`, `binary_tv`: mask tokens, or with `level:
    sequence` responses by their mean, whose KL divergence or total variation exceeds `high`; `none`: no factors."""
    low: NonNegativeFloat = 0.0
    """Lower end of the range."""
    high: PositiveFloat | None = None
    """Upper end of the range; default: 2, for `binary_kl` 0.05 (`level: sequence`: 0.003), for `binary_tv` 0.2."""

    @property
    def upper(self) -> float:
        """Upper end of the range: `high`, or its default for the mode."""
        if self.high is not None:
            return self.high
        gate = DIVERGENCES.get(self.mode)
        if gate is None:
            return 2.0
        return gate.token if self.level == "token" else gate.sequence

    @model_validator(mode="after")
    def _consistent(self) -> CorrectionSection:
        if self.mode in DIVERGENCES and (self.low or self.level == "geometric"):
            setting = f"low ({self.low:g})" if self.low else f"level ({self.level})"
            remedy = "remove low" if self.low else "set level to token or sequence"
            raise ValueError(
                f"actor.algorithm.correction.{setting} does not apply to mode: {self.mode}, which has only an upper "
                f"bound, per token or per response; {remedy}"
            )
        if self.low > self.upper:
            raise ValueError(
                f"actor.algorithm.correction.low ({self.low:g}) is above actor.algorithm.correction.high "
                f"({self.upper:g}); lower it"
            )
        return self


class AlgorithmSection(Section):
    """The algorithm: advantages and policy loss.

    `name` sets both, and the published defaults of other keys; the other keys replace single parts of it.
    docs/algorithms.md has formulas and sources.
    """

    name: AlgorithmName = "ppo"
    """Sets advantage function, loss and published defaults of other keys; see docs/algorithms.md. Only `ppo`, `vapo`
    and `sao` use the critic."""
    advantage: AdvantageName = "auto"
    """Advantage function: `auto`, the algorithm's, or your own, `path/to/file.py:name`."""
    loss: LossName = "auto"
    """Policy loss: `auto`, the algorithm's, a built-in one by name, or your own, `path/to/file.py:name`."""
    responses_per_prompt: Count = 1
    """Responses to each prompt; algorithms without critic need at least 2, except `reinforce++` and
    `flash_reinforce`."""
    clip_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower clip range of the probability ratio (for `dppo`, of the difference of probabilities), and the upper one
    unless `clip_ratio_high` is set. Default: as published for the loss."""
    clip_ratio_high: PositiveFloat | None = None
    """Upper clip range (clip-higher); for `flash_reinforce`, which has no lower one, the largest mean binary KL of a
    response. Default: `clip_ratio` (not for `flash_reinforce`), or as published for the loss."""
    loss_mean: Literal["auto", "token", "sequence", "constant"] = "auto"
    """How the loss is averaged: `token`, over a minibatch's tokens; `sequence`, over its sequences' means; `constant`,
    sum / (sequences * `actor.generation.max_new_tokens`); `auto`: as the algorithm does."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the loss."""
    old_logprobs: Literal["recomputed", "sampler"] = "recomputed"
    """Log-probs in the denominator of the probability ratio: recomputed by the policy, or from the engine that
    sampled."""
    correction: CorrectionSection | None = None
    """Importance correction for responses that vLLM or an older policy sampled; default: none. Its factors multiply the
    loss: each is the ratio of a token's probability under the policy before the update and under the sampler."""
    max_resampled: CountOrZero = 0
    """Dynamic sampling: how often per step to replace prompts whose responses all have the same score; 0: off."""
    gamma: Fraction = 1.0
    """Discount factor."""
    lam: Fraction | None = None
    """GAE's lambda; default: 0.95, or for `vapo` and `sao` one that grows with the response."""
    critic_warmup_steps: CountOrZero = 0
    """Number of steps at the start of the run that train only the critic."""
    mask_unfinished: bool = True
    """Exclude responses that did not end from the policy gradient, and from the baselines of the others."""

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm needs the critic's values and therefore the sidecar."""
        return self.defaults.needs_critic

    @property
    def defaults(self) -> Algorithm:
        """The algorithm's requirements, and its choices for settings that are not set."""
        return ALGORITHMS[self.name]

    @property
    def factors(self) -> CorrectionSection | None:
        """The correction if it gives importance factors, which its mode `none` does not."""
        return None if self.correction is None or self.correction.mode == "none" else self.correction

    @property
    def loss_name(self) -> str:
        """The policy loss: a built-in one by name, or `path/to/file.py:name`."""
        return self.defaults.loss if self.loss == "auto" else self.loss

    @property
    def clip(self) -> tuple[float, float]:
        """Lower and upper clip range: as set, or as published for the loss (a user's own loss: as for PPO)."""
        published = LOSSES.get(self.loss_name, LOSSES["clipped"])
        low = published.low if self.clip_ratio is None else self.clip_ratio
        high = published.high if self.clip_ratio is None or published.is_gate else self.clip_ratio
        return low, high if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def own_functions(self) -> dict[str, str]:
        """The user's own functions, by configuration key."""
        named = {"actor.algorithm.advantage": self.advantage, "actor.algorithm.loss": self.loss}
        return {key: spec for key, spec in named.items() if ":" in spec}


class KLSection(Section):
    """The KL divergence from the reference: its penalty and its measurement.

    The reference is the initial policy, or with `reference: triton` the model that `reference.model` names.
    """

    reference: Literal["actor", "triton"] = "actor"
    """Where reference log-probs are computed: in the actor, or in tritonserver by the section `reference`'s model."""
    coef: NonNegativeFloat = 0.01
    """Coefficient of the KL penalty; 0: no reference is loaded, and no KL is measured."""
    penalty_in: Literal["auto", "reward", "loss"] = "auto"
    """Where the penalty applies; `auto`: `reward` for ppo, vapo, sao, rloo and reinforce++, `loss` for the others."""
    target: PositiveFloat | None = None
    """Target KL for adapting `coef`, in nats per sequence; default: `coef` is fixed."""
    estimator: EstimatorName = "auto"
    """Estimator of the per-token KL; `auto`: `k3` in the loss, `abs` (as in NeMo-Aligner) in the rewards. `unbiased`,
    only in the loss: `k3` times the probability ratio, which has the gradient of the true KL."""

    @property
    def uses_reference(self) -> bool:
        """Whether the KL to the reference is penalised and measured."""
        return self.coef > 0

    @property
    def serves_reference(self) -> bool:
        """Whether tritonserver needs the reference model."""
        return self.reference == "triton" and self.uses_reference


class RewardsSection(Section):
    """How scores become rewards: normalisation, clipping, then penalties.

    A response without a score is masked and counted, never scored 0.
    """

    normalization: Literal["none", "running", "batch"] = "none"
    """Normalisation of scores: `running`, by the statistics of all scores so far; `batch`, of the rollout. For a fixed
    mean and standard deviation, use `reward.standardization`."""
    clip: PositiveFloat | None = None
    """Maximum absolute value of a normalised score."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response that did not end; without a critic it needs
    `actor.algorithm.mask_unfinished: false`."""
    overlong_tokens: CountOrZero = 0
    """Tokens before `actor.generation.max_new_tokens` over which the penalty rises linearly to `overlong_penalty`; 0:
    no penalty."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Subtracted from the score of a response of the maximum length."""
    max_failed_fraction: Fraction = 0.1
    """Maximum fraction of a rollout's rows that may be masked because they have no score; above it, the run stops. A
    validation above it leaves `best/` as it is."""


class UpdateSection(Section):
    """How a rollout is divided into optimizer steps.

    With one epoch, and `minibatch_size` equal to `actor.rollout_size`, a step is one on-policy update.
    """

    epochs: Count = 1
    """Passes over one rollout."""
    max_kl: PositiveFloat | None = None
    """Stop a step's update before a minibatch whose KL from `actor.algorithm.old_logprobs` exceeds this, in nats per
    token; default: no limit."""
    minibatch_size: Count = 32
    """Rows per optimizer step of the policy; a smaller rollout is one minibatch."""


class ValidationSection(Section):
    """Validation on held-out prompts, before the first step, after the last one, and in between if `every` is set.

    The policy with the highest validation reward is kept in `best/`.
    """

    prompts: Path | None = None
    """Held-out prompts, in the formats of `actor.prompts.path`."""
    size: CountOrZero = 256
    """Number of prompts to use from `prompts`."""
    every: CountOrZero = 0
    """Steps between validations; 0: only before the first step and after the last."""
    greedy: bool = False
    """Greedy decoding in validations, instead of sampling."""


class ActorSection(Section):
    """The training loop of the policy."""

    ranks: Count = 1
    """Processes that generate and train the policy together, one per GPU (FSDP2). See docs/scaling.md."""
    steps: Count = 100
    """Number of steps; a step is a rollout and the update on it."""
    max_minutes: PositiveFloat | None = None
    """Time limit: the run ends with a checkpoint after the step that exceeds it."""
    rollout_size: Count = 128
    """Responses per step."""
    max_staleness: CountOrZero = 1
    """Maximum number of critic updates, sent before a row is scored, that the weights that score it may lack."""
    max_off_policy_steps: CountOrZero = 0
    """Generate responses up to this many steps ahead, during updates, with a copy of the policy; 0: on-policy."""
    checkpoint_every: Count = 50
    """Steps between checkpoints of policy and critic."""
    keep_checkpoints: Count = 2
    """Newest policy checkpoints to keep."""
    threads: Count = 1
    """Torch threads."""
    logged_texts: CountOrZero = 1
    """Responses per step logged to rollouts.jsonl and the trackers' table."""
    trackers: tuple[Tracker, ...] = ()
    """Experiment trackers of accelerate; install them, and configure them by their own environment variables."""
    policy: PolicySection = PolicySection()
    prompts: PromptsSection = PromptsSection()
    generation: GenerationSection = GenerationSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    kl: KLSection = KLSection()
    rewards: RewardsSection = RewardsSection()
    update: UpdateSection = UpdateSection()
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and the learning-rate schedule of the policy. A step takes `update.epochs` * `rollout_size` /
    `update.minibatch_size` optimizer steps."""
    validation: ValidationSection = ValidationSection()
    client: ClientSettings = ClientSettings()

    @property
    def is_one_update(self) -> bool:
        """Whether each rollout is used for exactly one update of the policy that sampled it, so all ratios are 1."""
        one_minibatch = self.update.minibatch_size >= self.rollout_size
        is_ours = self.generation.engine != "vllm"  # vLLM's probabilities differ by rounding
        return self.update.epochs == 1 and one_minibatch and not self.max_off_policy_steps and is_ours

    @property
    def longest_row(self) -> tuple[int, str]:
        """Maximum tokens of a prompt and its response, and a text that names the keys behind it."""
        prompt = self.prompts.max_tokens
        new = self.generation.max_new_tokens
        keys = f"actor.prompts.max_tokens ({prompt}) + actor.generation.max_new_tokens ({new})"
        return prompt + new, f"{keys} is {prompt + new}; lower them"

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts in a rollout."""
        return self.rollout_size // self.algorithm.responses_per_prompt

    @property
    def optimizer_steps(self) -> int:
        """Number of the policy's optimizer steps in the whole run."""
        each = self.update.epochs * math.ceil(self.rollout_size / self.update.minibatch_size)
        return each * (self.steps - self.algorithm.critic_warmup_steps)


def check_actor(actor: ActorSection) -> None:
    """Check constraints between fields. Raises ValueError naming the fields and their values."""
    algorithm = actor.algorithm
    generation = actor.generation
    size = actor.rollout_size
    each = algorithm.responses_per_prompt
    if size % each:
        above = size - size % each + each
        near = f"{above - each} or {above}" if above > each else above
        raise ValueError(
            f"actor.rollout_size ({size}) is not a multiple of actor.algorithm.responses_per_prompt ({each}); set it "
            f"to {near}"
        )
    if algorithm.defaults.needs_groups and each < 2:
        raise ValueError(
            f"actor.algorithm.name: {algorithm.name} compares the responses to a prompt; set "
            f"actor.algorithm.responses_per_prompt to 2 or more (it is {each})"
        )
    if (loss := LOSSES.get(algorithm.loss_name)) is not None and loss.is_on_policy:
        _check_on_policy(actor)
    own_vllm = generation.engine == "vllm" and not generation.vllm.servers
    if own_vllm and actor.policy.device != "cpu" and not generation.vllm.cuda_devices:
        raise ValueError(
            "actor.generation.vllm.cuda_devices is not set, so vLLM would take most of the first GPU; name its GPUs, "
            "such as '1', or running servers in actor.generation.vllm.servers"
        )
    _check_ratios(actor)
    if actor.ranks > 1 and actor.max_off_policy_steps > 1:
        raise ValueError(
            f"actor.max_off_policy_steps ({actor.max_off_policy_steps}): several ranks (actor.ranks: {actor.ranks}) "
            "generate at most one step ahead; set one of the two to 1"
        )
    _check_critic_settings(algorithm)
    if algorithm.critic_warmup_steps >= actor.steps:
        raise ValueError(
            f"actor.algorithm.critic_warmup_steps ({algorithm.critic_warmup_steps}) must be below actor.steps "
            f"({actor.steps}), or the policy is never updated; set one of them"
        )
    if generation.min_new_tokens > generation.max_new_tokens:
        raise ValueError(
            f"actor.generation.min_new_tokens ({generation.min_new_tokens}) is above actor.generation.max_new_tokens "
            f"({generation.max_new_tokens})"
        )
    if "" in generation.stop_strings:
        raise ValueError("actor.generation.stop_strings contains an empty string, which ends every response; remove it")
    _check_rewards(actor)
    _check_prompts(actor.prompts)


def _check_prompts(prompts: PromptsSection) -> None:
    """Reject `files` in addition to `path`, an empty list without `path`, and a file that is listed twice."""
    files = prompts.files
    fields = prompts.model_fields_set
    if not files and "files" in fields and "path" not in fields:
        raise ValueError("actor.prompts.files is empty; list a file, or set actor.prompts.path")
    if files and prompts.path != PromptsSection().path:
        raise ValueError(
            f"actor.prompts.path ({prompts.path}) and actor.prompts.files are both set; add the path to the files, or "
            "remove one of the two"
        )
    paths = [str(file.path) for file in files]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"actor.prompts.files: {twice[0]} occurs more than once; remove one of them")


def _check_critic_settings(algorithm: AlgorithmSection) -> None:
    """Reject a critic warm-up for an algorithm without a critic, and dynamic sampling without groups."""
    if algorithm.critic_warmup_steps and not algorithm.uses_critic:
        raise ValueError(
            f"actor.algorithm.critic_warmup_steps ({algorithm.critic_warmup_steps}): {algorithm.name} has no critic; "
            "remove it"
        )
    if algorithm.max_resampled and algorithm.responses_per_prompt < 2:
        raise ValueError(
            f"actor.algorithm.max_resampled ({algorithm.max_resampled}) compares the responses to a prompt; set "
            f"actor.algorithm.responses_per_prompt to 2 or more, or remove it"
        )


def _check_ratios(actor: ActorSection) -> None:
    """Reject probability-ratio settings without effect, and settings that make log-probs incomparable."""
    algorithm = actor.algorithm
    generation = actor.generation
    is_vllm = generation.engine == "vllm"
    correction = algorithm.factors
    uses_engine = algorithm.old_logprobs == "sampler" or correction is not None
    key = "old_logprobs: sampler" if algorithm.old_logprobs == "sampler" else "correction"
    if correction is not None and algorithm.old_logprobs == "sampler":
        raise ValueError(
            "actor.algorithm.correction has no effect with actor.algorithm.old_logprobs: sampler, where the ratios "
            "already use the sampler's log-probs; remove one of them"
        )
    if correction is not None and not (is_vllm or actor.max_off_policy_steps):
        raise ValueError(
            "actor.algorithm.correction has no effect, because the updated policy itself samples; remove it, or set "
            "actor.generation.engine: vllm or actor.max_off_policy_steps"
        )
    if actor.max_off_policy_steps and needs_correction(actor):
        raise ValueError(
            f"actor.max_off_policy_steps ({actor.max_off_policy_steps}) trains on responses of older policies: "
            f"{CORRECTION_CHOICES}"
        )
    names = ("top_k", "top_p", "min_new_tokens")
    changed = [name for name in names if getattr(generation, name) != GenerationSection.model_fields[name].default]
    if uses_engine and is_vllm and changed:
        raise ValueError(
            f"actor.algorithm.{key} needs the sampler's log-probs, but vLLM computes them before it applies "
            f"actor.generation.{changed[0]} ({getattr(generation, changed[0])}); remove one of them"
        )


CORRECTION_CHOICES = (
    "set actor.algorithm.correction.mode to clip, mask, binary_kl or binary_tv, or to none to train without a "
    "correction, or set actor.algorithm.old_logprobs to sampler, as sao and flash_reinforce do"
)


def needs_correction(actor: ActorSection) -> bool:
    """Return whether the user must choose a correction if older policies sample the responses.

    With `old_logprobs: sampler` the loss's own ratio is to the policy that sampled each token. Otherwise it is to the
    policy before the update, and only a correction limits how far the sampler may differ from that one; the explicit
    choice `mode: none` counts as one.
    """
    algorithm = actor.algorithm
    loss = LOSSES.get(algorithm.loss_name)
    has_ratio = loss is None or not loss.is_on_policy
    return algorithm.correction is None and not (has_ratio and algorithm.old_logprobs == "sampler")


def _check_rewards(actor: ActorSection) -> None:
    """Reject settings of rewards and KL that contradict others, or would have no effect."""
    rewards = actor.rewards
    algorithm = actor.algorithm
    kl = actor.kl
    kl_in = algorithm.defaults.kl_in if kl.penalty_in == "auto" else kl.penalty_in
    if kl.uses_reference and kl_in == "reward" and kl.estimator == "unbiased":
        raise ValueError(
            "actor.kl.estimator: unbiased corrects the gradient of a KL in the loss, but the penalty is in the reward; "
            "set actor.kl.penalty_in: loss, or another estimator"
        )
    if algorithm.advantage == "auto":
        _check_shaping(actor, kl_in)
    if rewards.overlong_tokens >= actor.generation.max_new_tokens:
        raise ValueError(
            f"actor.rewards.overlong_tokens ({rewards.overlong_tokens}) must be below actor.generation.max_new_tokens "
            f"({actor.generation.max_new_tokens})"
        )
    if rewards.missing_eos_penalty and algorithm.mask_unfinished and not algorithm.uses_critic:
        raise ValueError(
            f"actor.rewards.missing_eos_penalty ({rewards.missing_eos_penalty:g}) has no effect under "
            f"{algorithm.name} with actor.algorithm.mask_unfinished: true, which excludes the penalised responses from "
            "the update; set actor.algorithm.mask_unfinished to false, or remove the penalty"
        )
    if kl.target is not None and not kl.coef:
        raise ValueError(
            f"actor.kl.target ({kl.target:g}) scales actor.kl.coef, which is 0 and stays 0; set actor.kl.coef above "
            "0, or remove actor.kl.target"
        )


def _check_shaping(actor: ActorSection, kl_in: str) -> None:
    """Reject shaping that an algorithm would ignore, because it uses the terms of the reward, or that it cannot use."""
    defaults = actor.algorithm.defaults
    if defaults.needs_components:
        names = ["normalization", "clip", "missing_eos_penalty", "overlong_tokens"]
        effect = "changes the sum of the rewards"
        why = "standardises each of them; remove it, or add a function of your own to `rewards`"
    elif defaults.divides_by_mean:
        names = ["normalization", "missing_eos_penalty", "overlong_tokens"]
        effect = "makes scores of 0 negative"
        why = "divides by their mean; remove it, or choose another algorithm"
    else:
        return
    usual = RewardsSection()
    changed = [f"actor.rewards.{name}" for name in names if getattr(actor.rewards, name) != getattr(usual, name)]
    if actor.kl.uses_reference and kl_in == "reward":
        changed.append("actor.kl.penalty_in: reward")
    if changed:
        raise ValueError(f"{changed[0]} {effect}, but actor.algorithm.name: {actor.algorithm.name} {why}")


def _check_on_policy(actor: ActorSection) -> None:
    """Reject off-policy settings for an algorithm without probability ratios."""
    reason = f"{actor.algorithm.name}'s loss is on-policy, without probability ratios"
    if actor.update.epochs > 1:
        raise ValueError(
            f"actor.update.epochs ({actor.update.epochs}): {reason}, so a rollout can be used only once; set it to 1, "
            "or choose another algorithm"
        )
    if actor.max_off_policy_steps:
        raise ValueError(
            f"actor.max_off_policy_steps ({actor.max_off_policy_steps}): {reason}, but the responses would come from "
            "older policies; remove it, or choose another algorithm"
        )
