"""Records a run's validations: validations.jsonl, samples.jsonl, the best policy, entries of the summary."""

import asyncio
import logging
import math

from rlhf_triton.actor.algorithms.batch import describe_failures
from rlhf_triton.actor.algorithms.sample_metrics import process_metrics, text_metrics
from rlhf_triton.actor.data.prompt_files import fingerprint
from rlhf_triton.actor.data.rollout_rows import failure_of, rows_of
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.recording.metrics import MetricsLog, finite, kl_text
from rlhf_triton.actor.run.checkpoints import write_policy
from rlhf_triton.actor.run.settings import reward_fingerprint
from rlhf_triton.actor.run.validation import Validation, explained_by_values, samples
from rlhf_triton.actor.scoring.scorer import Scorer
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.digests import json_digest
from rlhf_triton.store.durable import read_json, write_json
from rlhf_triton.store.jsonl import append_jsonl, drop_steps_from, each_line, read_jsonl, write_jsonl

logger = logging.getLogger(__name__)
VALIDATIONS_FILE = "validations.jsonl"


class ValidationLog:
    """The validations of one run; a resumed run drops the lines of steps that it repeats."""

    def __init__(self, config: RunConfig, policy: Policy, log: MetricsLog, *, first_step: int) -> None:
        self._every = config.actor.validation.every
        self._max_failed_fraction = config.actor.rewards.max_failed_fraction
        self._dir = config.run.dir
        self._policy = policy
        self._log = log
        self._path = config.run.dir / VALIDATIONS_FILE
        self._steps: set[int] = set()  # with a line in `_path`
        self._before: Validation | None = None  # not kept across a resume
        self._fingerprint = _fingerprint(config)
        if self._path.is_file():
            drop_steps_from(first_step, self._path)
            self._steps = {line["step"] for line in each_line(self._path)}

    def needs(self, step: int) -> bool:
        """Return whether `actor.validation.every` requires a validation at `step` that is not logged yet."""
        return self._every > 0 and step % self._every == 0 and step not in self._steps

    async def add(self, when: str, step: int, result: Validation, *, seconds: float) -> None:
        """Log a validation and save the policy if it is the best; `when`: before, between or after.

        Only the validations before and after training write their texts.
        """
        if failed := describe_failures(result.conversations):
            logger.warning("validation %s: %s", when, failed)
        metrics = await asyncio.to_thread(text_metrics, result.conversations)
        line = {"reward": result.reward, "kl": result.kl, "explained_variance": result.explained_variance}
        line = finite(line | process_metrics(result.conversations))
        if when == "before":
            self._before = result
        if when != "between":
            await asyncio.to_thread(self._write_samples, when, result)
            await asyncio.to_thread(write_json, self._dir / f"validation_{when}.json", line)
        version = metrics.get("reward_version")
        await asyncio.to_thread(self._save_if_best, step, result, None if version is None else int(version))
        if step in self._steps:  # a start repeats the validation before the first step, and the one after the last
            await asyncio.to_thread(drop_steps_from, step, self._path)
        self._steps.add(step)
        append_jsonl(self._path, [{"step": step, "timers/validation_time": seconds, **line}])
        charted = {f"val_rollouts/{name}": value for name, value in {**metrics, **line}.items() if value is not None}
        self._log.chart(charted, step)
        logger.info("validation at step %d: reward %.3f%s", step, result.reward, kl_text(result.kl))

    def _write_samples(self, when: str, result: Validation) -> None:
        path = self._dir / "samples.jsonl"  # "before" overwrites the file
        others = [line for line in read_jsonl(path) if line["when"] != when and when != "before"]
        write_jsonl(path, [*others, *samples(result, when, self._policy.tokenizer)])

    def _save_if_best(self, step: int, result: Validation, version: int | None) -> None:
        """Write the policy to `best/`, with its score, if it has the highest validation reward so far.

        Rewards from different versions of a live reward model, or from validations with different fingerprints, cannot
        be compared, so the first validation by a new one counts as the best. Nor is the mean of the few responses that
        an outage leaves comparable with that of all.
        """
        reward = result.reward
        num_failed = sum(bool(failure_of(conversation)) for conversation in result.conversations)
        if num_failed > self._max_failed_fraction * len(result.conversations) or not math.isfinite(reward):
            logger.warning(
                "validation at step %d: %d of %d responses have no score, so best/ is unchanged; the limit is "
                "actor.rewards.max_failed_fraction (%g)",
                step,
                num_failed,
                len(result.conversations),
                self._max_failed_fraction,
            )
            return
        best = self._dir / "best"
        old = read_json(best / "best.json")
        # A best/ of a later step was written before a resume from an older checkpoint, so it is replaced.
        if (
            old is not None
            and old.get("reward_version") == version
            and old.get("validation_fingerprint", self._fingerprint) == self._fingerprint  # 0.1.0 wrote none
            and old["reward"] >= reward
            and old["step"] <= step
        ):
            return
        score = {"step": step, "reward": reward, "validation_fingerprint": self._fingerprint}
        score |= {} if version is None else {"reward_version": version}
        write_policy(self._policy, best, score)

    def summary(self) -> dict[str, float]:
        """Return the entries of the first and the last validation in the summary; {} without validation."""
        before, after = (read_json(self._dir / f"validation_{when}.json") or {} for when in ("before", "after"))
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

    async def last_explained_variance(self, scorer: Scorer) -> dict[str, float]:
        """Return {"ev_last": explained variance by the critic as it is now}; {} without a validation in this process.

        It is measured on the responses of the first validation, so that it is comparable with `ev_v0`.
        """
        if self._before is None:
            return {}
        conversations = self._before.conversations
        rows = iter(await scorer.add_values(rows_of(conversations)))
        valued = [tuple(next(rows) for _ in conversation) for conversation in conversations]
        return {"ev_last": await asyncio.to_thread(explained_by_values, conversations, valued)}


def _fingerprint(config: RunConfig) -> str:
    """Return what must be equal for the rewards of two validations to be comparable, as text."""
    section = config.actor.validation
    prompts = fingerprint(section.prompts) if section.prompts and section.size else ""
    generation = config.actor.generation.model_dump(exclude_defaults=True, exclude={"batch_size", "engine", "vllm"})
    limits = config.actor.prompts.model_dump(exclude_defaults=True, exclude={"path", "files"})
    sampled = json_digest({**generation, "prompts": limits})[:16]
    return "-".join([prompts, str(section.size), str(section.greedy), sampled, reward_fingerprint(config)])
