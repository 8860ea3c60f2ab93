"""Sections of the YAML configuration, except the actor's: type, default and meaning of each field.

`docs/configuration.md` is generated from the field docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from rlhf_triton.checkpoints.heads import Pooling
from rlhf_triton.config.fields import (
    AUTO_PRECISION,
    BUDGET_OF_DEVICE,
    Address,
    Count,
    Device,
    Host,
    Port,
    Precision,
    Section,
    Seed,
    TokenBudget,
)
from rlhf_triton.config.optimizer import CriticOptimizerSection
from rlhf_triton.config.rewards import TokenRewardSettings
from rlhf_triton.config.trained_model import Resume, TrainedSection
from rlhf_triton.wire.contract import RUN_ID_PATTERN


class MonitoringSection(Section):
    """Prometheus metrics of actor and sidecar. The server's metrics are on `server.metrics_port`."""

    host: Host = "127.0.0.1"
    """Address to bind. There is no authentication: beyond loopback, let only Prometheus connect."""
    actor_port: Port | None = None
    """Port of the actor's metrics; 0: a free port, which is logged; default: no metrics."""
    trainer_port: Port | None = None
    """Port of the sidecar's metrics, as `actor_port`."""


class ServedPolicySection(Section):
    """A policy that the gateway serves to agents, recording their calls as trajectories; see docs/gateway.md."""

    model: Path
    """Hugging Face folder with the policy's tokenizer and chat template."""
    servers: Annotated[tuple[Address, ...], Field(min_length=1)]
    """HTTP addresses of the policy's vLLM servers (docs/vllm.md), as in `actor.client.servers`."""
    export: Path | None = None
    """JSONL file to which trajectories are appended when a session ends; default: they are only returned."""


class GatewaySection(Section):
    """The HTTP gateway for other trainers (`rlhf-triton gateway`). Its requests use the settings of `actor.client`."""

    host: Host = "127.0.0.1"
    """Address to bind. Beyond loopback, set `key_env` and use a TLS proxy."""
    port: Port = 8100
    """Port; 0: a free port, which the gateway prints."""
    key_env: str | None = None
    """Environment variable with the key that every request must carry; default: no key."""
    policy: ServedPolicySection | None = None
    """A policy for agents; default: the gateway serves only rewards."""


class RunSection(Section):
    """Settings shared by all processes: the folder and the identity of the run."""

    dir: Path = Path("runs/default")
    """Output folder of the run."""
    run_id: str | None = None
    """Name of the run in the journal; default: the name of `dir`."""
    access: Literal["owner", "group"] = "owner"
    """Who can read and write the run's files: `owner` (umask 077) or also the `group` (umask 007)."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log lines of actor, sidecar, `rlhf-triton serve` and gateway; `json`: one object per line."""
    trace_endpoint: str | None = None
    """Base URL of an OpenTelemetry collector, such as `http://localhost:4318`. Needs the extra `tracing`; default: no
    tracing."""
    seed: Seed = 0
    """Seed for prompts, sampling and initial weights."""
    deterministic: bool = False
    """Make the run bit-identical on a CPU, even if processes are killed. Slower: one forward pass per row, staleness 0,
    one thread per worker; a row without a score stops the run."""

    @field_validator("trace_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/]\S*", value):
            raise ValueError("must be a URL such as http://localhost:4318")
        return value

    @field_validator("run_id")
    @classmethod
    def _safe_name(cls, value: str | None) -> str | None:
        if value is not None and not RUN_ID_PATTERN.fullmatch(value):
            raise ValueError("use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit")
        return value

    @property
    def identity(self) -> str:
        """`run_id`, or the name of `dir` with `-` for every character that a run id cannot contain."""
        return self.run_id or re.sub(r"[^A-Za-z0-9._-]", "-", self.dir.resolve().name).lstrip("._-")[:64] or "run"

    @property
    def journal_dir(self) -> Path:
        """Folder of the training journal."""
        return self.dir / "journal"

    @property
    def sample_journal_dir(self) -> Path:
        """Folder of the journal of samples."""
        return self.dir / "sample_journal"

    @property
    def critic_checkpoints_dir(self) -> Path:
        """Folder of the critic's checkpoints."""
        return self.dir / "checkpoints" / "critic"

    @property
    def weights_dir(self) -> Path:
        """Folder of the critic's weights store."""
        return self.dir / "weights" / "critic"

    @property
    def reward_weights_dir(self) -> Path:
        """Folder of the reward model's weights store."""
        return self.dir / "weights" / "reward"

    @property
    def repository_dir(self) -> Path:
        """Folder of the model repository rendered for this run."""
        return self.dir / "model_repository"

    @property
    def logs_dir(self) -> Path:
        """Folder of the processes' logs."""
        return self.dir / "logs"


