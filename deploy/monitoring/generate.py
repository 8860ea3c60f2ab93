"""Generates the dashboard from the table of metrics."""

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a file: the package beside it, not the installed one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rlhf_triton.monitoring.metrics import TABLES, MetricSpec

DASHBOARD = Path(__file__).with_name("dashboard.json")
PANELS = (  # in their order
    "Steps",
    "Reward",
    "KL from the reference",
    "Tokens per second",
    "Phases of a step",
    "Response length",
    "Versions of the critic",
    "Staleness and policy lag",
    "Putting a version into service",
    "Journal",
    "Loss",
    "Gradient norm",
    "Failures, per 5 minutes",
    "Requests per second",
    "Latency in the server",
    "Warnings and errors, age of the last",
    "Memory",
    "Processes that answer, and the disk",
)
PROBLEMS = 'time() - {__name__=~"rlhf_(actor|trainer)_last_problem_timestamp_seconds"}'
SUCCESSES = "sum by (model) (rate(nv_inference_request_success[$__rate_interval]))"
DURATIONS = "sum by (model) (rate(nv_inference_request_duration_us[$__rate_interval]))"
FORWARDS = "sum by (model) (rate(rlhf_forward_tokens_total[$__rate_interval]))"
FREE = "rlhf_actor_disk_free_bytes / rlhf_actor_disk_size_bytes"


def _line(panel: str, legend: str, query: str, unit: str = "short") -> MetricSpec:
    return MetricSpec("", "", unit=unit, panel=panel, legend=legend, query=query)


OTHERS = (  # of the server, and of several processes
    _line("Tokens per second", "{{model}}, forward", FORWARDS),
    _line("Versions of the critic", "served, {{instance}}", 'rlhf_weights_version{model="critic"}'),
    _line("Requests per second", "{{model}}", SUCCESSES),
    _line("Latency in the server", "{{model}}", f"{DURATIONS} / {SUCCESSES} / 1e6", "s"),
    _line("Warnings and errors, age of the last", "{{job}}, {{level}}", PROBLEMS, "s"),
    _line("Memory", "{{job}}", 'process_resident_memory_bytes{job=~"rlhf-(actor|trainer)"}', "bytes"),
    _line("Processes that answer, and the disk", "{{job}} {{instance}}", 'up{job=~"rlhf-.+"}'),
    _line("Processes that answer, and the disk", "free share of the disk of run.dir", FREE),
)


def exported(prefix: str, metric: MetricSpec) -> str:
    """Return the name of a metric as Prometheus has it."""
    return prefix + metric.name + ("_total" if metric.kind == "counter" else "")


def panel(number: int, title: str, like: dict[str, Any]) -> dict[str, Any]:
    """Return the panel with a line for each metric that names it; its style is that of `like`."""
    lines = [
        (metric, metric.query.replace("{}", exported(prefix, metric)))
        for prefix, table in {**TABLES, "": OTHERS}.items()
        for metric in table
        if metric.panel == title
    ]
    targets = [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": metric.legend}
        for i, (metric, query) in enumerate(lines)
    ]
    place = {"x": 8 * (number % 3), "y": 7 * (number // 3), "w": 8, "h": 7}
    fields = {**like["fieldConfig"], "defaults": {**like["fieldConfig"]["defaults"], "unit": lines[0][0].unit}}
    return {**like, "id": number + 1, "title": title, "gridPos": place, "fieldConfig": fields, "targets": targets}


def dashboard(text: str) -> str:
    """Return the dashboard with all panels regenerated."""
    board = json.loads(text)
    board["panels"] = [panel(i, title, board["panels"][0]) for i, title in enumerate(PANELS)]
    return json.dumps(board, indent=1) + "\n"


if __name__ == "__main__":
    DASHBOARD.write_text(dashboard(DASHBOARD.read_text()))
