"""Reload benchmark, part d (journal): accepting a training payload, against only writing and syncing its bytes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reload.critic_service import RUN_ID
from benchmarks.reload.setup import ReloadSetup, on_core, under_load
from benchmarks.reload.windows import ratio
from benchmarks.support.benchmark import Target
from benchmarks.support.samples import medians
from benchmarks.support.workload import SIZES, VOCAB_SIZE, make_checkpoint, noise_payload
from benchmarks.update import one_update
from python_backend.config import TrainerSection
from python_backend.serving.allocator import keep_freed_memory
from python_backend.store.durable import sync_directory
from python_backend.store.journal import Journal
from python_backend.wire.contract import Limits
from python_backend.wire.training_payload import TrainPayload, sent_payload, train_payload

MOST_TIMES = 1.5
MOST_SHARE = 0.02


def measure(setup: ReloadSetup) -> dict[str, Any]:
    """Alternately accept a payload and only write its bytes; then time one critic update with as many tokens."""
    settings = setup.settings
    rows = np.random.default_rng(0).integers(3, VOCAB_SIZE, (settings.journal_rows, settings.journal_tokens))
    arrays = padded_arrays(noise_payload(list(rows)))
    limits = Limits(VOCAB_SIZE, settings.journal_tokens)
    folder = setup.folder / "journal"
    shutil.rmtree(folder, ignore_errors=True)
    journal = Journal(folder, RUN_ID)
    keep_freed_memory()  # as critic_train does
    with on_core(*range(os.cpu_count() or 1)):  # critic_train computes the digest in a second thread
        steps = range(1, settings.journal_repeats + 1)
        samples = [accept_once(journal, arrays, limits, step, folder) for step in steps]
    setup.say(f"d: {len(samples)} payloads of {settings.journal_rows} x {settings.journal_tokens:,} tokens")
    shutil.rmtree(folder)
    model = under_load(settings.models)[0]
    update_s = _update_seconds(model, train_payload(arrays, limits))
    setup.say(f"d, {model}: an update with as many tokens took {update_s:.1f} s")
    return {
        "samples": samples,
        "rows": settings.journal_rows,
        "tokens": settings.journal_tokens,
        "update_s": update_s,
        "update_model": model,
    }


def padded_arrays(payload: TrainPayload) -> dict[str, np.ndarray]:
    """Return the payload as padded arrays, as the actor sends them; all of its rows must have the same length."""
    return {name: array.reshape(payload.lengths.size, -1) for name, array in payload.arrays().items()}


def accept_once(
    journal: Journal, arrays: Mapping[str, np.ndarray], limits: Limits, step: int, folder: Path
) -> dict[str, float]:
    """Accept one payload, then only write its bytes; return the milliseconds of both, and the number of bytes."""
    start = time.perf_counter()
    sent = sent_payload(arrays, limits)  # as critic_train does; the content is checked while it is written
    checked = time.perf_counter()
    entry = journal.accept_training(sent.packed(), run_id=RUN_ID, step=step, check=sent.check)
    accepted = time.perf_counter()
    (written,) = folder.rglob(entry.name)
    data = written.read_bytes()
    bare_ms = bare_write_ms(written.with_name(f".bare-{step}"), data)
    written.write_bytes(b"")  # frees the disk; the following steps need only its name
    sync_directory(written.parent)  # so that the next write does not include freeing these blocks
    return {
        "check_ms": (checked - start) * 1e3,
        "journal_ms": (accepted - checked) * 1e3,
        "accept_ms": (accepted - start) * 1e3,
        "bare_ms": bare_ms,
        "bytes": len(data),
    }


def bare_write_ms(path: Path, data: bytes) -> float:
    """Return the milliseconds to write a new file and sync it and its directory; then remove the file."""
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds * 1e3


def _update_seconds(model: str, payload: TrainPayload) -> float:
    """Return the seconds of one update of the critic with the payload."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as checkpoint:
        make_checkpoint(SIZES[model], Path(checkpoint))
        return one_update(Path(checkpoint), payload, TrainerSection().token_budget)


def summarise(part: dict[str, Any]) -> dict[str, Any]:
    """Return medians, the ratio of accepting to a bare write, and accepting as a share of an update."""
    found = medians(part["samples"], "check_ms", "journal_ms", "accept_ms", "bare_ms")
    return {
        **found,
        "n": len(part["samples"]),
        "bytes": part["samples"][0]["bytes"],
        "payload": f"{part['rows']} x {part['tokens']:,}",
        "update_s": part["update_s"],
        "model": part["update_model"],
        "ratio": ratio(found["accept_ms"], found["bare_ms"]),
        "share": found["accept_ms"] / 1e3 / part["update_s"],
    }


def targets(summary: dict[str, Any]) -> list[Target]:
    """Return the targets. A PPO step takes longer than its update, so the share of a PPO step is even smaller."""
    detail = (
        f"form {summary['check_ms']:,.1f} ms + content and journal {summary['journal_ms']:,.1f} ms against "
        f"{summary['bare_ms']:,.1f} ms for {summary['bytes'] / 1e6:,.1f} MB; n {summary['n']}"
    )
    update = f"of a {summary['model']} critic's update with as many tokens, {summary['update_s']:,.1f} s"
    name = f"d: accepting {summary['payload']} tokens / write + fsync"
    return [
        Target(name, summary["ratio"], None, MOST_TIMES, detail),
        Target("d: accepting a payload as % of a PPO step", 100 * summary["share"], None, 100 * MOST_SHARE, update),
    ]
