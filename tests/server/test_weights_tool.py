"""`python -m tools weights`: what an operator sees and does, without a server and beside a live one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from bare_client import ask
from live_system import KEY, LiveRun, System, identity, training_inputs
from sidecar_rig import Rig

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.wire.contract import CRITIC_TRAIN
from tools.weights import main

Output = pytest.CaptureFixture[str]


def config_of(rig: Rig, folder: Path) -> list[str]:
    """The rig's configuration as a file."""
    path = folder / "run.yaml"
    path.write_text(rig.config.model_dump_json(exclude_none=True))
    return ["--config", str(path)]


def test_list_says_what_every_version_is(rig: Rig, tmp_path: Path, capsys: Output):
    rig.train(1, 2)
    assert main(["list", *config_of(rig, tmp_path)]) == 0
    told = capsys.readouterr().out
    print(told)
    lines = told.splitlines()
    assert lines[0].split()[:3] == ["version", "step", "from"]
    assert [line.split()[:3] for line in lines[1:]] == [["0", "0", "-"], ["1", "1", "0"], ["2", "2", "1"]]
    assert lines[3].endswith(f"CURRENT, {rig.store.serving()[0].name}")


def test_verify_reads_all_of_them_and_names_the_bad_one(rig: Rig, tmp_path: Path, capsys: Output):
    rig.train(1, 2)
    config = config_of(rig, tmp_path)
    assert main(["verify", *config]) == 0
    assert capsys.readouterr().out.count("good") == 3
    path = rig.store.folder(1) / WEIGHTS_FILE
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-9])
    assert main(["verify", *config]) == 1
    told = capsys.readouterr()
    print(told.out, told.err)
    assert "version 1: cannot read model.safetensors" in told.out
    assert told.out.count("good") == 2
    assert told.err == "error: 1 of 3 versions cannot be served\n"
    assert main(["verify", *config, "--version", "2"]) == 0


def test_rollback_serves_old_bytes_under_a_new_number(rig: Rig, tmp_path: Path, capsys: Output):
    rig.train(1, 2, 3)
    old, weights = rig.store.manifest(1), rig.weights(1)
    config = config_of(rig, tmp_path)
    assert main(["rollback", *config, "--to", "1"]) == 0
    told = capsys.readouterr().out
    print(told)
    assert "version 4 is served, with the weights of version 1 (step 1)" in told
    assert "a sidecar is training this critic" in told
    new = rig.store.manifest(4)
    assert (new.sha256, new.parent, new.step) == (old.sha256, 1, 1)
    assert (rig.store.current(), rig.instances[0].served[-1]) == (4, 4)
    assert torch.equal(rig.weights(4), weights)
    (result,) = rig.train(4)  # the sidecar trains on from its own weights, with a number above
    assert (result.error, result.weights_version) == (None, 5)
    assert rig.store.manifest(5).step == 4


def test_rollback_without_a_number_takes_the_parent(rig: Rig, tmp_path: Path, capsys: Output):
    rig.train(1, 2)
    assert main(["rollback", *config_of(rig, tmp_path)]) == 0
    assert "with the weights of version 1 " in capsys.readouterr().out


def test_rollback_to_a_damaged_version_is_refused(rig: Rig, tmp_path: Path, capsys: Output):
    rig.train(1, 2)
    path = rig.store.folder(1) / WEIGHTS_FILE
    path.unlink()
    assert main(["rollback", *config_of(rig, tmp_path), "--to", "1"]) == 2
    assert "version 1: cannot read model.safetensors" in capsys.readouterr().err
    assert rig.store.current() == 2
    assert main(["rollback", *config_of(rig, tmp_path), "--to", "77"]) == 2
    assert "version 77 is not in the weights store" in capsys.readouterr().err


def test_rollback_without_an_instance_moves_current_and_says_so(rig: Rig, tmp_path: Path, capsys: Output):
    rig.train(1, 2)
    rig.stop()
    rig.instances.pop().close()
    assert main(["rollback", *config_of(rig, tmp_path), "--to", "1"]) == 2
    assert "CURRENT is now 3, but no serving instance is alive" in capsys.readouterr().err
    assert rig.store.current() == 3


def test_an_empty_store_is_told(tmp_path: Path, capsys: Output):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/nothing}}")
    assert main(["list", "--config", str(tmp_path / "run.yaml")]) == 2
    assert re.search("error: the weights store .* is empty", capsys.readouterr().err)


def test_a_live_server_follows_a_rollback(live: System, capsys: Output):
    run: LiveRun = live.run
    first = run.store.current() or 0
    step = run.next_step()
    ask(run.url, CRITIC_TRAIN, {**training_inputs(seed=77), **identity("test", step)}, headers=KEY)
    assert main(["rollback", "--config", str(run.path), "--to", str(first)]) == 0
    print(capsys.readouterr().out)
    assert main(["ready", "--config", str(run.path)]) == 0
    current = run.store.current() or 0
    assert f"serves version {current}" in capsys.readouterr().out
    assert run.store.manifest(current).sha256 == run.store.manifest(first).sha256
    assert {record.version for record in run.store.serving()} == {current}
