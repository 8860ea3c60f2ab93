"""The sections of the one YAML: every field with its type, default and meaning; `config.py` reads the file.

A field's docstring is its documentation: `docs/configuration.md` is generated from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from python_backend.config.addresses import Address

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # torch's generator on a CPU takes no more
Beta = Annotated[float, Field(ge=0, lt=1)]
Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]


class Section(BaseModel):
    """A frozen part of the configuration; field docstrings are their documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class RunSection(Section):
    """What every room knows: where the run lies and which run it is."""

    dir: Path = Path("runs/default")
    """Folder of everything the run writes; relative paths start at the working directory."""
    run_id: str | None = None
    """Identity of the run in the journal; default: the name of `dir`."""
    seed: Seed = 0
    """Seed of prompts, sampling and initial weights."""
    deterministic: bool = False
    """The same run gives the same bits, on a CPU, whichever process is killed and started again meanwhile: each row is
    scored in a forward of its own (slower), by the critic of the step before (`actor.max_staleness` 0), nothing is
    measured (`auto` takes fixed values), and a row without a score stops the run. `deterministic.py` has the list."""

    @field_validator("run_id")
    @classmethod
    def _safe_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
            raise ValueError("use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
        return value

    @property
    def identity(self) -> str:
        """`run_id`, or the folder's name, cleaned to what a run id may contain."""
        return self.run_id or re.sub(r"[^A-Za-z0-9._-]", "-", self.dir.resolve().name).lstrip("._-")[:64] or "run"

    @property
    def journal_dir(self) -> Path:
        """Folder of the training journal."""
        return self.dir / "journal"

    @property
    def weights_dir(self) -> Path:
        """Folder of the critic's weights versions."""
        return self.dir / "weights" / "critic"

    @property
    def repository_dir(self) -> Path:
        """Model repository rendered for this run."""
        return self.dir / "model_repository"

    @property
    def logs_dir(self) -> Path:
        """Folder of the processes' logs."""
        return self.dir / "logs"


class ServerSection(Section):
    """The tritonserver process. Ports of 0 mean: take a free one (`tools run` only)."""

    host: str = "127.0.0.1"
    """Address to bind; keep it on loopback unless a proxy with TLS and auth stands in front."""
    http_port: Port = 8000
    """Port of inference over HTTP."""
    grpc_port: Port = 8001
    """Port of model control over gRPC."""
    metrics_port: Port = 8002
    """Port of the Prometheus metrics."""
    tritonserver: Path | None = None
    """The executable; default: the one inside the nvidia-pytriton wheel, then PATH."""
    start_timeout_s: Seconds = 180.0
    """Longest wait until every model answers a real request."""
    load_timeout_s: Seconds = 120.0
    """Longest wait for one model load."""
    exit_timeout_s: CountOrZero = 5
    """How long tritonserver waits for open connections when it stops."""
    log_limit_mb: Count = 64
    """A log of a process that `tools` started is set aside as `.previous.log` when it grows beyond this."""
    tokens_dtype: Literal["INT64", "INT32"] = "INT64"
    """Type of `tokens` on the wire. Triton holds a request to the declared type, so all clients send the same."""
    training_key_env: str | None = None
    """Environment variable that holds the key which critic_train and critic_save demand; none: no key."""

    @property
    def http_url(self) -> str:
        """`host:port` of inference."""
        return f"{self.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        """`host:port` of model control."""
        return f"{self.host}:{self.grpc_port}"

    @property
    def metrics_url(self) -> str:
        """`host:port` of the metrics."""
        return f"{self.host}:{self.metrics_port}"


Auto = Literal["auto"]


class ModelSection(Section):
    """How one model is loaded and batched inside tritonserver.

    `auto`: measured when the server first starts with this model on this machine, and remembered.
    """

    checkpoint: Path
    """Hugging Face checkpoint folder (safetensors)."""
    device: Device = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    instances: Count = 1
    """Processes that serve the model; on a CPU they share the memory of the weights, but not the rows that wait."""
    workers: Count | Auto = "auto"
    """Forwards that run at the same time in one instance, fed from one line of rows."""
    threads: Count | Auto = "auto"
    """Torch threads of each worker."""
    token_budget: Count | Auto = "auto"
    """Most tokens, padding included, in one forward; a longer row runs alone."""
    forward_overhead_tokens: CountOrZero | Auto = "auto"
    """What a forward costs beyond its tokens, in tokens: rows share one while that saves more than their padding."""
    allocator: Literal["default", "retain"] | Auto = "auto"
    """Freed memory of a forward: back to the system (glibc's default), or kept for the next forward."""
    micro_batch_rows: Count = 64
    """Most rows in one forward."""
    strip_sequence_length_to_multiple: Count = 1
    """A forward is as wide as its longest row, rounded up to a multiple of this."""
    queue_delay_us: CountOrZero = 2000
    """How long the dynamic batcher waits for more requests."""
    preferred_batch_size: Count | list[Count] = []
    """Triton's preferred batch sizes; no upper bound."""
    max_batch_size: Count = 8192
    """Most rows of one request, and of those that Triton merges; a request of more is an error."""
    max_queue_size: CountOrZero = 0
    """Requests that may wait in Triton's queue; one more is answered with 503. 0: any number."""
    queue_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """Longest wait for the first forward; then 503. A request's own `timeout` counts instead. 0: no limit."""
    max_length: Count | None = None
    """Longest sequence, in tokens; default: the checkpoint's own limit, 32768 where it names none."""
    max_sentence_bytes: Count = 1_000_000
    """Longest sentence, and longest metadata of a row, in bytes of UTF-8; longer ones are an error, not cut."""
    max_request_tokens: Count = 4_000_000
    """Most tokens of one request, padding included; more are an error. The answer of a critic is as large."""
    max_request_bytes: Count = 4_000_000
    """Most bytes of the sentences and metadata of one request; more are an error."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the body's weights in the forward; the head computes in fp32, from the checkpoint's own fp32 values."""
    compile: bool = False
    """torch.compile the body: seconds to minutes at every load, and it needs a C++ compiler."""

    def settled(self, name: str) -> Any:
        """The setting `name`, or what stands for it where it is `auto` and nothing was measured."""
        value = getattr(self, name)
        return UNMEASURED[name] if value == "auto" else value


UNMEASURED = {
    "workers": 1,
    "threads": 1,
    "token_budget": 1024,
    "forward_overhead_tokens": 64,
    "allocator": "retain",
}


class Standardization(Section):
    """Rewards and values leave the model as `(x - mean) / std`."""

    mean: float = 0.0
    """Mean of the raw scores."""
    std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the raw scores."""


def constants_of(setting: str | Standardization) -> Any:
    """A standardisation setting as the models take it: `checkpoint`, `off` or (mean, std)."""
    return (setting.mean, setting.std) if isinstance(setting, Standardization) else setting


class RewardSection(ModelSection):
    """The reward model: a checkpoint with a trained classification or value head of one label or more."""

    checkpoint: Path = Path("checkpoints/reward")
    """Hugging Face checkpoint folder (safetensors)."""
    standardization: Literal["checkpoint", "off"] | Standardization = "checkpoint"
    """`checkpoint`: `reward_standardization` of its config.json when there; `off`; or {mean, std}."""
    pooling: Literal["auto", "last", "mean"] = "auto"
    """Of a linear head: `last` (index length-1), `mean`, or `auto`: `last`, and of `sentences` the last token that is
    not the padding token, as transformers pools. Encoders' pooled heads take `auto` alone."""
    attribute_weights: list[float] | None = None
    """Weights of the merged sum, one for each label; default: 1/A each."""
    merge_attributes: bool = True
    """Give the weighted sum [B, 1]; otherwise all A labels [B, A]."""
    add_special_tokens: bool = True
    """Tokenise `sentences` as transformers' pipelines do, with the [CLS], [SEP], BOS or EOS that the checkpoint's
    tokenizer adds and a chat template does not have already. `false`: add none, as NeMo-Aligner's server did."""


class CriticSection(ModelSection):
    """The critic: version 0 is made from this checkpoint, later versions come from the sidecar."""

    checkpoint: Path = Path("checkpoints/critic")
    """Token classification checkpoint with one label, or any checkpoint whose body it starts from."""
    attribute_weights: list[float] | None = None
    """Where `checkpoint` has a head of several outputs: their weights in the one value; default: 1/A each."""
    standardization: Literal["checkpoint", "off"] | Standardization = "checkpoint"
    """Of the values, as `reward.standardization`; it is written into version 0, later versions inherit it."""
    reload: Literal["swap", "triton"] = "swap"
    """How a published version comes into service: in place in milliseconds, or by Triton's load API."""
    poll_interval_ms: Count = 5
    """How often an instance looks whether CURRENT has moved."""


class ReferenceSection(ModelSection):
    """The frozen policy that the KL is measured against; served only where `actor.reference` is `triton`."""

    checkpoint: Path = Path("checkpoints/policy")
    """Hugging Face causal LM folder; default: `actor.checkpoint`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What forwards compute in; default: `actor.precision`, from which it may not differ. Log-probs are made in
    float32."""


class PublishSection(Section):
    """When and how weights versions are written."""

    every: Count = 1
    """Publish after every n-th critic_train; scores are then up to n-1 updates stale, whatever `max_staleness` is."""
    keep: Count = 3
    """Newest versions kept, beside those in service and version 0."""


class TrainerSection(Section):
    """The critic sidecar."""

    lr: Annotated[float, Field(gt=0)] = 9e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 9e-7
    """Learning rate at the end of the cosine."""
    warmup_steps: CountOrZero = 10
    """Optimizer steps of linear warm-up."""
    constant_steps: CountOrZero = 1000
    """Optimizer steps at `min_lr` after the cosine."""
    max_steps: Count = 10_000
    """Optimizer steps of the whole schedule: warm-up, cosine and constant end."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's betas."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """AdamW's weight decay, on matrices only."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest gradient norm."""
    clip_value: float = 0.2
    """Clip range of the value loss around the rollout's values; <= 0: plain squared error."""
    global_batch_size: Count = 64
    """Rows per optimizer step; N rows make ceil(N / this) steps."""
    epochs: Count = 1
    """Passes over one payload."""
    token_budget: Count = 4096
    """Most tokens, padding included, in one forward; never changes the result. A CPU is faster with 1024 to 2048."""
    threads: Count = 1
    """Torch threads."""
    device: Device = "cpu"
    """Where the critic trains."""
    checkpoint_every: Count = 20
    """Write a checkpoint after so many steps, beside those that critic_save asks for."""
    keep_checkpoints: Count = 3
    """Checkpoints kept of those that critic_save asked for, where it does not say which ones are needed still."""
    keep_entries: CountOrZero = 200
    """Trained steps kept in the journal, so that each step since the last critic_save can still be gone back to."""
    keep_set_aside: Count = 3
    """Newest folders kept of what rewinds took out of the journal, and of what was found damaged."""
    reload_on_save: Literal["triton", "none"] = "triton"
    """Also reload through Triton's load API at every critic_save, unless such a reload is still under way."""
    servers: list[Address] = []
    """gRPC addresses of all servers of the critic, `host:port`, or `dns:name:port` for every address that the name has;
    default: the one of `server`."""
    serve_timeout_s: Seconds = 60.0
    """Longest wait until every instance serves a published version."""
    nice: Annotated[int, Field(ge=0, le=19)] = 10
    """Added to the sidecar's niceness: where it shares cores with tritonserver, the server's forwards come first."""
    heartbeat_timeout_s: Seconds = 15.0
    """Silence of the sidecar after which waiting critic_train callers get UNAVAILABLE."""
    publish: PublishSection = PublishSection()
    """Weights versions."""


class DemoSection(Section):
    """Only for the demo: what `tools run` prepares before it starts the rooms."""

    recipe: Literal["sentences", "chat", "reasoning"] = "sentences"
    """What is prepared: `sentences`, all models trained on those of the standard library; `chat`, pretrained SmolLM2
    and MiniLM with chat prompts, downloaded through pip; `reasoning`, SmolLM2 with tasks of reasoning-gym."""
    cache_dir: Path = Path("runs/prepared")
    """Where the prepared checkpoints are kept between runs."""
    quick: bool = False
    """A small version of the preparation, for tests."""
