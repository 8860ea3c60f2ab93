"""Writes report.html: a run's results as numbers, pictures and sample texts, in one self-contained file."""

import re
import statistics
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from python_backend.config import RunConfig
from tools.report.curves import panels, write_curves
from tools.report.data import (
    ALL_WORDS,
    MOST_TEXTS,
    SETTINGS_FILE,
    Gain,
    RunRecord,
    flattened,
    formatted,
    load_run,
    reward_gain,
    series,
)
from tools.report.summary import SUMMARY_KEYS, Pair, word_gains

__all__ = ["write_curves", "write_report"]

NUM_WORDS = 15
NUM_TEXTS = 24


def write_report(run_dir: Path) -> Path:
    """Write report.html into the folder of a finished run; return its path.

    Gold scores and held-out texts are optional. Raises FileNotFoundError, which names the file, if another is missing.
    """
    run = load_run(run_dir)
    words = word_gains(run.pairs) if run.gold else []
    environment = Environment(
        loader=PackageLoader("tools"), undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": formatted, "shown": _shown}
    page = environment.get_template("report.html.j2").render(
        run=run,
        s=run.summary,
        reward=reward_gain(run),
        verdicts=[verdict(what, gain) for what, gain in _results(run)],
        training=None if run.pairs else _training_rewards(run),
        panels=[(caption, b64encode(svg.encode()).decode()) for caption, svg in panels(run)],
        words=_words(run, words),
        groups=pick_texts(run.pairs, run.gold),
        highlight=highlight,
        marked=word_pattern([word for word, gain in words[:NUM_WORDS] if gain > 0]),
        most_texts=MOST_TEXTS,
        sentences=SUMMARY_KEYS,
        settings=_changed_settings(run.settings),
        settings_file=SETTINGS_FILE,
    )
    path = Path(run_dir) / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def pick_texts(pairs: Sequence[Pair], gold: bool) -> list[tuple[str, list[tuple[Pair, float]]]]:
    """Return (label, [(pair, gain)]): the largest gains, those around the median, and the largest losses.

    No pair appears twice; fewer than NUM_TEXTS pairs are split into thirds. The gain is that of the gold score if
    `gold`, else that of the reward.
    """
    ranked = sorted(
        ((pair, gain) for pair in pairs if (gain := _change(pair, gold)) is not None),
        key=lambda pair: -pair[1],
    )
    third = min(NUM_TEXTS, len(ranked)) // 3
    most = min(NUM_TEXTS, len(ranked)) - 2 * third
    middle = most + (len(ranked) - most - 2 * third) // 2
    groups = {
        "Largest gains": ranked[:most],
        "Around the median": ranked[middle : middle + third],
        "Largest losses": ranked[len(ranked) - third :][::-1],
    }
    return [(label, group) for label, group in groups.items() if group]


def verdict(what: str, gain: Gain) -> str:
    """Return a sentence that says how `what` changed; an interval that includes 0 counts as no change."""
    interval = f"95 % interval [{gain.low:.3f}, {gain.high:.3f}]"
    if gain.low > 0:
        return f"{what} rose by {gain.mean:.3f}, {interval}."
    if gain.high < 0:
        return f"{what} fell by {-gain.mean:.3f}, {interval}."
    return f"{what} did not change measurably: {gain.mean:+.3f}, and the {interval} includes 0."


def highlight(text: str, marked: re.Pattern[str]) -> Markup:
    """Return `text` as HTML, matches of `marked` in <mark>; split before escaping, so that no match cuts an entity."""
    pieces = marked.split(text)
    return Markup("").join(
        Markup("<mark>{}</mark>").format(piece) if i % 2 else piece for i, piece in enumerate(pieces)
    )


def word_pattern(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern with one group that matches any of `words` as a whole word, in any case; [] matches nothing."""
    if not words:
        return re.compile(r"(?!)()")
    return re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)", re.IGNORECASE)


def _results(run: RunRecord) -> list[tuple[str, Gain]]:
    results = []
    for gain in run.gains:
        name = ", which PPO never saw," if gain.label == ALL_WORDS else f" {gain.label}, the word that gained most,"
        results.append((f"The gold score{name}", gain))
    reward = reward_gain(run)
    return results + ([("The reward", reward)] if reward else [])


def _training_rewards(run: RunRecord) -> dict[str, Any] | None:
    """Return the mean rewards of the first and of the last tenth of the steps; None for a run of one step."""
    _, rewards = series(run.steps, "train_rollouts/rewards")
    count = max(1, len(rewards) // 10)
    if len(rewards) < 2 * count:
        return None
    first, last = statistics.fmean(rewards[:count]), statistics.fmean(rewards[-count:])
    return {"first": first, "last": last, "part": "tenth of the steps" if count > 1 else "step"}


def _words(run: RunRecord, words: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return table rows for the words that gained most, and for up to five that lost most."""
    total = run.summary["gold_after"] - run.summary["gold_before"] if run.gold else 0.0
    scale = max((abs(gain) for _, gain in words), default=1.0)
    rows = []
    for word, gain in [*words[:NUM_WORDS], *(pair for pair in words[NUM_WORDS:][-5:] if pair[1] < 0)]:
        pattern = word_pattern([word])
        rows.append({
            "word": word, "gain": gain, "width": 100 * abs(gain) / scale,
            "share": gain / total if total > 0.01 else None,  # a share of a negligible gain is meaningless
            "before": sum(bool(pattern.search(pair.text_before)) for pair in run.pairs),
            "after": sum(bool(pattern.search(pair.text_after)) for pair in run.pairs),
        })  # fmt: skip
    return rows


def _change(pair: Pair, gold: bool) -> float | None:
    sides = (pair.gold_before, pair.gold_after) if gold else (pair.reward_before, pair.reward_after)
    return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]


def _changed_settings(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings that differ from their defaults, except ports."""
    defaults = flattened(RunConfig().model_dump(mode="json"))
    changed = ((key, value) for key, value in settings.items() if value != defaults.get(key))
    return [(key, value) for key, value in changed if not key.endswith("_port")]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, float):
        return formatted(value, ",.3f" if abs(value) < 100 else ",.0f")
    return f"{value}"
