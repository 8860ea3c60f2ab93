"""The follower of a store: an instance serves what CURRENT names, whatever happens to the store."""

import dataclasses
import re
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from waiting import wait_for

from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE
from rlhf_triton.python_backend.serving.versions.follower import Follower
from rlhf_triton.store.durable import replace_file
from rlhf_triton.store.serving_records import ServingRecord
from rlhf_triton.store.weights import Origin, WeightsError, WeightsStore
from rlhf_triton.wire.contract import VersionRange

PATIENCE_S = 120.0


class Instance:
    """A follower whose critics are the number in their folder; `while_loading` is called in the middle of a load."""

    def __init__(self, store, *, swaps=True):
        self.store = store
        self.loaded = []
        self.counted = []
        self.logged = []
        self.freed = []  # versions that were served when the memory of another one was free
        self.while_loading = lambda number: None
        self.follower = Follower(
            store,
            "critic_0",
            load=self._load,
            swaps=swaps,
            log_error=self.logged.append,
            count=lambda number, rejected: self.counted.append((number, rejected)),
            freed=lambda: self.freed.append(self.follower.version.number),
        )

    def _load(self, folder, served):
        number = int(folder.name)
        self.loaded.append((number, served))
        self.while_loading(number)
        value = float(load_file(folder / WEIGHTS_FILE)["w"][0])
        if value != value:
            raise ValueError("w has values that are not finite")
        return value

    @property
    def record(self):
        (record,) = self.store.records.alive()
        return record


@pytest.fixture
def store(tmp_path):
    store = WeightsStore(tmp_path / "weights")
    publish(store, 0.0)
    return store


@pytest.fixture
def instance(store):
    made = Instance(store)
    made.follower.start()
    yield made
    made.follower.stop()
    assert store.records.alive() == []


def add(store, value, *, canary=None):
    def write(folder):
        save_file({"w": np.full(1, value, np.float32)}, folder / WEIGHTS_FILE)
        (folder / "config.json").write_text("{}")

    origin = Origin(run_id="run", step=len(store.versions()), parent=None, epoch=1)
    return store.add(write, origin, canary=canary).version


def publish(store, value):
    version = add(store, value)
    store.set_current(version)
    return version


def test_follower_serves_current_and_writes_its_record(store, instance):
    assert (instance.follower.version.number, instance.record.version) == (0, 0)
    version = publish(store, 1.5)
    wait_for(lambda: instance.record.version == version)
    assert (instance.follower.version.model, instance.record.previous) == (1.5, 0)
    assert instance.loaded == [(0, None), (1, 0.0)], "the new version was not loaded into the served model"
    wait_for(lambda: instance.counted == [(0, False), (1, False)])
    wait_for(lambda: instance.freed == [1])


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_follower_rejects_a_damaged_version_while_running_and_at_its_start(store, instance, file):
    """Neither one that runs nor one that starts, as a process that was replaced does: each reads the files itself."""
    version = add(store, 1.5)
    path = store.folder(version) / file
    data = path.read_bytes()
    path.unlink()  # it is read-only
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    replace_file(store.root / "CURRENT", b"1\n")
    wait_for(lambda: instance.record.rejected == version)
    assert file in str(instance.record.error)
    assert (instance.follower.version.number, instance.loaded) == (0, [(0, None)])
    with pytest.raises(WeightsError, match=f"weights version 1 cannot be served: version 1: .*{file}"):
        Instance(store).follower.start()


def test_follower_start_fails_on_an_unusable_first_version_and_keeps_dead_records(store):
    """An instance that cannot start takes no place, so the missing one must still be visible."""
    gone = ServingRecord.of_this_process("critic_1", 0)
    store.records.put(dataclasses.replace(gone, born=gone.born - 1))
    damaged = publish(store, np.nan)
    message = (
        f"weights version {damaged} cannot be served: w has values that are not finite; `rlhf-triton weights "
        "rollback --model critic` serves an older version"
    )
    with pytest.raises(WeightsError, match=f"^{re.escape(message)}$"):
        Instance(store).follower.start()
    assert [record.instance for record in store.records.died()] == ["critic_1"]
    assert store.records.alive() == []
    store.set_current(0, back=True)
    second = Instance(store)
    second.follower.start()
    assert store.records.died() == []
    second.follower.stop()
    with pytest.raises(WeightsError, match="is empty; make version 0 with"):
        Instance(WeightsStore(store.root / "empty")).follower.start()


def test_an_announced_version_is_loaded_once_and_served_when_current_moves(store, instance):
    version = add(store, 2.0)
    store.announce(version)
    wait_for(lambda: (1, 0.0) in instance.loaded)
    time.sleep(0.05)
    assert instance.follower.version.number == 0, "the version is served before CURRENT moves"
    store.set_current(version)
    wait_for(lambda: instance.record.version == version)
    assert [number for number, _ in instance.loaded] == [0, 1]
    store.announce(2)  # before it is whole
    wait_for(lambda: 2 in instance.follower._unusable)
    version = publish(store, 5.0)
    wait_for(lambda: instance.record.version == version)


