"""The whole configuration as one class."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import PrivateAttr, model_validator

from rlhf_triton.config.actor import (
    ActorSection,
    check_actor,
)
from rlhf_triton.config.algorithms import ALGORITHMS
from rlhf_triton.config.environment import EnvironmentSection, check_environment
from rlhf_triton.config.keys import value_at, with_value
from rlhf_triton.config.rewards import (
    FunctionSpec,
    RewardTerm,
    Terms,
    check_components,
    check_terms,
    check_token_rewards,
    check_weights,
)
from rlhf_triton.config.sections import (
    CriticSection,
    GatewaySection,
    ModelSection,
    MonitoringSection,
    ReferenceSection,
    RewardSection,
    RunSection,
    Section,
    ServerSection,
    TrainerSection,
    check_ranks,
)
from rlhf_triton.config.training_checks import check_training
from rlhf_triton.errors import RlhfError
from rlhf_triton.models.placement import Place, check_gpus, devices_of, ranks_here
from rlhf_triton.store import control_key
from rlhf_triton.store.durable import read_json
from rlhf_triton.user_code import KEY_OPTION
from rlhf_triton.wire.contract import MODEL_TERM


class ConfigError(RlhfError, ValueError):
    """The YAML or an override is invalid; the message names the key, the value and what to do."""


@dataclass(frozen=True)
class UserKeys:
    """Keys that the user has set. They do not count when configurations are compared: only the values do."""

    keys: frozenset[str] = field(default=frozenset(), compare=False)


class RunConfig(Section):
    """The whole configuration file."""

    run: RunSection = RunSection()
    """Settings shared by all processes: the folder and name of the run, who may read it, and how it logs. The folder
    decides whether a run starts or resumes. Start all processes of a run with the same values."""
    server: ServerSection = ServerSection()
    """The tritonserver process that `rlhf-triton run` and `rlhf-triton serve` start: its addresses, limits and keys.
    A port of 0 selects a free one. See docs/operating.md for keys, docs/scaling.md for several servers."""
    reward: RewardSection = RewardSection()
    """The reward model, which tritonserver serves as `reward_model`. `model` is not needed if `rewards` contains only
    functions. By default the folder's own head scores texts in its own chat template;
    docs/your-models.md has the settings that published models need."""
    rewards: Terms | None = None
    """Terms of a weighted sum of rewards, by name; default: only the reward model, or, with an `environment`, only its
    own rewards. `model` is the reward model of the section `reward`; every other name is a Python function. See
    docs/rewards.md."""
    critic: CriticSection = CriticSection()
    """The critic, which is served while the sidecar trains it (`trainer`); version 0 is made from `model`. It needs a
    `model` if the algorithm has a critic (`ppo`, `vapo`, `sao`), otherwise none is served. See docs/live-critic.md."""
    reference: ReferenceSection = ReferenceSection()
    """The reference model: the frozen policy from which the KL is measured. tritonserver serves it if
    `actor.kl.reference` is `triton`; otherwise the actor keeps the initial policy for this."""
    trainer: TrainerSection = TrainerSection()
    """The critic sidecar: on which devices the critic is trained, how many optimizer steps an update takes, and when
    its weights are published. The targets come from the actor, or from a trainer of your own."""
    actor: ActorSection = ActorSection()
    """The training loop of the policy: how long it runs, how many responses a step has, and how far the weights that
    generate and score them may lag behind. Each subsection is one part of a step."""
    environment: EnvironmentSection | None = None
    """The environment that answers an agent's turns: a Python class in worker processes, or an agent that calls the
    policy itself. Default: none, each response is one turn. See docs/environments.md."""
    gateway: GatewaySection = GatewaySection()
    """The HTTP gateway for other trainers (`rlhf-triton gateway`). It is a process in front of the servers of
    `actor.client`, whose settings its requests use. See docs/gateway.md."""
    monitoring: MonitoringSection = MonitoringSection()
    """Prometheus metrics of actor and sidecar, which are off unless a port is set. The server's are on
    `server.metrics_port`. See docs/monitoring.md."""
    report: FunctionSpec | None = None
    """`path/to/file.py:name` or `package.module:name` of a function that adds sections to the run's report."""

    _roles: frozenset[str] = PrivateAttr(frozenset())  # models that a YAML without `actor` serves
    _written: UserKeys = PrivateAttr(UserKeys())

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        """Set keys without a value to the values that the algorithm was published with."""
        name = value_at(data, "actor.algorithm.name")
        if isinstance(name, str) and name in ALGORITHMS:
            for key, value in ALGORITHMS[name].recipe.items():
                section, _, last = key.rpartition(".")
                values = value_at(data, section)
                if values is None or (isinstance(values, dict) and last not in values):
                    data = with_value(data, key, value)
        return data

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if "actor" not in self.model_fields_set or self.actor.model_fields_set == {"client"}:
            self._roles = frozenset({"reward", "rewards", "critic"} & self.model_fields_set)
        check_terms(self.rewards or {})
        check_weights(self.rewards, self.environment)
        slow = [name for name, term in self.functions.items() if term.timeout_s >= self.actor.client.deadline_s]
        if slow:
            raise ValueError(
                f"rewards.{slow[0]}.timeout_s ({self.functions[slow[0]].timeout_s:g}) must be below "
                f"actor.client.deadline_s ({self.actor.client.deadline_s:g}), or the actor times out first"
            )
        for key, section in (("reward", self.reward), ("critic", self.critic), ("reference", self.reference)):
            check_ranks(key, section)
        check_token_rewards(self.reward)
        algorithm = self.actor.algorithm
        if self.uses_reward_model and self.reward.process and not algorithm.defaults.takes_process_rewards:
            others = [name for name, other in ALGORITHMS.items() if other.takes_process_rewards]
            raise ValueError(
                f"actor.algorithm.name is {algorithm.name}, which has no published form for process rewards "
                f"(reward.process); choose {', '.join(others)}, or remove reward.process"
            )
        if algorithm.defaults.needs_components and algorithm.advantage == "auto":
            check_components(algorithm.name, self.rewards, self.environment)
        check_actor(self.actor)
        if self.environment is not None:
            check_environment(self.environment, self.actor)
            if self.run.deterministic and self.actor.generation.engine == "vllm":
                raise ValueError(
                    "run.deterministic: with an environment, vLLM's turns differ from run to run; set "
                    "actor.generation.engine: slots, or remove run.deterministic"
                )
        actor = self.actor
        trainer = self.trainer
        steps = actor.optimizer_steps
        check_training("actor.policy", actor.policy, actor.optimizer, ranks=actor.ranks, total_steps=steps)
        steps = trainer.optimizer.max_steps
        check_training("trainer", trainer, trainer.optimizer, ranks=trainer.ranks, total_steps=steps)
        if trainer.publish.format == "adapter" and not trainer.lora_rank:
            raise ValueError("trainer.publish.format: adapter needs trainer.lora_rank above 0; set it, or set merged")
        check_gpus(self.places)
        return self

    @property
    def written(self) -> frozenset[str]:
        """Keys (`section.key`) that the YAML or the command line sets, except to 0, false, null or `auto`."""
        return self._written.keys

    @property
    def longest_row(self) -> tuple[int, str]:
        """Maximum tokens of a row in this run, and a text that names the keys behind it."""
        if self.environment is None:
            return self.actor.longest_row
        most = self.environment.max_tokens
        return most, f"environment.max_tokens is {most}; lower it"

    @property
    def truncated(self) -> str:
        """`environment.truncated`; `score` without an environment, whose rows no other limit ends."""
        return "score" if self.environment is None else self.environment.truncated

    @property
    def published_choices(self) -> str:
        """The algorithm's settings as text for a log line, with the published values where they differ."""
        algorithm = self.actor.algorithm
        choices = [f"actor.algorithm.loss {algorithm.loss_name} (clip {', '.join(f'{x:g}' for x in algorithm.clip)})"]
        for key, value in algorithm.defaults.recipe.items():
            chosen = functools.reduce(getattr, key.split("."), cast(Any, self))
            choices.append(f"{key} {chosen}" if chosen == value else f"{key} {chosen} (published: {value})")
        return ", ".join(choices)

    @property
    def server_dir(self) -> Path:
        """Folder of the server's own files."""
        return self.server.dir or self.run.dir

    @property
    def server_file(self) -> Path:
        """File in which a server that is ready writes its process ID and its URLs."""
        return self.server_dir / "server.json"

    def server_url(self, protocol: Literal["http", "grpc", "metrics"]) -> str:
        """Return `host:port` of the server.

        If the configured port is 0, the server has chosen one: return what it wrote when it was ready, or port 0.
        """
        configured = f"{self.server.host}:{getattr(self.server, f'{protocol}_port')}"
        if not configured.endswith(":0"):
            return configured
        return str((read_json(self.server_file) or {}).get(protocol, configured))

    @property
    def has_actor(self) -> bool:
        """Whether this project's actor trains; False if the YAML serves models for another trainer."""
        return not self._roles

    @property
    def functions(self) -> dict[str, RewardTerm]:
        """The reward terms that are Python functions, by name."""
        return {name: term for name, term in (self.rewards or {}).items() if name != MODEL_TERM}

    def hidden_variables(self, options: Mapping[str, Any]) -> list[str]:
        """Return the environment variables to hide from processes that run the user's code with these options.

        These are all keys of the run except the one that the options name.
        """
        keys = [
            control_key.VARIABLE,
            control_key.TRAINING_VARIABLE,
            self.server.training_key_env,
            self.gateway.key_env,
            *(each.options.get(KEY_OPTION) for each in self.functions.values()),
        ]
        return sorted({key for key in keys if isinstance(key, str)} - {options.get(KEY_OPTION)})

    @property
    def serves_critic(self) -> bool:
        """Whether the critic is served and trained: the algorithm uses it or, without an actor, the YAML has one."""
        return "critic" in self._roles if self._roles else self.actor.algorithm.uses_critic

    @property
    def serves_rewards(self) -> bool:
        """Whether rewards are served; False for a critic alone, and for an environment without `rewards`."""
        return self._roles != {"critic"} and (self.environment is None or self.rewards is not None)

    @property
    def needs_server(self) -> bool:
        """Whether any model is served; an environment's own rewards need no server."""
        return self.serves_rewards or self.serves_critic or self.actor.kl.serves_reference

    @property
    def uses_reward_model(self) -> bool:
        """Whether the reward model is served; False if `rewards` contains only functions."""
        return self.serves_rewards and (self.rewards is None or MODEL_TERM in self.rewards)

    @property
    def served_sections(self) -> dict[str, ModelSection]:
        """Sections of the models that tritonserver loads, by section name."""
        sections: dict[str, tuple[bool, ModelSection]] = {
            "reward": (self.uses_reward_model, self.reward),
            "critic": (self.serves_critic, self.critic),
            "reference": (self.actor.kl.serves_reference, self.reference),
        }
        return {name: section for name, (is_served, section) in sections.items() if is_served}

    @property
    def places(self) -> list[Place]:
        """The devices of every model, and of a vLLM server that `rlhf-triton run` starts on named GPUs.

        Server, trainer and actor are on one machine unless `actor.client.servers` names the servers.
        """
        vllm = self.actor.generation.vllm
        apart = bool(self.actor.client.servers)
        server, trainer, actor = ("server", "trainer", "actor") if apart else ("", "", "")
        places = [
            Place(
                f"{key}.device",
                devices_of(section.device, section.tensor_parallel),
                server,
                every=section.device == "cuda" and section.tensor_parallel == 1,
            )
            for key, section in self.served_sections.items()
        ]
        if self.serves_critic:
            ranks = ranks_here(self.trainer.ranks)
            places.append(Place("trainer.device", devices_of(self.trainer.device, ranks), trainer))
        if self.has_actor:
            ranks = ranks_here(self.actor.ranks)
            places.append(Place("actor.policy.device", devices_of(self.actor.policy.device, ranks), actor))
            if self.actor.generation.engine == "vllm" and not vllm.servers:
                named = (vllm.cuda_devices or "").split(",")
                gpus = tuple(f"cuda:{index.strip()}" for index in named if index.strip().isdigit())
                places.append(Place("actor.generation.vllm.cuda_devices", gpus, actor))
        return places

    @property
    def gpu_precisions(self) -> str:
        """Device and precision of every model on a GPU, as text for a log line; "" if all models are on the CPU."""
        used = {key: (section.device, section.dtype) for key, section in self.served_sections.items()}
        if self.serves_critic:
            used["trainer"] = (self.trainer.device, self.trainer.precision)
        if self.has_actor:
            used["actor.policy"] = (self.actor.policy.device, self.actor.policy.precision)
        return ", ".join(f"{key} {device} in {how}" for key, (device, how) in used.items() if device != "cpu")
