"""Writes a run's page: its results as numbers, pictures and sample texts, in one self-contained file."""

import re
import statistics
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from actor.run.settings import SETTINGS_FILE, flattened
from python_backend.config import RewardTerm, RunConfig
from python_backend.errors import RlhfError
from python_backend.store.durable import replace_file
from tools.report.curves import panels
from tools.report.data import (
    ALL_WORDS,
    MOST_TEXTS,
    Gain,
    RunRecord,
    formatted,
    load_run,
    loading_line,
    reward_gain,
    series,
)
from tools.report.summary import SUMMARY_KEYS, Pair, word_gains

NUM_WORDS = 15
NUM_TEXTS = 24


class PageNotWritten(RlhfError):
    """The page's file cannot be written."""


def write_report(run_dir: Path, out: Path | None = None, *, refresh_s: float | None = None) -> Path:
    """Write the page of a run, with what its folder has now, and return the page's path.

    Args:
        out: path of the page; None for report.html in the run's folder.
        refresh_s: seconds after which a browser loads the page again; None for a page that does not change any more.

    Raises:
        UnreadableRun: the folder is no run, or has a damaged file.
        PageNotWritten: `out` cannot be written.
    """
    run = load_run(run_dir)
    words = word_gains(run.pairs) if run.gold else []
    page = render(
        "report.html.j2",
        run=run,
        refresh_s=refresh_s,
        state=state(run),
        s=run.summary,
        reward=reward_gain(run),
        verdicts=[verdict(what, gain) for what, gain in _results(run)],
        training=None if run.pairs else ends(run, "train_rollouts/rewards"),
        training_kl=None if "kl_final" in run.summary else ends(run, "train_rollouts/init_policy_kl_per_sequence"),
        panels=panels(run),
        words=_words(run, words),
        groups=pick_texts(run.pairs, run.gold),
        highlight=highlight,
        marked=word_pattern([word for word, gain in words[:NUM_WORDS] if gain > 0]),
        most_texts=MOST_TEXTS,
        sentences=SUMMARY_KEYS,
        has_policy=loading_line(Path(run_dir)) is not None,
        settings=changed_settings(run.settings),
        settings_file=SETTINGS_FILE,
    )
    path = out or Path(run_dir) / "report.html"
    write_page(path, page)
    return path


def render(template: str, **values: Any) -> str:
    """Return the page that one of tools/templates makes of these values."""
    environment = Environment(
        loader=PackageLoader("tools"), undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": formatted,
        "shown": shown,
        "setting": setting,
        "base64": lambda text: b64encode(text.encode()).decode(),
    }
    return environment.get_template(template).render(**values)


def write_page(path: Path, page: str) -> None:
    """Write a page, atomically replacing an earlier one. Raises PageNotWritten."""
    try:
        replace_file(path, page.encode(), durable=False)
    except OSError as error:
        raise PageNotWritten(f"{path} cannot be written: {error.strerror}") from error


def state(run: RunRecord) -> str | None:
    """Return a sentence on how far a run is that has not finished; None for a finished run."""
    if run.is_finished:
        return None
    steps, total = run.summary["steps"], run.settings.get("actor.steps")
    done = f"step {steps}{f' of {total}' if total else ''}" if steps else "no step"
    return (
        f"In progress: {done} has ended." if run.in_progress else f"The run stopped before its end: {done} has ended."
    )


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


def ends(run: RunRecord, key: str) -> dict[str, Any] | None:
    """Return the means of a metric over the first and the last tenth of the steps; None with fewer than two steps."""
    _, values = series(run.steps, key)
    count = max(1, len(values) // 10)
    if len(values) < 2 * count:
        return None
    first, last = statistics.fmean(values[:count]), statistics.fmean(values[-count:])
    return {"first": first, "last": last, "part": "tenth of the steps" if count > 1 else "step"}


def _words(run: RunRecord, words: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return table rows for the words that gained most, and for up to five that lost most."""
    total = run.summary["gold_after"] - run.summary["gold_before"] if run.gold else 0.0
    scale = max((abs(gain) for _, gain in words), default=1.0)
    rows = []
    for word, gain in [*words[:NUM_WORDS], *(pair for pair in words[NUM_WORDS:][-5:] if pair[1] < 0)]:
        pattern = word_pattern([word])
        rows.append(
            {
                "word": word,
                "gain": gain,
                "width": 100 * abs(gain) / scale,
                "share": gain / total if total > 0.01 else None,  # a share of a negligible gain is meaningless
                "before": sum(bool(pattern.search(pair.text_before)) for pair in run.pairs),
                "after": sum(bool(pattern.search(pair.text_after)) for pair in run.pairs),
            }
        )
    return rows


def _change(pair: Pair, gold: bool) -> float | None:
    sides = (pair.gold_before, pair.gold_after) if gold else (pair.reward_before, pair.reward_after)
    return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]


def changed_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, except ports."""
    defaults = flattened(RunConfig().model_dump(mode="json"))
    of_a_reward = {name: field.default for name, field in RewardTerm.model_fields.items()}
    defaults["reference.checkpoint"] = settings.get("actor.policy.checkpoint")

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
