"""deploy/monitoring: its files name what exists; `make check-deploy` lets promtool read them."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import yaml

from rlhf_triton.monitoring.metrics import TABLES

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
ROOT = MONITORING.parents[1]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
NAME = re.compile(r"\b(?:rlhf|nv|process)_\w+|\bup\b")
TRITON = {"nv_inference_request_success", "nv_inference_request_duration_us"}
GENERATE = runpy.run_path(str(MONITORING / "generate.py"))
OURS = {GENERATE["exported"](prefix, metric): metric for prefix, table in TABLES.items() for metric in table}


def rules() -> list[dict[str, Any]]:
    """Return the alerts of deploy/monitoring/alerts.yml."""
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return group["rules"]


def queries() -> list[tuple[str, str]]:
    """Return (panel, query) for each query of the dashboard, with Grafana's interval filled in."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [(p["title"], t["expr"].replace("$__rate_interval", "1m")) for p in panels for t in p["targets"]]


def of_the_server() -> set[str]:
    """Names that the models in tritonserver register."""
    sources = (ROOT / "python_backend" / "serving").rglob("*.py")
    return {name for path in sources for name in re.findall(r'"(rlhf_\w+)"', path.read_text())}


def test_every_metric_of_alerts_and_dashboard_exists():
    known = {*OURS, *of_the_server(), *TRITON, "up", "process_resident_memory_bytes"}
    for expression in [*(rule["expr"] for rule in rules()), *(query for _, query in queries())]:
        text = re.sub(r"rlhf_\(actor\|trainer\)_(\w+)", r"rlhf_actor_\1 rlhf_trainer_\1", expression)
        names = set(NAME.findall(re.sub(r'="[^"]*"', "", text.replace('__name__=~"', "")).replace('job=~"', "")))
        assert names, expression
        assert names <= known, (expression, names - known)


def test_each_alert_has_a_severity_a_summary_and_a_line_of_the_docs():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule
        assert rule["annotations"]["summary"].endswith("."), rule
    assert re.findall(r"^\| `(Rlhf\w+)`", PAGE, re.MULTILINE) == names


def test_the_dashboard_is_generated_and_selects_the_jobs_that_are_scraped():
    board = (MONITORING / "dashboard.json").read_text()
    assert GENERATE["dashboard"](board) == board, "run python deploy/monitoring/generate.py"
    assert {metric.panel for metric in OURS.values()} <= {"", *GENERATE["PANELS"]}
    panels = json.loads(board)["panels"]
    assert len({tuple(panel["gridPos"].values()) for panel in panels}) == len(panels) > 10
    assert all(panel["targets"] and panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    texts = (MONITORING / "alerts.yml").read_text() + board.replace('\\"', '"')
    assert (
        jobs
        == {"rlhf-server", "rlhf-actor", "rlhf-trainer", "rlhf-gateway"}
        >= set(re.findall(r'job="([\w-]+)"', texts))
    )
