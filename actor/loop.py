"""The training loop: prompts -> generate -> score -> advantages -> critic training and policy update.

Scoring overlaps with generation; the critic trains and reloads while the policy is updated. Algorithms differ only in
their `Method` (an advantage function and a loss) and in whether they use a critic.
"""

import asyncio
import functools
import time
from typing import Any

from rlhf_triton.actor.algorithms.batch import critic_payload
from rlhf_triton.actor.algorithms.kl import KLControl
from rlhf_triton.actor.algorithms.method import Method, log_choices
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.compute import ComputeThread
from rlhf_triton.actor.data.prompt_reader import PromptReader, check_columns, read_prompts
from rlhf_triton.actor.data.prompts import StepInputs
from rlhf_triton.actor.policy.update import PolicyUpdateResult
from rlhf_triton.actor.recording.metrics import ActorMetrics
from rlhf_triton.actor.recording.recorder import Recorder
from rlhf_triton.actor.replay.sample_journal import SampleJournal, StepResults
from rlhf_triton.actor.run.checkpoints import RunCheckpoints, RunState
from rlhf_triton.actor.run.collection import Collector
from rlhf_triton.actor.run.last_step import LastStep
from rlhf_triton.actor.run.policies import make_policy
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.rollouts import Rollouts
from rlhf_triton.actor.run.step import StepTraining, policy_batch
from rlhf_triton.actor.run.stopping import STOP_GRACE_S, Stop, Stopped, TimeLimit, end_forwards
from rlhf_triton.actor.run.timers import Timers
from rlhf_triton.actor.run.validation import validate
from rlhf_triton.actor.scoring.reference import ServedReference
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.client.client import TritonClient
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import RlhfError
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks


class TrainingRun:
    """One run of the actor: its parts, and its steps."""

    def __init__(self, config: RunConfig, client: TritonClient, ranks: AnyRanks = ALONE) -> None:
        """`ranks`: the processes that train the policy; this process is rank 0."""
        self.settings = actor = config.actor
        self.stop = Stop(self.saved)
        self.seed = seed = config.run.seed
        self.run_dir = config.run.dir
        log_choices(config)
        method = Method.from_settings(actor.algorithm, actor.kl)
        self.policy, self.policy_update = make_policy(config, method, ranks)
        self.shaper = RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens)
        kl = KLControl(actor.kl.coef, target=actor.kl.target)
        with_critic = actor.algorithm.uses_critic
        with_rewards = config.serves_rewards
        self.scorer = Scorer(client, self.policy.tokenizer, with_critic=with_critic, with_rewards=with_rewards)
        served = config.actor.kl.serves_reference
        self.reference = ServedReference(client, self.policy, config.reference.model) if served else None
        reader = PromptReader.from_config(config, self.policy.tokenizer, self.policy.vocab_size)
        held_out = actor.validation.prompts if actor.validation.size else None
        self.held_out = [] if held_out is None else read_prompts(held_out, reader, limit=actor.validation.size)
        self.inputs = StepInputs(actor.prompts.sources, reader, seed=seed)
        state = RunState(self.policy, self.shaper, kl, self.inputs)
        self.training = StepTraining(config, method, state, self.policy_update)
        every = config.trainer.publish.every
        self.critic = RemoteCritic(client, config.run, is_trained=with_critic, publish_every=every)
        self.checkpoints = RunCheckpoints(config, state, self.critic)
        exported = ActorMetrics(config, client.counters, lambda: self.critic.num_failed_updates)
        self.open_recorder = functools.partial(Recorder, config, state, self.critic, client.counters, exported)
        self.samples = SampleJournal(config, state)
        device = self.policy.generator.device
        self.in_thread = ComputeThread(actor.threads, device)
        # A second thread, so that the update can run while the policy samples.
        self.in_update_thread = ComputeThread(actor.threads, device) if actor.max_off_policy_steps else self.in_thread
        self.last = LastStep(self.policy, self.shaper, self.checkpoints)
        self.collector = Collector(actor, self.policy, self.scorer, self.reference, self.in_thread)
        self.rollouts = Rollouts(
            actor,
            self.inputs,
            self.collector,
            self.critic,
            record_sampled=self.samples.add_sampled,
            publish_every=every,
            truncated=config.truncated,
        )

    @property
    def done(self) -> int:
        """The last complete step, which is the number of complete steps."""
        return self.last.step

    def saved(self) -> int:
        """Return the last complete step if its checkpoint exists, else 0."""
        return self.done if self.done in self.checkpoints.steps() else 0

    async def run(self) -> dict[str, Any]:
        """Run all steps, resuming from the newest checkpoint; return the summary.

        However the run ends, the checkpoint of its last complete step is written if possible, see `LastStep`.

        Raises:
            Stopped: a stop was requested.
            RlhfError, OSError: the run failed, e.g. with RequestFailed or NotFinite.
        """
        try:
            return await self.all_steps()
        except Exception as error:  # process edge: raised again
            await self.leave(error)
            raise
        finally:  # tasks still in flight would otherwise print tracebacks after the reported error
            self.policy.close()
            await self.rollouts.cancel()
            await self.critic.cancel()
            await asyncio.to_thread(self.samples.close)

    async def all_steps(self) -> dict[str, Any]:
        """Check the servers, resume, then train, validate and checkpoint step by step; return the summary."""
        settings, limit = self.settings, TimeLimit(self.settings.max_minutes)
        await self.scorer.compare_tokenizers()
        if self.reference is not None:
            await self.reference.compare()
        prompts = [*self.inputs.first_prompts(), *self.held_out]
        check_columns(self.scorer.reward, prompts)
        self.policy.generation.check_prompts(prompts)
        self.last.record(await self.stop.or_done(self.checkpoints.resume()))
        opened = asyncio.to_thread(self.open_recorder, first_step=self.done + 1)
        recorder = await self.stop.or_done(opened)
        self.rollouts.resume(await asyncio.to_thread(self.samples.sampled, self.done))
        await asyncio.to_thread(self.samples.resume, self.done)
        is_last = self.done >= settings.steps
        if self.done == 0:
            await self.validate("before", recorder)
        while not is_last:
            if recorder.validations.needs(self.done):  # also if a stop or crash interrupted the validation
                await self.validate("between", recorder)
            await self.one_step(self.done + 1, recorder)
            self.last.record(self.done + 1)
            is_last = self.done == settings.steps or limit.is_over(self.done, settings.steps)
            if is_last or self.done % settings.checkpoint_every == 0:
                await self.samples.durable()
                await self.checkpoints.save(self.done)
                await asyncio.to_thread(self.samples.prune)
        await self.rollouts.cancel()  # `actor.max_minutes` may end the run while groups of later steps are in flight
        await self.stop.or_done(self.critic.wait_served(self.done))
        await self.validate("after", recorder)
        await self.checkpoints.finish(self.done)
        return await recorder.finish(self.scorer, limit.seconds, steps=self.done)

    async def one_step(self, step: int, recorder: Recorder) -> None:
        """Get a rollout, send the critic its update without waiting for it, and update the policy."""
        timers = Timers(step)
        with timers.phase("rollout_wait"):
            rollout = await self.stop.or_done(self.rollouts.take(step))  # past this point the step runs to its end
        timers.spans += rollout.timers.spans
        self.samples.add_groups(step, [*rollout.groups, *rollout.dropped])
        batch = await self.in_thread(self.training.make_batch, rollout.groups, rollout.dropped)
        payload = await self.in_thread(critic_payload, batch) if self.scorer.has_critic else None
        await self.samples.durable()
        if payload is not None:
            self.critic.send(step, payload)
        batch = policy_batch(batch, rollout.groups)
        await self.rollouts.start_ahead(step)
        update = PolicyUpdateResult()
        if trains_policy := self.training.trains_policy(step):
            self.last.is_updating = True
            with timers.phase("train_time"):
                update = await self.in_update_thread(self.training.update, batch, self.inputs.seed_of(step))
        kl_per_sequence = await recorder.log_step(
            step, rollout.groups, rollout.dropped, batch, {**rollout.metrics, **update.metrics, **timers.metrics()}
        )
        timers.append_spans(self.run_dir)
        if trains_policy:
            self.training.adapt_kl(kl_per_sequence, rollout.groups)
        results = StepResults(batch, len(rollout.dropped), payload, update)
        await self.in_update_thread(self.samples.add_step, step, results)

    async def validate(self, when: str, recorder: Recorder) -> None:
        """Validate the current policy; do nothing if there are no held-out prompts."""
        if self.held_out:
            start = time.monotonic()
            await self.stop.or_done(self.rollouts.settle())  # validation samples with one policy
            greedy = self.settings.validation.greedy
            validation = validate(self.collector, self.held_out, step=self.done, greedy=greedy, seed=self.seed)
            result = await self.stop.or_done(validation)
            await recorder.validations.add(when, self.done, result, seconds=time.monotonic() - start)

    async def leave(self, error: Exception) -> None:
        """Cancel the work in flight; write the checkpoint of the last complete step, and `policy/`.

        Nothing is written if another rank may be lost, or may wait for this one. Extends the
        message of `error` by where the run stopped and whether the checkpoint is written.
        """
        if self.policy.ranks.size > 1 and not isinstance(error, (Stopped, RlhfError)):
            return
        self.policy.close()
        models = (self.policy.model, self.policy.generator, self.policy.reference)
        end_forwards(*(model for model in models if model is not None))
        await self.rollouts.cancel()
        await self.in_thread(lambda: None)  # wait until the thread is idle: it may have adapters disabled
        await asyncio.to_thread(self.samples.close)  # the step is on disk before its checkpoint
        lost = await self.last.save(error)
        await self.critic.settle(self.done, error, patience_s=STOP_GRACE_S)
        self.last.describe(error, lost)
