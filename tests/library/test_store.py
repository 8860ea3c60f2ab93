"""Tests of `rlhf_triton.store`: what is on disk after a call or a kill; versions of weights, serving records, locks."""

import dataclasses
import errno
import fcntl
import io
import json
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import xxhash
from journal_entries import done, train
from live_system import make_run
from safetensors.numpy import save_file

import rlhf_triton.tools.run
from rlhf_triton import digests
from rlhf_triton.digests import json_digest
from rlhf_triton.errors import RlhfError
from rlhf_triton.store import serving_records, weights
from rlhf_triton.store.durable import TEMPORARY_SUFFIX, remove_folder, sweep, write_folder
from rlhf_triton.store.heartbeat import Heartbeat
from rlhf_triton.store.journal import Entry, Journal, Result
from rlhf_triton.store.jsonl import append_jsonl, read_jsonl
from rlhf_triton.store.run_lock import LOCK_FILE, in_progress, only_actor, only_run
from rlhf_triton.store.serving_records import REMOTE_SILENCE_S, STOPPED, ServingRecord, ServingRecords, _process
from rlhf_triton.store.weights import Manifest, Origin, WeightsError, WeightsStore


@pytest.fixture
def store(tmp_path):
    return WeightsStore(tmp_path / "weights")


def writer(value):
    def write(folder):
        save_file({"w": np.full((2, 3), value, np.float32)}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    return write


def add(store, step, *, parent=None, value=None, reuse=True):
    write = writer(step if value is None else value)
    return store.add(write, Origin(run_id="run", step=step, parent=parent, epoch=1), reuse=reuse)


@pytest.fixture
def records(tmp_path):
    return ServingRecords(tmp_path / "serving")


# ---- durability ----


class Synced(list[Path]):
    """Records every synced path in order, and the contents of the files at that time, by inode."""

    def __init__(self):
        super().__init__()
        self.contents = {}

    def record(self, descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.append(path)
        if path.suffix == TEMPORARY_SUFFIX:  # not yet under its name
            self.contents[path.stat().st_ino] = path.read_bytes()


@pytest.fixture
def synced(monkeypatch):
    found = Synced()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (found.record(descriptor), fsync(descriptor)))
    return found


@pytest.mark.parametrize("kind", ["training", "save", "result", "CURRENT"])
def test_files_are_synced_before_their_rename_and_folders_after_it(journal, store, synced, kind):
    add(store, 0)
    entry = train(journal, 1)
    entries = journal.root / "run" / "entries"
    assert {entries, entries.parent, journal.root, journal.root.parent} <= set(synced)
    synced.clear()
    if kind == "CURRENT":
        store.set_current(0)
        path = store.root / "CURRENT"
    elif kind == "result":
        done(journal, entry)
        path = journal.root / "run" / "results" / f"{entry.name}.json"
    else:
        accepted = train(journal, 2) if kind == "training" else journal.accept_save(run_id=None)
        path = entries / accepted.name
    assert synced.contents[path.stat().st_ino] == path.read_bytes()
    assert synced[-1] == path.parent


def test_set_aside_entries_are_synced(journal, synced):
    for step in (1, 2):
        done(journal, train(journal, step))
    rewind = journal.accept_rewind(run_id=None, target=1)
    synced.clear()
    journal.set_aside_after(rewind)
    run = journal.root / "run"
    assert {run / "entries", run / "results", run / "set_aside" / "1", run / "set_aside", run} <= set(synced)
    synced.clear()
    journal.set_aside_damaged(entry := Entry(1, 0, "train"))
    aside = run / "set_aside" / "2"
    assert [path for path in synced if path.is_relative_to(aside)] == [aside / entry.name, aside]


def test_checkpoints_and_versions_are_synced_before_their_rename(make, synced):
    rig = make().begin()
    rig.train(1)
    rig.save()
    for root, staged in ((rig.checkpoints.root, 1), (rig.store.root, 2)):
        assert sum(path.parent == root and path.name.startswith(".staging-") for path in synced) == staged
        assert {root, root.parent, rig.config.run.dir} <= set(synced)
    rig.train(2)
    rig.save()
    synced.clear()
    rig.checkpoints.drop_after(1)  # the sidecar writes elsewhere
    assert [path for path in synced if path.is_relative_to(rig.checkpoints.root)][-1] == rig.checkpoints.root


# ---- a folder that replaces another ----


KILL_EVERYWHERE = """
import os, sys
from pathlib import Path
from rlhf_triton.store.durable import sweep, write_folder

class Killed:
    def __init__(self, last): self.left = last
    def __call__(self, event, _):
        if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree") or event == "open":
            self.left -= 1
            if self.left < 0: os._exit(9)

def fill(value): return lambda folder: (folder / "file").write_text(value)

code, point = 9, 0
while code:
    root = Path(sys.argv[1]) / str(point)
    write_folder(root / "best", fill("old"))
    if not (child := os.fork()):
        sys.addaudithook(Killed(point))
        write_folder(root / "best", fill("new"))
        os._exit(0)
    code, point = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), point + 1
    sweep(root)
    print((root / "best" / "file").read_text() if (root / "best").exists() else "lost", *sorted(os.listdir(root)))
"""


def test_folder_replacement_is_atomic_at_every_kill_point(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILL_EVERYWHERE, tmp_path], capture_output=True, text=True, check=True)
    found = run.stdout.splitlines()
    assert {"old best", "new best"} == set(found)
    assert found == sorted(found, reverse=True), "a reader got the old file after the new one"


