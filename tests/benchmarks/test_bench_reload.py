"""The reload measurement: its pieces with real files, and one whole quick run. No test asserts times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reload.service import Cores, on_core
from benchmarks.reload.training import make_payload
from benchmarks.support.workload import LONGEST, VOCAB_SIZE
from python_backend.wire.contract import SEQUENCE_LENGTHS, Limits
from python_backend.wire.training_payload import train_payload

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


# ---- the command ----
