"""The critic in training, in every family: dtypes, adapters, gradient checkpointing, mixtures, and its versions."""

import copy
import re

import numpy as np
import pytest
import torch
from critic_training import payload, settings, silent, state, weights
from loaders import load_critic
from safetensors.torch import load_file
from tiny_checkpoints import save_tiny, save_with_layers
from versions import flip

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.sections import CriticSection
from rlhf_triton.models.heads import ModelHead
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.store.weights import Origin, WeightsError, WeightsStore
from rlhf_triton.trainer.checkpoint import CheckpointFolder
from rlhf_triton.trainer.critic_update import CriticUpdate
from rlhf_triton.trainer.publish import initialise_store
from rlhf_triton.trainer.trained_critic import build_critic
from rlhf_triton.trainer.verification import holds_weights, verify_alone, verify_version

LORA = {"lora_rank": 2}
BFLOAT16 = {"precision": "bfloat16"}
ALL = {**LORA, **BFLOAT16, "gradient_checkpointing": True}
ADAPTER = {**ALL, "publish_format": "adapter"}
CASES = [("llama", LORA), ("llama", BFLOAT16), ("layers", {}), ("layers", BFLOAT16)]
CASES += [
    (family, case) for family in ("llama", "gpt2", "mixtral", "bert", "deberta-v3", "layers") for case in (ALL, ADAPTER)
]
CASES.remove(("mixtral", ADAPTER))
ROW = np.arange(16)
quiet_transformers()


def make_store(folder, family="llama"):
    """Return a store with version 0, as the sidecar makes it."""
    save_with_layers(folder / "start") if family == "layers" else save_tiny(folder / "start", family, "critic")
    store = WeightsStore(folder / "weights")
    initialise_store(store, CriticSection(model=folder / "start"), run_id="run")
    return store


def build(store, *, seed=0, **changes):
    section = settings(**{"warmup_steps": 3, **changes})
    return CriticUpdate(build_critic(store.folder(0), section, seed=seed), section)


def train(update, *seeds):
    for seed in seeds:
        update.train(payload(seed=seed), silent)
    return update


def publish(store, update):
    return store.add(update.critic.write, Origin(run_id="run", step=1, parent=0, epoch=1)).version


@pytest.mark.device
@pytest.mark.parametrize(("family", "changes"), CASES, ids=str)
def test_published_version_reproduces_the_trained_critic(tmp_path, family, changes):
    """Through the code of the server: a first load, a swap, and peft's own merge agree."""
    store = make_store(tmp_path, family)
    update = build(store, **changes)
    start = {name: p.detach().clone() for name, p in update.critic.model.named_parameters()}
    train(update, 0, 1)
    assert_only_frozen_matrices_are_low(update, start, changes)
    version = publish(store, update)
    verify_version(store, version, update.critic)
    assert verify_alone(store, version).base == (0 if changes == ADAPTER else None)
    assert holds_weights(store, version, update.critic)
    loaded = load_critic(store.folder(version))
    swapped = load_critic(store.folder(0)).with_weights(store.folder(version))
    merged = merged_by_peft(update)
    for critic in (loaded, swapped):
        stored = critic.model.state_dict()
        assert all(torch.equal(stored[name].cpu(), tensor.cpu()) for name, tensor in merged.items())
        np.testing.assert_allclose(critic.values([ROW])[0], update.critic.values([ROW])[0], rtol=1e-5, atol=1e-6)
    assert not holds_weights(store, 0, update.critic)
    config = store.folder(version) / "config.json"
    published = config.read_bytes()
    config.unlink()  # it is read-only
    config.write_bytes(published.replace(b'"std": 1.0', b'"std": 9.0'))
    assert not holds_weights(store, version, update.critic)
    config.write_bytes(published)
    assert not hasattr(loaded.model.config, "critic_adapters")  # saved again, it is an ordinary version
    train(update, 2)
    assert not holds_weights(store, version, update.critic)
    with pytest.raises(WeightsError, match="the values for the canary row differ"):
        verify_version(store, version, update.critic)


def assert_only_frozen_matrices_are_low(update, start, changes):
    """Assert that trained weights and the head are float32, and only frozen matrices bfloat16."""
    parameters = dict(update.critic.model.named_parameters())
    head = {id(p) for p in ModelHead(update.critic.model).module.parameters()}
    assert head <= {id(p) for p in update.trained.parameters.values()}
    assert {name for name, p in parameters.items() if not torch.equal(p, start[name])} <= set(update.trained.parameters)
    assert all("lora_" in name or id(p) in head for name, p in update.trained.parameters.items()) == (
        "lora_rank" in changes
    )
    frozen = {name: p.dtype for name, p in parameters.items() if name not in update.trained.parameters}
    low = {name for name, dtype in frozen.items() if dtype == torch.bfloat16}
    matrices = {name for name in frozen if name.endswith("base_layer.weight") and "mlp.gate." not in name}  # no router
    assert matrices <= low if {*ALL} <= {*changes} else not low
    assert {p.dtype for p in update.trained.parameters.values()} == {torch.float32}
    assert {value.dtype for value in update.trained.state().values()} == {torch.float32}


