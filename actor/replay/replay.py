"""Replays steps of a run, without its servers, and compares each with the journal of samples."""

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlhf_triton.actor.algorithms.batch import critic_payload
from rlhf_triton.actor.algorithms.kl import KLControl
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.algorithms.sample_metrics import rollout_metrics
from rlhf_triton.actor.algorithms.stages import RewardShaper
from rlhf_triton.actor.data.rollout_rows import RolloutRow, conversations_of, rows_of
from rlhf_triton.actor.data.sample_records import describe_damage, group_of
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.policy.update import PolicyUpdate, PolicyUpdateResult
from rlhf_triton.actor.replay.recorded_steps import OLD_LOGPROBS, find_steps
from rlhf_triton.actor.replay.sample_journal import RecordedGroups, StepResults, environment_of, step_record
from rlhf_triton.actor.run.checkpoints import RunState, check_checkpoint_of, reference_of, save_checkpoint
from rlhf_triton.actor.run.settings import actor_checkpoints, started_with
from rlhf_triton.actor.run.step import StepTraining, policy_batch
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.config.sections import RunSection
from rlhf_triton.errors import RlhfError, reason_of
from rlhf_triton.store.durable import numbers_in
from rlhf_triton.store.record_log import DamagedRecord, StoredRecord, first_difference
from rlhf_triton.store.sealed_folder import saved_steps
from rlhf_triton.wire.contract import Limits
from rlhf_triton.wire.training_payload import TrainPayload, train_payload


@dataclass(frozen=True)
class ReplayedStep:
    """The differences between a recorded step and its replay."""

    step: int
    difference: str  # the first difference from the run; "" if there is none
    payload: TrainPayload | None  # the critic's update; None without a critic
    has_weights: bool  # whether the trained weights were compared
    seconds: float


