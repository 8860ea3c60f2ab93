"""A real Prometheus that scrapes the processes of a test, and what the rules and the dashboard select."""

import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_triton.tools.server.ports import free_port

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
VARIABLE = "RLHF_PROMETHEUS"


def program(name: str) -> Path:
    """Return the path of `prometheus` or `promtool`; skip the test outside `make test-monitoring`."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        pytest.skip("opt-in: `make test-monitoring`, which needs a Prometheus")
    path = Path(folder) / name
    assert path.is_file(), f"{VARIABLE}: {path} is missing"
    return path


def rules() -> list[dict[str, Any]]:
    """Return the alerts of deploy/monitoring/alerts.yml."""
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return group["rules"]


def quick(rules: Sequence[Mapping[str, Any]], thresholds: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rules without `for`, with windows of seconds instead of minutes, and with other thresholds.

    Args:
        thresholds: text in an expression -> its replacement.
    """
    found = []
    for rule in rules:
        expression = re.sub(r"\[\d+m\]", "[10s]", rule["expr"]).replace("offset 1m", "offset 2s")
        for old, new in thresholds.items():
            expression = expression.replace(old, new)
        found.append({**rule, "expr": expression, "for": "0s"})
    return found


def queries() -> list[tuple[str, str]]:
    """Return (panel, query) for each query of the dashboard, with Grafana's interval filled in."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [(p["title"], t["expr"].replace("$__rate_interval", "1m")) for p in panels for t in p["targets"]]


class Prometheus:
    """A running Prometheus on a free port."""

    def __init__(
        self, folder: Path, targets: Mapping[str, int], rules: Sequence[Mapping[str, Any]], *, interval_s: int = 1
    ) -> None:
        """Start it; `targets` are the ports on loopback by job."""
        folder.mkdir(parents=True)
        (folder / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "rlhf", "rules": list(rules)}]}))
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()
        ]
        each = {key: f"{interval_s}s" for key in ("scrape_interval", "scrape_timeout", "evaluation_interval")}
        (folder / "prometheus.yml").write_text(
            yaml.safe_dump({"global": each, "rule_files": ["rules.yml"], "scrape_configs": jobs})
        )
        self.url = f"http://127.0.0.1:{free_port()}"
        self._log = (folder / "log").open("w")
        command = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        self.wait(self._is_ready)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return json.load(answer)["data"]["result"]

    def value(self, expression: str) -> float | None:
        """Return the value of a query with one series; None if there is none."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def fired(self, since: float = 0.0) -> set[str]:
        """Return the alerts that have fired since a time, by default since the start."""
        window_s = max(1, min(3600, int(time.time() - since)))
        found = self.query(f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{window_s}s]))')
        return {series["metric"]["alertname"] for series in found}

    def wait_for_alerts(self, *alerts: str, since: float = 0.0) -> None:
        """Return when all of them have fired since a time."""
        self.wait(lambda: set(alerts) <= self.fired(since))

    def wait(self, condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Return when the condition holds; fail with what has fired after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, Path(self._log.name).read_text()[-3000:]
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s; fired so far: {self.fired()}"
            time.sleep(0.2)

    def stop(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(60)
        self._log.close()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False
