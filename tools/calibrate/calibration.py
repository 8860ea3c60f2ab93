"""Measures the fastest values of served models' settings that are `auto`; caches them per model and machine."""

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.config import ConfigError, ModelSection, RewardSection, RunConfig
from python_backend.config.labels import attribute_weights
from python_backend.config.sections import UNMEASURED
from python_backend.store.durable import read_json, write_json

CACHE_VARIABLE = "RLHF_ON_TRITON_CACHE"
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
CARD_BUDGETS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
NEARLY = 0.97  # share of the best speed that is fast enough: a smaller budget needs less memory
TIMEOUT_S = 600.0  # for each measured pair of workers and threads


@dataclass(frozen=True)
class Settled:
    """Fastest settings of a model on this machine."""

    workers: int
    threads: int
    token_budget: int
    forward_overhead_tokens: int
    tokens_per_s: float


def settle(config: RunConfig, log: Callable[[str], None]) -> list[str]:
    """Measure every setting that is `auto`; return overrides `section.key=value`, [] if no setting is `auto`.

    Raises:
        ConfigError: a model cannot be loaded; the message says why.
    """
    overrides = []
    for role, section in config.served_sections.items():
        names = [name for name in UNMEASURED if getattr(section, name) == "auto"]
        if section.tensor_parallel > 1:  # measuring would need the whole model on one device
            overrides += [f"{role}.{name}={section.settled(name)}" for name in names]
        elif names:
            found = _remembered(role, section, _cores_of(config, section), log)
            overrides += [f"{role}.{name}={getattr(found, name)}" for name in names]
    return overrides


def cached(config: RunConfig, role: str) -> Settled | None:
    """Return the settings of a served model that an earlier start measured; None if there was none."""
    section = config.served_sections[role]
    return _read(_cache_file(role, section, _cores_of(config, section)))