def merged_by_peft(update):
    """Return the state of a float32 copy, merged by peft module by module."""
    model = copy.deepcopy(update.critic.model).float()
    layers = {path: layer for path, layer in model.named_modules() if hasattr(layer, "lora_A")}
    for layer in layers.values():
        layer.merge()
    merged = model.state_dict()
    names = {name: ".".join(p for p in name.split(".") if p != "base_layer") for name in merged if ".lora_" not in name}
    return {plain: merged[name] for name, plain in names.items()}


def test_bfloat16_critic_computes_its_body_in_bfloat16_and_head_in_float32(tmp_path):
    update = build(make_store(tmp_path), **BFLOAT16)
    head = ModelHead(update.critic.model).module
    seen = {}
    body = update.critic.model.model.layers[0].mlp.down_proj
    head.register_forward_hook(lambda _, inputs, output: seen.update(head=output.dtype))
    body.register_forward_hook(lambda _, inputs, output: seen.update(body=output.dtype))
    train(update, 0)
    assert seen == {"head": torch.float32, "body": torch.bfloat16}


def test_an_adapter_version_is_small_and_needs_its_base(tmp_path):
    store = make_store(tmp_path)
    version = publish(store, train(build(store, **ADAPTER), 0))
    sizes = [(store.folder(number) / "model.safetensors").stat().st_size for number in (0, version)]
    assert sizes[1] < sizes[0]
    assert set(load_file(store.folder(version) / "model.safetensors")) == set(
        build(store, **ADAPTER).trained.parameters
    )
    base = store.folder(0) / "model.safetensors"
    verify_alone(store, version)
    flip(base)
    for each in (store, WeightsStore(store.root)):  # the first has verified the base before
        with pytest.raises(WeightsError, match=r"version 0: model\.safetensors has digest"):
            verify_alone(each, version)
    base.unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load_critic(store.folder(version))


def test_critic_adapters_are_initialised_from_the_seed(tmp_path):
    """A replay from version 0 must begin with the same adapters."""
    store = make_store(tmp_path)
    one, other, again = (build(store, seed=seed, **LORA) for seed in (1, 2, 1))
    assert torch.equal(weights(one), weights(again))
    assert not torch.equal(weights(one), weights(other))
    assert np.array_equal(one.critic.values([ROW])[0], load_critic(store.folder(0)).values([ROW])[0])


FROZEN = {  # a llama's frozen parameters; more have no gradient because nothing before them is trained
    "weights": {"freeze": ["embed_tokens", r"layers\.1\.self_attn"]},
    "adapters": {**LORA, "freeze": [r"self_attn\.q_proj\.weight$", "score"]},
    "adapter versions": {**LORA, "publish_format": "adapter", "freeze": ["mlp"]},
    "bfloat16": {**BFLOAT16, "gradient_checkpointing": True, "freeze": ["layers"]},
}


@pytest.mark.parametrize("case", FROZEN)
def test_frozen_critic_parameters_are_bit_identical_after_ten_steps(tmp_path, case):
    """They are unchanged in memory, in the published version and in a checkpoint; all others have changed."""
    store = make_store(tmp_path)
    changes = FROZEN[case]
    update = build(store, **changes)
    named = dict(update.critic.model.named_parameters())
    start = {name: p.detach().clone() for name, p in named.items()}
    plain = {name: tensor.clone() for name, tensor in update.critic.weights().items()}
    train(update, *range(10))
    in_optimizer = {id(p) for group in update.trained.optimizer.param_groups for p in group["params"]}
    moved = {name for name, p in named.items() if not torch.equal(p, start[name])}
    assert moved == {name for name, p in named.items() if id(p) in in_optimizer} == {*update.trained.parameters}
    after = load_critic(store.folder(publish(store, update))).model.state_dict()
    kept = {name for name, tensor in plain.items() if torch.equal(after[name].cpu(), tensor)}
    frozen = {name for name in plain if any(re.search(pattern, name) for pattern in changes["freeze"])}
    assert set() < frozen <= kept < plain.keys()
    verify_version(store, 1, update.critic)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    place = folder.save(update, state(1, update))
    stored = {name for path in place.glob("*.safetensors") for name in load_file(path)}
    assert {name for name in stored if "/" not in name} == {*update.trained.parameters}  # nothing of the base
    resumed = build(store, **changes)
    assert folder.load(1, resumed) == state(1, update)
    assert torch.equal(weights(train(resumed, 50)), weights(train(update, 50)))


@pytest.mark.parametrize("changes", [{}, LORA], ids=str)
@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["embed_tokens", "self_atn"],
            r"trainer\.freeze: 'self_atn' matches no parameter; names of LlamaForT\w+'s parameters are",
        ),
        (["lora_A"], r"'lora_A' matches no parameter; .* are model\.embed_tokens\.weight, model\.layers\.\d\.\S+, "),
        (["layers|embed|norm", "score"], "trainer.freeze: 'score' leaves no parameter to train; names of Llama"),
    ],
)
def test_freeze_pattern_that_matches_no_or_every_parameter_is_refused(tmp_path, changes, patterns, message):
    with pytest.raises(CheckpointError, match=message):
        build(make_store(tmp_path), freeze=patterns, **changes)


def test_adapters_on_experts_cannot_be_published_as_adapters(tmp_path):
    with pytest.raises(CheckpointError, match=r"publish\.format: adapter does not support adapters on the experts"):
        build(make_store(tmp_path, "mixtral"), **ADAPTER)
