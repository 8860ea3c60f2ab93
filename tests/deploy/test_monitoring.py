"""deploy/monitoring: its files name what exists, and each alert fires after its cause, and it alone, in `promtool`."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_triton.monitoring.metrics import TABLES

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
ROOT = MONITORING.parents[1]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
NAME = re.compile(r"\b(?:rlhf|nv|process)_\w+|\bup\b")
TRITON = {"nv_inference_request_success", "nv_inference_request_duration_us"}
GENERATE = runpy.run_path(str(MONITORING / "generate.py"))
OURS = {GENERATE["exported"](prefix, metric): metric for prefix, table in TABLES.items() for metric in table}
SERVER, ACTOR, TRAINER = (f'job="rlhf-{job}", instance="{job}"' for job in ("server", "actor", "trainer"))
# Promtool's notation, a value each minute: `1+2x3` is 1 3 5 7; `1x3` is 1 1 1 1. A step and an update each minute.
CALM = {
    f"up{{{SERVER}}}": "1x180",
    f"up{{{ACTOR}}}": "1x180",
    f"up{{{TRAINER}}}": "1x180",
    f"rlhf_actor_step_timestamp_seconds{{{ACTOR}}}": "0+60x180",
    f"rlhf_trainer_step{{{TRAINER}}}": "0+1x180",
    f"rlhf_trainer_journal_pending_entries{{{TRAINER}}}": "1x180",
    f"rlhf_trainer_blocked{{{TRAINER}}}": "0x180",
    f"rlhf_trainer_updates_total{{{TRAINER}}}": "0+1x180",
    f"rlhf_trainer_weights_version{{{TRAINER}}}": "0+1x180",
    f'rlhf_weights_version{{{SERVER}, model="critic"}}': "0+1x180",
    f"rlhf_trainer_rejected_versions_total{{{TRAINER}}}": "0x180",
    f'rlhf_trainer_publish_seconds{{{TRAINER}, phase="write"}}': "5x180",
    f'rlhf_trainer_publish_seconds{{{TRAINER}, phase="reload"}}': "9x180",
    f"rlhf_actor_staleness{{{ACTOR}}}": "1x180",
    f"rlhf_actor_allowed_staleness{{{ACTOR}}}": "1x180",
    f"rlhf_trainer_failed_updates_total{{{TRAINER}}}": "0x180",
    f"rlhf_trainer_skipped_optimizer_steps_total{{{TRAINER}}}": "0x180",
    f"rlhf_trainer_loss{{{TRAINER}}}": "0.3x180",
    f"rlhf_actor_kl_nats{{{ACTOR}}}": "6x180",
    f"rlhf_actor_rows_total{{{ACTOR}}}": "0+128x180",
    f"rlhf_actor_masked_rows_total{{{ACTOR}}}": "0x180",
    f"rlhf_actor_requests_total{{{ACTOR}}}": "0+20x180",
    f"rlhf_actor_failed_requests_total{{{ACTOR}}}": "0x180",
    f"rlhf_actor_retries_total{{{ACTOR}}}": "0x180",
    f"rlhf_actor_outages_total{{{ACTOR}}}": "0x180",
    'rlhf_gateway_requests_total{job="rlhf-gateway", route="/score", status="200"}': "0+10x180",
    'rlhf_gateway_requests_total{job="rlhf-gateway", route="/health", status="503"}': "0x180",
    f"rlhf_actor_disk_free_bytes{{{ACTOR}}}": "50x180",
    f"rlhf_actor_disk_size_bytes{{{ACTOR}}}": "100x180",
    f"rlhf_trainer_disk_free_bytes{{{TRAINER}}}": "50x180",
    f"rlhf_trainer_disk_size_bytes{{{TRAINER}}}": "100x180",
}
# What changes after an hour of calm. One cause may have several effects.
ONCE = "0x60 1x119"
CAUSES: dict[str, dict[str, str]] = {
    "RlhfServerDown": {f"up{{{SERVER}}}": "1x60 0x119"},
    "RlhfActorDown": {f"up{{{ACTOR}}}": "1x60 0x119"},
    "RlhfSidecarDown": {f"up{{{TRAINER}}}": "1x60 0x119"},
    "RlhfActorStalled": {f"rlhf_actor_step_timestamp_seconds{{{ACTOR}}}": "0+60x60 3600x119"},
    "RlhfSidecarStalled": {f"rlhf_trainer_step{{{TRAINER}}}": "0+1x60 60x119"},
    "RlhfSidecarBlocked": {f"rlhf_trainer_blocked{{{TRAINER}}}": "0x60 1x119"},
    "RlhfJournalBacklog": {f"rlhf_trainer_journal_pending_entries{{{TRAINER}}}": "1x60 2+1x119"},
    "RlhfWeightsNotMoving": {
        f"rlhf_trainer_weights_version{{{TRAINER}}}": "0+1x60 60x119",
        f'rlhf_weights_version{{{SERVER}, model="critic"}}': "0+1x60 60x119",
    },
    "RlhfVersionRejected": {f"rlhf_trainer_rejected_versions_total{{{TRAINER}}}": ONCE},
    "RlhfServerBehind": {f'rlhf_weights_version{{{SERVER}, model="critic"}}': "0+1x60 60x119"},
    "RlhfPublishSlow": {f'rlhf_trainer_publish_seconds{{{TRAINER}, phase="reload"}}': "9x60 119x119"},
    "RlhfStale": {f"rlhf_actor_staleness{{{ACTOR}}}": "1x60 2x119"},
    "RlhfCriticUpdateFailed": {f"rlhf_trainer_failed_updates_total{{{TRAINER}}}": ONCE},
    "RlhfCriticNotFinite": {f"rlhf_trainer_skipped_optimizer_steps_total{{{TRAINER}}}": ONCE},
    "RlhfKLHigh": {f"rlhf_actor_kl_nats{{{ACTOR}}}": "6x60 101x119"},
    "RlhfRowsMasked": {f"rlhf_actor_masked_rows_total{{{ACTOR}}}": "0x60 8+8x119"},
    "RlhfRequestsFailed": {f"rlhf_actor_failed_requests_total{{{ACTOR}}}": ONCE},
    "RlhfRequestsRefused": {'rlhf_requests_refused_total{job="rlhf-server", model="critic", status="400"}': ONCE},
    "RlhfGatewayFailing": {
        'rlhf_gateway_requests_total{job="rlhf-gateway", route="/score", status="504"}': "0x60 1+1x119"
    },
    "RlhfRetries": {f"rlhf_actor_retries_total{{{ACTOR}}}": "0x60 8+8x119"},
    "RlhfOutage": {f"rlhf_actor_outages_total{{{ACTOR}}}": ONCE},
    "RlhfError": {
        f'rlhf_trainer_last_problem_timestamp_seconds{{{TRAINER}, level="error"}}': "_x60 3660x119",
        f'rlhf_actor_last_problem_timestamp_seconds{{{ACTOR}, level="warning"}}': "3660x180",
    },
    "RlhfDiskLow": {f"rlhf_actor_disk_free_bytes{{{ACTOR}}}": "50x60 4x119"},
}
NEEDS_MINUTES = {"RlhfActorStalled": 40, "RlhfSidecarStalled": 25, "RlhfWeightsNotMoving": 40, "RlhfJournalBacklog": 40}


def promtool() -> str:
    """Return the path of `promtool`; skip the test where there is none."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("needs promtool, which is not on the PATH")
    return path


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


