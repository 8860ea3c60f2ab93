"""A run that only writes its journal of samples, over many steps and several starts."""

import asyncio
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from samples import groups_of, scored_samples

from rlhf_triton.actor.data.prompts import Positions
from rlhf_triton.actor.replay.sample_journal import SampleJournal
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.store.durable import make_folder
from rlhf_triton.store.record_log import StoredRecord

EVERY = 10
KEEP = 2
AHEAD = 2
NUM_TENSORS = 100


def simulate(folder, steps, *, starts):
    """Record steps of two groups of two samples, with a checkpoint after every 10th, and the next ones in flight.

    For each start of the run, yield the most bytes that the samples took at a checkpoint until its next one.
    """
    config = RunConfig.model_validate(
        {
            "run": {"dir": folder},
            "critic": {"model": "none"},
            "rewards": {"verdict": {"function": "verdict.py:verdict"}},
            "actor": {
                "keep_checkpoints": KEEP,
                "max_off_policy_steps": AHEAD,
                "rollout_size": 4,
                "algorithm": {"name": "grpo", "responses_per_prompt": 2, "correction": {"mode": "none"}},
            },
        }
    )
    state = SimpleNamespace(
        policy=SimpleNamespace(fingerprint=""),
        numbers=dict,
        inputs=SimpleNamespace(
            seed_of=lambda step: step,
            positions={step: Positions(2 * step) for step in range(steps + 1)},
            fingerprints={},
        ),
    )
    checkpoints = folder / "checkpoints" / "actor"
    groups = groups_of([*scored_samples()][:4], 2)
    digests = np.zeros(NUM_TENSORS, np.uint64)

    async def session(begin, last):
        samples = SampleJournal(config, state)
        samples.sampled(begin - 1)
        samples.resume(begin - 1)
        sizes = [0]
        for step in range(begin, last + 1):
            for number, group in enumerate(groups, 2 * (step + AHEAD)):
                samples.add_sampled(number, step, group)
            first = 2 * (step - 1)
            samples.add_groups(step, [replace(group, number=first + i) for i, group in enumerate(groups)])
            await samples.durable()
            header = {"kind": "step", "step": step, "groups": samples._recorded.numbers}
            samples._append(step, lambda header=header: [StoredRecord(header, {"weights": digests})])
            if step % EVERY == 0:
                await samples.durable()
                make_folder(checkpoints / str(step))
                (checkpoints / str(step) / "state.json").touch()
                shutil.rmtree(checkpoints / str(step - KEEP * EVERY), ignore_errors=True)
                samples.prune()
                sizes.append(
                    sum(path.stat().st_size for path in config.run.sample_journal_dir.rglob("*") if path.is_file())
                )
        samples.close()
        return max(sizes)

    size = steps // starts
    for number in range(starts):
        yield asyncio.run(session(number * size + 1, (number + 1) * size))
