"""The critic update on several ranks: results of one process, and checkpoints and versions for any number of ranks."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from critic_training import arrays, payload, settings, silent, state, trained
from loaders import load_trained
from ranks import on_ranks, whole_tensors
from tiny_checkpoints import VOCAB, save_tiny, save_with_layers

from rlhf_triton.models.adapters import MergedWeights
from rlhf_triton.models.modeling import CriticModel, load_critic
from rlhf_triton.store.sealed_folder import STATE_FILE, DamagedCheckpoint
from rlhf_triton.store.weights import Origin, WeightsError, WeightsStore
from rlhf_triton.trainer import trained_critic
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.critic_update import CriticUpdate, follow_rank_0, load_update
from rlhf_triton.trainer.verification import holds_weights, verify_version
from rlhf_triton.training_engine.merged_slices import MergedSlices
from rlhf_triton.wire.contract import Limits
from rlhf_triton.wire.training_payload import train_payload

pytestmark = pytest.mark.slow
FAMILIES = ["llama", "gpt2", "bert", "layers"]
FROZEN = ["embed_tokens", r"layers\.1\.self_attn"]
CASES = [*((family, {}) for family in FAMILIES), ("llama", {"lora_rank": 2}), ("gpt2", {"lora_rank": 2})]
CASES += [
    ("layers", {"lora_rank": 2}),
    ("llama", {"freeze": FROZEN}),
    ("gpt2", {"freeze": [r"c_attn\.weight"], "lora_rank": 2}),
]
TRAINING = {"token_budget": 60, "global_batch_size": 5}  # 12 rows: two batches of several micro-batches, one small one
LONG_TRAINING = 5
SAVING = {"precision": "bfloat16", "gradient_checkpointing": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("sharded")
    for family in FAMILIES:
        save_with_layers(root / family) if family == "layers" else save_tiny(root / family, family, "critic")
    store = WeightsStore(root / "store")
    store.set_current(store.add(load_critic(root / "llama").write, about(0)).version)
    return root


def about(step):
    return Origin(run_id="run", step=step, parent=None, epoch=1)


def payloads(count):
    # The last payload has a single row: one rank has nothing to do.
    last = train_payload({n: a[:1] for n, a in arrays(12, seed=9).items()}, Limits(VOCAB))
    return [*(payload(seed=seed) for seed in range(count - 1)), last]


def everything(update):
    """Return all weights and moments of an update, unsharded."""
    return {n: t.clone() for n, t in whole_tensors({**update.critic.model.state_dict(), **update.trained.state()})}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def without_key_biases(name, parameter):
    """Return the parameter without attention's key biases.

    Their gradient is zero in theory: they add the same to the scores of all keys, which softmax ignores. What is left
    is rounding, some 1e-18, which AdamW amplifies by up to lr / eps = 1e6: 1 and 2 ranks differ by 3e-12.
    """
    if name.endswith("attn.c_attn.bias"):
        query, _, value = np.split(parameter, 3)
        return np.concatenate([query, value])
    return parameter[:0] if name.endswith("key.bias") else parameter


# ---- functions that ranks execute ----


@contextlib.contextmanager
def in_doubles():
    """Train critics in float64 within the block."""
    trained_critic.load_critic = lambda *args, **more: CriticModel(load_critic(*args, **more).model.double())
    try:
        yield
    finally:
        trained_critic.load_critic = load_critic


def in_float64(ranks, root):
    """Return weights, losses and gradient norms of each case after three payloads."""
    results = {"cases": []}
    for family, options in CASES:
        with in_doubles():
            update = load_update(root / family, settings(**TRAINING, **options), seed=0, ranks=ranks)
        sent = payloads(3)
        reports = [update.train(each if ranks.rank == 0 else None, silent) for each in sent]
        weights = {n: t.numpy() for n, t in whole_tensors(MergedSlices(update.critic.model))}
        canary = update.critic.values([np.arange(9)])[0]
        results["cases"].append((weights, [(r.loss_mean, r.grad_norm, r.optimizer_steps) for r in reports], canary))
    update = load_update(root / "llama", settings(**TRAINING, **SAVING), seed=0, ranks=ranks)
    reports = [update.train(each if ranks.rank == 0 else None, silent) for each in payloads(3)]
    results["saving"] = [(r.loss_mean, r.grad_norm) for r in reports], update.critic.values([np.arange(9)])[0]
    return results


def in_float32(ranks, root):
    """Train, write a checkpoint in between, and train on from it; rank 0 announces all of it."""
    options = settings(**TRAINING)
    if ranks.rank:
        follow_rank_0(options, 0, ranks)
        return None
    folder = CheckpointFolder(root / "checkpoints")
    load_update(root / "llama", options, seed=0, ranks=ranks)
    update = load_update(root / "llama", options, seed=0, ranks=ranks)  # a second one replaces the first
    for each in payloads(LONG_TRAINING):
        update.train(each, silent)
    folder.save(update, state(1, update))
    update.train(payload(seed=50), silent)
    after = load_all(folder, update, root, 2)
    resumed = load_update(root / "llama", options, seed=0, ranks=ranks)
    folder.load(1, resumed)
    resumed.train(payload(seed=50), silent)
    again = load_all(folder, resumed, root, 3)
    versions = publish(resumed, WeightsStore(root / "store"))
    damaged = damage(folder, update)
    ranks.operations.announce("end")
    return same(after, again), versions, damaged


def load_all(folder, update, root, step):
    """The content of a checkpoint of several ranks, read by one process."""
    folder.save(update, state(step, update))
    return read_alone(root, step)


def read_alone(root, step):
    alone = CriticUpdate(load_trained(root / "llama"), settings(**TRAINING))
    CheckpointFolder(root / "checkpoints").load(step, alone)
    return everything(alone)


def publish(update, store):
    """Publish twice; then a version of other weights, and a damaged one."""
    seen = []
    for _ in range(2):
        manifest = store.add(update.critic.write, about(1), reuse=False, canary=[0.5])
        verify_version(store, manifest.version, update.critic)
        seen.append((manifest.version, holds_weights(store, manifest.version, update.critic)))
    seen.append(holds_weights(store, 0, update.critic))
    for spoil in (lambda: None, lambda: spoil_one(store.folder(2))):
        spoil()
        try:
            verify_version(store, 0 if len(seen) == 3 else 2, update.critic)
        except WeightsError as error:
            seen.append(str(error))
    return seen


def spoil_one(folder):
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")


def damage(folder, update):
    spoil_one(folder.root / "3")
    try:
        folder.load(3, update)
    except DamagedCheckpoint as error:
        return str(error)
    return "not noticed"


# ---- tests ----


@pytest.mark.parametrize("size", [2, 4])
def test_float64_critic_training_on_ranks_matches_one_process(root, size):
    results = on_ranks(size, in_float64, root)
    for i, (family, changes) in enumerate(CASES):
        options = settings(**TRAINING, **changes)
        with in_doubles():
            update = load_update(root / family, options, seed=0)
        reports = [update.train(each, silent) for each in payloads(3)]
        expected = MergedWeights(update.critic.model)
        for weights, seen, canary in (result["cases"][i] for result in results):
            assert weights.keys() == expected.keys()
            for name, tensor in expected.items():
                difference = np.abs(weights[name] - tensor.numpy())
                assert difference.max() <= 1e-10, name
                assert without_key_biases(name, difference).max(initial=0) <= 1e-12, name
            wanted = [(r.loss_mean, r.grad_norm, r.optimizer_steps) for r in reports]
            np.testing.assert_allclose(seen, wanted, rtol=1e-12)
            np.testing.assert_allclose(canary, update.critic.values([np.arange(9)])[0], atol=1e-12)
    update = load_update(root / "llama", settings(**TRAINING, **SAVING), seed=0)
    reports = [update.train(each, silent) for each in payloads(3)]
    for result in results:
        seen, canary = result["saving"]
        np.testing.assert_allclose(seen, [(r.loss_mean, r.grad_norm) for r in reports], rtol=2e-2)
        np.testing.assert_allclose(canary, update.critic.values([np.arange(9)])[0], atol=2e-2)


@pytest.fixture(scope="module")
def two_ranks(root):
    return on_ranks(2, in_float32, root)[0]


def test_float32_critic_training_on_ranks_is_close_to_one_process_and_resumes_bitwise(two_ranks, root):
    assert two_ranks[0]
    update, _ = trained(root / "llama", payloads(LONG_TRAINING), **TRAINING)
    ranks = read_alone(root, 1)
    assert max(float((ranks[n] - t).abs().max()) for n, t in update.critic.model.state_dict().items()) <= 1e-5
    names = {path.name for path in (root / "checkpoints" / "1").iterdir()}
    assert {Path(name).suffix for name in names} == {".safetensors", ".json"}
    assert STATE_FILE in names


def test_versions_published_by_two_ranks_are_whole_checkpoints_and_verified(two_ranks, root):
    _, versions, damaged = two_ranks
    assert versions[:3] == [(1, True), (2, True), False]
    assert "of version 0 differs" in versions[3]
    assert "version 2" in versions[4]
    assert all("differs from the trained weights" in message for message in versions[3:])
    assert "is damaged: its digest" in damaged
    store = WeightsStore(root / "store")
    first = store.manifest(1)
    second = store.manifest(2)
    assert (first.digest, first.files) == (second.digest, second.files)
    assert sorted(first.files) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    store.verify_files(1)
    served = load_critic(root / "llama").with_weights(store.folder(1)).model.state_dict()
    assert same(served, {name: tensor for name, tensor in read_alone(root, 2).items() if name in served})
