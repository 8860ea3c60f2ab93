"""Generates the dashboards from the table of metrics: of a run, and of a server without one."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a file: the package beside it, not the installed one
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rlhf_triton.monitoring.metrics import TABLES, MetricSpec

DASHBOARD = Path(__file__).with_name("dashboard.json")
SERVING = Path(__file__).with_name("serving.json")
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
GATEWAY_SECONDS = "rate(rlhf_gateway_request_seconds_bucket[$__rate_interval])"
FREE = "rlhf_actor_disk_free_bytes / rlhf_actor_disk_size_bytes"


def _line(panel: str, legend: str, query: str, unit: str = "short") -> MetricSpec:
    return MetricSpec("", "", unit=unit, panel=panel, legend=legend, query=query)


OTHERS = (  # panels of the server and of several processes
    _line("Tokens per second", "{{model}}, forward", FORWARDS),
    _line("Versions of the critic", "served, {{instance}}", 'rlhf_weights_version{model="critic"}'),
    _line("Requests per second", "{{model}}", SUCCESSES),
    _line("Latency in the server", "{{model}}", f"{DURATIONS} / {SUCCESSES} / 1e6", "s"),
    _line("Warnings and errors, age of the last", "{{job}}, {{level}}", PROBLEMS, "s"),
    _line("Memory", "{{job}}", 'process_resident_memory_bytes{job=~"rlhf-(actor|trainer)"}', "bytes"),
    _line("Processes that answer, and the disk", "{{job}} {{instance}}", 'up{job=~"rlhf-.+"}'),
    _line("Processes that answer, and the disk", "free share of the disk of run.dir", FREE),
)
SERVED = (  # panels of a server and a gateway before it, in this order
    _line("Requests per second", "{{model}}", SUCCESSES),
    _line(
        "Requests per second",
        "gateway {{route}}",
        "sum by (route) (rate(rlhf_gateway_requests_total[$__rate_interval]))",
    ),
    _line("Latency", "{{model}}", f"{DURATIONS} / {SUCCESSES} / 1e6", "s"),
    _line("Latency", "gateway, 95%", f"histogram_quantile(0.95, sum by (le) ({GATEWAY_SECONDS}))", "s"),
    _line("Tokens per second", "{{model}}", FORWARDS),
    _line("Refused and failed, per 5 minutes", "{{model}}, {{status}}", "increase(rlhf_requests_refused_total[5m])"),
    _line("Refused and failed, per 5 minutes", "gateway, rows", "increase(rlhf_gateway_failed_rows_total[5m])"),
    _line("Served versions", "{{model}}, {{instance}}", "rlhf_weights_version"),
    _line("Processes that answer", "{{job}} {{instance}}", 'up{job=~"rlhf-(server|gateway)"}'),
)


def exported(prefix: str, metric: MetricSpec) -> str:
    """Return the name of a metric as Prometheus has it."""
    return prefix + metric.name + ("_total" if metric.kind == "counter" else "")


def panel(number: int, title: str, tables: Mapping[str, Sequence[MetricSpec]], like: dict[str, Any]) -> dict[str, Any]:
    """Return the panel with a line for each metric of `tables` that names it, in the style of the panel `like`."""
    lines = [
        (metric, metric.query.replace("{}", exported(prefix, metric)))
        for prefix, table in tables.items()
        for metric in table
        if metric.panel == title
    ]
    targets = [
        {"refId": chr(ord("A") + i), "expr": query, "legendFormat": metric.legend}
        for i, (metric, query) in enumerate(lines)
    ]
    place = {"x": 12 * (number % 2), "y": 7 * (number // 2), "w": 12, "h": 7}
    fields = {**like["fieldConfig"], "defaults": {**like["fieldConfig"]["defaults"], "unit": lines[0][0].unit}}
    return {**like, "id": number + 1, "title": title, "gridPos": place, "fieldConfig": fields, "targets": targets}


def dashboards(text: str) -> dict[Path, str]:
    """Return the text of each dashboard with all panels regenerated; `text`: the run's, whose style both have."""
    board = json.loads(text)
    like = board["panels"][0]
    tables = {**TABLES, "": OTHERS}
    board["panels"] = [panel(i, title, tables, like) for i, title in enumerate(PANELS)]
    titles = dict.fromkeys(line.panel for line in SERVED)
    served = [panel(i, title, {"": SERVED}, like) for i, title in enumerate(titles)]
    serving = {**board, "title": f"{board['title']}: serving", "uid": f"{board['uid']}-serving", "panels": served}
    return {path: json.dumps(content, indent=1) + "\n" for path, content in ((DASHBOARD, board), (SERVING, serving))}


if __name__ == "__main__":
    for path, written in dashboards(DASHBOARD.read_text()).items():
        path.write_text(written)
