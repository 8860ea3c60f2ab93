"""The YAML's `actor` section, which configures the training loop of the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from python_backend.config.actor_parts import (
    AlgorithmSection,
    ClientSection,
    GenerationSection,
    KLSection,
    PolicySection,
    PromptFileSection,
    PromptsSection,
    RewardsSection,
    UpdateSection,
    ValidationSection,
)
from python_backend.config.algorithms import ON_POLICY_LOSSES
from python_backend.config.fields import Count, CountOrZero, Seconds, Section
from python_backend.config.optimizer import OptimizerSection


class ActorSection(Section):
    """The training loop of the policy."""

    ranks: Count = 1
    """Number of processes (ranks) that generate responses and train the policy together, one per GPU. Each holds a
    shard of the weights, gradients and optimizer state (FSDP2). Above 1, torchrun starts them; see docs/scaling.md."""
    steps: Count = 100
    """Number of steps; each consists of a rollout and the update on it."""
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    """Time limit: the run ends with a checkpoint after the step that exceeds it; the next start resumes from there."""
    rollout_size: Count = 128
    """Responses per step."""
    max_staleness: CountOrZero = 1
    """How many of the critic updates sent before a row is scored may be missing from the weights that score it; 0 with
    `run.deterministic`."""
    one_step_off_policy: bool = False
    """Generate the responses of the next step while the policy is updated. They come from the policy before that
    update, never from an older one. Needs a second copy of the policy."""
    checkpoint_every: Count = 50
    """Steps between checkpoints of policy and critic."""
    stop_grace_s: Seconds = 25.0
    """Time limit after SIGTERM or Ctrl-C for finishing the current update and writing a checkpoint of policy and critic
    at the last complete step. When it expires, the actor exits without that checkpoint. Kubernetes kills a pod after
    30 s by default: if you raise this, raise its `terminationGracePeriodSeconds` too. Both must be longer than a policy
    update."""
    keep_checkpoints: Count = 2
    """Newest policy checkpoints to keep."""
    threads: Count = 1
    """Torch threads."""
    logged_texts: CountOrZero = 1
    """Responses per step logged to rollouts.jsonl and to the trackers' table of (step, prompt, response, reward)."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Experiment trackers that get the metrics in addition to metrics.jsonl and TensorBoard. Each must be installed and
    is configured by its own environment variables."""
    policy: PolicySection = PolicySection()
    prompts: PromptsSection = PromptsSection()
    generation: GenerationSection = GenerationSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    kl: KLSection = KLSection()
    rewards: RewardsSection = RewardsSection()
    update: UpdateSection = UpdateSection()
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW and the learning-rate schedule of the policy. A step of the run takes `update.epochs` * `rollout_size` /
    `update.minibatch_size` optimizer steps."""
    validation: ValidationSection = ValidationSection()
    client: ClientSection = ClientSection()

    @property
    def is_one_update(self) -> bool:
        """Whether the policy that sampled a rollout is updated on it once, as one minibatch: all ratios are then 1."""
        one_minibatch = self.update.minibatch_size >= self.rollout_size
        is_ours = self.generation.engine != "vllm"  # whose probabilities differ by rounding
        return self.update.epochs == 1 and one_minibatch and not self.one_step_off_policy and is_ours

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
    """Check constraints between fields. Raises ValueError, which names the fields and their values."""
    algorithm, generation, size = actor.algorithm, actor.generation, actor.rollout_size
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
    if algorithm.loss_name in ON_POLICY_LOSSES:
        _check_on_policy(actor)
    _check_vllm(generation, actor.policy.device)
    if algorithm.critic_warmup_steps and not algorithm.uses_critic:
        raise ValueError(
            f"actor.algorithm.critic_warmup_steps ({algorithm.critic_warmup_steps}): {algorithm.name} has no critic; "
            "remove it"
        )
    if algorithm.critic_warmup_steps >= actor.steps:
        raise ValueError(
            f"actor.algorithm.critic_warmup_steps ({algorithm.critic_warmup_steps}) must be below actor.steps "
            f"({actor.steps}), or the policy is never updated"
        )
    if generation.min_new_tokens > generation.max_new_tokens:
        raise ValueError(
            f"actor.generation.min_new_tokens ({generation.min_new_tokens}) is above actor.generation.max_new_tokens "
            f"({generation.max_new_tokens})"
        )
    if "" in generation.stop_strings:
        raise ValueError("actor.generation.stop_strings contains an empty string, which ends every response; remove it")
    _check_adapters(actor.policy)
    _check_rewards(actor)
    _check_prompts(actor.prompts, actor.steps)


