"""The YAML's `rewards`: a weighted sum of the scores of the reward model and of Python functions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat

from rlhf_triton.config.fields import Count, Section
from rlhf_triton.errors import reason_of
from rlhf_triton.user_code import TIMEOUT_OPTION, check_spec
from rlhf_triton.wire.contract import MODEL_TERM, PROCESS, TEXTS_ONLY

if TYPE_CHECKING:
    from rlhf_triton.config.environment import EnvironmentSection
    from rlhf_triton.config.sections import RewardSection

TERM_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
OTHER_NAMES = re.compile(r"environment|version|.*_missing")  # what else `train_rollouts/reward_…` is about


FunctionSpec = Annotated[str, AfterValidator(check_spec)]


def _for_a_call(value: dict[str, Any]) -> dict[str, Any]:
    wrong = next((name for name in value if not name.isidentifier() or name == TIMEOUT_OPTION), None)
    if wrong is not None:
        why = "set timeout_s of the section instead" if wrong == TIMEOUT_OPTION else "not a valid argument name"
        raise ValueError(f"{wrong!r}: {why}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:  # a date, or .nan
        raise ValueError(f"not expressible in JSON: {error}") from error
    return value


Options = Annotated[dict[str, Any], AfterValidator(_for_a_call)]
"""Keyword arguments of a function or a class."""


class RewardTerm(Section):
    """A term of the weighted sum of rewards: `model`, the model of the section `reward`, or a Python function."""

    weight: float = 1.0
    """Weight of the score in the sum; 0: the score is only charted, and its failure does not mask a row."""
    function: FunctionSpec | None = None
    """`path/to/file.py:name` or `package.module:name`, called with one `Sample`; not allowed for `model`."""
    groupwise: bool = False
    """True: the function receives all responses to a prompt and returns one number per response."""
    options: Options = Field(default={})
    """Keyword arguments of the function, or of the class's constructor; must be expressible in JSON."""
    timeout_s: PositiveFloat = 2.0
    """Timeout for one sample or group; on expiry, the worker is killed, and the sample or group gets no reward."""
    workers: Count = 2
    """Worker processes."""


Terms = Annotated[dict[str, RewardTerm], Field(min_length=1)]


def check_weights(terms: dict[str, RewardTerm] | None, environment: EnvironmentSection | None) -> None:
    """Raise ValueError if all rewards have weight 0."""
    weights = {f"rewards.{name}.weight": term.weight for name, term in (terms or {}).items()}
    if environment is None and weights and not any(weights.values()):
        raise ValueError(
            f"{' and '.join(weights)} {'is' if len(weights) == 1 else 'are'} 0, so every reward would be 0; set "
            "at least one weight to another value"
        )


def check_components(
    algorithm: str, terms: dict[str, RewardTerm] | None, environment: EnvironmentSection | None
) -> None:
    """Raise ValueError unless at least two rewards count, which `algorithm` needs."""
    counted = [term for term in (terms or {}).values() if term.weight]
    if len(counted) + (environment is not None) < 2:
        raise ValueError(
            f"actor.algorithm.name: {algorithm} standardises each of several rewards, but this run has one; add "
            "another to `rewards`, or choose grpo"
        )


def check_terms(terms: dict[str, RewardTerm]) -> None:
    """Raise ValueError if a name is invalid, `model` sets more than a weight, or another term has no function."""
    for name, term in terms.items():
        if not TERM_NAME.fullmatch(name):
            raise ValueError(
                f"rewards.{name}: a name must have 1 to 40 characters from a-z, 0-9 and _, and start with a letter"
            )
        if OTHER_NAMES.fullmatch(name):
            raise ValueError(
                f"rewards.{name}: train_rollouts/reward_{name} is another metric; choose another name, such as "
                f"{name}_reward"
            )
        fields = {key: field.default for key, field in RewardTerm.model_fields.items() if key != "weight"}
        wrong = sorted(key for key, default in fields.items() if getattr(term, key) != default)
        if name == MODEL_TERM and wrong:
            raise ValueError(
                f"rewards.{MODEL_TERM}.{wrong[0]}: {MODEL_TERM!r} is the model of the section `reward` and accepts "
                "only a weight; give a function another name"
            )
        if name != MODEL_TERM and term.function is None:
            raise ValueError(
                f"rewards.{name}.function is missing; set it (only {MODEL_TERM!r}, the model of the section `reward`, "
                "has none)"
            )


TokenNames = list[str | int]