def splits(cores: int, section: ModelSection) -> list[tuple[int, int]]:
    """Return the pairs (workers, threads) to measure.

    A number that `section` sets is kept, and the other one follows from `cores`. On a GPU there is one pair, with the
    default for each `auto`.
    """
    if section.device != "cpu":
        return [(section.settled("workers"), section.settled("threads"))]
    if section.workers != "auto":
        threads = max(1, cores // section.workers) if section.threads == "auto" else section.threads
        return [(section.workers, threads)]
    if section.threads != "auto":
        return [(max(1, cores // section.threads), section.threads)]
    return sorted({(workers, cores // workers) for workers in (1, 2, cores // 2, cores) if 1 <= workers <= cores})


def choose(results: Mapping[tuple[int, int], Mapping[str, Any]]) -> Settled:
    """Return the fastest settings, with the smallest token budget that is nearly as fast as the best.

    Args:
        results: output of `tools.calibrate.worker` by (workers, threads).
    """
    best: Settled | None = None
    for (workers, threads), result in results.items():
        speeds = {int(budget): speed for budget, speed in result["speeds"].items()}
        budget = min(budget for budget, speed in speeds.items() if speed >= NEARLY * max(speeds.values()))
        if best is None or speeds[budget] > best.tokens_per_s:
            best = Settled(workers, threads, budget, result["overheads"][str(budget)], speeds[budget])
    assert best is not None, "nothing was measured"
    return best


def forward_overhead(checkpoint: Path) -> int:
    """Measure and return the fixed cost of a reward model's forward pass, in tokens. Raises ConfigError."""
    return _measure("reward", RewardSection(model=checkpoint), 1, 1, budgets=(256,))["overheads"]["256"]


def _remembered(role: str, section: ModelSection, cores: int, log: Callable[[str], None]) -> Settled:
    path = _cache_file(role, section, cores)
    known = _read(path)
    if known is not None:
        return known
    pairs = splits(cores, section)
    log(
        f"{role}: measuring the fastest settings, once per model and machine (a few minutes); to skip this, set "
        f"{role}.{', '.join(UNMEASURED)}"
    )
    results = {}
    for workers, threads in pairs:
        started = time.monotonic()
        result = results[workers, threads] = _measure(role, section, workers, threads)
        too_many = result.get("too_many")
        log(
            f"{role}: measured {workers} workers x {threads} threads ({len(results)} of {len(pairs)}) in "
            f"{time.monotonic() - started:.0f} s"
            + (f"; budgets from {too_many} tokens do not fit into the GPU's memory" if too_many else "")
        )
    settled = choose(results)
    log(
        f"{role}: {settled.workers} workers x {settled.threads} threads, token budget {settled.token_budget}, "
        f"forward overhead {settled.forward_overhead_tokens} tokens: {settled.tokens_per_s:,.0f} tokens/s"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(settled), durable=False)
    return settled


def _cache_file(role: str, section: ModelSection, cores: int) -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    general = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(chosen) if chosen else general / "rlhf-on-triton"
    return folder / f"{role}-{_identity(section, cores)}.json"


def _cores_of(config: RunConfig, section: ModelSection) -> int:
    """Return the cores of one instance: models on the CPU share them equally, and so do the instances of a model."""
    on_cpu = sum(other.device == "cpu" for other in config.served_sections.values())
    return max(1, len(os.sched_getaffinity(0)) // max(1, on_cpu) // section.instances)


def _read(path: Path) -> Settled | None:
    """Return the cached result; None if there is none or the file is damaged (it is not written durably)."""
    try:
        known = read_json(path)
        return None if known is None else Settled(**known)
    except (ValueError, TypeError):
        return None


def _measure(
    role: str, section: ModelSection, workers: int, threads: int, *, budgets: Sequence[int] = ()
) -> dict[str, Any]:
    """Run `tools.calibrate.worker` in its own process and return its result. Raises ConfigError."""
    kind, options = _loading(role, section)
    spec = {
        "role": kind,
        "options": options,
        "model": str(section.model.absolute()),
        "device": section.device,
        "dtype": section.dtype,
        "workers": workers,
        "threads": threads,
        "max_length": section.max_length,
        "budgets": budgets or (BUDGETS if section.device == "cpu" else CARD_BUDGETS),
    }
    command = [sys.executable, "-m", "tools.calibrate.worker", json.dumps(spec)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{role}: measuring its fastest settings took longer than {TIMEOUT_S:g} s; set {role}."
            f"{f', {role}.'.join(UNMEASURED)} instead of leaving them `auto`"
        ) from error
    if done.returncode != 0:
        raise ConfigError(f"{role}.model: {(done.stderr.strip() or 'the measuring process died').splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _loading(role: str, section: ModelSection) -> tuple[str, dict[str, Any]]:
    """Return the worker's name for how the model is loaded, and the loader's options."""
    if isinstance(section, RewardSection) and section.logit is not None:
        return "logit", section.logit.model_dump()
    if not isinstance(section, RewardSection):
        return role, {}
    try:
        options = {"attribute_weights": attribute_weights(section)}
    except CheckpointError as error:
        raise ConfigError(f"{role}.model: {error}") from error
    if section.process is not None:
        return "process", options
    return role, {**options, "merge_attributes": section.merge_attributes is not False}


def _identity(section: ModelSection, cores: int) -> str:
    """Return a hash of what the measurement depends on: the model, the fixed settings, the machine, the libraries."""
    folder = section.model
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model: it has no config.json")
    parts = [
        (folder / "config.json").read_text(),
        sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors")),
        section.device,
        section.dtype,
        section.max_length,
        section.workers,
        section.threads,
        cores,
        _processor(section.device),
        importlib.metadata.version("torch"),
        importlib.metadata.version("transformers"),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _processor(device: str) -> str:
    if device != "cpu":  # of all cards that can be seen: none if it is those of another machine that a dry run plans
        import torch  # slow

        return ", ".join(sorted({torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())}))
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line for line in lines if line.startswith("model name")), "unknown")