class ServerSection(Section):
    """The tritonserver process. A port of 0 selects a free one (`rlhf-triton run`, `rlhf-triton serve`)."""

    host: Host = "127.0.0.1"
    """Address to bind: IPv4, or a name that resolves to it. Beyond loopback, use a proxy with TLS and
    authentication."""
    http_port: Port = 8000
    """HTTP port, for inference."""
    grpc_port: Port = 8001
    """gRPC port, for model control."""
    metrics_port: Port = 8002
    """Port for Prometheus metrics."""
    dir: Path | None = None
    """Folder of the rendered model repository and the log; default: `run.dir`. Servers that share a `run.dir` need a
    separate folder each."""
    tritonserver: Path | None = None
    """Path of the executable; default: the one in the nvidia-pytriton wheel, then the one on PATH."""
    start_timeout_s: PositiveFloat = 180.0
    """Timeout for every model to answer a request after a start or reload."""
    queue_timeout_s: NonNegativeFloat = 0.0
    """How long a request may wait for its first forward pass before it gets a 503; its own `timeout` takes precedence.
    0: no limit."""
    max_request_tokens: Count = 4_000_000
    """Maximum tokens of one request, including padding, and of a critic's response; also the maximum UTF-8 bytes of a
    request's sentences and metadata."""
    training_key_env: str | None = None
    """Environment variable with the key that critic_train and critic_save require; default: no key."""

    @property
    def http_url(self) -> str:
        """`host:port` for inference over HTTP."""
        return f"{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port` for model control over gRPC."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """`host:port` of the metrics endpoint."""
        return f"{self.host}:{self.metrics_port}"


class ModelSection(Section):
    """Settings for loading and batching one model inside tritonserver."""

    model: Path
    """Folder of a Hugging Face model (safetensors)."""
    device: Device = "cpu"
    """`cpu`, `cuda:N`, or `cuda`: a copy of the model on every visible GPU, with one shared queue."""
    instances: Count = 1
    """Processes that serve the model, per GPU, each with its own row queue and one forward pass at a time. On a CPU,
    they share the weights' memory."""
    tensor_parallel: Count = 1
    """Number of devices over which one instance is split, starting with `device`; on a CPU, number of processes. Needs
    `instances: 1`."""
    threads: Count | None = None
    """Torch threads per instance; default: an equal share of the cores, and 1 on a GPU."""
    token_budget: TokenBudget = BUDGET_OF_DEVICE
    """Maximum tokens in one forward pass, padding included; a longer row runs alone. Default: 1024 on a CPU, 16384 on a
    GPU."""
    max_length: Count | None = None
    """Maximum tokens of a row; a longer row is refused, never truncated. Default: the model's limit, or 32768."""
    dtype: Precision = AUTO_PRECISION
    """Data type of the body; `auto`: bfloat16 on a GPU, float32 on a CPU. The head computes in float32."""


def check_ranks(key: str, model: ModelSection) -> None:
    """Raise ValueError if the section `key` asks for several instances of a model that is split over devices."""
    if model.tensor_parallel > 1 and model.instances > 1:
        raise ValueError(
            f"{key}.instances is {model.instances}, but {key}.tensor_parallel ({model.tensor_parallel}) needs 1: "
            f"all devices run each forward pass together; remove {key}.instances"
        )


class Standardization(Section):
    """Constants of standardisation: the model returns `(x - mean) / std`."""

    mean: float = 0.0
    """Mean of the raw scores."""
    std: PositiveFloat = 1.0
    """Standard deviation of the raw scores."""


def constants_of(setting: str | Standardization) -> Any:
    """Convert a standardisation setting to the form that the models' loaders accept: `model`, `off` or (mean, std)."""
    return (setting.mean, setting.std) if isinstance(setting, Standardization) else setting


