"""Prepares the files of `configs/rlvr.yaml` and `configs/sao.yaml`: SmolLM2 as the policy, the critic of SAO, and sums.

The sums are from reasoning-gym, with known answers.
"""

import importlib
import importlib.util
from collections.abc import Iterable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from examples.demo.llm import CRITIC_LAYERS
from examples.demo.prepare import write_quick_policy
from examples.demo.pretrained import build_once
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.jsonl import write_jsonl
from rlhf_triton.tools.example_model import save_smollm2

TASK = "chain_sum"
TASK_SETTINGS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
NUM_TRAIN = 1024
NUM_HELD_OUT = 256
# reasoning-gym draws task i of seed s from seed s + i: two seeds closer together than the number of tasks share tasks.
TRAIN_SEED = 0
HELD_OUT_SEED = 1_000_000


def prepare(out_dir: Path, quick: bool) -> Path:
    """Return the folder with `policy`, `critic` and the prompt files; build it if needed. Raises RlhfError.

    The folder is the same for every seed of a run; a seed changes only the order of the prompts and the sampling. With
    `quick`, it holds the policy of the quick `make demo`, and nothing is downloaded.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise RlhfError("reasoning-gym is not installed: pip install --constraint constraints.txt -e '.[rlvr]'")
    return build_once(out_dir, lambda folder: _build(folder, quick), tasks=version("reasoning-gym"), quick=quick)


def _build(folder: Path, quick: bool) -> None:
    from examples.demo.models import save_critic  # imports torch
    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    _write_tasks(folder)
    if quick:
        write_quick_policy(folder / "policy")
    else:
        save_smollm2(folder / "policy")
    save_critic(folder / "policy", folder / "critic", num_hidden_layers=1 if quick else CRITIC_LAYERS)


def _write_tasks(folder: Path) -> None:
    """Write the two prompt files. Held-out questions differ from each other and from all training questions."""
    held_out: dict[str, dict[str, Any]] = {}
    # Draw more than needed: reasoning-gym repeats questions, and some training questions are held out.
    for entry in _drawn_sums(HELD_OUT_SEED, 2 * NUM_HELD_OUT):
        if len(held_out) < NUM_HELD_OUT:
            held_out.setdefault(entry["question"], entry)
    unseen = (entry for entry in _drawn_sums(TRAIN_SEED, 4 * NUM_TRAIN) if entry["question"] not in held_out)
    _write(folder / "prompts.jsonl", "train", islice(unseen, NUM_TRAIN))
    _write(folder / "validation.jsonl", "validation", held_out.values())


def _drawn_sums(seed: int, size: int) -> Iterable[dict[str, Any]]:
    """Return reasoning-gym's entries for the seeds from `seed` on."""
    reasoning_gym = importlib.import_module("reasoning_gym")  # from the extra `rlvr`, and slow to import
    return reasoning_gym.create_dataset(TASK, seed=seed, size=size, **TASK_SETTINGS)


def _write(path: Path, name: str, entries: Iterable[dict[str, Any]]) -> None:
    """Write a prompt file; its column `task` has the complete reasoning-gym entry, which the verifier needs."""
    lines = (
        {"text": entry["question"].strip(), "prompt_id": f"{name}-{number:05d}", "task": entry}
        for number, entry in enumerate(entries)
    )
    write_jsonl(path, lines)
