"""YAML files that name only what their run uses: each kind of reward, with a critic and without one."""

import pytest
import reward_functions
import yaml
from settings import nested

from rlhf_triton.config.actor import ActorSection

ALGORITHMS = ("ppo", "rloo")  # with a critic, and without one
FUNCTION = {"verdict": {"function": f"{reward_functions.__file__}:token_sum", "workers": 1}}
REWARDS = {"model": None, "functions": FUNCTION, "both": {"model": {}, **FUNCTION}}
every_combination = pytest.mark.parametrize(
    ("algorithm", "reward"), [(algorithm, reward) for algorithm in ALGORITHMS for reward in REWARDS]
)


def checkpoints_of(algorithm, reward):
    """Return the sections of the served models that are read from a checkpoint."""
    return [*(["reward"] if reward != "functions" else []), *(["critic"] if algorithm == "ppo" else [])]


def write_yaml(folder, algorithm, reward, checkpoints):
    """Write a YAML that names only what this run uses; return its path."""
    data = {
        "run": {"dir": str(folder / "run")},
        "server": {"http_port": 0, "grpc_port": 0, "metrics_port": 0},
        "actor": nested(
            ActorSection,
            {
                "model": str(checkpoints.policy),
                "prompts_path": str(checkpoints.prompts),
                "algorithm_name": algorithm,
                "steps": 2,
                "rollout_size": 4,
                "responses_per_prompt": 2,
                "minibatch_size": 4,
                "max_new_tokens": 3,
                "prompts_max_tokens": 64,
                "mask_unfinished": False,
            },
        ),
    }
    for section in checkpoints_of(algorithm, reward):
        data[section] = {"model": str(getattr(checkpoints, section))}
    if REWARDS[reward] is not None:
        data["rewards"] = REWARDS[reward]
    path = folder / "my.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path
