"""Reads what served models declare, and whether all servers declare the same; only it reads a model's parameters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_triton.wire.contract import (
    GROUPWISE,
    LABELS,
    LOAD_LABEL,
    MODEL_TERM,
    PROCESS,
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_VERSION,
    REWARD_WEIGHTS,
    REWARDS,
    STORE_ID,
    TEXTS_ONLY,
    Limits,
)

Config = Mapping[str, Any]  # a model's configuration, as Triton returns it
Expected = Mapping[str, str | None]  # expected parameters of a model; None: the parameter must be absent
MAY_DIFFER = frozenset(
    {
        LOAD_LABEL,
        "device",
        "journal",
        "max_request_tokens",
        "model",
        "queue_timeout_s",
        "reload",
        "store",
        "tensor_parallel",
        "threads",
        "token_budget",
        "trace_endpoint",
        "training_key_sha256",
        "workers",  # for reward functions
    }
)
"""Parameters that may differ between servers of a run; all others affect scores or values."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A served model's declaration; the fields from `components` on describe a reward."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    """All parameters, as text."""
    outputs: frozenset[str] = frozenset()
    components: tuple[str, ...] = ()
    """Names of the terms of a weighted sum of rewards; empty if only the reward model is served."""
    weights: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    """Names of the labels, if a single checkpoint is served."""
    num_rewards: int = 1
    groupwise: bool = False
    """Whether a reward function receives all responses to a prompt in one request."""
    granularity: str | None = None
    """Granularity of a process reward, `step` or `token`; None: not a process reward."""
    texts_only: bool = False
    takes_pairs: bool = False
    """Whether the reward model was trained on prompt and response as two texts."""
    adds_special_tokens: bool = True
    max_request_bytes: int = Limits.max_request_tokens
    """Maximum size of a request's texts; larger requests are refused."""

    @classmethod
    def of(cls, parameters: Mapping[str, str], outputs: Iterable[str] = ()) -> ServedModel:
        """Read a model's `parameters`."""
        components, weights, labels = (
            tuple(json.loads(parameters.get(key) or "[]")) for key in (REWARD_COMPONENTS, REWARD_WEIGHTS, LABELS)
        )
        return cls(
            parameters=parameters,
            outputs=frozenset(outputs),
            components=components,
            weights=weights,
            labels=labels,
            num_rewards=int(parameters.get("num_rewards") or 1),
            groupwise=parameters.get(GROUPWISE) == "true",
            granularity=parameters.get(PROCESS),
            texts_only=parameters.get(TEXTS_ONLY) == "true",
            takes_pairs=parameters.get("text") == "pair",
            adds_special_tokens=parameters.get("add_special_tokens") != "false",
            max_request_bytes=int(parameters.get("max_request_tokens") or Limits.max_request_tokens),
        )

    @property
    def meaning(self) -> dict[str, str]:
        """The parameters that must be equal on all servers."""
        return {key: value for key, value in self.parameters.items() if key not in MAY_DIFFER}

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer."""
        return self.parameters.get("tokenizer_fingerprint")

    @property
    def rendering(self) -> str | None:
        """Fingerprint of tokenizer and chat template, which together determine the ids of a text."""
        return self.parameters.get("rendering_fingerprint")

    @property
    def has_model(self) -> bool:
        """Whether a checkpoint scores the rows, alone or in addition to reward functions."""
        return not self.components or MODEL_TERM in self.components

    @property
    def folder(self) -> str | None:
        """The model's folder on the server."""
        return self.parameters.get("model")

    @property
    def is_live(self) -> bool:
        """Whether the reward model is served from versions, which its replies name."""
        return REWARD_VERSION in self.outputs

    @property
    def reads_texts(self) -> bool:
        """Whether a reward function, a template or a process reward reads the rows' metadata."""
        return bool(self.components or self.granularity or self.texts_only)

    @property
    def reward_outputs(self) -> tuple[str, ...]:
        """Outputs to request for the reward of each row, without the steps of a process reward."""
        explained = (REWARD_COMPONENTS, REWARD_ERRORS) if self.components else ()
        return (REWARDS, *explained, *((REWARD_VERSION,) if self.is_live else ()))

    @property
    def model_weight(self) -> float:
        """Weight of the reward model's score in the sum."""
        return dict(zip(self.components, self.weights, strict=True)).get(MODEL_TERM, 1.0)


class ServedModels:
    """The models that all servers of a client must declare alike."""

    def __init__(self, expected: Mapping[str, Expected]) -> None:
        """`expected`: parameters by model; of other models, all servers must have those of the first declaration."""
        self.declared: dict[str, ServedModel] = {}
        """The latest declaration of each model."""
        self._expected = expected

    @property
    def compared(self) -> set[str]:
        """Models whose parameters are compared."""
        return {*self._expected, *self.declared}

    def declare(self, model: str, config: Config) -> str:
        """Record the declaration in a server's configuration of a model; return "".

        If it is another one than expected, returns the difference and a remedy instead.
        """
        theirs = {key: item["string_value"] for key, item in config.get("parameters", {}).items()}
        served = ServedModel.of(theirs, [tensor["name"] for tensor in config.get("output", [])])
        ours = dict(self._expected.get(model, {}))
        if model in self.declared:
            ours = {**dict.fromkeys(served.meaning), **self.declared[model].meaning, **ours}
        different = sorted(key for key in ours if theirs.get(key) != ours[key])
        if not different:
            self.declared[model] = served
            return ""
        value, wanted = (values.get(different[0]) or "none" for values in (theirs, ours))
        remedy = "start both from the same YAML"
        if different[0] == STORE_ID:
            remedy = "serve both from the weights store of one run.dir, or start this client again if it has a new one"
        return f"{model} has {different[0]} {value}, but {wanted} is expected; {remedy}"
