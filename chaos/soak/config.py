"""The run of the soak test: PPO with models so small that it takes as many steps as possible."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from benchmarks.learning import configuration, make_checkpoints
from benchmarks.support.children import free_ports

ROWS = 16  # responses per step
MOST_REQUESTS = 32  # in flight


def write_soak_config(folder: Path, seed: int) -> Path:
    """Write checkpoints, prompts and the YAML of a PPO run without an end in `folder`; return the YAML's path."""
    make_checkpoints(folder, seed)
    data = configuration(argparse.Namespace(steps=10**9, rollout_size=ROWS), folder, "ppo", seed)
    data["run"]["run_id"] = "soak"
    data["server"] |= free_ports()
    data["critic"] |= {"reload": "swap"}
    data["trainer"] |= {
        "global_batch_size": ROWS,
        "checkpoint_every": 10,
        "keep_checkpoints": 3,
        "reload_on_save": "none",
        "publish": {"every": 1, "keep": 4},
    }
    data["trainer"]["optimizer"]["max_steps"] = 10**6
    data["actor"] |= {
        "checkpoint_every": 20,
        "keep_checkpoints": 3,
        "stop_grace_s": 60,
        "client": {"max_in_flight": MOST_REQUESTS, "backoff_s": 0.1, "deadline_s": 20},
    }
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path
