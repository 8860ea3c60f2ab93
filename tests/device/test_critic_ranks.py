"""The critic on two ranks with a card each: what they exchange, and that what they publish is what they hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import VOCAB, save_tiny

from python_backend.models.canary import CANARY_TOKENS, check_canary
from python_backend.models.modeling import load_critic, save_critic
from python_backend.training import sharding
from python_backend.training.merged_slices import MergedSlices
from python_backend.training.ranks import Ranks
from python_backend.wire.contract import Limits
from python_backend.wire.training_payload import TrainPayload, train_payload
from tests.device.test_ranks import recorded_traffic
from tests.support.ranks import on_ranks, whole_tensors
from tests.support.settings import trainer_section
from trainer.critic_update import CriticUpdate, load_update, split_rows

ROWS, PASSES = 8, 2  # of a batch; micro-batches of each rank
CANARY = np.arange(CANARY_TOKENS)
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora_rank": 2},
    "lora, checkpointed": {"lora_rank": 2, "gradient_checkpointing": True},
}

RUNS = [*(("llama", case) for case in CASES), ("gpt2", "lora"), ("bert", "all weights")]
LIMITS = [sharding.MOST_UNREDUCED, 0]


def settings_of(case: str) -> Any:
    given = {"precision": "bfloat16", "token_budget": 20, "global_batch_size": ROWS, "warmup_steps": 0, "lr": 1e-2}
    return trainer_section(device="cuda", **given, **CASES[case])


def payload() -> TrainPayload:
    """Rows of 10 tokens, of which a micro-batch has two."""
    rng = np.random.default_rng(0)
    returns, prev_values = rng.normal(size=(2, ROWS, 9)).astype(np.float32)
    arrays = {
        "tokens": rng.integers(1, VOCAB, (ROWS, 10)),
        "sequence_lengths": np.full((ROWS, 1), 10),
        "returns": returns,
        "prev_values": prev_values,
        "mask": np.ones_like(returns),
    }
    return train_payload(arrays, Limits(VOCAB))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("critics")
    for family in ("llama", "gpt2", "bert"):
        save_tiny(root / f"first {family}", family, "critic")
        (root / family).mkdir()
        save_critic(load_critic(root / f"first {family}", device="cpu"), root / family)
    return root


def gradients(update: CriticUpdate) -> dict[str, np.ndarray]:
    """The gradients of one batch, whole."""
    for rows in update._micro_batches(list(split_rows(payload()))):
        update._accumulate(rows, float(ROWS * 9))
    found = {name: p.grad for name, p in update.parameters.items() if p.grad is not None}
    whole = {name: tensor.clone().numpy() for name, tensor in whole_tensors(found)}
    update.optimizer.zero_grad()
    return whole


def session(ranks: Ranks, root: Path) -> dict[Any, Any]:
    """Each case, in one group of ranks."""
    ranks.announce = lambda *_, **__: None  # type: ignore[method-assign]
    for family, case in RUNS:
        ranks.together(lambda folder=root / f"{family}, {case}": folder.mkdir(exist_ok=True))
    versions = {run: version(ranks, root, *run) for run in RUNS}
    sent = recorded_traffic()
    return {**versions, **{(case, most): traffic(ranks, root, case, most, sent) for case in CASES for most in LIMITS}}


def version(ranks: Ranks, root: Path, family: str, case: str) -> dict[str, Any]:
    """Train on a payload and write a version; returns gradients and weights, whole, and the canary row's values."""
    update = load_update(root / family, settings_of(case), seed=0, ranks=ranks)
    found: dict[str, Any] = {"gradients": gradients(update)}
    report = update.train(payload() if ranks.rank == 0 else None, lambda _: None)
    found["report"] = (report.loss_mean, report.grad_norm)
    found["canary"] = update.critic.values([CANARY])[0].tolist()
    update.critic.write(root / f"{family}, {case}")
    found["weights"] = {name: tensor.numpy() for name, tensor in whole_tensors(MergedSlices(update.critic.model))}
    found["after"] = gradients(update)  # trains on after the canary row
    return found


def traffic(ranks: Ranks, root: Path, case: str, most: int, sent: Counter[Any]) -> tuple[dict[Any, int], int, int]:
    """The elements exchanged in one optimizer step; the weights of all layers, and all that are trained."""
    sharding.MOST_UNREDUCED = most
    update = load_update(root / "llama", settings_of(case), seed=0, ranks=ranks)
    layers = update.critic.model.base_model.layers
    gradients(update)  # the first pass creates what later ones keep
    update.critic.values([CANARY])
    sent.clear()
    report = update.train(payload() if ranks.rank == 0 else None, lambda _: None)
    assert report.optimizer_steps == 1
    sizes = [sum(p.numel() for p in each) for each in (layers.parameters(), update.parameters.values())]
    return dict(sent), sizes[0], sizes[1]


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[Any, Any]]:
    return on_ranks(2, session, root, device="cuda", timeout_s=500)


@pytest.mark.parametrize(("family", "case"), RUNS)
def test_a_version_of_two_cards_gives_the_values_that_they_announced(ranks: Any, root: Path, family: str, case: str):
    """They gather weights in bfloat16, but publish those that they train, and a server may hold them in float32."""
    files = sorted((root / f"{family}, {case}").glob("*.safetensors"))
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    served = load_critic(root / f"{family}, {case}", device="cpu")
    alone = load_update(root / family, settings_of(case), seed=0)
    expected = gradients(alone)
    report = alone.train(payload(), lambda _: None)
    for found in (results[family, case] for results in ranks):
        assert found["weights"].keys() == stored.keys()
        assert all(np.array_equal(found["weights"][name], stored[name]) for name in stored)
        check_canary(served, served.values([CANARY])[0], found["canary"])
        np.testing.assert_allclose(found["canary"], served.values([CANARY])[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["report"], (report.loss_mean, report.grad_norm), rtol=2e-2)
        np.testing.assert_allclose(found["canary"], alone.critic.values([CANARY])[0], atol=2e-2)
        assert distance(found["gradients"], expected) <= 2e-2
        assert distance(found["after"], gradients(alone)) <= 0.1  # AdamW amplifies rounding


def distance(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The norm of the difference of all gradients, relative to that of `other`."""
    assert one.keys() == other.keys()
    squares = [(np.square(one[name] - other[name]).sum(), np.square(other[name]).sum()) for name in other]
    return float(np.sqrt(np.divide(*np.sum(squares, axis=0))))


@pytest.mark.parametrize("case", CASES)
def test_cards_gather_layers_in_bfloat16_and_add_up_gradients_once_a_step(ranks: Any, case: str):
    sent, in_layers, trained = ranks[0][case, LIMITS[0]]
    gathered, reduced = ("all_gather_single", torch.bfloat16), ("reduce_scatter_single", torch.float32)
    assert set(sent) == {gathered, ("all_gather_single", torch.float32), reduced}  # float32: embeddings, norm and head
    assert sent[gathered] == pytest.approx(2 * PASSES * in_layers, rel=0.05)  # forward and backward
    assert sent[reduced] == pytest.approx(trained, rel=0.05)  # once; slices are padded
    always, _, _ = ranks[0][case, LIMITS[1]]
    assert always[gathered] == sent[gathered]
    assert always[reduced] == PASSES * sent[reduced]