class Replay:
    """The policy of a run, trained again on recorded steps from the newest checkpoint before them."""

    config: RunConfig
    environment: Mapping[str, Any]
    """Settings and environment of the last replayed step, as the run recorded them."""

    def __init__(self, run_dir: Path, first: int, last: int) -> None:
        """Find the steps to replay.

        Raises:
            RlhfError: the run has no journal of samples, or a record that the steps need is missing or damaged.
        """
        self._checkpoints = actor_checkpoints(run_dir)
        self._folder = RunSection(dir=run_dir).sample_journal_dir
        if not run_dir.is_dir():
            raise RlhfError(f"{run_dir} is missing: name the folder of a run")
        if not numbers_in(self._folder):
            raise RlhfError(f"{self._folder} has no samples, so no step of this run can be replayed")
        self.start = max((saved for saved in saved_steps(self._checkpoints) if saved < first), default=0)
        self._steps = range(self.start + 1, last + 1)
        self._recorded = find_steps(self._folder, self.start + 1, last)
        missing = [step for step in self._steps if step not in self._recorded.steps]
        if missing:
            newest = started_with(run_dir)
            num_kept = "" if newest is None else f" ({newest.actor.keep_checkpoints})"
            raise self._damage_to(missing[0]) or RlhfError(
                f"{self._folder} lacks step {missing[0]}, which a replay of step {first} needs "
                f"({self.origin}): it was never complete, or actor.keep_checkpoints{num_kept} no "
                f"longer keeps it; {self._choice()}"
            )

    def _damage_to(self, step: int) -> RlhfError | None:
        """Return the damage to a record of `step`, or to one of unknown content; None if there is none."""
        damage = None
        for error in self._recorded.damage:
            where = describe_damage(error.payload) if isinstance(error, DamagedRecord) else ""
            if isinstance(error, DamagedRecord) and re.match(rf"step {step}\b", where):
                return DamagedRecord(error.path, error.position, where)
            if not where:
                damage = damage or error
        return damage

    def _choice(self) -> str:
        """Return which steps can be replayed: those after a checkpoint, or after the start, without a gap."""
        starts = {0, *saved_steps(self._checkpoints)}
        whole = set[int]()
        for step in sorted(find_steps(self._folder, 1, sys.maxsize).steps):
            if step - 1 in starts or step - 1 in whole:
                whole.add(step)
        begins = sorted(step for step in whole if step - 1 not in whole)
        ends = sorted(step for step in whole if step + 1 not in whole)
        spans = [f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)]
        return f"steps {' and '.join(spans)} can be replayed" if spans else "no step can be replayed"

    def run(self) -> Iterator[ReplayedStep]:
        """Replay step by step; end after the first one that differs."""
        settings = self._recorded.step(self._steps[0]).header["settings"]
        checkpoint = self._checkpoints / str(self.start) if self.start else None
        self._load(_valid(settings), checkpoint)
        for step in self._steps:
            recorded = self._recorded.step(step)
            if recorded.header["settings"] != settings:  # the run has resumed with others
                settings = recorded.header["settings"]
                numbers = {**self._state.numbers(), "kl_target": self._state.kl.target}
                with tempfile.TemporaryDirectory() as folder:
                    self._state.policy.trained.save(folder)
                    self._load(_valid(settings), Path(folder), numbers)
            self.environment = recorded.header["environment"]
            start = time.monotonic()
            replayed, rows, payload = self._train(recorded.header)
            trained = self._state.policy.trained
            names = {"weights": sorted(trained.weights()), "optimizer": sorted(trained.state())}
            difference = difference_of(recorded, replayed, rows, names)
            has_weights = bool(recorded.arrays["weights"].size)
            packed = None if payload is None else train_payload(payload, Limits(self._state.policy.vocab_size))
            yield ReplayedStep(step, difference, packed, has_weights, time.monotonic() - start)
            if difference:
                return

    @property
    def origin(self) -> str:
        """The start of the replay, for a line of the report."""
        return f"from the checkpoint of step {self.start}" if self.start else "from the start of the run"

    def save(self, config: RunConfig) -> None:
        """Write the state after the last step as a checkpoint of a new run, whose settings are `config`."""
        about = {"run_id": config.run.identity, "weights_version": 0, **reference_of(config, self._state.policy)}
        save_checkpoint(actor_checkpoints(config.run.dir), self._state, self._steps[-1], about, keep=1)

    def differing_environment(self) -> list[str]:
        """Return a line for each part of the environment that is not as it was in the run."""
        now = environment_of()
        return [
            f"{name}: {self.environment.get(name)} in the run, {now.get(name)} here"
            for name in {**self.environment, **now}
            if self.environment.get(name) != now.get(name)
        ]

    def _load(self, config: RunConfig, checkpoint: Path | None, numbers: Mapping[str, Any] | None = None) -> None:
        """Create the policy under these settings.

        Args:
            checkpoint: with the trained weights; None: as at the start of the run.
            numbers: for `RunState.restore`; default: the verified checkpoint's.
        """
        actor = config.actor
        torch.set_num_threads(actor.threads)
        torch.use_deterministic_algorithms(config.run.deterministic)
        self.config = config
        method = Method.from_settings(actor.algorithm, actor.kl)
        torch.manual_seed(config.run.seed)  # LoRA adapters are initialised randomly, as in the run
        policy = Policy(actor, longest_row=config.longest_row)
        shaper = RewardShaper(actor.rewards, max_new_tokens=actor.generation.max_new_tokens)
        kl = KLControl(actor.kl.coef, target=actor.kl.target)
        inputs: Any = SimpleNamespace(state=lambda step: self._recorded.step(step).header["inputs"])
        self._state = RunState(policy, shaper, kl, inputs)
        self._training = StepTraining(config, method, self._state, PolicyUpdate(actor, policy, method))
        if checkpoint is not None:
            self._state.restore(checkpoint, numbers or check_checkpoint_of(policy, checkpoint))

    def _train(self, header: Mapping[str, Any]) -> tuple[StoredRecord, list[RolloutRow], dict[str, np.ndarray] | None]:
        """Train on the groups of a step; return its record, the rows that the policy learned from, and the payload.

        `header`: of the recorded step.
        """
        state = self._state
        step = header["step"]
        before = state.numbers()
        groups = [group_of(self._recorded.group(step, number)) for number in header["groups"]]
        num_kept = len(groups) - header["num_dropped"]
        used = groups[:num_kept]
        batch = self._training.make_batch(used, groups[num_kept:])
        payload = None if header["payload"] is None else critic_payload(batch)
        batch = policy_batch(batch, used)
        update = PolicyUpdateResult()
        if self._training.trains_policy(step):
            metrics = rollout_metrics(used, batch, kl_coef=state.kl.coef)
            update = self._training.update(batch, header["seed"])
            self._training.adapt_kl(metrics.get("train_rollouts/init_policy_kl_per_sequence"), used)
        results = StepResults(batch, header["num_dropped"], payload, update)
        record = step_record(state, step, RecordedGroups(header["groups"], header["seed"], before), results)
        return record, rows_of(conversations_of(used)), payload


