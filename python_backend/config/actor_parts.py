"""The parts of the YAML's `actor` section, one class per concern."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from python_backend.config.addresses import Address
from python_backend.config.algorithms import (
    ALGORITHMS,
    AdvantageName,
    Algorithm,
    AlgorithmName,
    EstimatorName,
    LossName,
)
from python_backend.config.fields import (
    AUTO_PRECISION,
    Attention,
    Count,
    CountOrZero,
    Device,
    Fraction,
    LoraTargets,
    Precision,
    Seconds,
    Section,
)


class PolicySection(Section):
    """The policy: its checkpoint, how it computes, and which of its weights are trained."""

    checkpoint: Path = Path("checkpoints/policy")
    """Hugging Face causal LM folder: the initial policy and, by default, the frozen reference."""
    token_budget: Count = 4096
    """Maximum tokens in one forward pass of an update, or over the prompts of generation (but not with the engine
    `transformers`), padding included; does not change the result."""
    device: Device = "cpu"
    """Device of the policy; with several ranks the first one's, and each further rank takes the next GPU."""
    attention: Attention = "auto"
    """Attention implementation: `auto` is transformers' choice. `flash_attention_2` needs CUDA, `precision: bfloat16`
    and the package flash-attn."""
    precision: Precision = AUTO_PRECISION
    """Compute type of forward passes (autocast); trained weights, log-probs and the optimizer stay in float32. `auto`:
    bfloat16 on a GPU, float32 on a CPU."""
    lora_rank: CountOrZero = 0
    """Train only LoRA adapters of this rank, on `lora_targets`; 0: train all weights."""
    lora_alpha: Count = 16
    """The adapters' output is scaled by `lora_alpha / lora_rank`."""
    lora_targets: LoraTargets = "all-linear"
    """Linear layers with adapters: all except the output layer, or those with these names, such as [q_proj, v_proj]. A
    name matches the last part or parts of a layer's path."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapters' input, only in the forward passes of an update, not in generation, log-probs or
    validations. Unless a rollout is a single minibatch used once, the probability ratios contain the dropout noise,
    which counts against `actor.algorithm.clip_ratio`."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same result."""


class PromptFileSection(Section):
    """One of several files of training prompts."""

    path: Path
    """The file, in the formats of `actor.prompts.path`. A path may occur again with other, disjoint steps, and its
    prompts then continue where they were."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the file in the prompts of a step, relative to the weights of the other files that are active in it."""
    from_step: Count = 1
    """First step that uses the file."""
    until_step: Count | None = None
    """Last step that uses the file; default: the last of the run."""

    @field_validator("path")
    @classmethod
    def _one_spelling(cls, value: Path) -> Path:
        """Positions in the files are kept by path."""
        return Path(os.path.normpath(value))

    def is_active(self, step: int) -> bool:
        """Return whether `step` uses the file."""
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)


