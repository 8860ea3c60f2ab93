"""Draws the dashboard without Grafana: `python deploy/monitoring/draw.py PROMETHEUS_URL PICTURE [--minutes N]`.

The panels, their queries and legends are those of dashboard.json; the picture is a PNG or SVG file.
"""

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.dates import ConciseDateFormatter
from matplotlib.figure import Figure

DASHBOARD = Path(__file__).with_name("dashboard.json")
POINTS = 240
UNITS = {"s": ("seconds", 1.0), "bytes": ("GB", 1e9), "reqps": ("requests/s", 1.0)}


def main() -> None:
    """Draw the last minutes of what a Prometheus has scraped."""
    parser = argparse.ArgumentParser(description="Draw the dashboard from the data of a Prometheus.")
    parser.add_argument("url", help="for example http://127.0.0.1:9090")
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back; default: 60")
    arguments = parser.parse_args()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows, columns = math.ceil(len(panels) / 3), 3
    with mpl.rc_context({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3, "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2 * columns, 2.9 * rows), dpi=100, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        end = time.time()
        for axis, panel in zip(axes, panels, strict=False):
            draw(axis, panel, arguments.url, end - 60 * arguments.minutes, end)
        for axis in list(axes)[len(panels) :]:
            axis.remove()
        figure.savefig(arguments.picture)


def draw(axis: Any, panel: dict[str, Any], url: str, start: float, end: float) -> None:
    """Draw one panel: a line for each series that its queries return."""
    axis.set_title(panel["title"], loc="left", fontweight="bold")
    unit, scale = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], ("", 1.0))
    axis.set_ylabel(unit)
    step = max(1.0, (end - start) / POINTS)
    for target in panel["targets"]:
        window = f"{max(60, math.ceil(4 * step))}s"  # Grafana: four scrape intervals or more
        expression = target["expr"].replace("$__rate_interval", window)
        for series in ask(url, "query_range", query=expression, start=start, end=end, step=step):
            times = [datetime.fromtimestamp(when) for when, _ in series["values"]]
            values = [float(value) / scale for _, value in series["values"]]
            axis.plot(times, values, lw=1.2, label=legend(target["legendFormat"], series["metric"]))
    if axis.lines:
        axis.legend(fontsize=6.5, framealpha=0.6)
        axis.xaxis.set_major_formatter(ConciseDateFormatter(axis.xaxis.get_major_locator()))
    else:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", color="grey")


def legend(form: str, labels: dict[str, str]) -> str:
    """Return Grafana's legend: `{{label}}` becomes the label's value."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), form)


def ask(url: str, what: str, **parameters: Any) -> list[dict[str, Any]]:
    """Return the result of a query, one series each. Raises urllib.error.HTTPError if Prometheus refuses it."""
    address = f"{url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)["data"]["result"]


if __name__ == "__main__":
    main()
