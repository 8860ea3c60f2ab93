"""Sections that a run's own function adds to its report: `report: my_report.py:sections`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_triton.rewards.function import load_function
from rlhf_triton.user_code import describe


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A titled part of the page. It replaces the built-in section with the same title."""

    title: str  # the heading
    text: str = ""
    """Stands below the title; HTML if it is a `markupsafe.Markup`."""
    table: Sequence[Sequence[Any]] = ()
    """Rows of cells, first the row of headings; numbers are rounded and aligned to the right."""
    pictures: Mapping[str, Callable[[Any, Any], None]] = field(default_factory=dict)
    """{caption: function of matplotlib's axes and the run, which draws on the axes}; shown among the curves."""
    results: Sequence[str] = ()
    """Sentences for the list at the top of the page."""
    cards: Sequence[tuple[str, str, str]] = ()
    """Cards at the top of the page, (name, value, note) each."""
    figures: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """{name: (value, sentence)}: figures for summary.json and the page's table of numbers."""


def user_sections(spec: str | None, run: object) -> list[ReportSection]:
    """Return the sections of the user's function `spec`, [] without one. If it raises, a section has the error."""
    if not spec:
        return []
    try:
        sections = list(load_function(spec)(run))
        if wrong := next((s for s in sections if not isinstance(s, ReportSection)), None):
            raise TypeError(f"it returned {type(wrong).__name__}, not rlhf_triton.ReportSection")
        for draw in (draw for section in sections for draw in section.pictures.values()):
            from matplotlib.figure import Figure

            draw(Figure().subplots(), run)  # one that fails only when the page is written would leave no page
    except Exception as error:  # user code; the rest of the report does not depend on it
        return [ReportSection(title="Sections of this run", text=f"report: {spec} failed: {describe(error)}")]
    return sections
