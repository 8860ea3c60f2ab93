"""A version proves itself before CURRENT names it: every kind of damage is found, named, and never served."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sidecar_rig import Rig

from python_backend.checkpoints.inspection import CONFIG_FILE, WEIGHTS_FILE
from python_backend.models.modeling import CriticModel, save_critic
from python_backend.store.weights import MANIFEST_FILE, WeightsStore, sha256_of, tensor_types
from tests.support.loaders import load_critic
from trainer.publish import Publisher
from trainer.verification import VersionRejected, verify_alone, verify_version


@pytest.fixture
def critic(checkpoint: Path) -> CriticModel:
    return load_critic(checkpoint)


@pytest.fixture
def store(tmp_path: Path, critic: CriticModel) -> WeightsStore:
    store = WeightsStore(tmp_path / "weights")
    for step in range(2):
        with torch.no_grad():
            critic.model.classifier.bias += 0.25
        store.add(lambda folder: save_critic(critic, folder), run_id="run", step=step, parent=None, epoch=1)
    store.set_current(0)
    return store


def change_bytes(path: Path, change: Callable[[bytes], bytes]) -> None:
    data = path.read_bytes()
    path.unlink()  # versions are read-only
    path.write_bytes(change(data))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Other tensors under a manifest that fits them: what a faulty writer would leave, not a faulty disk."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    change(tensors)
    (folder / WEIGHTS_FILE).unlink()
    save_file(tensors, folder / WEIGHTS_FILE)
    edit_json(
        folder / MANIFEST_FILE,
        sha256=sha256_of(folder / WEIGHTS_FILE),
        tensors=tensor_types(folder / WEIGHTS_FILE),
    )


def edit_json(path: Path, **changes: object) -> None:
    data = {**json.loads(path.read_text()), **changes}
    path.unlink()
    path.write_text(json.dumps(data))


def unreadable(folder: Path) -> None:
    """A folder that cannot be listed or opened, also by root: a file stands in its place."""
    shutil.rmtree(folder)
    folder.write_text("")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (
        lambda folder: change_bytes(folder / WEIGHTS_FILE, lambda data: data[: len(data) // 2]),
        r"version 1: cannot read model\.safetensors: .* is damaged .*\d+ bytes are missing at its end",
    ),
    "one bit flipped": (
        lambda folder: change_bytes(folder / WEIGHTS_FILE, lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]),
        r"version 1: model\.safetensors has sha256 [0-9a-f]{12}…, its manifest says",
    ),
    "no safetensors": (
        lambda folder: change_bytes(folder / WEIGHTS_FILE, lambda data: b"PK" + data[2:]),
        r"version 1: cannot read model\.safetensors: .* is damaged or not a safetensors file",
    ),
    "no weights file": (
        lambda folder: (folder / WEIGHTS_FILE).unlink(),
        r"version 1: cannot read model\.safetensors: .*No such file",
    ),
    "no config file": (lambda folder: (folder / CONFIG_FILE).unlink(), r"version 1: .*has no config\.json"),
    "no manifest": (lambda folder: (folder / MANIFEST_FILE).unlink(), "version 1 is not in the weights store"),
    "manifest cut short": (
        lambda folder: change_bytes(folder / MANIFEST_FILE, lambda data: data[:40]),
        "version 1: unreadable manifest",
    ),
    "unreadable folder": (unreadable, "version 1: unreadable manifest: .*Not a directory"),
    "not a number": (
        lambda folder: rewrite(folder, lambda tensors: tensors["classifier.weight"].fill_(float("nan"))),
        r"version 1: classifier\.weight has values that are not finite",
    ),
    "a tensor is missing": (
        lambda folder: rewrite(folder, lambda tensors: tensors.pop("classifier.bias")),
        r"version 1: .*does not fit the served model: .*classifier\.bias",
    ),
    "another shape": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"classifier.bias": torch.zeros(2)})),
        r"version 1: .*classifier\.bias has shape \[2\], expected \[1\]",
    ),
    "another dtype": (
        lambda folder: rewrite(
            folder, lambda tensors: tensors.update({"classifier.bias": tensors["classifier.bias"].half()})
        ),
        r"version 1: classifier\.bias is F16, the published model's is F32",
    ),
    "another family": (
        lambda folder: edit_json(folder / CONFIG_FILE, model_type="llama"),
        "version 1: .* is a llama model, but the served model is ",
    ),
    "another forward of the same shapes": (
        lambda folder: edit_json(folder / CONFIG_FILE, hidden_act="relu", rms_norm_eps=0.5),
        r"version 1: .*(hidden_act|rms_norm_eps) in config\.json is .*, but .* in the served model; ",
    ),
    "another number": (
        lambda folder: rewrite(folder, lambda tensors: tensors["classifier.bias"].add_(0.01)),
        "version 1: the values for the canary row differ by 0.01",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_before_current_moves(store: WeightsStore, critic: CriticModel, kind: str):
    damage, message = DAMAGE[kind]
    verify_version(store, 1, critic)
    damage(store.folder(1))
    with pytest.raises(VersionRejected, match=message):
        verify_version(store, 1, critic)


@pytest.mark.parametrize("kind", ["truncated", "one bit flipped", "no weights file", "no manifest", "not a number"])
def test_damage_is_found_without_the_trained_critic(store: WeightsStore, kind: str):
    damage, message = DAMAGE[kind]
    assert verify_alone(store, 1).step == 1
    damage(store.folder(1))
    with pytest.raises(VersionRejected, match=message):
        verify_alone(store, 1)


@pytest.mark.parametrize("kind", ["one bit flipped", "no manifest", "another number"])
def test_the_caller_is_told_and_training_goes_on(rig: Rig, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Through the sidecar: the step fails with the cause, the old version serves on, the next step is served."""
    rig.train(1)
    damage, message = DAMAGE[kind]
    with monkeypatch.context() as patch:
        verify, done = Publisher.verify, []

        def damaging(publisher: Publisher, version: int, *args: object) -> None:
            done.append(damage(publisher._store.folder(version)))
            verify(publisher, version, *args)

        patch.setattr(Publisher, "verify", damaging)
        (result,) = rig.train(2)
    pattern = message.replace("version 1", "version 2")
    assert done
    assert result.error is not None
    assert re.search(pattern, result.error), result.error
    assert (rig.store.current(), rig.instances[0].served) == (1, [0, 1])
    (after,) = rig.train(3)
    assert after.error is None
    assert rig.store.current() == after.weights_version == 3


def test_a_number_that_is_not_above_the_last_is_refused(store: WeightsStore, critic: CriticModel):
    store.set_current(1)

    class Stale(WeightsStore):
        def next_version(self) -> int:
            return 0

        def _find(self, **_: object):
            return self.manifest(0)

    with torch.no_grad():
        critic.model.classifier.bias -= 0.25  # what version 0 holds
    publisher = Publisher(Stale(store.root), run_id="run", epoch=1, servers=[], reload="swap", timeout_s=1, keep=9)
    with pytest.raises(VersionRejected, match="version 0 is below version 1, which is served"):
        publisher.publish(critic, step=0, beat=lambda _: None)
    assert (store.current(), publisher.rejected) == (1, 1)
