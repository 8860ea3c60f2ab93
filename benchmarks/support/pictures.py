"""Pictures of the benchmarks, in the style of a run's report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.report.curves import STYLE


@contextlib.contextmanager
def figure_of(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield a styled figure of `size` inches; save it to `path` at the end of the block."""
    import matplotlib as mpl  # deferred, since only reports draw
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        yield figure
        figure.savefig(path)


def model_title(model: str) -> str:
    """Return a model's name for a title: `7 M parameters` for `7m`."""
    return f"{model.upper().replace('M', ' M')} parameters" if model[:1].isdigit() else f"{model} model"
