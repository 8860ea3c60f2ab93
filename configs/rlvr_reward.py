"""Reward function of configs/rlvr.yaml: 1 if reasoning-gym accepts the response's first line as the answer, else 0.

Works for every reasoning-gym task: each row of the prompt file has the task's entry in the column `task`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from rlhf_triton import Sample


def is_correct(sample: Sample) -> float:
    """Return 1.0 if the first line is exactly the answer; partial credit from reasoning-gym counts as 0."""
    task = sample.metadata["task"]
    lines = (sample.response or "").strip().splitlines()
    return float(_scorer(task["metadata"]["source_dataset"])(lines[0].strip() if lines else "", task) == 1.0)


@cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym.get_score_answer_fn(dataset)