class PromptsSection(Section):
    """The training prompts."""

    path: Path = Path("data/prompts.jsonl")
    """Training prompts: JSONL, Parquet (`.parquet`), Arrow (`.arrow`), or a folder written by `save_to_disk` of
    `datasets`. Each row has a `text`, chat `messages` ([{"role": …, "content": …}, …]), or a `prompt` that is either of
    them. Other columns are metadata for reward functions and must have plain JSON types."""
    files: tuple[PromptFileSection, ...] = ()
    """Several files instead of `path`, with weights and a curriculum by step: a list of {path, weight, from_step,
    until_step}. See docs/prompts.md."""
    max_tokens: Count = 512
    """Maximum prompt length."""
    too_long: Literal["error", "skip", "truncate"] = "error"
    """Handling of a longer prompt when a step reads it. `error`: the run ends with a checkpoint; `skip`: the next
    prompt of its file takes its place; `truncate`: only its last `max_tokens` tokens are kept, and BOS."""
    add_special_tokens: bool = True
    """Begin a plain-text prompt with the BOS, or whatever the tokenizer puts before a text, unless it is there already.
    No EOS follows it. A chat is as its template renders it. `false`: add none."""

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
    """vLLM servers that generate the responses, for `actor.generation.engine: vllm`."""

    servers: tuple[Address, ...] = ()
    """HTTP addresses of all servers, as in `actor.client.servers`; default: `tools run` starts one."""
    command: str = "vllm"
    """Executable of the server that `tools run` starts: `vllm`, or its path in an environment of its own."""
    cuda_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of that server, such as `1` or `2,3`; required if the policy is on a GPU."""
    arguments: tuple[str, ...] = ()
    """Further arguments of that server, such as [--tensor-parallel-size, "2"]."""
    deadline_s: Seconds = 600.0
    """Timeout of one response, and of loading a version of the weights."""
    importance_cap: Annotated[float, Field(ge=1)] | None = None
    """Truncated importance weights: multiply the policy loss of each token by the ratio of its probability under the
    policy to that under vLLM, at most this; default: no weights."""


class GenerationSection(Section):
    """How responses are generated."""

    batch_size: Count = 64
    """Responses generated at the same time. When one ends, it is scored and the next prompt takes its slot. Halved when
    a GPU runs out of memory."""
    engine: Literal["slots", "transformers", "vllm"] = "slots"
    """How responses are generated. `slots`: continuous batching over `batch_size` slots; `transformers`: plain
    `generate()` for `batch_size` prompts at a time, which is slower; `vllm`: by vLLM servers, see docs/vllm.md. Without
    vLLM, recurrent models, whose state is not only keys and values, and `flash_attention_2`, which copies the whole
    cache for each token, always use `transformers`."""
    vllm: VllmSection = VllmSection()
    max_new_tokens: Count = 128
    """Maximum response length."""
    min_new_tokens: CountOrZero = 0
    """Minimum response length; a stop string within these tokens does not end the response."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a response, like an end-of-sequence token."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides the positive logits and multiplies the negative logits of tokens that already occurred; does not affect
    log-probs."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; also applied to log-probs."""
    top_k: CountOrZero = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability; 1: from all."""


class AlgorithmSection(Section):
    """The algorithm: advantages and policy loss."""

    name: AlgorithmName = "ppo"
    """Advantage function, loss and defaults, see docs/algorithms.md. Only `ppo` uses the critic."""
    advantage: AdvantageName = "auto"
    """Advantage function: the algorithm's, or your own, `path/to/file.py:name`."""
    loss: LossName = "auto"
    """Policy loss: the algorithm's, one by name, or your own, `path/to/file.py:name`."""
    responses_per_prompt: Count = 1
    """Responses to each prompt; `rloo` and `grpo` compare their scores and need at least 2."""
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
    """Normalise the rollout's advantages to mean 0 and variance 1; default: true for ppo and reinforce++, otherwise
    false."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the entropy bonus in the loss."""
    gamma: Fraction = 1.0
    """Discount factor."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    critic_warmup_steps: CountOrZero = 0
    """Number of steps at the start of the run that train only the critic."""
    mask_unfinished: bool = True
    """Exclude responses that did not end from the policy gradient."""

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm needs the critic's values and therefore the sidecar."""
        return self.defaults.needs_critic

    @property
    def defaults(self) -> Algorithm:
        """What the algorithm needs, and its choices where a setting makes none."""
        return ALGORITHMS[self.name]

    @property
    def loss_name(self) -> str:
        """The policy loss: a built-in one by name, or `path/to/file.py:name`."""
        return self.defaults.loss if self.loss == "auto" else self.loss

    @property
    def own_functions(self) -> dict[str, str]:
        """The user's own functions, by configuration key."""
        named = {"actor.algorithm.advantage": self.advantage, "actor.algorithm.loss": self.loss}
        return {key: spec for key, spec in named.items() if ":" in spec}


class KLSection(Section):
    """The KL divergence from the reference: its penalty and its measurement."""

    reference: Literal["actor", "triton"] = "actor"
    """Where reference log-probs are computed. `actor`: in the actor, by a second copy of the policy (with LoRA: by the
    policy without its adapters); `triton`: in tritonserver, by the model of the `reference` section."""
    coef: Annotated[float, Field(ge=0)] = 0.01
    """Coefficient of the KL penalty. If `coef` and `every` are both 0, the reference is neither loaded nor computed."""
    every: CountOrZero = 0
    """With `coef: 0`: measure the KL to the reference in every n-th step and in validations; 0: never."""
    penalty_in: Literal["auto", "reward", "loss"] = "auto"
    """Where the KL penalty applies: in the rewards or in the loss; `auto`: `loss` for grpo, otherwise `reward`."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Target KL for adapting `coef`, in nats per sequence; default: `coef` is fixed."""
    horizon: Count = 10_000
    """Horizon of the adaptive `coef`, in responses; a smaller one adapts faster, down to `actor.rollout_size`."""
    estimator: EstimatorName = "auto"
    """Estimator of the per-token KL; `auto`: `k3` if the penalty is in the loss, `abs` (as in NeMo-Aligner) if it is in
    the rewards."""

    @property
    def uses_reference(self) -> bool:
        """Whether the KL to the reference is penalised or measured."""
        return self.coef > 0 or self.every > 0

    @property
    def serves_reference(self) -> bool:
        """Whether tritonserver needs the reference model."""
        return self.reference == "triton" and self.uses_reference

    def measures(self, step: int) -> bool:
        """Return whether the rollout of `step` needs reference log-probs."""
        return self.coef > 0 or (self.every > 0 and step % self.every == 0)


