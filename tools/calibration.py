"""Settles what is `auto` in the reward and critic sections: measured once per model and machine, then remembered.
Given: the configuration. Returns: overrides with numbers. The measuring happens in processes of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_backend.config import ConfigError, ModelSection, RewardSection, RunConfig
from python_backend.durable import read_json, write_json

AUTO = ("instances", "threads", "token_budget", "forward_overhead_tokens", "allocator")
CACHE_VARIABLE = "RLHF_ON_TRITON_CACHE"
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
NEARLY = 0.97  # of the best speed: the smaller budget needs less memory
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Settled:
    """The fastest settings found."""

    instances: int
    threads: int
    token_budget: int
    forward_overhead_tokens: int
    allocator: str
    tokens_per_s: float


def settle(config: RunConfig, log: Callable[[str], None]) -> list[str]:
    """Overrides `section.key=value` for every setting that is `auto`; none if all are fixed.

    Raises:
        ConfigError: a model cannot be loaded; the message says why.
    """
    sections: dict[str, ModelSection] = {"reward": config.reward, "critic": config.critic}
    on_cpu = sum(section.device == "cpu" for section in sections.values())
    overrides = []
    for role, section in sections.items():
        names = [name for name in AUTO if getattr(section, name) == "auto"]
        if names:
            found = _remembered(role, section, max(1, _cores() // max(1, on_cpu)), log)
            overrides += [f"{role}.{name}={getattr(found, name)}" for name in names]
    return overrides


def splits(cores: int, section: ModelSection) -> list[tuple[int, int]]:
    """Pairs of instances and threads to try: what is fixed stays, the rest shares the cores."""
    if section.device != "cpu":
        return [(section.settled("instances"), section.settled("threads"))]
    fixed_instances, fixed_threads = section.instances, section.threads
    pairs = {(instances, max(1, cores // instances)) for instances in (1, 2, cores // 2, cores) if instances}
    if fixed_instances != "auto":
        pairs = {(fixed_instances, max(1, cores // fixed_instances))}
    if fixed_threads != "auto":
        pairs = {(max(1, cores // fixed_threads) if fixed_instances == "auto" else fixed_instances, fixed_threads)}
    return sorted(pair for pair in pairs if pair[0] * pair[1] <= cores or len(pairs) == 1)


def choose(results: dict[tuple[int, int], list[dict[str, Any]]]) -> Settled:
    """The fastest of what was measured: per (instances, threads), one result of each instance."""
    best: Settled | None = None
    for (instances, threads), copies in results.items():
        overhead = round(sum(copy["overhead_tokens"] for copy in copies) / len(copies))
        for allocator in copies[0]["speeds"]:
            speeds = {
                int(budget): sum(copy["speeds"][allocator].get(budget, 0.0) for copy in copies)
                for budget in copies[0]["speeds"][allocator]
            }
            fastest = max(speeds.values())
            budget = min(budget for budget, speed in speeds.items() if speed >= NEARLY * fastest)
            if best is None or speeds[budget] > best.tokens_per_s:
                best = Settled(instances, threads, budget, overhead, allocator, speeds[budget])
    assert best is not None, "nothing was measured"
    return best


def forward_overhead(checkpoint: Path) -> int:
    """What a forward of a reward checkpoint costs beyond its tokens, in tokens, measured now. Raises ConfigError."""
    return _measure("reward", RewardSection(checkpoint=checkpoint), 1, 1, budgets=(256,))[0]["overhead_tokens"]


def _remembered(role: str, section: ModelSection, cores: int, log: Callable[[str], None]) -> Settled:
    path = _cache_folder() / f"{role}-{_identity(section, cores)}.json"
    known = read_json(path)
    if known is not None:
        return Settled(**known)
    pairs = splits(cores, section)
    log(f"{role}: measuring the fastest settings, once for this model on this machine")
    settled = choose({pair: _measure(role, section, *pair) for pair in pairs})
    log(
        f"{role}: {settled.instances} x {settled.threads} threads, token budget {settled.token_budget}, allocator "
        f"{settled.allocator}, forward overhead {settled.forward_overhead_tokens} tokens: "
        f"{settled.tokens_per_s:,.0f} tokens/s"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(settled), durable=False)
    return settled


def _measure(
    role: str, section: ModelSection, instances: int, threads: int, *, budgets: Sequence[int] = BUDGETS
) -> list[dict[str, Any]]:
    """Results of `instances` copies that measure at the same time. Raises ConfigError."""
    spec = {
        "role": role, "checkpoint": str(section.checkpoint.absolute()), "device": section.device,
        "dtype": section.dtype, "threads": threads, "max_length": section.max_length,
        "budgets": budgets,
    }  # fmt: skip
    command = [sys.executable, "-m", "tools.calibration_worker", json.dumps(spec)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        copies = []
        for _ in range(instances):
            copy = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
            copies.append(stack.enter_context(copy))
            stack.callback(copy.kill)
        for copy in copies:
            assert copy.stdout is not None
            copy.stdout.readline()  # "ready", or the end of one that could not load
        outputs = _finish(copies)
    for copy, (_, errors) in zip(copies, outputs, strict=True):
        if copy.returncode != 0:
            raise ConfigError(f"{role}.checkpoint: {(errors.strip() or 'the measurement died').splitlines()[-1]}")
    return [json.loads(output) for output, _ in outputs]


def _finish(copies: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    for copy in copies:
        assert copy.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and said why on stderr
            copy.stdin.write("go\n")
            copy.stdin.flush()
    return [copy.communicate(timeout=TIMEOUT_S) for copy in copies]


def _identity(section: ModelSection, cores: int) -> str:
    """What the measurement depends on: the model, the fixed settings, the machine, the libraries."""
    folder = section.checkpoint
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no Hugging Face checkpoint: it has no config.json")
    parts = [
        (folder / "config.json").read_text(),
        sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors")),
        section.device, section.dtype, section.max_length, section.instances, section.threads, cores, _processor(),
        importlib.metadata.version("torch"), importlib.metadata.version("transformers"),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line for line in lines if line.startswith("model name")), "unknown")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    general = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else general / "rlhf-on-triton"
