"""Reward and critic that wait where others compute: what a step takes when cores are not what limits it.
Given: what the real ones are given, and seconds per token. Returns: zeros, after as long as they would have taken.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from python_backend import critic, reward
from python_backend.serving import Parameters

SECONDS_PER_TOKEN = "bench_seconds_per_token"


class WaitingReward(reward.TritonPythonModel):
    """The reward model as it is served, but for its forward."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self._pause = float(Parameters(args).text(SECONDS_PER_TOKEN))
        super().initialize(args)

    def forward(self, model: Any, rows: list[np.ndarray], width: int) -> list[np.ndarray]:
        time.sleep(self._pause * len(rows) * width)
        return [np.zeros(1, np.float32) for _ in rows]


class WaitingCritic(critic.TritonPythonModel):
    """The critic as it is served, but for its forward."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Triton's entry point at load."""
        self._pause = float(Parameters(args).text(SECONDS_PER_TOKEN))
        super().initialize(args)

    def forward(self, model: Any, rows: list[np.ndarray], width: int) -> list[np.ndarray]:
        time.sleep(self._pause * len(rows) * width)
        return [np.zeros(row.size, np.float32) for row in rows]