def filled(text):
    return lambda folder: (folder / "file").write_text(text) and None


@pytest.mark.parametrize("refused", [1, 2])
def test_failed_rename_keeps_the_old_folder(tmp_path, monkeypatch, refused):
    write_folder(tmp_path / "best", filled("old"))
    calls = []
    rename = Path.rename

    def failing(path, target):
        calls.append(path)
        if len(calls) == refused:
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_folder(tmp_path / "best", filled("new"))
    assert [(path.name, (path / "file").read_text()) for path in tmp_path.iterdir()] == [("best", "old")]


def test_sweep_does_not_restore_a_removed_folder(tmp_path, monkeypatch):
    """The content that a killed writer had replaced already must not stand in for a folder removed later."""
    write_folder(tmp_path / "10", filled("old"))
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_triton.store.durable.remove_folder", lambda folder: None)  # killed before the removal
        write_folder(tmp_path / "10", filled("new"))
    remove_folder(tmp_path / "10")
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_remove_folder_tolerates_nfs_silly_renames(tmp_path, monkeypatch):
    """A client replaces a deleted file that is open or mapped by `.nfs...`, so that its folder cannot be removed."""
    write_folder(tmp_path / "1", filled("mapped"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty")))
        remove_folder(tmp_path / "1")
    assert not (tmp_path / "1").exists()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- a file that another process appends to ----


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', "\0" * 40, '{"step": 2}'], ids=["cut", "zeros", "no newline"])
def test_append_after_a_torn_line_starts_a_new_line(tmp_path, torn):
    path = tmp_path / "critic_metrics.jsonl"
    append_jsonl(path, [{"step": 1}])
    with path.open("a") as file:
        file.write(torn)
    append_jsonl(path, [{"step": 3}])
    append_jsonl(path, [{"step": 4}])
    assert [line["step"] for line in read_jsonl(path)] == [1, 3, 4]


def test_concurrent_appends_to_jsonl_wait_for_each_other(tmp_path):
    """Or one would take the line that another one is writing for what a crash left."""
    path = tmp_path / "export.jsonl"
    other = threading.Thread(target=append_jsonl, args=(path, [{"step": 2}]), daemon=True)
    with path.open("ab", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(b'{"step"')
        other.start()
        time.sleep(0.1)
        file.write(b": 1}\n")
    other.join()
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]


# ---- a folder of another host ----


class NfsClient:
    """A host that caches missing names and folder attributes until it opens the folder, as NFS allows."""

    def __init__(self):
        self._known = {}

    def __call__(self, look):
        """Return what `look` finds on this host."""
        status = os.stat

        def remembered(path, **more):
            if Path(path) not in self._known:
                self._known[Path(path)] = None  # unless it is found
                self._known[Path(path)] = status(path, **more)
            found = self._known[Path(path)]
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            return found

        def opening(real):
            def opened(path, *arguments, **more):
                if stat.S_ISDIR(remembered(path).st_mode):
                    inside = [name for name in self._known if Path(path) in (name, name.parent)]
                    for name in inside:
                        del self._known[name]
                return real(path, *arguments, **more)

            return opened

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "stat", remembered)
            for module, name in ((os, "open"), (os, "listdir"), (os, "scandir"), (io, "open")):
                patch.setattr(module, name, opening(getattr(module, name)))
            return look()


def test_stale_directory_caches_do_not_hide_new_entries(journal, tmp_path):
    server = NfsClient()
    sidecar = NfsClient()
    store = WeightsStore(tmp_path / "store")
    store.root.mkdir()
    with journal.lock():
        assert server(journal.heartbeat) is server(store.announced) is None
        entry = train(journal, 1)
        os.utime(journal.root / "run" / "entries", (1, 1))
        before = sidecar(journal.changed_at)
        assert server(lambda: journal.result(entry)) is None
        train(journal, 2)
        assert sidecar(journal.changed_at) not in (None, before)
        done(journal, entry)
        assert server(lambda: journal.result(entry)) == Result(
            entry=entry.name, weights_version=1, digest=journal.load(entry)[1]
        )
        journal.write_heartbeat(Heartbeat(epoch=1, step=1, micro_batch=0, state="idle", time=0.0))
        store.announce(3)
        assert (server(journal.heartbeat), server(store.announced)) == (
            Heartbeat(epoch=1, step=1, micro_batch=0, state="idle", time=0.0),
            3,
        )
        journal.set_aside_after(journal.accept_rewind(run_id=None, target=0))
        assert "removed by a rewind" in str(server(lambda: journal.result(Entry(2, 0, "train"))).error)


# ---- versions of weights ----


def test_versions_are_numbered_upwards_and_current_never_falls(store):
    for step in range(3):
        manifest = add(store, step, parent=step - 1 if step else None)
        assert manifest == store.manifest(step) == store.verify_files(step)
    assert store.versions() == [0, 1, 2]
    assert store.current() is None  # adding does not serve
    store.set_current(1)
    assert store.current() == 1
    store.set_current(1)  # a replay
    with pytest.raises(WeightsError, match="version 0 is below version 1, which is served"):
        store.set_current(0)
    store.set_current(0, back=True)
    store.set_current(1)
    with pytest.raises(WeightsError, match="version 3 is not in the weights store"):
        store.set_current(3)
    assert sorted(p.name for p in store.root.iterdir()) == ["0", "1", "2", "CURRENT", "WRITER"]  # no staging left


def test_a_replay_finds_its_version_and_a_rollback_gets_a_new_number(store):
    add(store, 0)
    first = add(store, 1, parent=0)
    assert add(store, 1, parent=0) == first  # the same step after a crash
    assert add(store, 0, parent=0, reuse=False).version == 2  # old bytes, a new number: a rollback
    assert add(store, 1, parent=2).version == 3  # the same bytes as 1, trained again after it: CURRENT must rise
    assert add(store, 1, parent=2, value=9).version == 4  # other bytes
    assert store.versions() == [0, 1, 2, 3, 4]


def test_prune_keeps_served_versions_and_never_reuses_numbers(store):
    for step in range(8):
        add(store, step)
    store.set_current(4)
    store.records.put(ServingRecord.of_this_process("critic_0", 2))
    store.records.put(ServingRecord.of_this_process("critic_1", None, loading=5))
    assert (store.prune(keep=2), store.versions()) == ([1, 3], [0, 2, 4, 5, 6, 7])
    assert add(store, 8).version == 8
    store.folder(11).mkdir()  # without a manifest it is no version, yet its number is taken
    assert add(store, 9).version == 12
    assert store.versions() == [0, 2, 4, 5, 6, 7, 8, 12]


def test_interrupted_prune_leaves_no_partial_version(store, monkeypatch):
    for step in range(3):
        add(store, step)

    def killed(folder, **_):
        (folder / "model.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_triton.store.durable.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.prune(keep=1)
    for version in store.versions():
        store.verify_files(version)


NO_OFFSETS = b'{"w": {"dtype": "F32"}}'


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:20],
        lambda data: b"",
        lambda data: (2).to_bytes(8, "little") + b"[]",
        lambda data: len(NO_OFFSETS).to_bytes(8, "little") + NO_OFFSETS,
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        None,
    ],
    ids=["cut", "cut in the header", "empty", "no header", "no offsets", "one bit", "missing"],
)
def test_verify_files_detects_damaged_weights(tmp_path, damage):
    store = WeightsStore(tmp_path / "weights")
    manifest = add(store, 0)
    assert manifest.digest.startswith("xxh3:")
    assert WeightsStore(store.root).verify_files(0) == manifest
    file = store.folder(0) / "model.safetensors"
    data = file.read_bytes()
    file.unlink()  # it is read-only
    if damage is not None:
        file.write_bytes(damage(data))
    with pytest.raises(WeightsError, match=r"version 0: .*model\.safetensors"):
        store.verify_files(0)


