"""Sections of the YAML configuration, except the actor's: type, default and meaning of each field.

`docs/configuration.md` is generated from the field docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_triton.checkpoints.heads import Pooling
from rlhf_triton.config.fields import (
    AUTO_PRECISION,
    BUDGET_OF_DEVICE,
    Address,
    Attention,
    Count,
    CountOrZero,
    Device,
    Host,
    LoraTargets,
    Patterns,
    Port,
    Precision,
    Seconds,
    Section,
    Seed,
    TokenBudget,
)
from rlhf_triton.config.live_models import GateSection
from rlhf_triton.config.optimizer import CriticOptimizerSection
from rlhf_triton.config.rewards import TokenRewardSettings
from rlhf_triton.digests import DEFAULT, Algorithm

# Section `monitoring` of the YAML configuration.


class MonitoringSection(Section):
    """Prometheus metrics of actor and sidecar. Those of the server are on `server.metrics_port`."""

    host: Host = "127.0.0.1"
    """Address to bind. There is no authentication: beyond loopback, let only Prometheus connect."""
    actor_port: Port | None = None
    """Port of the actor's metrics; 0 selects a free one, which the log names; default: no metrics."""
    trainer_port: Port | None = None
    """Port of the sidecar's metrics, as `actor_port`."""


# Section `gateway` of the YAML configuration.


class ServedPolicySection(Section):
    """The policy for agents, whose calls the gateway records as trajectories to train on; see docs/gateway.md."""

    model: Path
    """Hugging Face folder with the policy's tokenizer and chat template."""
    servers: Annotated[tuple[Address, ...], Field(min_length=1)]
    """HTTP addresses of vLLM servers with the policy, as in `actor.client.servers`, started as docs/vllm.md says."""
    export: Path | None = None
    """JSONL file to which a session's trajectories are appended when it ends; default: they are only returned."""
    max_tokens: Count = 1024
    """Most tokens of a reply, where the request sets no limit."""
    max_session_tokens: Count = 1_000_000
    """Most tokens of a session, of which a history that several calls share counts once."""
    max_sessions: Count = 1024
    """Number of sessions that may be open; beyond it, requests of new ones get 429."""
    idle_s: Seconds = 3600.0
    """How long a session stays open without a request; then it is dropped, without an export."""
    deadline_s: Seconds = 600.0
    """Timeout of one reply."""


class GatewaySection(Section):
    """The HTTP gateway for other trainers (`rlhf-triton gateway`). It sends requests as `actor.client` says."""

    host: Host = "127.0.0.1"
    """Address to bind. Beyond loopback, set `key_env`, and a proxy for TLS in front."""
    port: Port = 8100
    """Port; 0 selects a free one, which the gateway prints."""
    model: str = "reward_model"
    """Name of the reward model in vLLM's protocol."""
    key_env: str | None = None
    """Name of the environment variable with the key that every request must carry; default: no key."""
    deadline_s: Seconds = 60.0
    """Longest wait for the rewards of a row; it includes retries and waiting for a server."""
    max_body_bytes: Count = 16_000_000
    """Maximum size of a request's body, of the texts of all its rows, and of all large bodies in memory at a time."""
    policy: ServedPolicySection | None = None
    """The policy for agents; default: the gateway serves rewards only."""


