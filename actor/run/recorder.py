"""Records a run: metrics, validations, checkpoints, resume and summary.

Large files are written in a thread: on the event loop they would delay responses past their deadlines.
"""

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.batch import describe_failures
from rlhf_triton.actor.algorithms.sample_metrics import process_metrics, rollout_metrics, text_metrics
from rlhf_triton.actor.algorithms.stages import overlong_penalties
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.rollout_rows import Conversation, Group, RolloutRow, conversations_of, failure_of, rows_of
from rlhf_triton.actor.policy.checkpoint import (
    RunState,
    check_checkpoint_of,
    critic_steps,
    reference_fingerprint,
    restore,
    save_checkpoint,
    set_aside,
)
from rlhf_triton.actor.run.metrics import (
    ActorMetrics,
    Metric,
    MetricsLog,
    Trackers,
    figures_of_steps,
    finite,
    has_signal,
)
from rlhf_triton.actor.run.settings import actor_checkpoints, flat_settings
from rlhf_triton.actor.run.staleness import VersionSteps
from rlhf_triton.actor.run.validation import Validation, explained_by_values, samples, training_texts
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.errors import RequestFailed
from rlhf_triton.config import AlgorithmSection, RunConfig
from rlhf_triton.models.out_of_memory import gpu_bytes
from rlhf_triton.monitoring.log_lines import set_log_position
from rlhf_triton.monitoring.tracing import end_step
from rlhf_triton.store.durable import read_json, sweep, write_folder, write_json
from rlhf_triton.store.jsonl import append_jsonl, drop_steps_from, each_line, read_jsonl, write_jsonl
from rlhf_triton.store.sealed_folder import DamagedCheckpoint, saved_steps
from rlhf_triton.store.weights import WeightsError, WeightsStore
from rlhf_triton.wire.contract import STEP_AHEAD

logger = logging.getLogger(__name__)
RESPONSE_LIMIT = "actor.generation.max_new_tokens"  # as in `RolloutRow.truncated`
GRADIENT = "train_optim/grad_norm"
TIMELINE_FILE = "timeline.jsonl"
VALIDATIONS_FILE = "validations.jsonl"
FIRST_STEPS = 3  # after them, a warning names rewards that were constant and a gradient that was always 0
OPENING_TAG = re.compile(r"<\w+>\s*\Z")  # a tag at the end of a prompt, such as <think>