def test_every_metric_of_alerts_and_dashboard_exists() -> None:
    known = {*OURS, *of_the_server(), *TRITON, "up", "process_resident_memory_bytes"}
    for expression in [*(rule["expr"] for rule in rules()), *(query for _, query in queries())]:
        text = re.sub(r"rlhf_\(actor\|trainer\)_(\w+)", r"rlhf_actor_\1 rlhf_trainer_\1", expression)
        names = set(NAME.findall(re.sub(r'="[^"]*"', "", text.replace('__name__=~"', "")).replace('job=~"', "")))
        assert names, expression
        assert names <= known, (expression, names - known)


def test_each_alert_has_a_severity_a_summary_a_cause_here_and_a_line_of_the_docs() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule
        assert rule["annotations"]["summary"].endswith("."), rule
    assert list(CAUSES) == re.findall(r"^\| `(Rlhf\w+)`", PAGE, re.MULTILINE) == names


def test_the_dashboard_is_generated_and_selects_the_jobs_that_are_scraped() -> None:
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


def check(tmp_path: Path, series: dict[str, str], minute: int, expected: set[str]) -> str:
    """Return what promtool has to say against `expected` being the alerts that fire at `minute`; "" if nothing."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(expected)],
            }
        ],
    }
    file = tmp_path / "case.yml"
    file.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(MONITORING / "alerts.yml")],
                "evaluation_interval": "1m",
                "tests": [case],
            }
        )
    )
    done = subprocess.run([promtool(), "test", "rules", file], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("minute", [1, 10, 59, 179])
def test_a_calm_run_is_silent(tmp_path: Path, minute: int) -> None:
    assert check(tmp_path, CALM, minute, set()) == ""


@pytest.mark.parametrize("alert", CAUSES)
def test_an_alert_fires_after_its_cause_alone(alert: str, tmp_path: Path) -> None:
    series = {**CALM, **CAUSES[alert]}
    minute = 60 + NEEDS_MINUTES.get(alert, 12)
    assert check(tmp_path, series, 59, set()) == ""
    assert check(tmp_path, series, minute, {alert}) == ""