def _valid(settings: Mapping[str, Any]) -> RunConfig:
    """Return the settings that a step was recorded with. Raises RlhfError if this version does not know them."""
    try:
        return RunConfig.model_validate(settings)
    except ValueError as error:
        raise RlhfError(
            f"the run was recorded with settings that are invalid here: {reason_of(error)}; replay it with the version "
            "that wrote it"
        ) from error


def difference_of(
    recorded: StoredRecord, replayed: StoredRecord, rows: Sequence[RolloutRow], names: Mapping[str, Sequence[str]]
) -> str:
    """Return the first value of a step, in the order of its computation, that differs in a replay; "" if none does.

    Args:
        rows: of the training batch.
        names: of the tensors in `weights` and `optimizer`, sorted.
    """
    old = recorded.header
    new = replayed.header
    if different := _different_entry(old["before"], new["before"]):
        return f"before the step, {different}"
    for name, was, now in zip(old["tensors"], recorded.arrays["digests"], replayed.arrays["digests"], strict=True):
        if different := _different_value(recorded, replayed, name, rows):
            return different
        if (row := first_difference(was, now)) is not None:
            return f"`{name}` of {_sample(rows, row)}, by its digest"
    if different := _different_value(recorded, replayed, OLD_LOGPROBS, rows):
        return different
    for name in ("payload", "update"):
        if different := _different_entry(old[name] or {}, new[name] or {}):
            return f"in the {name}, {different}"
    for part, tensors in names.items():
        was = recorded.arrays[part]
        now = replayed.arrays[part]
        if len(was) == len(now) and (index := first_difference(was, now)) is not None:
            return f"in the {part} after the step, `{tensors[index]}`, by its digest"
    different = _different_entry(old["after"], new["after"])
    return different and f"after the step, {different}"


def _different_entry(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = [name for name in {**was, **now} if repr(was.get(name)) != repr(now.get(name))]
    return f"`{names[0]}`: {was.get(names[0])} in the run, {now.get(names[0])} here" if names else ""


def _different_value(recorded: StoredRecord, replayed: StoredRecord, name: str, rows: Sequence[RolloutRow]) -> str:
    """Return the first position and both values where a column `[N]` of all rows differs.

    "" if it does not, or if the journal has only its digests.
    """
    if name not in recorded.arrays:
        return ""
    was = recorded.arrays[name]
    now = replayed.arrays[name]
    index = first_difference(was, now)
    if index is None:
        return ""
    ends = np.cumsum([len(row.tokens) - 1 for row in rows])
    row = int(np.searchsorted(ends, index, side="right"))
    token = index - int(ends[row]) + len(rows[row].tokens)
    return f"`{name}` of {_sample(rows, row)} at token {token}: {was[index]} in the run, {now[index]} here"


def _sample(rows: Sequence[RolloutRow], row: int) -> str:
    return f"sample {row} (prompt {rows[row].prompt.prompt_id})"
