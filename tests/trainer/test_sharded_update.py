"""The critic update on several ranks: the result of one process, and checkpoints and versions that any number reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_critic_update import arrays, payload, settings, silent, trained
from tiny_checkpoints import VOCAB, save_tiny

from python_backend.models.modeling import CriticModel, load_critic, save_critic
from python_backend.parallel.ranks import Ranks
from python_backend.parallel.sharding import whole_tensors
from python_backend.store.sealed_folder import STATE_FILE, DamagedCheckpoint
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import Limits
from python_backend.wire.training_payload import TrainPayload, train_payload
from tests.support.ranks import on_ranks
from trainer.checkpoint import CheckpointFolder, CheckpointState
from trainer.critic_update import CriticUpdate
from trainer.sharded import update as sharded_update
from trainer.sharded.publish import ShardedPublisher
from trainer.sharded.update import ShardedUpdate, follow_rank_0
from trainer.trained_critic import build_critic
from trainer.verification import VersionRejected

FAMILIES = ["llama", "gpt2", "bert"]
TRAINING = {"token_budget": 60, "global_batch_size": 5}  # 12 rows: two batches of several micro-batches, one small one
LONG_TRAINING = 5
SAVING = {"precision": "bfloat16", "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded")
    for family in FAMILIES:
        save_tiny(root / family, family, "critic")
    store = WeightsStore(root / "store")
    store.set_current(store.add(lambda f: save_critic(load_critic(root / "llama"), f), **about(0)).version)
    return root


def about(step: int) -> dict[str, Any]:
    return {"run_id": "run", "step": step, "parent": None, "epoch": 1}


def payloads(count: int) -> list[TrainPayload]:
    # The last payload has a single row: one rank has nothing to do.
    last = train_payload({n: a[:1] for n, a in arrays(12, seed=9).items()}, Limits(VOCAB))
    return [*(payload(seed=seed) for seed in range(count - 1)), last]


def state(step: int, update: CriticUpdate) -> CheckpointState:
    return CheckpointState("run", step, update.optimizer_step, 0, 1, True, {}, "", "", [])


def everything(update: CriticUpdate) -> dict[str, torch.Tensor]:
    """All weights and moments of an update, whole."""
    moments = {
        f"{key}/{name}": value
        for name, parameter in update.parameters.items()
        for key, value in update.optimizer.state[parameter].items()
    }
    return {n: t.clone() for n, t in whole_tensors({**update.critic.model.state_dict(), **moments})}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- functions that ranks execute ----


def doubled(folder: Path, *_: Any, **__: Any) -> CriticModel:
    return CriticModel(load_critic(folder).model.double())


def in_float64(ranks: Ranks, root: Path) -> dict[str, Any]:
    """Weights, losses and gradient norms of each family after three payloads."""
    sharded_update.build_critic = doubled  # type: ignore[attr-defined]
    results: dict[str, Any] = {}
    for family in FAMILIES:
        update = ShardedUpdate(settings(**TRAINING), 0, ranks, root / family)
        sent = payloads(3)
        reports = [update.train(each if ranks.rank == 0 else None, silent) for each in sent]
        weights = {n: t.numpy() for n, t in whole_tensors(update.critic.model.state_dict())}
        canary = update.critic.values([np.arange(9)])[0]
        results[family] = weights, [(r.loss_mean, r.grad_norm, r.optimizer_steps) for r in reports], canary
    sharded_update.build_critic = build_critic  # type: ignore[attr-defined]
    update = ShardedUpdate(settings(**TRAINING, **SAVING), 0, ranks, root / "llama")
    reports = [update.train(each if ranks.rank == 0 else None, silent) for each in payloads(3)]
    results["saving"] = [(r.loss_mean, r.grad_norm) for r in reports], update.critic.values([np.arange(9)])[0]
    return results


def in_float32(ranks: Ranks, root: Path) -> Any:
    """Train, write a checkpoint in between, and train on from it: all announced by rank 0."""
    options = settings(**TRAINING)
    if ranks.rank:
        follow_rank_0(options, 0, ranks)
        return None
    folder = CheckpointFolder(root / "checkpoints")
    ShardedUpdate(options, 0, ranks, root / "llama")
    update = ShardedUpdate(options, 0, ranks, root / "llama")  # a second one replaces the first
    for each in payloads(LONG_TRAINING):
        update.train(each, silent)
    folder.save(update, state(1, update))
    update.train(payload(seed=50), silent)
    after = load_all(folder, update, root, 2)
    resumed = ShardedUpdate(options, 0, ranks, root / "llama")
    folder.load(1, resumed)
    resumed.train(payload(seed=50), silent)
    again = load_all(folder, resumed, root, 3)
    versions = publish(resumed, root)
    damaged = damage(folder, update)
    ranks.operations.announce("end")
    return same(after, again), versions, damaged


def load_all(folder: CheckpointFolder, update: ShardedUpdate, root: Path, step: int) -> dict[str, torch.Tensor]:
    """The content of a checkpoint of several ranks, read by one process."""
    folder.save(update, state(step, update))
    return read_alone(root, step)


def read_alone(root: Path, step: int) -> dict[str, torch.Tensor]:
    alone = CriticUpdate(load_critic(root / "llama"), settings(**TRAINING))
    CheckpointFolder(root / "checkpoints").load(step, alone)
    return everything(alone)


def publish(update: ShardedUpdate, root: Path) -> list[Any]:
    """Publish twice; then a version of other weights, and one that was damaged."""
    store = WeightsStore(root / "store")
    publisher = ShardedPublisher(
        store, run_id="run", epoch=1, servers=["127.0.0.1:1"], reload="swap", timeout_s=60, keep=9
    )
    seen: list[Any] = []
    for _ in range(2):
        manifest = store.add(update.critic.write, **about(1), reuse=False, canary=[0.5])
        publisher.verify(manifest.version, update.critic)
        seen.append((manifest.version, publisher.holds_weights(update.critic, manifest.version)))
    seen.append(publisher.holds_weights(update.critic, 0))
    for spoil in (lambda: None, lambda: spoil_one(store.folder(2))):
        spoil()
        try:
            publisher.verify(0 if len(seen) == 3 else 2, update.critic)
        except VersionRejected as error:
            seen.append(str(error))
    return seen


def spoil_one(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")


def damage(folder: CheckpointFolder, update: ShardedUpdate) -> str:
    spoil_one(folder.root / "3")
    try:
        folder.load(3, update)
    except DamagedCheckpoint as error:
        return str(error)
    return "not noticed"


def resume(ranks: Ranks, root: Path, step: int) -> list[str]:
    """Read a checkpoint on these ranks; return the names of tensors that are not those of one process that reads it."""
    options = settings(**TRAINING)
    update = ShardedUpdate(options, 0, ranks, root / "llama")
    CheckpointFolder(root / "checkpoints").load(step, update)
    own, alone = everything(update), read_alone(root, step)
    return sorted(name for name in own.keys() | alone.keys() if not torch.equal(own[name], alone[name]))


# ---- tests ----


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_float64_training_on_ranks_is_that_of_one_process(root: Path, size: int) -> None:
    results = on_ranks(size, in_float64, root)
    for family in FAMILIES:  # AdamW multiplies rounding of gradients near 0 by lr / eps = 1e6
        update, reports = trained(root / family, payloads(3), double=True, **TRAINING)
        expected = update.critic.model.state_dict()
        for weights, seen, canary in (result[family] for result in results):
            assert max(float(np.abs(weights[n] - tensor.numpy()).max()) for n, tensor in expected.items()) <= 1e-10
            wanted = [(r.loss_mean, r.grad_norm, r.optimizer_steps) for r in reports]
            np.testing.assert_allclose(seen, wanted, rtol=1e-12)
            np.testing.assert_allclose(canary, update.critic.values([np.arange(9)])[0], atol=1e-12)
    update = CriticUpdate(
        build_critic(root / "llama", settings(**TRAINING, **SAVING), seed=0), settings(**TRAINING, **SAVING)
    )
    reports = [update.train(each, silent) for each in payloads(3)]
    for result in results:
        seen, canary = result["saving"]
        np.testing.assert_allclose(seen, [(r.loss_mean, r.grad_norm) for r in reports], rtol=2e-2)
        np.testing.assert_allclose(canary, update.critic.values([np.arange(9)])[0], atol=2e-2)


@pytest.fixture(scope="module")
def two_ranks(root: Path) -> Any:
    return on_ranks(2, in_float32, root)[0]


@pytest.mark.slow
def test_float32_training_is_close_to_one_process_and_resumes_bitwise(two_ranks: Any, root: Path) -> None:
    assert two_ranks[0]
    update, _ = trained(root / "llama", payloads(LONG_TRAINING), **TRAINING)
    ranks = read_alone(root, 1)
    assert max(float((ranks[n] - t).abs().max()) for n, t in update.critic.model.state_dict().items()) <= 1e-5
    names = {path.name for path in (root / "checkpoints" / "1").iterdir()}
    assert {Path(name).suffix for name in names} == {".safetensors", ".json"}
    assert STATE_FILE in names


def test_versions_of_two_ranks_are_ordinary_checkpoints_and_are_verified(two_ranks: Any, root: Path) -> None:
    _, versions, damaged = two_ranks
    assert versions[:3] == [(1, True), (2, True), False]
    assert "version 0: " in versions[3]
    assert "version 2: " in versions[4]
    assert all("differs from the trained weights" in message for message in versions[3:])
    assert "is damaged: sha256" in damaged
    store = WeightsStore(root / "store")
    first, second = store.manifest(1), store.manifest(2)
    assert (first.sha256, first.files) == (second.sha256, second.files)
    assert sorted(first.files or {}) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    ]  # fmt: skip
    store.verify_files(1)
    served = load_critic(root / "llama").with_weights(store.folder(1)).model.state_dict()
    assert same(served, {name: tensor for name, tensor in read_alone(root, 2).items() if name in served})


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_of_any_number_of_ranks_is_read_by_others_bitwise(two_ranks: Any, root: Path, size: int) -> None:
    update, _ = trained(root / "llama", [payload()], **TRAINING)
    CheckpointFolder(root / "checkpoints").save(update, state(10, update))
    assert "optimizer.safetensors" in {path.name for path in (root / "checkpoints" / "10").iterdir()}
    assert same(read_alone(root, 10), everything(update))
    assert on_ranks(size, resume, root, 10) == [[]] * size
    if size != 2:
        assert on_ranks(size, resume, root, 1) == [[]] * size
