"""`python -m tools report`: the page of a run, or of several side by side, also while they are in progress."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from python_backend.config.command_line import interrupt_on_signals, reporting
from python_backend.errors import RlhfError
from python_backend.store.run_lock import in_progress
from tools.arguments import parse_or_complete, seconds
from tools.report.data import load_run
from tools.report.page import write_page

READ_FILES = ("metrics.jsonl", "critic_metrics.jsonl", "validations.jsonl", "summary.json", "actor_summary.json")


class ReportPage:
    """The page of one run or several, which can be written again and again."""

    def __init__(self, run_dirs: Sequence[Path], out: Path | None = None) -> None:
        self._run_dirs = list({run_dir.resolve(): run_dir for run_dir in run_dirs}.values())
        # Beside the runs, it would be among the folders that `runs/*` names.
        self.path = out or self._run_dirs[0] / ("report.html" if len(self._run_dirs) == 1 else "comparison.html")
        self._written: list[tuple[int, int] | None] = []

    def write(self, *, every_s: float | None = None) -> None:
        """Write the page; with `every_s`, a browser reloads it as long as a run is in progress.

        Raises RlhfError.
        """
        refresh_s = every_s if self._in_progress() else None
        self._written = self._state_of_files()
        named = zip(self._run_dirs, short_names(self._run_dirs), strict=True)
        write_page([replace(load_run(run_dir), name=name) for run_dir, name in named], self.path, refresh_s=refresh_s)

    def follow(self, every_s: float) -> None:
        """Rewrite the page every `every_s` seconds, if there is anything new, until no run is in progress."""
        try:
            while self._in_progress():
                time.sleep(every_s)
                if self._state_of_files() != self._written:
                    self.write(every_s=every_s)
        finally:
            self.write()  # a page that no browser reloads any more

    def _in_progress(self) -> bool:
        return any(in_progress(run_dir) for run_dir in self._run_dirs)

    def _state_of_files(self) -> list[tuple[int, int] | None]:
        paths = [run_dir / name for run_dir in self._run_dirs for name in READ_FILES]
        states = [path.stat() if path.is_file() else None for path in paths]
        return [(state.st_size, state.st_mtime_ns) if state else None for state in states]


def short_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return for each folder the shortest end of its path that tells it from the others."""
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(description="Write the page of a run, or one that compares several runs.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run (run.dir)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page; default: report.html, or comparison.html, in the (first) run's folder",
    )
    parser.add_argument("--follow", action="store_true", help="rewrite the page until the runs end, or until Ctrl-C")
    parser.add_argument("--every", type=seconds, default=5.0, metavar="SECONDS", help="with --follow; default: 5")
    arguments = parse_or_complete(parser, argv)
    if arguments.follow:
        interrupt_on_signals()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            page = ReportPage(arguments.run_dirs, arguments.out)
            page.write(every_s=arguments.every if arguments.follow else None)
            print(f"report: {page.path}", flush=True)
            if arguments.follow:
                page.follow(arguments.every)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise RlhfError("the report needs matplotlib: pip install '.[training]'") from error
    return 0