class LogitSection(Section):
    """A reward read from the next-token logits of a causal LM after a row's last token, without generation."""

    tokens: Annotated[TokenNames, Field(min_length=1)]
    """Tokens that count for the response, each as a text that is one token, such as "yes", a vocabulary entry, or an
    id."""
    against: TokenNames = Field(default=[])
    """Tokens that count against the response: the score is log p(tokens) - log p(against). Default: none; the score is
    the logit of `tokens`."""


class ProcessSection(Section):
    """A reward for every step or token of a response."""

    granularity: Literal["step", "token"] = "step"
    """`step`: one reward at the end of each step; `token`: one reward at each token."""
    separator: str | None = Field(default=None, min_length=1)
    """Text that ends a step; default: each row's `step_ends`."""
    mark: str | None = Field(default=None, min_length=1)
    """Text that the model expects after each step, instead of `separator`; requests must then send texts. Default:
    `separator`."""


class TokenRewardSettings(Section):
    """Settings of the section `reward` for rewards read at single tokens."""

    template: str | None = None
    """Jinja template, or its file, that renders the text to score. See docs/process-rewards.md."""
    generation_prompt: bool = False
    """End a chat with the chat template's prompt for the next reply."""
    logit: LogitSection | None = None
    """Read the reward from the next-token logits after a row's last token, without generation; `model` is then a causal
    LM. Default: a trained head. See docs/process-rewards.md."""
    process: ProcessSection | None = None
    """Reward every step or token of a response, as process reward models do. Default: one reward per response. See
    docs/process-rewards.md."""
    score: Literal["auto", "logit", "probability"] = "auto"
    """For `logit` and `process`: `probability` is the sigmoid. `auto`: `probability` for steps with two labels or
    `logit.against`, otherwise `logit`."""


def check_token_rewards(reward: RewardSection) -> None:
    """Raise ValueError if settings of the section `reward` contradict each other."""
    logit = reward.logit
    process = reward.process
    if logit is not None or process is not None:
        what = "reward.logit" if logit is not None else "reward.process"
        _need(reward, what, pooling="auto", store=False, append_eos=False)
        if reward.attribute_weights == "separate":
            _need(reward, what, attribute_weights=None)
    if logit is not None:
        _need(reward, "reward.logit", attribute_weights=None, tensor_parallel=1)
        if reward.score == "probability" and not logit.against:
            raise ValueError(
                "reward.score: probability needs tokens to compare with; set reward.logit.against, or remove "
                "reward.score"
            )
    elif process is None:
        _need(reward, "a reward without reward.logit and reward.process", score="auto")
    if process is not None:
        _need(reward, "reward.process", template=None, generation_prompt=False)
    if reward.template is not None or reward.generation_prompt or process is not None:
        _need(reward, "a reward with its own text", store=False, text="joined")
    if reward.template is not None:
        _need(reward, "reward.template, which can write it,", generation_prompt=False)


def read_template(template: str) -> str:
    """Return the template's source: the setting itself, or the content of the file that it names.

    Raises:
        ValueError: the file cannot be read.
    """
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error).removeprefix(f"{template}: ")
        raise ValueError(
            f"reward.template: {template!r} is neither a Jinja template nor a readable file ({reason}); correct it"
        ) from error


def text_parameters(reward: RewardSection) -> dict[str, str]:
    """Return the model parameters that define which text is scored and how, without unset ones.

    Raises:
        ValueError: the template's file cannot be read.
    """
    process = reward.process
    parameters = {
        **client_parameters(reward),
        "text": reward.text,
        "step_separator": None if process is None else process.separator,
        "step_mark": None if process is None else process.mark,
        "logit": None if reward.logit is None else json.dumps(reward.logit.model_dump()),
        "template": None if reward.template is None else read_template(reward.template),
        "score": None if reward.score == "auto" else reward.score,
        "generation_prompt": "true" if reward.generation_prompt else None,
    }
    return {name: value for name, value in parameters.items() if value is not None}


def client_parameters(reward: RewardSection) -> dict[str, str | None]:
    """Return the model parameters that clients need, about inputs and outputs; None: not set."""
    process = reward.process
    return {
        PROCESS: None if process is None else process.granularity,
        TEXTS_ONLY: "true" if reward.template or (process is not None and process.mark) else None,
        "add_special_tokens": json.dumps(reward.add_special_tokens),
        "append_eos": json.dumps(reward.append_eos),
    }


def _need(reward: RewardSection, feature: str, **values: Any) -> None:
    for name, value in values.items():
        if getattr(reward, name) != value:
            raise ValueError(
                f"reward.{name} is {getattr(reward, name)!r}, but {feature} needs {value!r}; remove reward.{name}"
            )
