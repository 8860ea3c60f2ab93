"""Resolves the setting that says which of a reward model's labels is the reward."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError, inspect_checkpoint, reward_head
from rlhf_triton.config.sections import RewardSection
from rlhf_triton.config.yaml_file import read_yaml


def attribute_weights(reward: RewardSection) -> list[float] | Literal["separate"] | None:
    """Return `reward.attribute_weights` as numbers in the order of the model's labels; None if they are not set.

    Raises:
        CheckpointError: the folder is not a reward model; the weights do not fit its labels; or it has several labels,
            and no setting says which is the reward.
    """
    weights = reward.attribute_weights
    if weights == "separate":
        return "separate"
    if reward.logit is not None or (weights is None and not (reward.model / CONFIG_FILE).is_file()):
        return None  # no labels needed, or the committed repository, which is rendered without a checkpoint
    info = inspect_checkpoint(reward.model)
    count = reward_head(info).num_labels
    names = info.label_names
    listed = f"{reward.model} has {count} {'label' if count == 1 else 'labels'} ({', '.join(names)})"
    if weights is None:
        ways = choices(names, good=names[-1 if info.good_label is None else info.good_label])
        if reward.process is not None:
            is_open = count > 2 or (count == 2 and info.good_label is None)
            ways = ways[:1]
        else:
            is_open = count > 1
        if is_open:
            raise CheckpointError(f"{listed}, but no setting says which is the reward; set {' or '.join(ways)}")
        return None
    if not isinstance(weights, dict):
        if len(weights) != count:
            raise CheckpointError(
                f"{listed}, but reward.attribute_weights has {len(weights)} numbers; give one per label, in this order "
                "or by name"
            )
        return weights
    wrong = {
        "unknown": [name for name in weights if name not in names],
        "missing": [name for name in names if name not in weights],
        "several times": [name for name, times in Counter(names).items() if times > 1],
    }
    if any(wrong.values()):
        problems = "; ".join(f"{what}: {', '.join(which)}" for what, which in wrong.items() if which)
        raise CheckpointError(f"{listed}, each of which reward.attribute_weights must name once ({problems})")
    return [weights[name] for name in names]


def choices(names: Sequence[str], good: str) -> list[str]:
    """Return the settings that can define the reward of a model with these labels, each with its meaning.

    Args:
        good: if there are two labels, the one whose log-odds to propose.
    """
    is_pair = len(set(names)) == len(names) == 2
    pairs = (f"{_quoted(name)}: {-1 if is_pair and name != good else 1}" for name in names)
    meaning = f"the log-odds of {good}, if that is the good one" if is_pair else "a number for each"
    return [
        f"reward.attribute_weights: {{{', '.join(pairs)}}} ({meaning})",
        "reward.attribute_weights: separate (a reward for each)",
    ]


def _quoted(name: str) -> str:
    """Return a label as a YAML key, in quotes if necessary."""
    return name if re.fullmatch(r"[A-Za-z][\w-]*", name) and read_yaml(name) == name else json.dumps(name)
