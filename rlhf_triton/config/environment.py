"""The YAML's `environment`: what answers the turns of an agent, and the limits of a trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from rlhf_triton.config.fields import Count, Seconds, Section
from rlhf_triton.config.rewards import FunctionSpec, Options

if TYPE_CHECKING:
    from rlhf_triton.config.actor import ActorSection


class EnvironmentSection(Section):
    """An environment of agents: a Python class in worker processes, or an OpenEnv server."""

    class_: FunctionSpec | None = Field(default=None, alias="class")
    """`path/to/file.py:name` or `package.module:name` of a class with `reset` and `step`, or of one for TRL's
    `environment_factory`. Each trajectory has an instance of its own."""
    url: Annotated[str, Field(pattern=r"^(ws|http)s?://[^\s/]+")] | None = None
    """An OpenEnv server, in place of `class`: `ws://` or `http://`. Each trajectory has a session of its own."""
    agent: FunctionSpec | None = None
    """An agent, in place of `class`: `path/to/file.py:name` or `package.module:name` of `run(base_url, task)`, sync or
    async, which calls the policy at `base_url` as OpenAI's or Anthropic's API, and returns a reward or None. `task` has
    the columns of the prompt and a `seed`."""
    options: Options = Field(default={})
    """Keyword arguments of the class or the agent. With `url`: `action`, name of the action's text field (default
    `message`), and `observation`, name of the observation's (default: its only text field, otherwise all fields as
    JSON)."""
    reward: FunctionSpec | None = None
    """Function with TRL's signature that scores a trajectory by its environment: `f(environments, **columns)`."""
    weight: float = 1.0
    """Factor of the environment's own rewards."""
    max_turns: Count = 8
    """Turns that the policy generates in a trajectory; of an agent, its calls of the policy."""
    max_tokens: Count = 4096
    """Tokens of a trajectory: its prompt, the policy's turns and what the environment answers."""
    step_timeout_s: Seconds = 30.0
    """Timeout for one call of the environment; on expiry the trajectory has failed. An agent only has `timeout_s`."""
    timeout_s: Seconds = 600.0
    """Timeout for a trajectory; on expiry it is truncated."""
    restarts: Annotated[int, Field(ge=0)] = 2
    """How often a trajectory begins again whose environment is lost: its worker has died, or a call raised an OSError,
    as when its server hangs up."""
    truncated: Literal["mask", "bootstrap", "score"] = "mask"
    """Of a trajectory that reaches a limit: `mask` leaves it out, `bootstrap` adds the critic's value of its end,
    `score` takes the rewards until then."""
    workers: Count = 1
    """Number of worker processes of each of the `actor.ranks`; each holds many instances."""
    concurrent: Count = 256
    """How many trajectories of a rank may have an instance at the same time; others wait."""
    memory_mib: Count = 4096
    """Memory limit of a worker; the environment gets a MemoryError beyond it."""
    max_observation_chars: Count = 20000
    """Limit on one observation, or one result of a tool, in characters."""

    @model_validator(mode="after")
    def _one_of_three(self) -> EnvironmentSection:
        kinds = {"class": self.class_, "url": self.url, "agent": self.agent}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given)} are given; keep one" if given else "give class, url or agent")
        if self.agent is not None and self.reward is not None:
            raise ValueError("reward scores environments, but an agent returns its reward itself; remove one of them")
        return self


def check_environment(environment: EnvironmentSection, actor: ActorSection) -> None:
    """Raise ValueError if settings of `environment` and `actor` contradict each other."""
    algorithm = actor.algorithm
    if environment.max_tokens <= actor.prompts.max_tokens:
        raise ValueError(
            f"environment.max_tokens ({environment.max_tokens}), which a whole trajectory may have, must be above "
            f"actor.prompts.max_tokens ({actor.prompts.max_tokens})"
        )
    if environment.truncated == "bootstrap" and not algorithm.uses_critic:
        raise ValueError(
            f"environment.truncated is bootstrap, which needs a critic, but {algorithm.name} has none; set it to mask "
            "or score"
        )
    unfit = {
        "actor.algorithm.prompt_candidates": algorithm.prompt_candidates > 1,
        "actor.prompts.too_long: truncate": actor.prompts.too_long == "truncate",
        "actor.rewards.overlong_tokens": actor.rewards.overlong_tokens > 0,
        "actor.rewards.missing_eos_penalty": actor.rewards.missing_eos_penalty > 0,
    }
    if wrong := [key for key, is_wrong in unfit.items() if is_wrong]:
        raise ValueError(f"{wrong[0]} cannot be used with an environment; remove one of them")
