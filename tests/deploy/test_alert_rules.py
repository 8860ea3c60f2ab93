"""Each alert rule, on series of hours in `promtool test rules`: it fires after its cause, and a calm run is silent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_server import MONITORING, program, rules

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
    "RlhfRetries": {f"rlhf_actor_retries_total{{{ACTOR}}}": "0x60 8+8x119"},
    "RlhfOutage": {f"rlhf_actor_outages_total{{{ACTOR}}}": ONCE},
    "RlhfError": {
        f'rlhf_trainer_last_problem_timestamp_seconds{{{TRAINER}, level="error"}}': "_x60 3660x119",
        f'rlhf_actor_last_problem_timestamp_seconds{{{ACTOR}, level="warning"}}': "3660x180",
    },
    "RlhfDiskLow": {f"rlhf_actor_disk_free_bytes{{{ACTOR}}}": "50x60 4x119"},
}
NEEDS_MINUTES = {"RlhfActorStalled": 40, "RlhfSidecarStalled": 25, "RlhfWeightsNotMoving": 40, "RlhfJournalBacklog": 40}


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
    done = subprocess.run([program("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_promtool_accepts_the_files() -> None:
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        subprocess.run([program("promtool"), "check", what, MONITORING / name], check=True)


@pytest.mark.parametrize("minute", [1, 10, 59, 179])
def test_a_calm_run_is_silent(tmp_path: Path, minute: int) -> None:
    assert check(tmp_path, CALM, minute, set()) == ""


def test_every_alert_has_a_cause() -> None:
    assert list(CAUSES) == [rule["alert"] for rule in rules()]


@pytest.mark.parametrize("alert", CAUSES)
def test_an_alert_fires_after_its_cause_alone(alert: str, tmp_path: Path) -> None:
    series = {**CALM, **CAUSES[alert]}
    minute = 60 + NEEDS_MINUTES.get(alert, 12)
    assert check(tmp_path, series, 59, set()) == ""
    assert check(tmp_path, series, minute, {alert}) == ""
