"""Writes a run's journal of samples: what each step trained on and its results, so that it can be replayed.

A step's groups are on disk before its update starts. The record of the step has a digest for each row of the training
batch, and for each parameter of the trained weights and of the optimizer's state.
"""

import asyncio
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.data.rollout_rows import Group
from rlhf_triton.actor.data.sample_records import group_of, record_of
from rlhf_triton.actor.policy.update import PolicyUpdateResult
from rlhf_triton.actor.replay.recorded_steps import (
    OLD_LOGPROBS,
    SAMPLED,
    STEP,
    STORED_TENSOR,
    find_sampled,
)
from rlhf_triton.actor.run.checkpoints import RunState
from rlhf_triton.actor.run.settings import CONTENTS_FILE, actor_checkpoints
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.digests import json_digest, short_digest
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import read_json
from rlhf_triton.store.record_log import RecordLog, StoredRecord
from rlhf_triton.store.sealed_folder import saved_steps

logger = logging.getLogger(__name__)
PACKAGES = ("torch", "transformers", "peft", "numpy")
VARIABLES = ("ATEN_", "CUBLAS_", "DNNL_", "MKL_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "TORCH_")


@dataclass(frozen=True)
class RecordedGroups:
    """What the record of a step says about its groups, which are recorded before it."""

    numbers: list[int]  # places in the order of prompts, of the groups as the batch has them: dropped ones last
    seed: int  # of the step
    before: dict[str, Any]  # `RunState.numbers` before the step


@dataclass(frozen=True)
class StepResults:
    """The results of one training step."""

    batch: PPOBatch  # the rows that the policy learned from
    num_dropped: int  # groups at the end that only the critic learned from
    payload: Mapping[str, np.ndarray] | None  # from `critic_payload`; None without a critic
    update: PolicyUpdateResult


class SampleJournal:
    """The journal of one run, written by rank 0."""

    def __init__(self, config: RunConfig, state: RunState) -> None:
        self._folder = config.run.sample_journal_dir
        self._state = state
        self._checkpoints = actor_checkpoints(config.run.dir)
        self._keep = config.actor.keep_checkpoints
        self._ahead = config.actor.max_off_policy_steps
        self._step = 0  # the newest step
        self._settings = config.model_dump(mode="json")
        self._environment = environment_of()
        actor = self._settings["actor"]
        contents = read_json(config.run.dir / CONTENTS_FILE) or {}
        decisive = {
            **{name: actor[name] for name in ("generation", "prompts")},
            "responses_per_prompt": config.actor.algorithm.responses_per_prompt,
            "environment": self._settings["environment"],
            "environment_files": {key: contents[key] for key in contents if key.startswith("environment.")},
            "sources": {"policy": state.policy.fingerprint, **state.inputs.fingerprints},
        }
        self._sampling = json_digest(decisive)
        self._saved: list[StoredRecord] = []  # groups in flight, which `resume` copies from folders that it deletes
        self._pending: list[Future[None]] = []
        self._log: RecordLog | None = None

    def resume(self, step: int) -> None:
        """Continue after `step`; delete what is recorded of later steps, except what `sampled` has returned."""
        self._step = step
        self._log = RecordLog(self._folder)
        if self._saved:
            self._log.append(step, lambda: self._saved).result()
        self._log.remove(lambda recorded: recorded > step)

    def add_groups(self, step: int, groups: Sequence[Group]) -> None:
        """Record the groups of a step, as its batch will have them: dropped ones last."""
        self._step = step
        numbers = [group.number for group in groups]
        self._recorded = RecordedGroups(numbers, self._state.inputs.seed_of(step), self._state.numbers())
        about = {"step": step, "seed": self._recorded.seed}
        self._append(step, lambda: [record_of(group, number=group.number, **about) for group in groups])

    def add_sampled(self, number: int, seed: int, group: Group) -> None:
        """Record a group as it was sampled, not scored; `number`: its place in the order of prompts."""
        about = {"kind": SAMPLED, "step": self._step, "number": number, "seed": seed, "sampling": self._sampling}
        self._append(self._step, lambda: [record_of(group, **about)])

    def sampled(self, step: int) -> dict[int, tuple[int, Group]]:
        """Return the seed and the group, by number, of groups that a run that resumes after `step` need not sample.

        Call before `resume`. Empty if the journal is damaged.
        """
        if not self._ahead:
            return {}
        first = self._state.inputs.positions[step].prompts
        try:
            groups = find_sampled(self._folder, step, first=first, ahead=self._ahead, sampling=self._sampling)
        except RlhfError as error:
            logger.warning("%s; groups that were in flight are sampled again", error)
            return {}
        self._saved = [record for number, record in groups if number > step]
        return {record.header["number"]: (record.header["seed"], group_of(record)) for _, record in groups}

    def add_step(self, step: int, results: StepResults) -> None:
        """Record a step after its update. The weights must not change meanwhile."""
        record = step_record(
            self._state,
            step,
            self._recorded,
            results,
            settings=self._settings,
            environment=self._environment,
            inputs=self._state.inputs.state(step),
        )
        self._append(step, lambda: [record])

    def _append(self, step: int, encode: Callable[[], list[StoredRecord]]) -> None:
        assert self._log is not None, "call `resume` first"
        self._pending.append(self._log.append(step, encode))

    async def durable(self) -> None:
        """Wait until all records are on disk. Raises OSError if the disk has refused one."""
        pending = self._pending
        self._pending = []
        await asyncio.to_thread(lambda: [future.result() for future in pending])

    def prune(self) -> None:
        """Remove the steps before the oldest checkpoint.

        While there are fewer checkpoints than the run keeps, the oldest one is the start of the run.
        """
        assert self._log is not None, "call `resume` first"
        checkpoints = saved_steps(self._checkpoints)
        oldest = min(checkpoints) if len(checkpoints) >= self._keep else 0
        # Groups of the steps after a checkpoint may have been sampled up to that many steps before it.
        self._log.remove(lambda recorded: recorded < oldest - self._ahead)

    def close(self) -> None:
        """Wait until all records are on disk, or have failed."""
        if self._log is not None:
            self._log.close()


def step_record(
    state: RunState, step: int, recorded: RecordedGroups, results: StepResults, **about: Any
) -> StoredRecord:
    """Return the record of a step, `about` in its header; a replay makes it again and compares the two.

    `state`: after the step.
    """
    batch = results.batch
    payload = results.payload
    trained = state.policy.trained
    rows = {name: rows_of_tensor(batch, name) for name, tensor in vars(batch).items() if tensor is not None}
    header = {
        "kind": STEP,
        "step": step,
        **about,
        "groups": recorded.numbers,
        "seed": recorded.seed,
        "before": recorded.before,
        "after": state.numbers(),
        "num_dropped": results.num_dropped,
        "tensors": [*rows],
        "payload": None
        if payload is None
        else {name: short_digest(np.ascontiguousarray(array)) for name, array in payload.items()},
        "update": results.update.metrics,
    }
    digests = {
        "digests": [list(map(short_digest, parts)) for parts in rows.values()],
        "weights": _digests_of(trained.weights()),
        "optimizer": _digests_of(trained.state()),
    }
    arrays = {name: np.array(numbers, np.uint64) for name, numbers in digests.items()}
    arrays[STORED_TENSOR] = np.concatenate(rows[STORED_TENSOR])
    if results.update.old_logprobs is not None:
        recomputed = replace(batch, logprobs=results.update.old_logprobs)
        arrays[OLD_LOGPROBS] = np.concatenate(rows_of_tensor(recomputed, "logprobs"))
    return StoredRecord(header, arrays)


def rows_of_tensor(batch: PPOBatch, name: str) -> list[np.ndarray]:
    """Return a tensor of the batch as one array per row, without padding."""
    array: np.ndarray = getattr(batch, name).numpy()
    if array.ndim == 1:
        return [*array[:, None]]
    return [row[: length - (name != "tokens")] for row, length in zip(array, batch.lengths.tolist(), strict=True)]


def environment_of() -> dict[str, Any]:
    """Return what results may depend on besides the settings, by name."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    return {
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "Python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "CPUs": os.cpu_count(),
        **dict(sorted(variables.items())),
    }


def _digests_of(tensors: Mapping[str, Tensor]) -> list[int]:
    """Return the digest of each tensor, in the order of their names.

    [] if they are sharded, or on a GPU, from which copying them takes long.
    """
    if any(tensor.device.type != "cpu" or isinstance(tensor, DTensor) for tensor in tensors.values()):
        return []
    ordered = (tensors[name].reshape(-1) for name in sorted(tensors))
    return [short_digest(tensor.contiguous().view(torch.uint8).numpy()) for tensor in ordered]
