"""deploy/monitoring and docs/monitoring.md name metrics that exist, alerts that exist, and all of them."""

from __future__ import annotations

import json
import re
import runpy

import yaml
from prometheus_server import MONITORING, queries, rules

from python_backend.monitoring.metrics import TABLES

ROOT = MONITORING.parents[1]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
NAME = re.compile(r"\b(?:rlhf|nv|process)_\w+|\bup\b")
TRITON = {"nv_inference_request_success", "nv_inference_request_duration_us"}
GENERATE = runpy.run_path(str(MONITORING / "generate.py"))
OURS = {GENERATE["exported"](prefix, metric): metric for prefix, table in TABLES.items() for metric in table}


def of_the_server() -> set[str]:
    """Names that the models in tritonserver register."""
    sources = (ROOT / "python_backend" / "serving").rglob("*.py")
    return {name for path in sources for name in re.findall(r'"(rlhf_\w+)"', path.read_text())}


def test_every_metric_of_alerts_and_dashboard_exists() -> None:
    known = {*OURS, *of_the_server(), *TRITON, "up", "process_resident_memory_bytes"}
    for expression in [*(rule["expr"] for rule in rules()), *(query for _, query in queries())]:
        text = re.sub(r"rlhf_\(actor\|trainer\)_(\w+)", r"rlhf_actor_\1 rlhf_trainer_\1", expression)
        names = set(NAME.findall(re.sub(r'="[^"]*"', "", text.replace('__name__=~"', "")).replace('job=~"', "")))
        assert names, expression
        assert names <= known, (expression, names - known)


def test_a_rule_has_what_a_person_needs() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule
        assert rule["annotations"]["summary"].endswith("."), rule


def test_the_jobs_are_those_that_are_selected() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    texts = (MONITORING / "alerts.yml").read_text() + (MONITORING / "dashboard.json").read_text().replace('\\"', '"')
    assert jobs == {"rlhf-server", "rlhf-actor", "rlhf-trainer"}
    assert set(re.findall(r'job="([\w-]+)"', texts)) <= jobs


def test_dashboard_and_page_are_those_of_the_table() -> None:
    board = (MONITORING / "dashboard.json").read_text()
    assert GENERATE["dashboard"](board) == board, "run python deploy/monitoring/generate.py"
    assert GENERATE["page"](PAGE) == PAGE, "run python deploy/monitoring/generate.py"
    assert {metric.panel for metric in OURS.values()} <= {"", *GENERATE["PANELS"]}


def test_the_page_has_every_alert() -> None:
    assert re.findall(r"^\| `(Rlhf\w+)`", PAGE, re.MULTILINE) == [rule["alert"] for rule in rules()]


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) > 10
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
