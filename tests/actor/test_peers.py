"""Losses, advantages and importance factors against the output of the peers' own functions (verl, NeMo-RL, TRL).

`peers.json` contains random inputs and what these functions returned for them in float64, to 12 digits.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.advantages import masked_whiten
from rlhf_triton.actor.algorithms.inputs import AdvantageInputs, ClipRange
from rlhf_triton.actor.algorithms.losses import importance_factors
from rlhf_triton.config.algorithms import ALGORITHMS, LOSSES
from rlhf_triton.rewards.function import import_function
from tests.support.masked_loss import loss_inputs, outcome
from tests.support.samples import method_of

GOLDEN = json.loads((Path(__file__).parent / "peers.json").read_text())
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["inputs"].items()}
MASK = INPUTS["mask"]


def close(found: Tensor, expected: Any) -> None:
    """Compare to 1e-6: verl adds 1e-8 to some denominators, NeMo-RL computes lambda in float32."""
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def cases(kind: str) -> Any:
    return pytest.mark.parametrize("case", GOLDEN[kind], ids=lambda case: case["source"])


@cases("losses")
def test_loss_and_gradient_match_peers(case: dict[str, Any]):
    """Of the three means, `constant` divides the sum by sequences times the longest length.

    verl adds a dual clip to the clipped loss: the gradient is compared only where the dual clip has no effect.
    """
    weights = MASK / MASK.sum(-1, keepdim=True) if case["mean"] == "sequence" else MASK
    total = float(MASK.numel()) if case["mean"] == "constant" else None
    inputs = loss_inputs(
        *(INPUTS[name] for name in ("logprobs", case["old"], "advantages")),
        weights,
        total,
        clip=ClipRange(case["low"], case["high"]),
    )
    loss, stats, (gradient,) = outcome(import_function(LOSSES[case["loss"]].function), inputs)
    if case["dual"] is not None:
        ratio = (INPUTS["logprobs"] - INPUTS[case["old"]]).exp()
        compared = ((INPUTS["advantages"] >= 0) | (ratio < case["dual"])).double()
        return close(gradient * compared, (torch.tensor(case["gradient"]) * compared).tolist())
    close(loss, case["value"])
    close(gradient, case["gradient"])
    if case["mean"] == "token":
        close(stats["clip_fraction"] / MASK.sum(), case["clip_fraction"])


def advantage_inputs(rewards: list[float], groups: list[int], values: Tensor, **settings: Any) -> AdvantageInputs:
    scored = torch.ones(len(MASK), dtype=torch.bool)
    zeros = torch.zeros_like(MASK)
    given = torch.tensor(rewards), zeros, values, MASK, torch.tensor(groups), scored, scored, scored
    return AdvantageInputs(*given, **settings)


@cases("advantages")
def test_group_advantages_match_peers(case: dict[str, Any]):
    algorithm = ALGORITHMS[case["algorithm"]]
    inputs = advantage_inputs(case["rewards"], case["groups"], torch.zeros_like(MASK))
    found = import_function(algorithm.advantage)(inputs)[0]
    n = float(MASK.sum())  # verl whitens with n - 1
    found = masked_whiten(found, MASK) * ((n - 1) / n) ** 0.5 if algorithm.whitens else found
    close(found, case["advantages"])


@cases("factors")
def test_importance_factors_match_peers(case: dict[str, Any]):
    settings = {name: case[name] for name in ("level", "mode", "low", "high")}
    close(importance_factors(INPUTS["log_ratio"], MASK, **settings) * MASK, case["factors"])


@pytest.mark.parametrize("case", GOLDEN["gae"]["cases"])
def test_gae_with_separate_and_length_adaptive_lambda_matches_peers(case: dict[str, Any]):
    """The reward is on the last sampled token, which is not the last one of every row."""
    settings = {name: case[name] for name in ("gamma", "lam", "lam_values", "lam_length")}
    values = torch.tensor(GOLDEN["gae"]["values"], dtype=torch.float64)
    inputs = advantage_inputs(case["rewards"], [0, 1, 2, 3], values, **settings)
    advantages, returns = method_of(algorithm_name="ppo").advantage(inputs)
    close(advantages, case["advantages"])
    close(returns * MASK, case["returns"])
