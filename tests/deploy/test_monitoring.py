"""Tests of deploy/monitoring: its files use existing names; `make check-deploy` lets promtool read them."""

import json
import re
import runpy
from pathlib import Path

import yaml

from rlhf_triton.monitoring.metrics import TABLES

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
ROOT = MONITORING.parents[1]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
NAME = re.compile(r"\b(?:rlhf|nv|process)_\w+|\bup\b")
TRITON = {"nv_inference_request_success", "nv_inference_request_duration_us"}
BOARDS = (MONITORING / "dashboard.json", MONITORING / "serving.json")
GENERATE = runpy.run_path(str(MONITORING / "generate.py"))
OURS = {GENERATE["exported"](prefix, metric): metric for prefix, table in TABLES.items() for metric in table}


def rules():
    """Return the alerts of deploy/monitoring/alerts.yml."""
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return group["rules"]


def queries():
    """Return (panel, query) for each query of the dashboards, with Grafana's interval filled in."""
    panels = [panel for path in BOARDS for panel in json.loads(path.read_text())["panels"]]
    return [(p["title"], t["expr"].replace("$__rate_interval", "1m")) for p in panels for t in p["targets"]]


def of_the_server():
    """Return the names that the models in tritonserver register."""
    sources = (ROOT / "python_backend" / "serving").rglob("*.py")
    return {name for path in sources for name in re.findall(r'"(rlhf_\w+)"', path.read_text())}


def test_every_metric_of_alerts_and_dashboard_exists():
    buckets = {f"{name}_bucket" for name, metric in OURS.items() if metric.kind == "histogram"}
    known = {*OURS, *buckets, *of_the_server(), *TRITON, "up", "process_resident_memory_bytes"}
    for expression in [*(rule["expr"] for rule in rules()), *(query for _, query in queries())]:
        text = re.sub(r"rlhf_\(actor\|trainer\)_(\w+)", r"rlhf_actor_\1 rlhf_trainer_\1", expression)
        names = set(NAME.findall(re.sub(r'="[^"]*"', "", text.replace('__name__=~"', "")).replace('job=~"', "")))
        assert names, expression
        assert names <= known, (expression, names - known)


def test_alerts_have_a_severity_a_summary_and_a_row_in_the_docs():
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule
        assert rule["annotations"]["summary"].endswith("."), rule
    assert re.findall(r"^\| `(Rlhf\w+)`", PAGE, re.MULTILINE) == names


def test_dashboards_are_up_to_date_and_select_scraped_jobs():
    run, serving = (path.read_text() for path in BOARDS)
    written = {BOARDS[0]: run, BOARDS[1]: serving}
    assert GENERATE["dashboards"](run) == written, (
        "a dashboard is out of date; run python deploy/monitoring/generate.py"
    )
    assert not re.search(r"rlhf_(actor|trainer)|rlhf-(actor|trainer)", serving), (
        "the dashboard of a server alone has metrics of actor or sidecar"
    )
    assert {metric.panel for metric in OURS.values()} <= {"", *GENERATE["PANELS"]}
    for board, least in ((run, 11), (serving, 6)):
        panels = json.loads(board)["panels"]
        assert len({tuple(panel["gridPos"].values()) for panel in panels}) == len(panels) >= least
        assert all(panel["targets"] and panel["datasource"]["uid"] == "${datasource}" for panel in panels)
        assert all(panel["options"]["legend"]["placement"] == "right" for panel in panels), (
            "a legend is not beside the curves"
        )
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    texts = (MONITORING / "alerts.yml").read_text() + (run + serving).replace('\\"', '"')
    assert (
        jobs
        == {"rlhf-server", "rlhf-actor", "rlhf-trainer", "rlhf-gateway"}
        >= set(re.findall(r'job="([\w-]+)"', texts))
    )
