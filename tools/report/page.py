"""`rlhf-triton report`: the page of a run, or of several side by side, also while they are in progress.

Results, pictures and texts are in one self-contained file.
"""

import argparse
import contextlib
import statistics
import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from rlhf_triton.actor.run.settings import SETTINGS_FILE, flattened
from rlhf_triton.config import RewardTerm, RunConfig
from rlhf_triton.config.command_line import interrupt_on_signals, reporting
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import replace_file
from rlhf_triton.store.run_lock import in_progress
from rlhf_triton.tools.arguments import parse_or_complete, seconds
from rlhf_triton.tools.report.conversations import Conversation
from rlhf_triton.tools.report.curves import KL, REWARD, as_svg, line_style, overlaid, pictures
from rlhf_triton.tools.report.data import (
    MOST_TEXTS,
    SUMMARY_KEYS,
    Gain,
    Pair,
    RunRecord,
    Scored,
    formatted,
    load_run,
    rewarded,
    series,
)

READ_FILES = ("metrics.jsonl", "critic_metrics.jsonl", "validations.jsonl", "summary.json", "actor_summary.json")
NUM_TEXTS = 24
ENDS = {  # figures from the curves, since a run without validation has no reward in its summary
    REWARD: ("reward", "Mean training reward"),
    KL: ("KL", "KL from the initial policy in training, nats per sequence"),
}


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Write the page, with `--follow` again and again; return 0, or 2 after an error."""
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
    run_dirs = list({run_dir.resolve(): run_dir for run_dir in arguments.run_dirs}.values())
    # Beside the runs, it would be among the folders that `runs/*` names.
    out = arguments.out or run_dirs[0] / ("report.html" if len(run_dirs) == 1 else "comparison.html")
    if arguments.follow:
        interrupt_on_signals()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            follows = arguments.follow and any(map(in_progress, run_dirs))
            written = _state_of_files(run_dirs)
            _write(run_dirs, out, refresh_s=arguments.every if follows else None)
            print(f"report: {out}", flush=True)
            if arguments.follow:
                _follow(run_dirs, out, written, arguments.every)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise RlhfError("the report needs matplotlib: pip install '.[training]'") from error
    return 0


def _follow(run_dirs: Sequence[Path], out: Path, written: list[tuple[int, int] | None], every_s: float) -> None:
    """Rewrite the page every `every_s` seconds, if there is anything new, until no run is in progress."""
    try:
        while any(map(in_progress, run_dirs)):
            time.sleep(every_s)
            if (state := _state_of_files(run_dirs)) != written:
                written = state
                _write(run_dirs, out, refresh_s=every_s)
    finally:
        _write(run_dirs, out, refresh_s=None)  # a page that no browser reloads any more


def _write(run_dirs: Sequence[Path], out: Path, *, refresh_s: float | None) -> None:
    named = zip(run_dirs, short_names(run_dirs), strict=True)
    write_page([replace(load_run(run_dir), name=name) for run_dir, name in named], out, refresh_s=refresh_s)


def _state_of_files(run_dirs: Sequence[Path]) -> list[tuple[int, int] | None]:
    paths = [run_dir / name for run_dir in run_dirs for name in READ_FILES]
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


def write_page(runs: Sequence[RunRecord], out: Path, *, refresh_s: float | None = None) -> None:
    """Write the page of a run, or the one that compares several, atomically replacing an earlier one.

    Args:
        refresh_s: seconds after which a browser loads the page again; None for a page that does not change any more.

    Raises:
        RlhfError: `out` cannot be written.
    """
    template, values = ("comparison", _comparison(runs)) if len(runs) > 1 else ("report", _report(runs[0]))
    page = render(f"{template}.html.j2", refresh_s=refresh_s, **values)
    try:
        replace_file(out, page.encode(), durable=False)
    except OSError as error:
        raise RlhfError(f"{out} cannot be written: {error.strerror}") from error


def _report(run: RunRecord) -> dict[str, Any]:
    reward = run.reward_gain
    added = {name: sentence for section in run.sections for name, (_, sentence) in section.figures.items()}
    return {
        "run": run,
        "state": state(run),
        "s": run.summary,
        "reward": reward,
        "verdict": reward and verdict("The reward", reward),
        "training": None if run.pairs else ends(run, REWARD),
        "training_kl": None if "kl_final" in run.summary else ends(run, KL),
        "panels": [(caption, as_svg(draw, run)) for draw, caption in pictures(run).items()],
        "groups": pick_texts(rewarded(run.pairs)) | _failed(run.pairs),
        "replaced": {section.title for section in run.sections},
        "most_texts": MOST_TEXTS,
        "sentences": SUMMARY_KEYS | added,
        "settings": changed_settings(run.settings),
        "settings_file": SETTINGS_FILE,
    }


def _comparison(runs: Sequence[RunRecord]) -> dict[str, Any]:
    tables = {"Settings that differ": _differing_settings(runs), "Numbers": _numbers(runs)}
    return {
        "title": f"{len(runs)} runs: RLHF on Triton",
        "runs": [(run.name, line_style(i), state(run)) for i, run in enumerate(runs)],
        "panels": overlaid(runs),
        "tables": {title: rows for title, rows in tables.items() if rows},
    }


def render(template: str, **values: Any) -> str:
    """Return what a template in tools/templates makes of these values."""
    environment = Environment(
        loader=PackageLoader("rlhf_triton.tools"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": formatted,
        "shown": shown,
        "setting": setting,
        "conversation": Conversation.of,
        "base64": lambda text: b64encode(text.encode()).decode(),
    }
    return environment.get_template(template).render(**values)


def state(run: RunRecord) -> str | None:
    """Return a sentence on how far a run is that has not finished; None for a finished run."""
    if run.is_finished:
        return None
    steps, total = run.summary["steps"], run.settings.get("actor.steps")
    done = f"step {steps}{f' of {total}' if total else ''}" if steps else "no step"
    return (
        f"In progress: {done} has ended." if run.in_progress else f"The run stopped before its end: {done} has ended."
    )


def pick_texts(scored: Sequence[Scored]) -> dict[str, Sequence[Scored]]:
    """Return {label: pairs with their scores}: the largest gains, those around the median, and the largest losses.

    No pair appears twice; fewer than NUM_TEXTS pairs are split into thirds.
    """
    ranked = sorted(scored, key=lambda item: item[1] - item[2])
    third = min(NUM_TEXTS, len(ranked)) // 3
    most = min(NUM_TEXTS, len(ranked)) - 2 * third
    middle = most + (len(ranked) - most - 2 * third) // 2
    groups = {
        "Largest gains": ranked[:most],
        "Around the median": ranked[middle : middle + third],
        "Largest losses": ranked[len(ranked) - third :][::-1],
    }
    return {label: group for label, group in groups.items() if group}


def _failed(pairs: Sequence[Pair]) -> dict[str, Sequence[tuple[Pair, float | None, float | None]]]:
    """Return {label: the first pairs with a conversation whose environment failed, and their scores}; {} if none."""
    failed = [(pair, pair.reward_before, pair.reward_after) for pair in pairs if pair.has_failed]
    return {f"Failed environments: {len(failed)} of {len(pairs)} prompts": failed[: NUM_TEXTS // 3]} if failed else {}


def verdict(what: str, gain: Gain) -> str:
    """Return a sentence that says how `what` changed; an interval that includes 0 counts as no change."""
    interval = f"95 % interval [{gain.low:.3f}, {gain.high:.3f}]"
    if gain.low > 0:
        return f"{what} rose by {gain.mean:.3f}, {interval}."
    if gain.high < 0:
        return f"{what} fell by {-gain.mean:.3f}, {interval}."
    return f"{what} did not change measurably: {gain.mean:+.3f}, and the {interval} includes 0."


def ends(run: RunRecord, key: str) -> dict[str, Any] | None:
    """Return the means of a metric over the first and the last tenth of the steps; None with fewer than two steps."""
    _, values = series(run.steps, key)
    count = max(1, len(values) // 10)
    if len(values) < 2 * count:
        return None
    first, last = statistics.fmean(values[:count]), statistics.fmean(values[-count:])
    return {"first": first, "last": last, "part": "tenth of the steps" if count > 1 else "step"}


def _differing_settings(runs: Sequence[RunRecord]) -> list[tuple[str, str, list[Any]]]:
    """Return (key, "", a value per run) of each setting that differs, and not only by being of no use to a run."""
    known = [run.settings for run in runs if run.settings]
    changed = {key for settings in known for key in changed_settings(settings)} - {"run.dir"}
    keys = dict.fromkeys(key for settings in known for key in settings if key in changed)
    differing = (key for key in keys if any(settings.get(key) != known[0].get(key) for settings in known))
    return [(key, "", [run.settings.get(key) for run in runs]) for key in differing]


def _numbers(runs: Sequence[RunRecord]) -> list[tuple[str, str, list[Any]]]:
    """Return (name, sentence, a value per run) of each figure that at least one run has."""
    rows = []
    for key, (name, what) in ENDS.items():
        found = [ends(run, key) for run in runs]
        for end in ("first", "last"):
            sentence = f"{what}, {end} tenth of the steps."
            rows.append((f"{name} in training, {end} tenth", sentence, [each and each[end] for each in found]))
    added = {name: what for run in runs for section in run.sections for name, (_, what) in section.figures.items()}
    sentences = SUMMARY_KEYS | added
    rows += [(key, sentence, [run.summary.get(key) for run in runs]) for key, sentence in sentences.items()]
    return [row for row in rows if any(value is not None for value in row[2])]


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, except ports."""
    defaults = flattened(RunConfig().model_dump(mode="json"))
    of_a_reward = {name: field.default for name, field in RewardTerm.model_fields.items()}
    defaults["reference.model"] = settings.get("actor.policy.model")

    def is_default(key: str, value: Any) -> bool:
        section, _, name = key.rpartition(".")
        known = of_a_reward if section.startswith("rewards.") and key not in defaults else {}
        return bool(value == known.get(name, defaults.get(key)))

    return {key: value for key, value in settings.items() if not is_default(key, value) and not key.endswith("_port")}


def setting(value: Any) -> str:
    """Return a setting as text for a table, in full: a learning rate may be 1e-06."""
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {setting(item)}' for key, item in value.items() if item is not None)}}}"
    return "none" if value is None else f"{value}"


def shown(value: Any) -> str:
    """Return a figure as text for a table."""
    if isinstance(value, list):
        return f"[{', '.join(shown(item) for item in value)}]"
    if isinstance(value, float):
        return formatted(value, ",.3f" if abs(value) < 100 else ",.0f")
    return f"{value}"