class RewardSection(ModelSection, TokenRewardSettings):
    """The reward model: any model with a trained classification or value head of one or more labels."""

    model: Path = Path("checkpoints/reward")
    """Folder of a Hugging Face model (safetensors)."""
    standardization: Literal["model", "off"] | Standardization = "model"
    """Constants of `(score - mean) / std`: `model` (from the model's config.json, if any), `off`, or {mean, std}."""
    pooling: Pooling = "auto"
    """Pooling of a linear head: `last`, `mean`, or `auto` (`last`, ignoring padding in `sentences`). Encoders with a
    pooled head accept only `auto`; other heads on encoders need `last` or `mean`."""
    attribute_weights: Literal["separate"] | list[float] | dict[str, float] | None = None
    """Weights of a model's A labels in the reward: a list, or by label, such as {NEGATIVE: -1, POSITIVE: 1}; or
    `separate`: one reward per label, [B, A]. Required if there are several labels."""
    text: Literal["joined", "pair"] = "joined"
    """Input format that the model was trained on: `joined`, prompt and response as one text or chat; `pair`,
    `tokenizer(prompt, response)`."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to `sentences` that lack them; a chat gets only its template's. `false`: add
    none, as NeMo-Aligner's server."""
    append_eos: bool = False
    """Append the end-of-sequence token to `sentences` other than chats, as TRL's RewardTrainer does."""
    store: bool = False
    """Serve the model from a weights store, so that new versions can replace it. See docs/live-reward.md."""
    gate: Path | None = None
    """With `store`: JSONL file of preference pairs with `chosen`, `rejected` and optionally `prompt`, each a text or a
    list of chat messages. A new version's accuracy on these pairs must be at least the served version's minus 0.01;
    default: no test."""

    @model_validator(mode="after")
    def _weighted(self) -> RewardSection:
        configured = self.attribute_weights
        weights = configured.values() if isinstance(configured, dict) else configured
        if configured not in (None, "separate") and not any(weights or ()):
            raise ValueError(
                f"reward.attribute_weights ({configured}) are all 0, so every reward would be 0; set one to another "
                "value"
            )
        return self

    @model_validator(mode="after")
    def _stored(self) -> RewardSection:
        if self.gate is not None and not self.store:
            raise ValueError("reward.gate checks new versions, which need reward.store: true; set it, or remove gate")
        return self


class CriticSection(ModelSection):
    """The critic. Version 0 is made from `model`; the sidecar publishes later versions."""

    model: Path = Path("checkpoints/critic")
    """Folder of a token classification model with one label, or of any other model, of which only the body is used."""
    standardization: Literal["model", "off"] | Standardization = "model"
    """Standardisation of the values, as in `reward.standardization`; stored in version 0."""
    reload: Literal["swap", "triton"] = "swap"
    """How instances switch to a version: `swap`, in place within milliseconds; `triton`, through Triton's load API."""
    pretrain: tuple[Path, ...] = ()
    """Folders of earlier runs and JSONL files on which to train the critic before step 1. See docs/live-critic.md."""


class ReferenceSection(ModelSection):
    """The frozen policy from which the KL is measured; served only if `actor.kl.reference` is `triton`."""

    model: Path = Path("checkpoints/policy")
    """Hugging Face causal LM folder; default: `actor.policy.model`."""
    dtype: Precision = AUTO_PRECISION
    """Compute type; must equal `actor.policy.precision`, its default. Log-probs are computed in float32."""


class PublishSection(Section):
    """Publishing of weights versions: when a trained critic replaces the served one, in which form, and how many
    versions stay on disk.
    """

    every: Count = 1
    """Publish after every n-th critic_train. Scores may then lag by n-1 updates, regardless of `max_staleness`."""
    keep: Count = 3
    """Number of newest versions to keep, in addition to version 0 and the served ones."""
    format: Literal["merged", "adapter"] = "merged"
    """Content of a version trained with LoRA: `merged`, all weights; `adapter`, only adapters and value head, which
    each instance merges into version 0."""


class TrainerSection(TrainedSection):
    """The critic sidecar."""

    ranks: Annotated[Count, Resume.ROUNDING] = 1
    """Processes that train the critic together, one per GPU (FSDP2). See docs/scaling.md."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    clip_value: float = 0.2
    """Clip range of the value loss around the rollout's values; <= 0: unclipped squared error."""
    global_batch_size: Count = 64
    """Rows per optimizer step; a payload of N rows takes ceil(N / this) steps."""
    epochs: Count = 1
    """Passes over one payload."""
    threads: Annotated[Count, Resume.ROUNDING] = 1
    """Torch threads."""
    checkpoint_every: Annotated[Count, Resume.FREE] = 20
    """Steps between checkpoints, in addition to those that critic_save requests."""
    servers: Annotated[list[Address], Resume.FREE] = Field(default=[])
    """gRPC addresses of the critic's servers: `host:port`, or `dns:name:port` for all addresses of a DNS name; default:
    the address of `server`."""
    publish: Annotated[PublishSection, Resume.FREE] = PublishSection()

    @property
    def changes_the_model(self) -> bool:
        """Whether the model in training is constructed differently from the served one."""
        return bool(self.precision != "float32" or self.gradient_checkpointing or self.lora_rank)