class RunSection(Section):
    """Settings shared by all processes: the folder and the identity of the run."""

    dir: Path = Path("runs/default")
    """Output folder of the run; relative paths start at the working directory."""
    run_id: str | None = None
    """Name of the run in the journal; default: the name of `dir`."""
    integrity: Algorithm = DEFAULT
    """Algorithm of the digests by which damaged versions, checkpoints and journal entries are detected: `xxh3`
    (xxh3-128), which is as fast as memory, or `sha256`, ten times slower, for storage on which someone might forge a
    file of the same digest. Each digest names its algorithm: a changed setting holds for new files only."""
    access: Literal["owner", "group"] = "owner"
    """Who can read and write what server, sidecar and actor write, which includes prompts and responses: `owner` (umask
    077) or also the `group` (umask 007), for processes of several users that share the folder."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log lines of actor, sidecar, `rlhf-triton serve` and gateway. `json`: one object a line, with the
    run, the step and the weights version that it belongs to."""
    trace_endpoint: str | None = None
    """Base URL of an OpenTelemetry collector, such as `http://localhost:4318`: actor, critic_train and sidecar send it
    the spans of each step, as OTLP over HTTP with JSON. Needs the extra `tracing`; default: no tracing."""
    share_cards: bool = False
    """Allow a role with several GPUs (`actor.ranks`, `trainer.ranks`, `tensor_parallel`) to share one of them with
    another role of the same machine, as on a machine with two GPUs that all roles use. Roles with one GPU each may
    always share it. See docs/scaling.md."""
    seed: Seed = 0
    """Seed for prompts, sampling and initial weights."""
    deterministic: bool = False
    """Make the run reproducible to the bit on a CPU, even if processes are killed and restarted. Each row is scored in
    its own forward pass (slower) by the critic of the previous step (`actor.max_staleness` 0), a worker
    has one thread unless `threads` is set, nothing is measured, and a row without a score stops the run.
    `rlhf_triton/config/deterministic.py` has the full list."""

    @field_validator("trace_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/]\S*", value):
            raise ValueError("must be a URL such as http://localhost:4318")
        return value

    @field_validator("run_id")
    @classmethod
    def _safe_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
            raise ValueError("use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
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
    """Address to bind, IPv4 or a name for one. Keep it on loopback unless the server is behind a proxy with TLS and
    authentication."""
    http_port: Port = 8000
    """HTTP port, for inference."""
    grpc_port: Port = 8001
    """gRPC port, for model control."""
    metrics_port: Port = 8002
    """Port for Prometheus metrics."""
    dir: Path | None = None
    """Folder of this server's own files: the rendered model repository and its log; default: `run.dir`. Servers that
    share one `run.dir` need one folder each."""
    tritonserver: Path | None = None
    """Path of the executable; default: the one in the nvidia-pytriton wheel, then the one on PATH."""
    start_timeout_s: Seconds = 180.0
    """Timeout for every model to answer an inference request after the start, and for loading a model again."""
    drain_s: Annotated[float, Field(ge=0)] = 20.0
    """How long `rlhf-triton serve`, when it is stopped, waits for requests in flight while it refuses others; 0: it
    stops at once. A client repeats a request that takes longer at another server."""
    tokens_dtype: Literal["INT64", "INT32"] = "INT64"
    """Data type of `tokens` on the wire. Triton rejects any other type, so all clients must send this one."""
    queue_delay_us: CountOrZero = 2000
    """How long Triton's dynamic batchers wait for more requests."""
    max_batch_size: Count = 8192
    """Maximum rows of one request, and of one batch that Triton merges; a larger request is rejected."""
    max_queue_size: CountOrZero = 0
    """Maximum requests in Triton's queue of a model; further requests get a 503. 0: no limit."""
    queue_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """How long a request may wait for its first forward pass before it gets a 503. A request's own `timeout` takes
    precedence. 0: no limit."""
    max_request_tokens: Count = 4_000_000
    """Maximum tokens of one request, padding included; a larger one is rejected. It also limits a critic's response."""
    max_request_bytes: Count = 4_000_000
    """Maximum UTF-8 bytes of the sentences and metadata of one request; a larger one is rejected, not truncated."""
    strip_sequence_length_to_multiple: Count = 1
    """Rows are padded to the longest row of their forward pass, rounded up to a multiple of this."""
    training_key_env: str | None = None
    """Name of the environment variable with the key that critic_train and critic_save require; default: no key."""

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
    """Device of the model: `cpu`; `cuda`, every GPU that the server sees, with a copy of the model on each, which take
    requests from one queue; or `cuda:N`, one GPU."""
    instances: Count = 1
    """Number of processes that serve the model, on each of its GPUs. On a CPU they share the weights' memory; each has
    its own row queue."""
    tensor_parallel: Count = 1
    """Number of devices that the layers of one instance are split over, for a model that does not fit one device. The
    device is the first of them; on a CPU it is a number of processes. Needs `instances: 1` and `workers: 1`."""
    workers: Count = 1
    """Concurrent forward passes in one instance; they take rows from one shared queue."""
    threads: Count | None = None
    """Torch threads per worker; default: the cores, shared equally by the workers of all models on the CPU, and 1 on a
    GPU."""
    token_budget: TokenBudget = BUDGET_OF_DEVICE
    """Maximum tokens in one forward pass, padding included; a longer row runs alone. Default: 1024 on a CPU, 16384 on a
    GPU."""
    forward_overhead_tokens: CountOrZero | None = None
    """Fixed cost of a forward pass, in tokens. A row joins a pass only if that adds no more padding than this.
    Default: measured whenever the model is loaded, in at most 2 s; 64 with `compile` or `tensor_parallel`."""
    max_length: Count | None = None
    """Maximum sequence length in tokens; default: the model's limit, or 32768 if it has none. A longer row is refused:
    nothing is truncated."""
    dtype: Precision = AUTO_PRECISION
    """Data type of the body in the forward pass; `auto`: bfloat16 on a GPU, float32 on a CPU. The head computes in
    fp32, from the model's own fp32 values."""
    compile: bool = False
    """Compile the body with torch.compile. Adds seconds to minutes to every load and needs a C++ compiler."""


def check_ranks(key: str, model: ModelSection) -> None:
    """Raise ValueError if the section `key` has a setting that does not fit its `tensor_parallel`."""
    needed: dict[str, tuple[Any, ...]] = {"instances": (1,), "workers": (1,), "compile": (False,)}
    wrong = [name for name, values in needed.items() if getattr(model, name) not in values]
    if model.tensor_parallel > 1 and wrong:
        raise ValueError(
            f"{key}.{wrong[0]} is {getattr(model, wrong[0])!r}, but {key}.tensor_parallel ({model.tensor_parallel}) "
            f"needs {needed[wrong[0]][0]!r}: all devices run each forward pass together; remove {key}.{wrong[0]}"
        )


class Standardization(Section):
    """Constants of standardisation: the model returns `(x - mean) / std`."""

    mean: float = 0.0
    """Mean of the raw scores."""
    std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the raw scores."""


def constants_of(setting: str | Standardization) -> Any:
    """Convert a standardisation setting to the form that the models take: `model`, `off` or (mean, std)."""
    return (setting.mean, setting.std) if isinstance(setting, Standardization) else setting


class RewardSection(ModelSection, TokenRewardSettings):
    """The reward model: any with a trained classification or value head of one or more labels."""

    model: Path = Path("checkpoints/reward")
    """Folder of a Hugging Face model (safetensors)."""
    standardization: Literal["model", "off"] | Standardization = "model"
    """Constants of `(score - mean) / std`: `model` (`reward_standardization` in its config.json, if any), `off`,
    or {mean, std}."""
    pooling: Pooling = "auto"
    """Pooling of a linear head: `last` (index length-1), `mean`, or `auto`. `auto` is `last`, except for `sentences`:
    for them it takes the last token that is not the padding token, as transformers does. Encoders with a pooled head
    support only `auto`; with any other head they need `last` or `mean`."""
    attribute_weights: list[float] | dict[str, float] | None = None
    """Weights of the A labels in their sum, which is then the reward: a list, or by the names in config.json, such as
    {NEGATIVE: -1, POSITIVE: 1}, the log-odds of POSITIVE. A model of several labels needs these or
    `merge_attributes`."""
    merge_attributes: bool | None = None
    """`true`: return the weighted sum of the labels, [B, 1], by default their mean; `false`: all A labels, [B, A].
    Default: the sum if there are `attribute_weights`; otherwise a model of several labels is refused."""
    text: Literal["joined", "pair"] = "joined"
    """What the reward model was trained on: `joined`, prompt and response as one text or chat; `pair`, prompt and
    response as the two texts of a pair (`tokenizer(prompt, response)`), which the actor and the gateway then send."""
    add_special_tokens: bool = True
    """Tokenise `sentences` as transformers' pipelines do: add the tokenizer's [CLS], [SEP], BOS or EOS unless the text
    already has them. A chat has the BOS and EOS of its template alone. `false`: add none, as NeMo-Aligner's server
    did."""
    append_eos: bool = False
    """End `sentences` other than chats with the tokenizer's end-of-sequence token, as TRL's RewardTrainer does."""
    store: bool = False
    """Serve the model from versions in a weights store: `model` becomes version 0, and `rlhf-triton weights
    publish --model reward` replaces it while the server runs. Every reply names the version (`reward_version`)."""
    reload: Literal["swap", "triton"] = "swap"
    """With `store`: how instances switch to a published version, as in `critic.reload`."""
    gate: GateSection | None = None
    """With `store`: accuracy on pairs of texts that a new version must reach before it is served; default: none."""

    @model_validator(mode="after")
    def _weighted(self) -> RewardSection:
        given = self.attribute_weights
        if given is not None and not any(given.values() if isinstance(given, dict) else given):
            raise ValueError(f"reward.attribute_weights ({given}) are all 0, so every reward would be 0")
        return self

    @model_validator(mode="after")
    def _stored(self) -> RewardSection:
        if self.gate is not None and not self.store:
            raise ValueError("reward.gate checks new versions, which need reward.store: true; set it, or remove gate")
        return self


class CriticSection(ModelSection):
    """The critic. Version 0 is made from `model`; the sidecar publishes later versions."""

    model: Path = Path("checkpoints/critic")
    """Folder of a token classification model with one label, or of any other model to take the body from."""
    attribute_weights: list[float] | None = None
    """Weights of the outputs in the value, if the head of `model` has A > 1 outputs; default: 1/A each."""
    standardization: Literal["model", "off"] | Standardization = "model"
    """Standardisation of the values, as in `reward.standardization`. Stored in version 0; later versions inherit it."""
    reload: Literal["swap", "triton"] = "swap"
    """How instances switch to a published version: `swap`, in place in milliseconds; `triton`, by Triton's load API."""
    pretrain: tuple[Path, ...] = ()
    """Training set for the critic before the run's first step: folders of earlier runs, whose journals have tokens and
    returns, and JSONL files with `prompt`, `response` and `return`. See docs/live-critic.md. Version 0 is then the
    pretrained critic; a run that has a version 0 refuses another list."""
    pretrain_epochs: Count = 3
    """Passes over that training set."""


class ReferenceSection(ModelSection):
    """The frozen policy that the KL is measured against; served only if `actor.kl.reference` is `triton`."""

    model: Path = Path("checkpoints/policy")
    """Hugging Face causal LM folder; default: `actor.policy.model`."""
    dtype: Precision = AUTO_PRECISION
    """Compute type of forward passes; default: `actor.policy.precision`, from which it must not differ. Log-probs are
    computed in float32."""


class PublishSection(Section):
    """When and how weights versions are written."""

    every: Count = 1
    """Publish after every n-th critic_train. Scores may then lag by n-1 updates, even if `max_staleness` is lower."""
    keep: Count = 3
    """How many of the newest versions to keep, in addition to version 0 and the versions being served."""
    format: Literal["merged", "adapter"] = "merged"
    """Content of a version trained with LoRA. `merged`: all weights; `adapter`: the adapters and the value head, a few
    MB, which every instance merges into version 0 when it loads the version."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of all weights in a version but the head's, which is float32, with `format: merged`. Default:
    `critic.dtype`, in which they are served. Version 0, from which training starts, has float32."""


class TrainerSection(Section):
    """The critic sidecar."""

    ranks: Count = 1
    """Number of processes (ranks) that train the critic together, one per GPU. Each holds a shard of the weights,
    gradients and optimizer state (FSDP2). Above 1, torchrun starts them; see docs/scaling.md."""
    optimizer: CriticOptimizerSection = CriticOptimizerSection()
    """AdamW and the learning-rate schedule of the critic."""
    clip_value: float = 0.2
    """Clip range of the value loss around the rollout's values; <= 0: unclipped squared error."""
    global_batch_size: Count = 64
    """Rows per optimizer step; a payload of N rows takes ceil(N / this) steps."""
    epochs: Count = 1
    """Passes over one payload."""
    token_budget: Count = 4096
    """Maximum tokens in one forward pass, padding included; does not change the result. CPUs are faster with 1024 to
    2048."""
    threads: Count = 1
    """Torch threads."""
    device: Device = "cpu"
    """Device that the critic trains on; with several ranks the first one's, and each further rank takes the next
    GPU."""
    precision: Precision = AUTO_PRECISION
    """Compute type of forward passes (autocast); trained weights, the value head, the loss and the optimizer stay in
    float32. `auto`: bfloat16 on a GPU, float32 on a CPU. With LoRA or `freeze` in bfloat16, the frozen matrices are
    held in bfloat16, and published with these values."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time, the same result."""
    attention: Attention = "auto"
    """Attention implementation: `auto` is transformers' choice. `flash_attention_2` needs CUDA, `precision: bfloat16`
    and the package flash-attn."""
    lora_rank: CountOrZero = 0
    """Train only LoRA adapters of this rank, on `lora_targets`, and the value head; 0: train all weights."""
    lora_alpha: Count = 16
    """The adapters' output is scaled by `lora_alpha / lora_rank`."""
    lora_targets: LoraTargets = "all-linear"
    """Linear layers with adapters, as in `actor.policy.lora_targets`; never the value head."""
    freeze: Patterns = ()
    """Regular expressions: parameters in whose name one is found are not trained, such as [embed_tokens, self_attn], or
    ['layers\\.[0-9]\\.'] for the first ten layers. Names are those in `weights/critic/0`. With LoRA, the adapter of a
    weight with such a name is not trained. A checkpoint resumes only with the same list."""
    checkpoint_every: Count = 20
    """Steps between checkpoints, in addition to those that critic_save requests."""
    keep_entries: CountOrZero = 200
    """Maximum trained steps kept in the journal after the last critic_save; a rewind can return to any of them."""
    archive_entries: CountOrZero = 100
    """How many of the newest trained steps are kept, 20 bytes a token, after the journal no longer needs them: later
    runs can pretrain their critics on them (`critic.pretrain`)."""
    reload_on_save: Literal["triton", "none"] = "triton"
    """`triton`: also reload through Triton's load API at every critic_save, unless such a reload is in progress. With
    the critic on a GPU the default is `none`, because the reload holds a third copy of its weights there."""
    servers: list[Address] = Field(default=[])
    """gRPC addresses of all servers of the critic: `host:port`, or `dns:name:port` for every address of the name;
    default: that of `server`."""
    serve_timeout_s: Seconds = 60.0
    """How long to wait for every instance to serve a published version before the model is reloaded through Triton;
    also the timeout of such a reload."""
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Increment of the sidecar's niceness, so that the server's forward passes take priority on shared cores."""
    heartbeat_timeout_s: Seconds = 15.0
    """Time without progress of the sidecar after which pending critic_train callers get UNAVAILABLE."""
    publish: PublishSection = PublishSection()
    """Publishing of weights versions."""

    @property
    def changes_the_model(self) -> bool:
        """Whether the model in training is built in another way than the served one."""
        default = (self.precision, self.attention) == ("float32", "auto")
        return bool(not default or self.gradient_checkpointing or self.lora_rank)
