"""The reload measurement: its pieces with real files, and one whole quick run. No test asserts times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.command import parse_arguments
from benchmarks.reload import parts
from benchmarks.reload.parts import PARTS
from benchmarks.reload.setup import Cores, on_core, under_load
from benchmarks.reload.training import make_payload
from benchmarks.support.pytriton import LockedCritic
from benchmarks.support.workload import LONGEST, SIZES, VOCAB_SIZE, make_checkpoint, make_trace
from python_backend.wire.contract import SEQUENCE_LENGTHS, Limits
from python_backend.wire.training_payload import train_payload
from tests.support.settings import trainer_section

ROOT = Path(__file__).resolve().parents[2]
SOME = Limits(VOCAB_SIZE, LONGEST)


def test_a_core_is_for_what_is_started_within():
    before = os.sched_getaffinity(0)
    core = max(before)
    with on_core(core):
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert child.stdout.split() == [f"[{core}]"]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("cores", "expected"), [({5}, (5, 5, (5,))), ({2, 3}, (2, 3, (3,))), ({0, 1, 2, 3}, (0, 1, (2, 3)))]
)
def test_cores_are_shared_only_where_they_are_few(
    cores: set[int], expected: tuple[int, int, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    found = Cores.of_machine()
    assert (found.server, found.clients, found.trainer) == expected


def test_payloads_are_exact_multiples_that_the_contract_accepts():
    one, four = (train_payload(make_payload(3, copies=copies), SOME) for copies in (1, 4))
    assert four.tokens.size == 4 * one.tokens.size
    assert four.lengths.tolist() == one.lengths.tolist() * 4
    assert make_payload(3, copies=2)[SEQUENCE_LENGTHS].shape == (6, 1)


def test_the_locked_server_computes_what_ours_does_and_trains(tmp_path: Path):
    from python_backend.models.modeling import load_critic

    make_checkpoint(SIZES["tiny"], tmp_path)
    critic = LockedCritic(tmp_path, trainer_section(lr=1e-2, warmup_steps=0))
    rows = make_trace(2)
    width = max(row.size for row in rows)
    values, version = critic.values(rows, width)
    direct = load_critic(tmp_path).values(rows, width)
    assert version == 0
    assert all(np.allclose(values[i, : row.size], direct[i]) for i, row in enumerate(rows))
    loss, version = critic.train(make_payload(2, copies=1))
    assert np.isfinite(loss)
    assert version == 1
    assert not np.allclose(critic.values(rows, width)[0], values)


# ---- the command ----


def test_quick_changes_defaults_only(tmp_path: Path):
    out = ["--out", str(tmp_path)]
    assert parse_arguments("reload", parts, [*out, "--quick"]).swaps == 4
    assert parse_arguments("reload", parts, [*out, "--quick", "--swaps", "7"]).swaps == 7
    full = parse_arguments("reload", parts, out)
    assert (full.swaps, full.triton_reloads, full.clients) == (200, 50, 32)


def test_models_too_large_for_milliseconds_are_published_only():
    assert under_load(["1m", "7m", "110m"]) == ["1m", "7m"]
    assert under_load(["110m"]) == ["110m"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quick_run_measures_every_part_and_leaves_nothing_running(tmp_path: Path):
    command = [sys.executable, "-m", "tools", "bench", "reload", "--out", str(tmp_path), "--quick"]
    first = subprocess.run([*command, "--parts", "b"], cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    assert list(json.loads((tmp_path / "result.json").read_text())["parts"]) == ["publish"]
    done = subprocess.run([*command, "--parts", "a,c"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["parts"]) == set(PARTS)
    (load,) = result["summary"]["load"].values()
    assert load["failed_by_clients"] == load["failed_by_server"] == 0
    assert (load["swap"]["reloads"], load["triton"]["reloads"]) == (4, 1)
    assert load["versions_seen"] > 1
    assert result["summary"]["training"]["one lock"]["x4"]["updates"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "report.md", "reload.png"}
    reward = [*command, "--parts", "a", "--model", "reward", "--swaps", "3", "--triton-reloads", "0"]
    done = subprocess.run(reward, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (load,) = json.loads((tmp_path / "result.json").read_text())["summary"]["load"].values()
    assert load["failed_by_clients"] == load["failed_by_server"] == 0
    assert load["swap"]["reloads"] == 3
    assert load["versions_seen"] > 1
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running
