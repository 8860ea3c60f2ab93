"""`python -m tools bench learning`: what it makes of its samples, and one short run of the whole. No times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import command, learning
from python_backend.config import load_config


def run(algorithm: str, seed: int, rewards: list[float]) -> list[dict[str, Any]]:
    return [
        {"algorithm": algorithm, "seed": seed, "step": i, "reward": reward, "optimum": 1.0, "kl": 2.0 * i}
        for i, reward in enumerate(rewards, 1)
    ]


def test_the_worst_seed_decides():
    good, bad = run("ppo", 0, [0.1, 0.96, 1.0, 1.0, 1.0, 1.0, 1.0]), run("ppo", 1, [0.1, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    result: dict[str, Any] = {"samples": [*good, *bad, *run("grpo", 0, [1.0] * 6)]}
    result["summary"] = learning.summarise(result)
    assert list(result["summary"][0].values()) == ["ppo", 0, 1.0, 2, 14.0]
    assert list(result["summary"][1].values()) == ["ppo", 1, pytest.approx(0.9), None, 14.0]
    ppo, grpo = learning.targets(result)
    assert (ppo.value, ppo.verdict) == (pytest.approx(0.9), "miss")
    assert (grpo.value, grpo.verdict) == (1.0, "pass")


@pytest.mark.parametrize("algorithm", sorted(learning.ALGORITHMS))
def test_every_configuration_is_valid(tmp_path: Path, algorithm: str):
    arguments = command.parse_arguments("learning", learning, ["--out", str(tmp_path)])
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(learning.configuration(arguments, tmp_path, algorithm, 3)))
    config = load_config(path)
    assert (config.actor.algorithm.name, config.run.seed, config.actor.kl.coef) == (algorithm, 3, 0.0)
