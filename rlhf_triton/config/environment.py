"""The YAML's `environment` section: the environment of an agent, and limits of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, PositiveFloat, model_validator

from rlhf_triton.config.fields import Count, Section
from rlhf_triton.config.rewards import FunctionSpec, Options

if TYPE_CHECKING:
    from rlhf_triton.config.actor import ActorSection


class EnvironmentSection(Section):
    """An environment for agents: a Python class in worker processes, or an agent that calls the policy."""

    class_: FunctionSpec | None = Field(default=None, alias="class")
    """`path/to/file.py:name` or `package.module:name` of a class with `reset` and `step`, or one for TRL's
    `environment_factory`; one instance per conversation. For an OpenEnv server, see docs/environments.md."""
    agent: FunctionSpec | None = None
    """An agent instead of `class`: a function `run(base_url, task)` that calls the policy at `base_url` through
    OpenAI's or Anthropic's API. See docs/environments.md."""
    options: Options = Field(default={})
    """Keyword arguments of the class or agent."""
    reward: FunctionSpec | None = None
    """Function with TRL's signature, `f(environments, **columns)`, that scores conversations."""
    max_turns: Count = 8
    """Maximum turns of the policy in a conversation; for an agent, its calls of the policy."""
    max_tokens: Count = 4096
    """Maximum tokens of a conversation: prompt, turns and observations."""
    timeout_s: PositiveFloat = 600.0
    """Timeout of a conversation, which is then truncated. If a single call takes longer, the conversation fails and its
    worker is killed."""
    truncated: Literal["mask", "bootstrap", "score"] = "mask"
    """What to do with conversations that reach a limit: `mask` excludes them, `bootstrap` adds the critic's value of
    the end, `score` uses the rewards so far."""
    workers: Count = 1
    """Worker processes per rank; each holds many instances."""

    @model_validator(mode="after")
    def _one_of_two(self) -> EnvironmentSection:
        if (self.class_ is None) == (self.agent is None):
            raise ValueError("set either class or agent")
        if self.agent is not None and self.reward is not None:
            raise ValueError("reward scores environments, but an agent returns its reward itself; remove one of them")
        return self


def check_environment(environment: EnvironmentSection, actor: ActorSection) -> None:
    """Raise ValueError if settings of `environment` and `actor` contradict each other."""
    algorithm = actor.algorithm
    if environment.max_tokens <= actor.prompts.max_tokens:
        raise ValueError(
            f"environment.max_tokens ({environment.max_tokens}), the limit of a whole conversation, must be above "
            f"actor.prompts.max_tokens ({actor.prompts.max_tokens}), the limit of its prompt"
        )
    if environment.truncated == "bootstrap" and not algorithm.uses_critic:
        raise ValueError(
            f"environment.truncated is bootstrap, which needs a critic, but {algorithm.name} has none; set it to mask "
            "or score"
        )
    unfit = {
        "actor.prompts.too_long: truncate": actor.prompts.too_long == "truncate",
        "actor.rewards.overlong_tokens": actor.rewards.overlong_tokens > 0,
        "actor.rewards.missing_eos_penalty": actor.rewards.missing_eos_penalty > 0,
    }
    if wrong := [key for key, is_wrong in unfit.items() if is_wrong]:
        raise ValueError(f"{wrong[0]} cannot be used with an environment; remove one of them")