def test_weights_file_that_the_manifest_does_not_name_is_damage(store):
    """A model would be loaded with it."""
    manifest = add(store, 0)
    save_file({"score.weight": np.ones(3, np.float32)}, store.folder(0) / "score.safetensors")
    with pytest.raises(WeightsError, match=r"version 0: its manifest does not name score\.safetensors; remove"):
        store.verify_hashes(manifest)


@pytest.mark.parametrize("size", [0, 1, mmap.PAGESIZE, 2 * mmap.PAGESIZE + 1])
def test_digest_of_mapped_file_equals_digest_of_its_bytes(tmp_path, monkeypatch, size):
    monkeypatch.setattr(digests, "MAPPED_AT_ONCE", mmap.PAGESIZE)
    monkeypatch.setattr(digests, "HASHED_AT_ONCE", 1000)
    content = np.random.default_rng(0).bytes(size)
    (tmp_path / "file").write_bytes(content)
    expected = f"xxh3:{xxhash.xxh3_128_hexdigest(content)}"
    assert [hashed(tmp_path / "file") for hashed in (digests.digest_of, digests.digest_of_mapped)] == [expected] * 2


@pytest.mark.parametrize("text", ["{", "[1]", '{"version": 0}', "\udcff"])
def test_verify_files_detects_an_unreadable_manifest(store, text):
    add(store, 0)
    (store.folder(0) / "manifest.json").write_text(text, errors="surrogateescape")
    with pytest.raises(WeightsError, match="version 0: cannot read manifest"):
        store.verify_files(0)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Manifest)])
