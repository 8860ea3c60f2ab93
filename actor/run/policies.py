"""Creates the policy and its update on one or several ranks; ranks other than 0 execute what rank 0 announces."""

import functools
import logging
import os
import threading

import torch

from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.generation.conversations import ConversationRunner
from rlhf_triton.actor.generation.generation import Generation
from rlhf_triton.actor.policy.policy import Policy, local_generation
from rlhf_triton.actor.policy.update import PolicyUpdate
from rlhf_triton.config.actor import GenerationSection
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.models.gpu import use_gpu
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks, RankLost, Ranks

logger = logging.getLogger(__name__)


def make_policy(config: RunConfig, method: Method, ranks: AnyRanks = ALONE) -> tuple[Policy, PolicyUpdate]:
    """Load the policy of a run; return it and its update."""
    actor = config.actor
    torch.manual_seed(config.run.seed)  # LoRA adapters are initialised randomly, but equal on all ranks
    policy = Policy(actor, ranks, config.longest_row, functools.partial(_make_generation, config))
    return policy, PolicyUpdate(actor, policy, method)


def _make_generation(config: RunConfig, policy: Policy, settings: GenerationSection) -> Generation:
    """Create the engine that generates the responses of a run, and its environments if it has any; collective."""
    if settings.engine == "vllm":
        from rlhf_triton.actor.vllm.generation import VllmGeneration  # deferred: HTTP

        generation: Generation = VllmGeneration(config, policy)
    else:
        generation = local_generation(policy, settings)
    if config.environment is not None:
        make_runner = functools.partial(
            _runner_class(config.environment),
            config.environment,
            policy.tokenizer,
            max_prompt_tokens=config.actor.prompts.max_tokens,
            vocab_size=policy.vocab_size,
            lockstep=config.run.deterministic,
            hidden_variables=config.hidden_variables(config.environment.options),
            stop_strings=settings.stop_strings,
            min_new_tokens=settings.min_new_tokens,
        )
        generation.runner = policy.ranks.run_on_all_ranks(make_runner)
    return generation


def _runner_class(environment: EnvironmentSection) -> type[ConversationRunner]:
    if environment.agent is None:
        return ConversationRunner
    try:
        from rlhf_triton.actor.capture.agents import CapturedAgents
    except ModuleNotFoundError as error:
        raise ConfigError(f"environment.agent needs {error.name}: pip install '.[gateway]'") from error
    return CapturedAgents


def follow_rank_0(config: RunConfig, ranks: Ranks) -> None:
    """Execute the operations that rank 0 announces, until it ends the job. Call on every rank except 0.

    Raises:
        RankLost: rank 0 has died.
    """
    try:
        policy, update = make_policy(config, Method.from_settings(config.actor.algorithm, config.actor.kl), ranks)
    except RlhfError as error:  # process edge: rank 0 meets the same error, reports it and ends the job
        logger.warning("rank %d cannot start: %s", ranks.rank, error)
        ranks.operations.follow({})
        return
    threading.Thread(target=_follow_sampling, args=(policy, config.actor.threads), daemon=True).start()
    ranks.operations.follow({**policy.operations, "update": functools.partial(update.run, None)})


def _follow_sampling(policy: Policy, threads: int) -> None:
    torch.set_num_threads(threads)  # torch keeps this setting per thread
    use_gpu(policy.generator.device)
    try:
        policy.follow_sampling()
    except RankLost:  # the main thread ends this process
        return
    except BaseException:  # thread edge: without this thread, rank 0 would wait for rows forever
        logger.exception("rank %d stops after an unexpected error", policy.ranks.rank)
        logging.shutdown()
        os._exit(1)
