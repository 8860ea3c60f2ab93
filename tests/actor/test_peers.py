"""Losses, advantages and importance factors against the output of the peers' own functions.

`peers.json` contains random inputs and what these functions returned for them in float64, to 12 digits. "Both signs":
DPPO's masks let a token move back, so the two masks of an advantage of either sign, together, are the gate. "Molt":
`PolicyLoss` of NVIDIA-NeMo/labs-molt, which has OpenRLHF's gates. "FlashREINFORCE": its authors' `loss.py`.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from masked_loss import loss_inputs, outcome
from samples import advantage_inputs, method_of

from rlhf_triton.actor.algorithms.advantages import masked_whiten
from rlhf_triton.actor.algorithms.importance import importance_factors
from rlhf_triton.actor.algorithms.inputs import ClipRange
from rlhf_triton.actor.algorithms.kl import kl_loss
from rlhf_triton.config.algorithms import ALGORITHMS, LOSSES
from rlhf_triton.user_code import import_function

GOLDEN = json.loads((Path(__file__).parent / "peers.json").read_text())
INPUTS = {name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["inputs"].items()}
MASK = INPUTS["mask"]


def close(found, expected, tolerance=1e-6):
    """Compare to 1e-6: verl adds 1e-8 to some denominators, NeMo-RL computes lambda in float32."""
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


def cases(kind):
    return pytest.mark.parametrize("case", GOLDEN[kind], ids=lambda case: case["source"])


@cases("losses")
def test_loss_and_gradient_match_peers(case):
    """The mean `constant` divides the sum by the number of sequences times the longest length.

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


@cases("advantages")
def test_group_advantages_match_peers(case):
    algorithm = ALGORITHMS[case["algorithm"]]
    inputs = advantage_inputs(torch.tensor(case["rewards"]), torch.tensor(case["groups"]), MASK)
    found = import_function(algorithm.advantage)(inputs)[0]
    n = float(MASK.sum())  # verl whitens with n - 1
    found = masked_whiten(found, MASK) * ((n - 1) / n) ** 0.5 if algorithm.whitens else found
    close(found, case["advantages"])


@cases("gdpo")
def test_gdpo_advantages_match_peers(case):
    """verl whitens over tokens, NeMo-RL and TRL over responses (here of one token), TRL with a larger epsilon."""
    components = torch.tensor([[math.nan if x is None else x for x in row] for row in case["components"]]).T
    mask = MASK if case["tokens"] == "mask" else torch.ones(len(components), 1)
    terms = {"components": components, "component_weights": torch.tensor(case["weights"])}
    inputs = advantage_inputs(torch.zeros(len(mask)), torch.tensor(case["groups"]), mask, **terms)
    gdpo = ALGORITHMS["gdpo"]
    advantages = import_function(gdpo.advantage)(inputs)[0]
    assert gdpo.whitens
    n = float(mask.sum())  # the peers whiten with n - 1
    close(masked_whiten(advantages, mask) * ((n - 1) / n) ** 0.5, case["advantages"], case["tolerance"])


@cases("flash_reinforce")
def test_flash_reinforce_matches_peers(case):
    """Compares all steps up to the gradient. verl's loss, the ratio, has the same gradient and another value."""
    algorithm = ALGORITHMS["flash_reinforce"]
    inputs = advantage_inputs(torch.tensor(case["rewards"]), torch.arange(4), MASK)
    advantages = import_function(algorithm.advantage)(inputs)[0]
    weights = MASK / MASK.sum(-1, keepdim=True)
    clip = ClipRange(case["delta"], case["delta"])
    given = loss_inputs(INPUTS["logprobs"], INPUTS[case["old"]], advantages.double(), weights, clip=clip)
    loss, _, (gradient,) = outcome(import_function(LOSSES[algorithm.loss].function), given)
    close(gradient, case["gradient"])
    if case["value"] is not None:
        close(loss, case["value"])


@cases("unbiased_kl")
def test_unbiased_kl_and_its_gradient_match_peers(case):
    logprobs = INPUTS["logprobs"].clone().requires_grad_()
    reference = INPUTS["logprobs"] - INPUTS["log_ratio"]
    log_ratio = logprobs - INPUTS["old_logprobs"]
    loss = kl_loss(logprobs, reference, log_ratio, MASK, kind="unbiased", total=float(MASK.sum()))
    loss.backward()
    close(loss.detach(), case["value"])
    close(logprobs.grad, case["gradient"])


@cases("factors")
def test_importance_factors_match_peers(case):
    settings = {name: case[name] for name in ("level", "mode", "low", "high")}
    logprobs = INPUTS["logprobs"]
    sampled = INPUTS[case["old"]] if "old" in case else logprobs - INPUTS["log_ratio"]
    close(importance_factors(logprobs, sampled, MASK, **settings) * MASK, case["factors"])


@pytest.mark.parametrize("case", GOLDEN["gae"]["cases"])
def test_gae_with_separate_and_length_adaptive_lambda_matches_peers(case):
    """The reward is on the last sampled token, which is not the last one of every row."""
    settings = {name: case[name] for name in ("gamma", "lam", "lam_values", "lam_length")}
    values = torch.tensor(GOLDEN["gae"]["values"], dtype=torch.float64)
    inputs = advantage_inputs(torch.tensor(case["rewards"]), torch.arange(4), MASK, values=values, **settings)
    advantages, returns = method_of(algorithm_name="ppo").advantage(inputs)
    close(advantages, case["advantages"])
    close(returns * MASK, case["returns"])
