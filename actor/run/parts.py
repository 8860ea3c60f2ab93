"""Creates the parts of a run from its configuration."""

from __future__ import annotations

from actor.algorithms.kl_control import KLControl
from actor.algorithms.methods import Method
from actor.algorithms.shaping import RewardShaper
from actor.data.compute import in_a_thread_of
from actor.data.prompt_stream import PromptStream
from actor.data.prompts import PromptReader, read_prompts
from actor.data.step_inputs import StepInputs
from actor.policy.checkpoint import RunState
from actor.run.critic_updates import CriticUpdates
from actor.run.policies import make_policy
from actor.run.recorder import Bookkeeper
from actor.run.rollouts import Rollouts
from actor.run.stopping import Stop
from actor.run.validation import Validator
from actor.scoring.client import TritonClient
from actor.scoring.reference import make_reference
from actor.scoring.scorer import Scorer
from python_backend.config import RunConfig
from python_backend.training.ranks import Ranks


class RunParts:
    """Base class of the training loop: creates the parts of the run as attributes."""

    def __init__(self, config: RunConfig, client: TritonClient, ranks: Ranks | None = None) -> None:
        """`ranks`: the processes that train the policy, of which this is rank 0; None if it is the only one."""
        self.settings = actor = config.actor
        self.stop = Stop()
        seed, validation, has_critic = config.run.seed, actor.validation, actor.algorithm.uses_critic
        self.method = Method.of(actor.algorithm, actor.kl)
        self.policy, self.policy_update = make_policy(config, self.method, ranks)
        self.shaper = RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens)
        self.kl = KLControl(actor.kl.coef, target=actor.kl.target, horizon=actor.kl.horizon)
        self.scorer = Scorer(
            client, self.policy.tokenizer, rows_per_request=actor.client.rows_per_request, with_critic=has_critic
        )
        self.reference = make_reference(config, client, self.policy)
        reader = PromptReader(
            self.policy.tokenizer,
            actor.prompts.max_tokens,
            actor.prompts.too_long,
            self.policy.vocab_size,
            actor.prompts.add_special_tokens,
        )
        stream = PromptStream(actor.prompts.sources, reader, seed=seed)
        held_out = (
            read_prompts(validation.prompts, reader, limit=validation.size)
            if validation.prompts and validation.size
            else []
        )
        self.inputs = StepInputs(stream, seed, actor.prompts_per_step, actor.algorithm.responses_per_prompt)
        state = RunState(self.policy, self.shaper, self.kl, self.inputs)
        self.books = Bookkeeper(config, state, client, has_critic=has_critic)
        device = self.policy.sampler.device
        self.in_thread = in_a_thread_of(actor.threads, device)
        # A second thread, so that the update can run beside a rollout.
        self.in_update_thread = in_a_thread_of(actor.threads, device) if actor.one_step_off_policy else self.in_thread
        self.critic = CriticUpdates(client, self.books, run_id=config.run.identity)
        self.rollouts = Rollouts(
            actor,
            self.inputs,
            self.policy,
            self.scorer,
            self.reference,
            self.critic,
            publish_every=config.trainer.publish.every,
            in_thread=self.in_thread,
        )
        self.validator = Validator(
            held_out,
            self.policy,
            self.scorer,
            self.reference,
            greedy=validation.greedy,
            with_kl=actor.kl.uses_reference,
            seed=seed,
            in_thread=self.in_thread,
        )
