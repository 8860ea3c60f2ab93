"""`python_backend.store.weights`: versions are whole, immutable, numbered upwards, and CURRENT never names another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from python_backend.store import weights
from python_backend.store.serving_records import ServingRecord
from python_backend.store.weights import Manifest, WeightsError, WeightsStore, tensor_types


def writer(value: float) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file({"w": np.full((2, 3), value, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    return write


def add(
    store: WeightsStore, step: int, *, parent: int | None = None, value: float | None = None, reuse: bool = True
) -> Manifest:
    write = writer(step if value is None else value)
    return store.add(write, run_id="run", step=step, parent=parent, epoch=1, reuse=reuse)


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "weights")


def test_an_empty_store_is_empty(store: WeightsStore):
    assert (store.current(), store.versions(), store.serving()) == (None, [], [])
    with pytest.raises(WeightsError, match="version 0 is not in the weights store"):
        store.set_current(0)


def test_versions_count_upwards_and_say_what_they_are(store: WeightsStore):
    for step in range(3):
        manifest = add(store, step, parent=step - 1 if step else None)
        assert manifest == store.manifest(step) == store.verify_files(step)
        assert manifest.tensors == {"w": ["F32", [2, 3]]}
    assert store.versions() == [0, 1, 2]
    assert store.current() is None  # adding does not serve
    store.set_current(1)
    assert store.current() == 1
    store.set_current(1)  # a replay
    with pytest.raises(WeightsError, match="version 0 is below version 1, which is served"):
        store.set_current(0)
    store.set_current(0, back=True)
    store.set_current(1)
    assert sorted(p.name for p in store.root.iterdir()) == ["0", "1", "2", "CURRENT", "WRITER"]  # no staging left


def test_a_replay_finds_its_version_and_a_rollback_gets_a_new_number(store: WeightsStore):
    add(store, 0)
    first = add(store, 1, parent=0)
    assert add(store, 1, parent=0) == first  # the same step after a crash
    assert add(store, 0, parent=0, reuse=False).version == 2  # old bytes, a new number: a rollback
    assert add(store, 1, parent=2).version == 3  # the same bytes as 1, trained again after it: CURRENT must rise
    assert add(store, 1, parent=2, value=9).version == 4  # other bytes
    assert store.versions() == [0, 1, 2, 3, 4]


def test_numbers_never_return(store: WeightsStore):
    for step in range(4):
        add(store, step)
    store.set_current(3)
    store.prune(keep=1)
    assert store.versions() == [0, 3]
    assert add(store, 4).version == 4
    (store.folder(9)).mkdir()  # a folder without a manifest is no version, yet its number is taken
    assert store.versions() == [0, 3, 4]
    assert add(store, 5).version == 10


def test_a_failed_write_leaves_nothing(store: WeightsStore):
    def broken(folder: Path) -> None:
        writer(1)(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.add(broken, run_id="run", step=1, parent=None, epoch=1)
    assert [p.name for p in store.root.iterdir()] == ["WRITER"]


def test_what_a_crash_left_is_no_version_and_is_swept(store: WeightsStore):
    add(store, 0)
    for name in (".staging-1", ".removed-2"):
        writer(1)(_made(store.root / name))
    assert store.versions() == [0]
    store.prune(keep=1)
    assert sorted(p.name for p in store.root.iterdir()) == ["0", "WRITER"]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_pruning_keeps_what_is_needed(store: WeightsStore):
    for step in range(8):
        add(store, step)
    store.set_current(4)
    store.records.put(ServingRecord.of_this_process("critic_0", 2))
    store.records.put(ServingRecord.of_this_process("critic_1", None, loading=5))
    assert store.prune(keep=2) == [1, 3]
    assert store.versions() == [0, 2, 4, 5, 6, 7]


def test_a_removal_cut_short_leaves_no_half_version(store: WeightsStore, monkeypatch: pytest.MonkeyPatch):
    for step in range(3):
        add(store, step)

    def killed(folder: Path, **_: object) -> None:
        (folder / "model.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("python_backend.store.durable.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.prune(keep=1)
    for version in store.versions():
        store.verify_files(version)


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def damage_empty(file: Path) -> None:
    file.write_bytes(b"")


def damage_no_header(file: Path) -> None:
    file.write_bytes((2).to_bytes(8, "little") + b"[]")


def damage_no_offsets(file: Path) -> None:
    header = b'{"w": {"dtype": "F32"}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def damage_missing(file: Path) -> None:
    file.unlink()


def damage_one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncated,
        damage_cut_in_the_header,
        damage_empty,
        damage_no_header,
        damage_no_offsets,
        damage_missing,
        damage_one_bit,
    ],
)
def test_damage_is_found(store: WeightsStore, damage: Callable[[Path], None]):
    add(store, 0)
    damage(store.folder(0) / "model.safetensors")
    with pytest.raises(WeightsError, match=r"version 0: .*model\.safetensors"):
        store.verify_files(0)


def test_a_manifest_that_names_other_tensors_is_found(store: WeightsStore):
    manifest = add(store, 0)
    lie = {**vars(manifest), "tensors": {"w": ["F32", [3, 2]]}}
    (store.folder(0) / "manifest.json").write_text(json.dumps(lie))
    with pytest.raises(WeightsError, match="version 0: tensors differ"):
        store.verify_files(0)


@pytest.mark.parametrize("text", ["{", "[1]", '{"version": 0}', "\udcff"])
def test_unreadable_manifests_are_said_so(store: WeightsStore, text: str):
    add(store, 0)
    (store.folder(0) / "manifest.json").write_text(text, errors="surrogateescape")
    with pytest.raises(WeightsError, match="version 0: unreadable manifest"):
        store.manifest(0)


@pytest.mark.parametrize("text", ["", "three", "-1", "\udcff"])
def test_an_unreadable_current_is_said_so(store: WeightsStore, text: str):
    add(store, 0)
    (store.root / "CURRENT").write_text(text, errors="surrogateescape")
    with pytest.raises(WeightsError, match=r"CURRENT contains .*, not a version number"):
        store.current()


def test_tensor_types_reads_names_dtypes_and_shapes(tmp_path: Path):
    save_file({"b": np.zeros(3, np.int64), "a": np.zeros((1, 2), np.float16)}, tmp_path / "x", metadata={"k": "v"})
    assert tensor_types(tmp_path / "x") == {"a": ["F16", [1, 2]], "b": ["I64", [3]]}


@pytest.mark.parametrize("name", ["99999999999999999999", "007", "²", "9" * 400])
def test_a_folder_whose_name_is_no_number_of_ours_is_left_alone(store: WeightsStore, name: str):
    add(store, 0)
    shutil.copytree(store.folder(0), store.root / name) if len(name) < 200 else None
    assert store.versions() == [0]
    assert add(store, 1).version == 1
    store.set_current(1)
    store.prune(keep=1)
    assert store.versions() == [0, 1]
    (store.root / "CURRENT").write_text(f"{name}\n")
    with pytest.raises(WeightsError, match="not a version number"):
        store.current()


def test_a_writer_that_was_stopped_is_not_waited_for_for_ever(store: WeightsStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "WRITER_PATIENCE_S", 0.05, raising=False)
    add(store, 0)
    with WeightsStore(store.root)._writing():
        with pytest.raises(
            OSError, match=r"locked by another process for 0.05 s; is that process suspended\?: .*WRITER"
        ):
            add(store, 1)
        with pytest.raises(OSError, match="WRITER"):
            store.prune(keep=1)
    assert add(store, 1).version == 1