def test_follower_expects_the_version_that_current_names_until_it_is_rejected(store, instance):
    follower = instance.follower
    loading = threading.Event()
    go = threading.Event()
    changes = []
    instance.while_loading = lambda number: (loading.set(), go.wait(PATIENCE_S))
    follower.changed = lambda: changes.append(follower.version.number)
    assert not follower.is_arriving(VersionRange(1))
    publish(store, 1.5)
    assert loading.wait(PATIENCE_S)
    arriving = [follower.is_arriving(versions) for versions in (VersionRange(1), VersionRange(2), VersionRange(0, 0))]
    assert arriving == [True, False, False]
    go.set()
    wait_for(lambda: changes == [1])
    bad = publish(store, np.nan)
    wait_for(lambda: changes == [1, 1])
    assert not follower.is_arriving(VersionRange(bad))
    assert not Instance(store, swaps=False).follower.is_arriving(VersionRange(0)), (
        "a process that does not swap waits for a version"
    )


def test_non_finite_version_is_rejected_once_and_the_old_one_stays_served(store, instance):
    bad = add(store, np.nan)
    store.announce(bad)
    wait_for(lambda: (bad, 0.0) in instance.loaded)
    assert (instance.record.rejected, instance.logged) == (None, [])
    store.set_current(bad)
    wait_for(lambda: instance.record.rejected == bad)
    assert (instance.record.version, instance.record.error) == (0, "w has values that are not finite")
    wait_for(lambda: instance.counted[-1] == (bad, True))
    loads = len(instance.loaded)
    time.sleep(0.03)
    assert len(instance.loaded) == loads, "the rejected version is loaded again"
    store.set_current(0, back=True)
    good = publish(store, 4.0)
    wait_for(lambda: instance.record.version == good)
    assert instance.record.rejected is None


def test_version_truncated_after_its_load_is_rejected(store, instance):
    """The file is mapped: a forward that reads behind its end would kill the process."""
    version = add(store, 2.5)
    store.announce(version)
    wait_for(lambda: (version, 0.0) in instance.loaded)
    path = store.folder(version) / WEIGHTS_FILE
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-2])
    store.set_current(version)
    wait_for(lambda: instance.record.rejected == version)
    assert instance.follower.version.number == 0


@pytest.mark.parametrize("swaps", [True, False])
def test_follower_start_ends_at_current_if_it_moves_during_the_first_load(store, swaps):
    """In Triton mode no swap follows, so a process that starts must load the version that CURRENT names."""
    publish(store, 0.5)
    instance = Instance(store, swaps=swaps)
    pruned = []

    def prune(number):
        if not pruned:
            for value in range(1, 5):
                publish(store, float(value))
            pruned.extend(store.prune(keep=1))

    instance.while_loading = prune
    instance.follower.start()
    found = (pruned, instance.follower.version.number, instance.record.version)
    instance.follower.stop()
    assert found == ([2, 3, 4], 5, 5), "the version being loaded is not expected"


def test_follower_logs_and_retries_on_a_full_disk_or_an_unreadable_current(store, instance, monkeypatch):
    put = store.records.put
    full = threading.Event()

    def refuse(record):
        if full.is_set():
            raise OSError(28, "No space left on device")
        put(record)

    full.set()
    monkeypatch.setattr(store.records, "put", refuse)
    monkeypatch.setattr("rlhf_triton.python_backend.serving.versions.follower.TROUBLE_PAUSE_S", 0.02)
    version = publish(store, 7.0)
    wait_for(lambda: instance.follower.version.number == version and len(instance.logged) > 1)
    assert instance.record.version == 0
    full.clear()
    wait_for(lambda: instance.record.version == version)
    assert "No space left on device" in instance.logged[0]
    (store.root / "CURRENT").write_text("soon")
    wait_for(lambda: any("not a version number" in line for line in instance.logged))
    (store.root / "CURRENT").write_text("0")
    version = publish(store, 8.0)
    wait_for(lambda: instance.record.version == version)


def test_the_serving_record_reports_the_result_of_staging(instance, store):
    """Several ranks wrote it, and none of them has loaded it whole: the sidecar waits for this."""
    plain = add(store, 1.0)
    store.announce(plain)
    wait_for(lambda: (plain, 0.0) in instance.loaded)
    for value, error in ((2.0, None), (np.nan, "w has values that are not finite")):
        staged = add(store, value, canary=[0.5])
        store.announce(staged)
        wait_for(lambda staged=staged: instance.record.staged == staged)
        assert (instance.record.staging_error, instance.record.version) == (error, 0)
    assert instance.record.rejected is None