class RewardsSection(Section):
    """How scores become rewards: normalisation, clipping, then penalties."""

    normalization: Literal["none", "static", "running", "batch"] = "none"
    """Normalisation of the scores: `static`, by `mean` and `std`; `running`, by the statistics of all
    scores so far; `batch`, by those of the rollout."""
    mean: float = 0.0
    """Mean of the scores, for `normalization: static`."""
    std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the scores, for `normalization: static`."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Maximum absolute value of a score after normalisation; larger ones are clipped."""
    missing_eos_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Subtracted from the score of a response that did not end; without a critic it needs
    `actor.algorithm.mask_unfinished: false`."""
    overlong_tokens: CountOrZero = 0
    """Number of tokens before `actor.generation.max_new_tokens` over which the penalty rises linearly to
    `overlong_penalty`; 0: no penalty."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Subtracted from the score of a response of the maximum length, if `overlong_tokens` is set."""
    max_failed_fraction: Fraction = 0.1
    """Maximum fraction of a rollout's rows that may be masked because their reward or reference log-probs are
    unavailable; above it the run stops."""


class UpdateSection(Section):
    """How a rollout is divided into optimizer steps."""

    epochs: Count = 1
    """Passes over one rollout."""
    max_kl: Annotated[float, Field(gt=0)] | None = None
    """Stop the update of a step before the first minibatch whose KL from the sampling policy exceeds this, in nats per
    token; default: no limit."""
    minibatch_size: Count = 32
    """Rows per optimizer step of the policy; a smaller rollout is one minibatch."""


class ValidationSection(Section):
    """Validation on held-out prompts."""

    prompts: Path | None = None
    """Held-out prompts, in the formats of `actor.prompts.path`, used for validation before the first step and after the
    last."""
    size: CountOrZero = 256
    """Number of prompts to use from `prompts`."""
    every: CountOrZero = 0
    """Steps between validations; 0: only before the first step and after the last."""
    greedy: bool = False
    """Greedy decoding in validations, instead of sampling."""


class ClientSection(Section):
    """Requests of the actor to the servers."""

    servers: tuple[Address, ...] = ()
    """HTTP addresses of all servers: `host:port`, or `dns:name:port` for every address of the name, which is resolved
    again every 10 s and when a server fails; default: that of `server`. All servers serve all models and share one
    weights store and one journal."""
    max_outage_s: Annotated[float, Field(ge=0)] = 600.0
    """How long to wait for a healthy server once the run has started, and to repeat training requests while the sidecar
    is away; 0: do not wait, only retry as after a 503."""
    deadline_s: Seconds = 60.0
    """Timeout of one scoring attempt."""
    train_deadline_s: Seconds = 600.0
    """Timeout of one critic_train or critic_save attempt."""
    retries: CountOrZero = 6
    """Maximum retries of a request after a 503, a timeout or a lost connection."""
    train_retries: CountOrZero = 3
    """Maximum retries of critic_train and critic_save; `retries` also limits them. Attempts while the sidecar is away
    count only before the first update of a run; each takes 3 s."""
    backoff_s: Seconds = 0.25
    """First pause between attempts, and before a lost server is tried again; doubles up to 8 s, with jitter."""
    retry_budget: Fraction = 0.2
    """Retries that each request adds to a budget shared by all requests, so that few retries happen if all requests
    fail. The budget starts at its maximum, 100 retries. critic_train and critic_save have a separate budget."""
    max_in_flight: Count = 256
    """Maximum requests in flight, over all servers."""
    rows_per_request: Count = 1
    """Maximum rows in one scoring request. Responses that end at the same time share a request, which costs less per
    row, but if all its attempts fail, all its rows are masked. If the server refuses it, only the refused rows are."""
