"""`rlhf-triton status`: who serves which version, the journal, the last step, and the last problem of a run."""

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.actor.replay.recorded_steps import describe_samples
from rlhf_triton.actor.run.settings import last_step, started_with
from rlhf_triton.config.command_line import add_run_arguments, reporting
from rlhf_triton.config.live_models import live_models
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.errors import REPORTED, reason_of
from rlhf_triton.monitoring.log_lines import as_text
from rlhf_triton.monitoring.metrics import ACTOR
from rlhf_triton.store.durable import read_json
from rlhf_triton.store.heartbeat import HEARTBEAT_TIMEOUT_S
from rlhf_triton.store.journal import Journal
from rlhf_triton.store.run_lock import in_progress, read_phase
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.arguments import parse
from rlhf_triton.tools.server.health import is_triton
from rlhf_triton.tools.server.server_log import is_noise, last_lines

PROBLEM = re.compile(r"\b(?:WARNING|ERROR|CRITICAL|Traceback|error:)")
TAIL_BYTES = 1 << 16  # read from the end of a log or JSONL file; a line of metrics has some kilobytes


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Print the state; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(description="Show the state of a run.")
    add_run_arguments(parser)
    arguments = parse(parser, argv)
    config = load_config(arguments.config, arguments.overrides)
    config = started_with(config.run.dir) or config
    print("\n".join(status(config)))
    return 0


def status(config: RunConfig) -> Iterator[str]:
    """Yield the lines of the state, read from the run's folder; the server only says whether it is up."""
    yield f"run       {config.run.identity} in {config.run.dir}" + (f": {_state(config)}" if config.has_actor else "")
    yield f"server    {_server(config)}"
    if config.has_actor:
        yield f"actor     {_actor(config)}"
    if config.serves_critic:
        yield f"sidecar   {_sidecar(config)}"
    live = {model.name: model for model in live_models(config)}
    for role, section in config.served_sections.items():
        if role in live:
            yield from _versions(role, WeightsStore(live[role].store))
        else:
            yield f"{role:<9} {section.model}, without versions"
    if config.has_actor:
        yield f"samples   {_samples(config)}"
    for name in ("actor", "sidecar", "tritonserver"):
        problem = _last_problem(config.run.logs_dir / f"{name}.log")
        if problem:
            yield f"problem   {name}.log: {problem}"


def _state(config: RunConfig) -> str:
    """Return whether the actor runs or has finished, or the step at which the next start begins."""
    folder = config.run.dir
    if in_progress(folder):
        phase = read_phase(folder)
        return f"running{phase and ': '}{phase}"
    last = _last_step(config)
    if not last:
        return "not running; no step has ended"
    if (read_json(folder / "actor_summary.json") or {}).get("steps") == last:
        steps = config.actor.steps  # `actor.max_minutes` ends a run earlier
        return f"finished after step {last}" + (f" of {steps}; the next start continues" if last < steps else "")
    return f"not running; the next start begins with step {last_step(folder) + 1}"


def _last_step(config: RunConfig) -> int:
    """Return the last complete step; 0 before the first."""
    return int((_last_line(config.run.dir / "metrics.jsonl") or {"step": 0})["step"])


def _server(config: RunConfig) -> str:
    """Return where the server is, and whether it is up."""
    url = config.server_url("http")
    if url.endswith(":0"):
        return "has not begun"
    return f"http://{url} {'is up' if is_triton(url) else 'does not answer'}"


def _memory(line: Mapping[str, Any]) -> str:
    """Return a process's memory on its GPU, as the end of its line; empty on a CPU."""
    used, peak, size = (line.get(f"gpu_{name}bytes", 0) / (1 << 30) for name in ("", "peak_", "size_"))
    return f"; {used:.1f} GiB on its GPU of {size:.1f} GiB, at most {peak:.1f}" if size else ""


def _actor(config: RunConfig) -> str:
    line = _last_line(config.run.dir / "metrics.jsonl")
    if line is None:
        return "no step has ended"
    ago = time.time() - (config.run.dir / "metrics.jsonl").stat().st_mtime
    values = {spec.status: line.get(spec.key) for spec in ACTOR if spec.status}
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in values.items() if value is not None)
    return f"step {line['step']} of {config.actor.steps} ended {_ago(ago)}: {numbers}{_memory(line)}"


def _samples(config: RunConfig) -> str:
    try:
        ahead = config.actor.max_off_policy_steps
        return describe_samples(config.run.sample_journal_dir, _last_step(config), ahead=ahead)
    except REPORTED as error:  # damage is part of the state
        return reason_of(error)


def _sidecar(config: RunConfig) -> str:
    journal = Journal(config.run.journal_dir, config.run.identity)
    heartbeat = journal.heartbeat()
    pending = [entry for entry in journal.entries() if not journal.is_answered(entry)]
    queue = f"{len(pending)} of the journal's entries pending, last step {journal.last_step()}"
    if heartbeat is None:
        return f"has not begun; {queue}"
    age_s = time.time() - heartbeat.time
    before = ""
    if age_s > HEARTBEAT_TIMEOUT_S:  # its lock may not be seen on another host
        before = "stuck, was " if journal.is_followed() else "not running, was "
    state = f"{before}{heartbeat.state} at step {heartbeat.step}, heartbeat {_ago(age_s)}"
    state += _memory(_last_line(config.run.dir / "critic_metrics.jsonl", having="gpu_bytes") or {})
    return f"{state}; {queue}" + (f"; blocked: {heartbeat.trouble}" if heartbeat.trouble else "")


def _versions(name: str, store: WeightsStore) -> Iterator[str]:
    try:
        current = store.current()
        if current is None:
            yield f"{name:<9} no version yet"
            return
        yield f"{name:<9} CURRENT is version {current} (step {store.manifest(current).step})"
    except REPORTED as error:  # as above
        yield f"{name:<9} {reason_of(error)}"
    records = store.serving()
    for record in records:
        swap = "" if record.swap_ms is None else f", swapped in {record.swap_ms:.0f} ms"
        refused = "" if record.rejected is None else f"; refused version {record.rejected}: {record.error}"
        heard = store.records.last_sign(record)
        silent = "" if heard is None else f"; last sign of life {_ago(time.time() - heard)}"
        yield f"          {record.name} serves version {record.version}{swap}{refused}{silent}"
    if not records:
        yield "          no instance is alive"


def _last_line(path: Path, having: str = "step") -> dict[str, Any] | None:
    """Return the last complete line with this key."""
    for line in reversed(last_lines(path, TAIL_BYTES)):
        try:
            row: dict[str, Any] = json.loads(line)
        except ValueError:  # still being written
            continue
        if having in row:
            return row
    return None


def _last_problem(path: Path) -> str | None:
    lines = (as_text(line.strip()) for line in reversed(last_lines(path, TAIL_BYTES)))
    return next((line for line in lines if PROBLEM.search(line) and not is_noise(line)), None)


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
