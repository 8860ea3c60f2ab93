"""Records the steps of a run: metrics, texts, and the summary.

Files are written in a thread: on the event loop they would delay responses past their deadlines.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_triton.actor.algorithms.batch import describe_failures
from rlhf_triton.actor.algorithms.sample_metrics import rollout_metrics
from rlhf_triton.actor.algorithms.stages import overlong_penalties
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.rollout_rows import Conversation, Group, conversations_of, rows_of, scores_of
from rlhf_triton.actor.recording.learning_warnings import LearningWarnings
from rlhf_triton.actor.recording.metrics import (
    ActorMetrics,
    MetricsLog,
    figures_of_steps,
    finite,
    kl_text,
)
from rlhf_triton.actor.recording.trackers import Trackers
from rlhf_triton.actor.recording.validation_log import ValidationLog
from rlhf_triton.actor.run.checkpoints import RunState
from rlhf_triton.actor.run.remote_critic import RemoteCritic
from rlhf_triton.actor.run.settings import flat_settings
from rlhf_triton.actor.run.staleness import Metric
from rlhf_triton.actor.run.timers import TIMELINE_FILE
from rlhf_triton.actor.run.validation import read_texts
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.client.retry import RequestCounters
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.models.out_of_memory import gpu_bytes
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.monitoring.tracing import end_step
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.jsonl import drop_steps_from

logger = logging.getLogger(__name__)


class Recorder:
    """Records one run from `first_step`; the lines of this step and later ones, which it repeats, are dropped."""

    def __init__(
        self,
        config: RunConfig,
        state: RunState,
        critic: RemoteCritic,
        counters: RequestCounters,
        exported: ActorMetrics | None = None,
        *,
        first_step: int,
    ) -> None:
        self._settings = config.actor
        self._dir = config.run.dir
        self._state = state
        self._critic = critic
        self._counters = counters
        settings = flat_settings(config)
        trackers = Trackers(self._settings.trackers, self._dir, config.run.identity, settings)
        self._log = MetricsLog(self._dir, first_step=first_step, trackers=trackers, exported=exported)
        self._warnings = LearningWarnings(config.actor, state.policy)
        drop_steps_from(first_step, self._dir / TIMELINE_FILE)
        self.validations = ValidationLog(config, state.policy, self._log, first_step=first_step)

    async def log_step(
        self,
        step: int,
        groups: Sequence[Group],
        dropped: Sequence[Group],
        batch: PPOBatch,
        measured: dict[str, float],
    ) -> float | None:
        """Write the metrics and texts of a step, and warn if the policy learns little from it.

        Args:
            groups: the groups that the policy learned from.
            dropped: groups without spread that dynamic sampling replaced.
            batch: the training batch of the rows of `groups`.
            measured: further metrics of the step.

        Returns the mean KL per sequence in nats; None if it is not measured.
        """
        conversations = conversations_of(groups)
        everything = conversations_of([*groups, *dropped])
        version = max(row.score.version for row in rows_of(conversations))
        if self._critic.is_trained:
            set_log_position(version=version)
        metrics = await asyncio.to_thread(rollout_metrics, groups, batch, dropped=dropped, kl_coef=self._state.kl.coef)
        seconds = measured["timers/step_time"]
        line = {
            **metrics,
            **self._critic_metrics(conversations, step),
            "train_rollouts/consumed_samples": self._state.inputs.positions[step].prompts,
            "train_rollouts/epoch": self._state.inputs.epoch(step),
            "tokens_per_s": metrics["train_rollouts/generation_length"] * len(conversations) / seconds,
            **{f"client/{name}": float(value) for name, value in vars(self._counters).items()},
            **gpu_bytes(self._state.policy.generator.device),
            **{
                f"out_of_memory/{halving.setting}": halving.num_halvings
                for halving in self._state.policy.halvings
                if halving.num_halvings
            },
            **self._overlong_metrics(conversations),
            **measured,
        }
        self._log.write(step, line)
        tokenizer = self._state.policy.tokenizer
        texts = await asyncio.to_thread(read_texts, conversations, tokenizer, self._settings.logged_texts)
        self._log.add_texts([{"step": step, **text} for text in texts])
        end_step(step)
        logger.info(
            "step %d/%d: reward %.3f%s%s, %.1f s",
            step,
            self._settings.steps,
            metrics["train_rollouts/rewards"],
            kl_text(kl_per_sequence := metrics.get("train_rollouts/init_policy_kl_per_sequence")),
            f", scored by weights version {version}" if self._critic.is_trained else "",
            seconds,
        )
        if failed := describe_failures(everything):
            logger.warning("step %d: %s", step, failed)
        contributing = await asyncio.to_thread(lambda: batch.conversations[batch.policy_weights.any(-1)].tolist())
        self._warnings.check(step, line, conversations, {*contributing})
        return kl_per_sequence

    def _critic_metrics(self, conversations: Sequence[Conversation], step: int) -> dict[str, Metric]:
        if not self._critic.is_trained:
            return {}
        versions = [score.version for score in scores_of(conversations)]
        staleness = self._critic.staleness(versions, step)
        return {**staleness, "client/failed_critic_updates": float(self._critic.num_failed_updates)}

    def _overlong_metrics(self, conversations: Sequence[Conversation]) -> dict[str, float]:
        rewards = self._settings.rewards
        if not rewards.overlong_tokens:
            return {}
        sampled = [sum(int(row.sampled.sum()) for row in conversation) for conversation in conversations]
        longest = self._settings.generation.max_new_tokens
        penalties = overlong_penalties(torch.tensor(sampled, dtype=torch.float32), rewards, longest)
        return {"train_rollouts/overlong_penalty": float(penalties.mean())}

    async def finish(self, scorer: Scorer, seconds: float, *, steps: int) -> dict[str, Any]:
        """Close the metrics, write actor_summary.json, and return the summary."""
        await asyncio.to_thread(self._log.close)
        _, figures = await asyncio.to_thread(figures_of_steps, self._dir / "metrics.jsonl")
        summary = {
            "steps": steps,
            **self.validations.summary(),
            **(await self._critic_summary(scorer, steps=steps) if self._critic.is_trained else {}),
            "failed_requests": self._counters.failed_requests,
            "retries": self._counters.retries,
            "outages": self._counters.outages,
            "outage_seconds": self._counters.outage_seconds,
            "seconds_total": seconds,
            **figures,
        }
        await asyncio.to_thread(write_json, self._dir / "actor_summary.json", finite(summary))
        return summary

    async def _critic_summary(self, scorer: Scorer, *, steps: int) -> dict[str, float]:
        return {
            "weights_version": self._critic.weights_version,
            "critic_updates": steps,
            "failed_critic_updates": self._critic.num_failed_updates,
            **await self.validations.last_explained_variance(scorer),
        }