class Recorder:
    """Records one run: its metrics, validations and checkpoints."""

    def __init__(self, config: RunConfig, state: RunState, client: TritonClient, *, has_critic: bool) -> None:
        self._config, self._settings = config, config.actor
        self._publish_every = config.trainer.publish.every
        self._dir = config.run.dir
        self._run_id = config.run.identity
        self._checkpoints = actor_checkpoints(config.run.dir)
        self._weights = WeightsStore(config.run.weights_dir)
        self._state = state
        self._policy = state.policy
        self._reference = {
            "reference": str(config.reference.model),
            "reference_fingerprint": reference_fingerprint(config, state.policy),
        }
        self._has_critic = has_critic
        self._client = client
        self._validation_before: Validation | None = None  # not kept across a resume
        self._validated: set[int] = set()  # steps with a line in validations.jsonl
        self.saves: list[asyncio.Task[None]] = []  # critic saves in flight, or failed with an unexpected error
        self.weights_version = 0  # newest critic version that the server has reported
        self.failed_critic_updates = 0  # in this process; the sidecar counts them as done
        self._unsaved: int | None = None  # newest step whose critic_save failed
        self._constants = ConstantTerms(min(FIRST_STEPS, config.actor.steps))
        self._num_mostly_excluded = 0  # steps in which fewer than half of the responses contribute
        self._gradients_seen: list[bool] = []  # whether each of the first updates had a gradient besides the KL's
        self._is_first, self._has_warned_of_no_signal = True, False
        self._exported = ActorMetrics(config, client.counters, lambda: self.failed_critic_updates)
        self._log: MetricsLog
        self.version_steps: VersionSteps

    async def resume(self) -> int:
        """Restore the newest intact checkpoint and rewind the critic to it; return its step, 0 for a new run.

        Raises:
            CheckpointError: no checkpoint is intact, or the newest intact one was saved with other settings.
            RequestFailed: the critic cannot be rewound.
        """
        sweep(self._dir)
        step, state = await self._newest_usable()
        set_log_position(step=step)
        if state:
            restore(self._checkpoints / str(step), state, self._state)
            logger.info("resuming from the checkpoint of step %d", step)
            if step >= self._settings.steps:
                logger.warning(
                    "step %d is the last: raise actor.steps (%d) to continue training, or start over with --fresh",
                    step,
                    self._settings.steps,
                )
        self.version_steps = VersionSteps(
            self.weights_version,
            step,
            every=self._publish_every,
            manifest_step=self._manifest_step,
        )
        settings = flat_settings(self._config)
        trackers = await asyncio.to_thread(Trackers, self._settings.trackers, self._dir, self._run_id, settings)
        self._log = await asyncio.to_thread(
            MetricsLog, self._dir, first_step=step + 1, trackers=trackers, exported=self._exported
        )
        await asyncio.to_thread(self._drop_lines_from, step + 1)
        return step

    def _drop_lines_from(self, step: int) -> None:
        drop_steps_from(step, self._dir / TIMELINE_FILE)
        if (path := self._dir / VALIDATIONS_FILE).is_file():
            drop_steps_from(step, path)
            self._validated = {line["step"] for line in each_line(path)}

    async def _newest_usable(self) -> tuple[int, dict[str, Any]]:
        """Rewind the critic to the newest intact checkpoint that it can reach; return its step and state, or (0, {}).

        A run that ended during an outage may have left a checkpoint of a step that the critic never received.
        Checkpoints newer than the returned one are set aside.
        """
        steps = saved_steps(self._checkpoints)
        skipped: dict[int, str] = {}  # step of a skipped checkpoint -> reason
        for step in reversed(steps):
            try:
                state = await asyncio.to_thread(
                    check_checkpoint_of,
                    self._policy,
                    self._checkpoints / str(step),
                    reference=self._reference["reference_fingerprint"],
                )
                await self._rewind_critic(state["critic_step"])
            except DamagedCheckpoint as error:
                if step == steps[0]:
                    raise CheckpointError(
                        f"{error}; there is no earlier checkpoint, so restore this one, or start a run in another "
                        "folder (run.dir)"
                    ) from error
                skipped[step] = str(error)
            except RequestFailed as error:
                if error.code != STEP_AHEAD or step == steps[0]:
                    raise
                skipped[step] = f"the checkpoint of step {step} is ahead of the critic: {error}"
            else:
                for newer, reason in skipped.items():
                    aside = set_aside(self._checkpoints, newer)
                    logger.warning("%s; kept as %s, resuming from step %d instead", reason, aside.name, step)
                return step, state
        await self._rewind_critic(0)
        return 0, {}

    async def _rewind_critic(self, step: int) -> None:
        if self._has_critic:
            self.weights_version = await self._client.rewind(run_id=self._run_id, step=step)
            set_log_position(version=self.weights_version)
            logger.info("the critic is at step %d and serves version %d", step, self.weights_version)

    async def log_step(
        self,
        step: int,
        groups: Sequence[Group],
        dropped: Sequence[Group],
        batch: PPOBatch,
        measured: dict[str, float],
    ) -> float | None:
        """Write the metrics and texts of a step, and warn if few responses contributed to the update.

        Args:
            groups: the groups that the policy learned from.
            dropped: groups without spread that dynamic sampling replaced.
            batch: the training batch of the rows of `groups`.
            measured: further metrics of the step.

        Returns the mean KL per sequence in nats; None if it is not measured.
        """
        conversations, everything = conversations_of(groups), conversations_of([*groups, *dropped])
        ends, rows = [conversation[-1] for conversation in conversations], rows_of(conversations)
        version = max(row.score.version for row in rows)
        if self._has_critic:
            set_log_position(version=version)
        metrics = await asyncio.to_thread(rollout_metrics, groups, batch, kl_coef=self._state.kl.coef)
        num_failed = sum(bool(failure_of(conversation)) for conversation in everything)
        seconds = measured["timers/step_time"]
        line = {
            **metrics,
            "train_rollouts/masked_samples": float(num_failed),
            **self._critic_metrics(conversations, step),
            "train_rollouts/consumed_samples": self._state.inputs.positions_after(step).prompts,
            "train_rollouts/epoch": self._state.inputs.epoch(step),
            "tokens_per_s": metrics["train_rollouts/generation_length"] * len(conversations) / seconds,
            **{f"client/{name}": float(value) for name, value in vars(self._client.counters).items()},
            **gpu_bytes(self._state.policy.sampler.device),
            **{
                f"out_of_memory/{halving.setting}": halving.num_halvings
                for halving in self._state.policy.halvings
                if halving.num_halvings
            },
        }
        if (rewards := self._settings.rewards).overlong_tokens:
            sampled = [sum(int(row.sampled.sum()) for row in conversation) for conversation in conversations]
            longest = self._settings.generation.max_new_tokens
            penalties = overlong_penalties(torch.tensor(sampled, dtype=torch.float32), rewards, longest)
            line["train_rollouts/overlong_penalty"] = float(penalties.mean())
        line |= measured
        self._log.write(step, line)
        texts = await asyncio.to_thread(
            training_texts, groups, batch, self._policy.tokenizer, self._settings.logged_texts
        )
        self._log.add_texts([{"step": step, **text} for text in texts])
        end_step(step)
        logger.info(
            "step %d/%d: reward %.3f%s%s, %.1f s",
            step,
            self._settings.steps,
            metrics["train_rollouts/rewards"],
            _kl_text(kl_per_sequence := metrics.get("train_rollouts/init_policy_kl_per_sequence")),
            f", scored by weights version {version}" if self._has_critic else "",
            seconds,
        )
        _warn_of_failures(f"step {step}", everything)
        self._constants.add(conversations)
        contributing = set((await asyncio.to_thread(_contributing_conversations, batch)).tolist())
        self._warn_of_no_learning(step, line, bool(contributing), ends)
        self._warn_of_excluded(step, [i in contributing for i in range(len(ends))], ends)
        return kl_per_sequence

    def _warn_of_no_learning(
        self, step: int, line: Mapping[str, Any], counts: bool, ends: Sequence[RolloutRow]
    ) -> None:
        """Warn, once each, if no response of the first step ended, a step has no signal, or no update has a gradient.

        Args:
            line: the step's line of metrics.jsonl.
            counts: whether any response contributes to the update; if not, `_warn_of_excluded` says why.
            ends: the last row of each conversation.
        """
        first, self._is_first = self._is_first, False
        has_ends = bool(line["train_rollouts/fraction_of_samples_properly_ended"])
        if first and not has_ends and all(end.truncated == RESPONSE_LIMIT for end in ends if end.turns is not None):
            generation, ids = self._settings.generation, self._policy.eos_ids
            named = [f"{self._policy.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in ids]
            logger.warning(
                "step %d: no response ended within %s (%d) by %s: raise it; or if the policy ends its responses with "
                "another token, set that token as eos_token_id in generation_config.json of actor.policy.model",
                step,
                RESPONSE_LIMIT,
                generation.max_new_tokens,
                " or ".join([*named, *map(repr, generation.stop_strings)]),
            )
        has_gradient, why = bool(line.get(GRADIENT)), "there are advantages, so check actor.policy.freeze"
        if not has_signal(line):
            has_gradient, why = False, _why_no_signal(self._settings.algorithm) if counts else "no response counts"
            if counts and not self._has_warned_of_no_signal:
                logger.warning(
                    "step %d has no signal: %s (steps_without_signal in the summary counts these)", step, why
                )
                self._has_warned_of_no_signal = True
        wanted = min(FIRST_STEPS, self._settings.steps)
        if GRADIENT in line and len(self._gradients_seen) < wanted:
            self._gradients_seen.append(has_gradient)
            if len(self._gradients_seen) == wanted and not any(self._gradients_seen):
                logger.warning("the gradient of the loss is 0 in each of the first %d steps: %s", wanted, why)

    def _warn_of_excluded(self, step: int, contributes: Sequence[bool], ends: Sequence[RolloutRow]) -> None:
        """Warn the first, 10th, 100th, … time that fewer than half of the responses contribute to the update.

        `_warn_of_failures` reports conversations that failed.
        """
        limits = {end.truncated for end, counts in zip(ends, contributes, strict=True) if end.truncated and not counts}
        contributing, total = sum(contributes), len(ends)
        if contributing >= total / 2 or (ends[0].turns is not None and not limits):
            return
        self._num_mostly_excluded += 1
        if contributing and str(self._num_mostly_excluded).strip("0") != "1":
            return
        logger.warning(
            "step %d: %d of %d responses are excluded from the update, mostly because they did not end within %s; "
            "raise it, or set %s",
            step,
            total - contributing,
            total,
            " or ".join(sorted(limits)) or RESPONSE_LIMIT,
            "environment.truncated to score" if limits else "actor.algorithm.mask_unfinished to false",
        )

    def log_timeline(self, step: int, spans: list[tuple[str, float, float]]) -> None:
        """Append the phases of a step to `TIMELINE_FILE`; `spans`: (phase, start, end), seconds since the epoch."""
        lines = ({"step": step, "phase": phase, "start": start, "end": end} for phase, start, end in spans)
        append_jsonl(self._dir / TIMELINE_FILE, lines)

    def _manifest_step(self, version: int) -> int | None:
        """Return the critic step of a weights version; None if the store is inaccessible or has pruned the version."""
        try:
            return self._weights.manifest(version).step
        except WeightsError:
            return None

    def _critic_metrics(self, conversations: Sequence[Conversation], step: int) -> dict[str, Metric]:
        if not self._has_critic:
            return {}
        versions = [conversation[-1].score.version for conversation in conversations if not failure_of(conversation)]
        staleness = self.version_steps.metrics(versions, sent=step - 1)
        return {**staleness, "client/failed_critic_updates": float(self.failed_critic_updates)}

    def needs_validation(self, step: int) -> bool:
        """Return whether `actor.validation.every` requires a validation at `step` that is not logged yet."""
        every = self._settings.validation.every
        return every > 0 and step % every == 0 and step not in self._validated

    async def log_validation(self, when: str, step: int, result: Validation, *, seconds: float) -> None:
        """Log a validation and save the policy if it is the best; `when`: before, between or after.

        Only the validations before and after training write their texts.
        """
        _warn_of_failures(f"validation {when}", result.conversations)
        metrics = await asyncio.to_thread(text_metrics, result.conversations)
        line = {"reward": result.reward, "kl": result.kl, "explained_variance": result.explained_variance}
        line = finite(line | process_metrics(result.conversations))
        if when == "before":
            self._validation_before = result
        if when != "between":
            await asyncio.to_thread(self._write_samples, when, result)
            await asyncio.to_thread(write_json, self._dir / f"validation_{when}.json", line)
        version = metrics.get("reward_version")
        await asyncio.to_thread(self._save_if_best, step, result.reward, None if version is None else int(version))
        path = self._dir / VALIDATIONS_FILE
        if step in self._validated:  # a start repeats the validation before the first step, and the one after the last
            await asyncio.to_thread(drop_steps_from, step, path)
        self._validated.add(step)
        append_jsonl(path, [{"step": step, "timers/validation_time": seconds, **line}])
        charted = {f"val_rollouts/{name}": value for name, value in {**metrics, **line}.items() if value is not None}
        self._log.chart(charted, step)
        logger.info("validation at step %d: reward %.3f%s", step, result.reward, _kl_text(result.kl))

    def _write_samples(self, when: str, result: Validation) -> None:
        path = self._dir / "samples.jsonl"  # "before" overwrites the file
        kept = [line for line in read_jsonl(path) if line["when"] != when and when != "before"]
        write_jsonl(path, [*kept, *samples(result, when, self._policy.tokenizer)])

    def _save_if_best(self, step: int, reward: float, version: int | None) -> None:
        """Write the policy to `best/`, with its score, if it has the highest validation reward so far.

        Rewards from different versions of a live reward model cannot be compared, so the first validation by a new
        version counts as the best.
        """
        if not math.isfinite(reward):
            logger.warning("validation at step %d: no response has a score, so best/ is unchanged", step)
            return
        best = self._dir / "best"
        old = read_json(best / "best.json")
        # A best/ of a later step was written before a resume from an older checkpoint, so it is replaced.
        if old is not None and old.get("reward_version") == version and old["reward"] >= reward and old["step"] <= step:
            return
        score = {"step": step, "reward": reward, **({} if version is None else {"reward_version": version})}
        self._write_policy(best, score)

    def _write_policy(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the policy to `folder`, and `about` to a JSON file in it, named after the folder."""

        def fill(staging: Path) -> None:
            self._policy.save(staging)
            write_json(staging / f"{folder.name}.json", about)

        write_folder(folder, fill)

    async def save_last_step(self, step: int) -> None:
        """Write the files of a run that stops after `step`: its checkpoint, unless it exists, and `policy/`.

        The previous checkpoint is kept as well, because the critic may not have received its update of this step.
        """
        if not self.has_checkpoint(step):
            await self.checkpoint(step, keep=self._settings.keep_checkpoints + 1)
        await self.save_policy(step)

    def has_checkpoint(self, step: int | None = None) -> bool:
        """Return whether the policy's checkpoint of `step` exists; without `step`, whether any exists."""
        steps = saved_steps(self._checkpoints)
        return bool(steps) if step is None else step in steps

    async def checkpoint(self, step: int, *, keep: int | None = None) -> None:
        """Write the policy's checkpoint, and start the save of the critic's. The policy must not change meanwhile.

        `keep`: number of newest checkpoints to keep; default: `actor.keep_checkpoints`.
        """
        state = {
            "step": step,
            "run_id": self._run_id,
            "critic_step": step,
            "weights_version": self.weights_version,
            **self._reference,
        }
        await asyncio.to_thread(
            save_checkpoint,
            self._checkpoints,
            self._state,
            state,
            keep=keep or self._settings.keep_checkpoints,
        )
        if self._has_critic:
            self.saves = [save for save in self.saves if not _succeeded(save)]
            self.saves.append(asyncio.create_task(self._save_critic(step, critic_steps(self._checkpoints))))

    async def _save_critic(self, step: int, keep_steps: list[int]) -> None:
        try:
            await self._client.save(run_id=self._run_id, step=step, keep_steps=keep_steps)
        except RequestFailed as error:  # task edge: the critic can still replay its journal to this step
            self._unsaved = max(step, self._unsaved or 0)
            logger.warning("saving the critic's checkpoint of step %d failed: %s", step, error)
        else:
            self._unsaved = None if step >= (self._unsaved or 0) else self._unsaved

    async def save_policy(self, step: int) -> None:
        """Write the current policy, after `step`, to `policy/`."""
        await asyncio.to_thread(self._write_policy, self._dir / "policy", {"step": step})

    async def finish(self, scorer: Scorer, seconds: float, *, steps: int) -> dict[str, Any]:
        """Wait for pending saves, write the final policy and actor_summary.json, and return the summary."""
        await asyncio.gather(*self.saves)
        if self._unsaved is not None:
            await self._client.save(run_id=self._run_id, step=self._unsaved, keep_steps=critic_steps(self._checkpoints))
        await self.save_policy(steps)
        await asyncio.to_thread(self._log.close)
        _, figures = await asyncio.to_thread(figures_of_steps, self._dir / "metrics.jsonl")
        summary = {
            "steps": steps,
            **self._validation_summary(),
            **(await self._critic_summary(scorer, steps=steps) if self._has_critic else {}),
            "failed_requests": self._client.counters.failed_requests,
            "retries": self._client.counters.retries,
            "outages": self._client.counters.outages,
            "outage_seconds": self._client.counters.outage_seconds,
            "seconds_total": seconds,
            **figures,
        }
        await asyncio.to_thread(write_json, self._dir / "actor_summary.json", finite(summary))
        return summary

    def _validation_summary(self) -> dict[str, float]:
        """Return the entries of the first and the last validation in the summary; {} without validation."""
        before, after = self._validation("before"), self._validation("after")
        figures = {
            "reward_before": before.get("reward"),
            "reward_after": after.get("reward"),
            "kl_final": after.get("kl"),
            "ev_v0": before.get("explained_variance"),
            "process_reward_before": before.get("process_rewards"),
            "process_reward_after": after.get("process_rewards"),
            "steps_before": before.get("steps_per_response"),
            "steps_after": after.get("steps_per_response"),
        }
        return {name: value for name, value in figures.items() if value is not None}

    async def _critic_summary(self, scorer: Scorer, *, steps: int) -> dict[str, float]:
        """Return the critic's entries of the summary.

        `ev_last` is measured on the responses of the first validation, so that it is comparable with `ev_v0`.
        """
        figures: dict[str, float] = {
            "weights_version": self.weights_version,
            "critic_updates": steps,
            "failed_critic_updates": self.failed_critic_updates,
        }
        if (before := self._validation_before) is not None:
            rows = iter(await scorer.add_values(rows_of(before.conversations)))
            valued = [tuple(next(rows) for _ in conversation) for conversation in before.conversations]
            figures["ev_last"] = await asyncio.to_thread(explained_by_values, before.conversations, valued)
        return figures

    def _validation(self, when: str) -> dict[str, Any]:
        return read_json(self._dir / f"validation_{when}.json") or {}


def _why_no_signal(algorithm: AlgorithmSection) -> str:
    """Return why all counted responses of a step have an advantage of 0, and what to do."""
    check = "check what the reward returns (rollouts.jsonl has texts and rewards)"
    if not algorithm.defaults.needs_groups:
        return f"all advantages are 0; {check}"
    return (
        f"all rewards are equal within each group; {check}, raise actor.algorithm.responses_per_prompt, or choose "
        "prompts that are neither too easy nor too hard"
    )


def _kl_text(kl: float | None) -> str:
    return "" if kl is None else f", KL {round(kl, 2) + 0.0:.2f} nats per sequence"  # a rounded -0.0 becomes 0.0


def _succeeded(save: asyncio.Task[None]) -> bool:
    return save.done() and not save.cancelled() and save.exception() is None


class ConstantTerms:
    """Warns of reward terms that are constant in the first steps, so that nothing can be learned from them."""

    def __init__(self, steps: int) -> None:
        """`steps`: number of steps before the warning."""
        self._steps = steps
        self._num_steps_seen = 0
        self._rows = 0
        self._seen: dict[str, set[float]] = {}

    def add(self, conversations: Sequence[Conversation]) -> None:
        """Record the rewards of a step; after the last of the first steps, warn of each term with a single value."""
        if self._num_steps_seen >= self._steps:
            return
        scores = [conversation[-1].score for conversation in conversations if not failure_of(conversation)]
        self._num_steps_seen, self._rows = self._num_steps_seen + 1, self._rows + len(scores)
        for score in scores:
            for name, value in (score.components or {"": score.reward}).items():
                self._seen.setdefault(name, set()).update([value] if math.isfinite(value) else [])
        if self._num_steps_seen < self._steps or self._rows < 2:
            return
        prompts = [conversation[0].prompt for conversation in conversations]
        tags = {match[0] for prompt in prompts if (match := OPENING_TAG.search(prompt.text))}
        hint = (
            f"the prompts end with {tags.pop().strip()}, which the chat template writes, so no response has it"
            if tags
            else "compare what it looks for with the responses in rollouts.jsonl (actor.logged_texts)"
        )
        for name, seen in self._seen.items():
            if len(seen) == 1:
                logger.warning(
                    "%s is %g for all %d responses of the first %d steps, so nothing is learned from it: %s",
                    f"the reward {name!r}" if name else "the reward",
                    *seen,
                    self._rows,
                    self._num_steps_seen,
                    hint,
                )


def _warn_of_failures(where: str, conversations: Sequence[Conversation]) -> None:
    if failed := describe_failures(conversations):
        logger.warning("%s: %s", where, failed)


def _contributing_conversations(batch: PPOBatch) -> Tensor:
    """Return the indices of the conversations that contribute to the policy's update, int64."""
    assert batch.conversations is not None
    return batch.conversations[batch.policy_weights.any(-1)].unique()
