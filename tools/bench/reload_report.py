"""What the parts of the reload measurement add up to: summary, bars, picture.
Given: a result with raw samples, as in result.json. Returns: the text; writes result.json, report.md and reload.png.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from python_backend.durable import write_json
from tools.bench import reload_gaps, reload_journal, reload_leak, reload_load, reload_publish, reload_training
from tools.bench.report import Bar
from tools.bench.table import bars_table


@dataclass(frozen=True)
class Part:
    """One measurement: how it is made, what its samples say, and what was promised."""

    letter: str
    measure: Callable[..., Any]
    summarise: Callable[[Any], dict[str, Any]]
    bars: Callable[[dict[str, Any]], list[Bar]]


PARTS = {
    name: Part(letter, module.measure, module.summarise, module.bars)
    for name, letter, module in (
        ("load", "a", reload_load),
        ("publish", "b", reload_publish),
        ("training", "c", reload_training),
        ("gaps", "c", reload_gaps),
        ("leak", "d", reload_leak),
        ("journal", "e", reload_journal),
    )
}


def write_report(result: dict[str, Any], out: Path) -> str:
    """Summarise what was measured so far; writes result.json, report.md, reload.png; returns the table of bars."""
    from tools.bench.reload_picture import draw_picture  # matplotlib is imported where it draws

    measured = {name: part for name, part in PARTS.items() if name in result["parts"]}
    result["summary"] = {name: part.summarise(result["parts"][name]) for name, part in measured.items()}
    judged = [bar for name, part in measured.items() for bar in part.bars(result["summary"][name])]
    result["bars"] = [{**asdict(bar), "verdict": bar.verdict} for bar in judged]
    write_json(out / "result.json", result, durable=False)
    text = bars_table(judged) + "\n"
    (out / "report.md").write_text(text)
    draw_picture(result, out / "reload.png")
    return text