def _check_prompts(prompts: PromptsSection, steps: int) -> None:
    """Reject files beside `path`, an empty list without it, and files whose steps do not fit the run."""
    files, given = prompts.files, prompts.model_fields_set
    if not files and "files" in given and "path" not in given:
        raise ValueError("actor.prompts.files is empty; list a file, or set actor.prompts.path")
    if files and prompts.path != PromptsSection().path:
        raise ValueError(
            f"actor.prompts.path ({prompts.path}) and actor.prompts.files are both set; add the path to the files, or "
            "remove one of the two"
        )
    for i, file in enumerate(files):
        if file.until_step is not None and file.until_step < file.from_step:
            raise ValueError(
                f"actor.prompts.files.{i}.until_step ({file.until_step}) is before its from_step ({file.from_step})"
            )
    _check_active_files(files, steps)


def _check_active_files(files: Sequence[PromptFileSection], steps: int) -> None:
    """Reject steps without an active file, and steps in which a path is active more than once."""
    # A set of active files begins at step 1, where a file starts, or after one has ended.
    begins = {1, *(file.from_step for file in files), *((file.until_step or 0) + 1 for file in files)}
    for step in sorted(step for step in begins if files and step <= steps):
        paths = [str(file.path) for file in files if file.is_active(step)]
        if not paths:
            raise ValueError(
                f"actor.prompts.files: no file is active in step {step}, but actor.steps is {steps}; change from_step "
                "or until_step of a file"
            )
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise ValueError(
                f"actor.prompts.files: {twice[0]} occurs more than once in step {step}; give disjoint steps"
            )


def _check_vllm(generation: GenerationSection, device: str) -> None:
    """Reject a vLLM server on GPUs that are not named, and importance weights without use or comparable log-probs."""
    if (
        generation.engine == "vllm"
        and device != "cpu"
        and not (generation.vllm.servers or generation.vllm.cuda_devices)
    ):
        raise ValueError(
            "actor.generation.vllm.cuda_devices is not set, so vLLM would take most of the first GPU; name its GPUs, "
            "such as '1', or running servers in actor.generation.vllm.servers"
        )
    cap, settings = generation.vllm.importance_cap, ("top_k", "top_p", "repetition_penalty", "min_new_tokens")
    if cap is None:
        return
    if generation.engine != "vllm":
        raise ValueError(
            f"actor.generation.vllm.importance_cap ({cap:g}) needs actor.generation.engine: vllm (it is "
            f"{generation.engine}); remove it, or set the engine"
        )
    changed = [name for name in settings if getattr(generation, name) != GenerationSection.model_fields[name].default]
    if changed:
        raise ValueError(
            f"actor.generation.vllm.importance_cap ({cap:g}) needs log-probs that vLLM computes before "
            f"actor.generation.{changed[0]} ({getattr(generation, changed[0])}); remove one of them"
        )


def _check_adapters(policy: PolicySection) -> None:
    """Reject LoRA settings if `lora_rank` is 0."""
    if not policy.lora_rank and (policy.lora_targets != "all-linear" or policy.lora_dropout):
        raise ValueError(
            f"actor.policy.lora_targets ({policy.lora_targets}) and actor.policy.lora_dropout "
            f"({policy.lora_dropout:g}) need actor.policy.lora_rank above 0; set it, or remove them"
        )


def _check_rewards(actor: ActorSection) -> None:
    """Reject penalties that would have no effect."""
    rewards, algorithm, kl = actor.rewards, actor.algorithm, actor.kl
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


def _check_on_policy(actor: ActorSection) -> None:
    """Reject off-policy settings for an algorithm without probability ratios."""
    reason = f"{actor.algorithm.name}'s loss is on-policy, without probability ratios"
    if actor.update.epochs > 1:
        raise ValueError(
            f"actor.update.epochs ({actor.update.epochs}): {reason}, so a rollout can be used only once; set it to 1, "
            "or choose another algorithm"
        )
    if actor.one_step_off_policy:
        raise ValueError(
            f"actor.one_step_off_policy: {reason}, but the responses would come from the previous policy; remove it, "
            "or choose another algorithm"
        )