def test_edited_manifest_field_is_detected(store, field):
    edited = {**add(store, 0).to_json(), field: 7}
    (store.folder(0) / "manifest.json").write_text(json.dumps(edited))
    with pytest.raises(WeightsError, match=r"version 0: manifest\.json is damaged"):
        store.manifest(0)


def test_folder_with_the_manifest_of_another_version_is_refused(store):
    add(store, 0)
    shutil.copytree(store.folder(0), store.folder(1))
    for refusing in (store.manifest, store.verify_files, store.set_current):
        with pytest.raises(WeightsError, match=r"version 1: manifest\.json is that of version 0; remove the folder 1"):
            refusing(1)
    assert [manifest.version for manifest in store.manifests()] == [0]


def test_manifest_of_release_0_1_0_is_read(store):
    manifest = add(store, 0)
    written = {**dataclasses.asdict(manifest), "tensors": {"weight": ["F32", [2, 2]]}}
    sealed = {**written, "seal": json_digest(written)}
    (store.folder(0) / "manifest.json").write_text(json.dumps(sealed))
    assert store.manifest(0) == manifest


@pytest.mark.parametrize("name", ["", "three", "-1", "\udcff", "99999999999999999999", "007", "²", "9" * 400])
def test_non_canonical_numbers_are_not_versions(store, name):
    add(store, 0)
    if 0 < len(name) < 200:
        shutil.copytree(store.folder(0), store.root / name)
    assert store.versions() == [0]
    assert add(store, 1).version == 1
    store.set_current(1)
    store.prune(keep=1)
    assert store.versions() == [0, 1]
    (store.root / "CURRENT").write_text(f"{name}\n", errors="surrogateescape")
    with pytest.raises(WeightsError, match=r"CURRENT contains .*, not a version number"):
        store.current()


def test_store_write_times_out_if_a_suspended_writer_holds_the_lock(store, monkeypatch):
    monkeypatch.setattr(weights, "WRITER_PATIENCE_S", 0.05, raising=False)
    add(store, 0)
    for write in (lambda: add(store, 1), lambda: store.prune(keep=1)):
        with (
            WeightsStore(store.root)._writing(),
            pytest.raises(OSError, match=r"locked by another process for 0.05 s; .*WRITER"),
        ):
            write()
    assert add(store, 1).version == 1


# ---- serving records ----


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(serving_records, "time", clock)
    return clock


class Clock:
    """The records' time: elapsed seconds, and a wall clock that may be set."""

    def __init__(self):
        self.passed = 0.0
        self.set_by = 0.0

    def monotonic(self):
        return self.passed

    def time(self):
        return 1e9 + self.passed + self.set_by


def instances(found):
    return [record.instance for record in found]


def test_serving_record_is_alive_while_its_process_is(records, clock):
    mine = ServingRecord.of_this_process("critic_0", 0)
    records.put(mine)
    for name, text in (("a.json", ""), ("b.json", "{}"), ("c.json", '{"instance": "x", "colour": 1}')):
        (records._folder / name).write_text(text)  # no records
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        theirs = dataclasses.replace(mine, instance="critic_1", pid=child.pid, born=_process(child.pid)[1])
        records.put(theirs)
        assert instances(records.alive()) == ["critic_0", "critic_1"]
        clock.passed += REMOTE_SILENCE_S
        assert instances(records.alive()) == ["critic_0", "critic_1"]  # busy, perhaps with loading
        child.send_signal(signal.SIGSTOP)
        while _process(child.pid)[0] not in STOPPED:
            time.sleep(0.005)
        records.touch(theirs)
        assert instances(records.alive()) == ["critic_0", "critic_1"]  # suspended just now
        clock.passed += REMOTE_SILENCE_S
        assert instances(records.died()) == ["critic_1"]
        records.touch(theirs)
        child.kill()
        while "critic_1" in instances(records.alive()):  # until the kernel has ended it; it is not reaped yet
            time.sleep(0.01)
    assert instances(records.died()) == ["critic_1"]
    records.forget_died()
    assert (records.died(), instances(records.alive())) == ([], ["critic_0"])
    for _ in range(2):  # twice is once
        records.withdraw(mine)
    assert records.alive() == []


def test_serving_record_of_a_reused_process_id_is_dead(records):
    mine = ServingRecord.of_this_process("critic_0", 0)
    records.put(dataclasses.replace(mine, born=mine.born - 1))
    assert records.alive() == []
    assert instances(records.died()) == ["critic_0"]


@pytest.fixture
def elsewhere(records, clock):
    """Return a record of another machine, or of another container with the same host name and process ids."""
    record = dataclasses.replace(ServingRecord.of_this_process("critic_0", 3), place="cafe0123", pid=1)
    records.put(record)
    return record


def test_remote_serving_record_is_alive_while_its_mtime_changes(records, elsewhere, clock):
    records.put(ServingRecord.of_this_process("critic_0", 4))
    assert len(records.alive()) == 2, "two instances share a file"
    path = records._folder / elsewhere.file_name
    clock.passed += REMOTE_SILENCE_S
    assert [record.version for record in records.alive()] == [4]
    assert records.died() == [], "an instance on another host counts as dead"
    records.touch(elsewhere)
    assert len(records.alive()) == 2
    clock.passed += REMOTE_SILENCE_S
    for known in (False, True):  # who replaces an instance knows nothing of other machines
        records.forget_died(elsewhere=known)
        assert path.exists() != known
    records.touch(elsewhere)  # forgotten by somebody who took it for dead
    assert len(records.alive()) == 2


@pytest.mark.parametrize("seconds", [60, -60, 3600])
def test_clock_skew_and_jumps_do_not_change_serving_records(records, elsewhere, clock, seconds):
    os.utime(records._folder / elsewhere.file_name, (clock.time() - seconds,) * 2)
    for _ in range(2):
        assert len(records.alive()) == 1
        clock.passed += 1
        clock.set_by += seconds
    records.forget_died(elsewhere=True)
    assert len(records.alive()) == 1
    clock.passed += REMOTE_SILENCE_S
    assert records.alive() == []


# ---- run locks ----


def test_run_is_in_progress_while_the_run_or_actor_lock_is_held(tmp_path):
    assert not in_progress(tmp_path / "none")
    for lock, what in ((only_run, "`rlhf-triton run`"), (only_actor, "actor")):
        with lock(tmp_path), only_actor(tmp_path / "other"):
            assert in_progress(tmp_path)
            with pytest.raises(RlhfError, match=f"another {what} is running in {tmp_path}"), lock(tmp_path):
                pass
        assert not in_progress(tmp_path), "a lock file without a process counts as a run"
    with only_run(tmp_path), only_actor(tmp_path):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(RlhfError, match=r"run.dir: .*/file/run cannot be used: Not a directory; choose another"):
        only_run(tmp_path / "file" / "run").__enter__()


@pytest.mark.parametrize("lock", [only_run, only_actor])
def test_fresh_refuses_to_move_a_run_in_progress(tmp_path, checkpoints, lock, capsys):
    run = make_run(tmp_path / "run", checkpoints)
    (run.config.run.dir / "metrics.jsonl").touch()
    with lock(run.config.run.dir):
        assert rlhf_triton.tools.run.main(["--fresh", "--config", str(run.path)]) == 2
    assert f"is running in {run.config.run.dir} (process {os.getpid()} on" in capsys.readouterr().err
    assert (run.config.run.dir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("lock", "file"), [(only_actor, LOCK_FILE), (lambda folder: Journal(folder, "run").lock(), "LOCK")]
)
def test_checking_a_lock_does_not_block_its_owner(tmp_path, lock, file):
    """`in_progress` and `is_followed` briefly hold a shared lock."""
    with lock(tmp_path):
        pass
    with (tmp_path / file).open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (opened, fcntl.LOCK_UN)).start()
        with lock(tmp_path):
            pass
