"""report.html: what a run did, in words, numbers, pictures and texts, in one file that needs no other.
Given a finished run folder with its summary.json; a run without gold or without held-out texts works too.
Returns the path; nothing in the page depends on the machine that wrote it.
"""

import re
import statistics
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from python_backend.config import RunConfig
from tools.report_curves import panels, write_curves
from tools.report_data import (
    ALL_WORDS,
    MOST_TEXTS,
    SETTINGS_FILE,
    Gain,
    Run,
    Sample,
    flattened,
    formatted,
    load_run,
    reward_gain,
    series,
)
from tools.report_page import PAGE, SENTENCES
from tools.summary import Pair, word_gains

__all__ = ["write_curves", "write_report"]

NUM_WORDS = 15
NUM_TEXTS = 24


def write_report(run_dir: Path) -> Path:
    """Returns the path of the report.html it wrote. Raises FileNotFoundError naming a missing file."""
    run = load_run(run_dir)
    words = word_gains(run.pairs) if run.gold else []
    sections = [
        _headline(run), _pictures(run), _words(run, words), _texts(run, words), _samples(run.texts), _numbers(run),
        _settings(run.settings),
    ]  # fmt: skip
    page = PAGE.format(
        title=escape(f"{run.name}: RLHF on Triton"), name=escape(run.name), body="\n".join(filter(None, sections))
    )
    path = Path(run_dir) / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def pick_texts(pairs: Sequence[Pair], gold: bool) -> list[tuple[str, list[tuple[Pair, float]]]]:
    """Returns (label, [(pair, gain)]): the largest gains, those around the median, and the largest losses.

    No pair comes twice; fewer than NUM_TEXTS pairs are cut into thirds. Gains are gold's, else the reward's.
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
    """Returns one honest sentence: an interval that includes 0 is no change."""
    interval = f"95 % interval [{gain.low:.3f}, {gain.high:.3f}]"
    if gain.low > 0:
        return f"{what} rose by {gain.mean:.3f}, {interval}."
    if gain.high < 0:
        return f"{what} fell by {-gain.mean:.3f}, {interval}."
    return f"{what} did not change measurably: {gain.mean:+.3f}, and the {interval} includes 0."


def _headline(run: Run) -> str:
    s = run.summary
    sentences = [f"<b>{escape(verdict(what, gain))}</b>" for what, gain in _results(run)]
    if not run.pairs:
        sentences += _of_training(run)
    if run.pairs and "reward_after" in s:
        sentences.append(f"The mean reward was {s['reward_before']:.3f} before and {s['reward_after']:.3f} after.")
    if "kl_final" in s:
        sentences.append(
            f"The policy is {formatted(s['kl_final'], '.2f')} nats per sequence away from where it started."
        )
    if "ev_v0" in s and "ev_last" in s:
        sentences.append(
            f"On the same held-out rollouts critic version {s['weights_version']} explains "
            f"{s['ev_last']:.2f} of the returns' variance, version 0 explains {s['ev_v0']:.2f}."
        )
    if run.critic:
        sentences.append(
            f"Meanwhile the server took {s['reloads_swap']} new critic versions by swap{_median(s, 'swap_ms_p50')} and "
            f"{s['reloads_triton']} by Triton reload{_median(s, 'triton_reload_ms_p50')}."
        )
    sentences.append(
        f"{s['failed_requests']} requests failed by the client's count, {s['server_failures']} by the server's."
    )
    items = "".join(f"<li>{sentence}</li>" for sentence in sentences)
    lead = f"After {s['steps']} steps{_training_of(run.settings)}"
    lead += f", on {len(run.pairs)} held-out prompts continued before and after:" if run.pairs else ":"
    cards = f'<div class="cards">{_cards(run)}</div>'
    return f'<section class="headline">{cards}<p>{lead}</p><ul>{items}</ul></section>'


def _results(run: Run) -> list[tuple[str, Gain]]:
    results = []
    for gain in run.gains:
        name = ", which PPO never saw," if gain.label == ALL_WORDS else f" {gain.label}, the word that gained most,"
        results.append((f"The gold score{name}", gain))
    reward = reward_gain(run)
    return results + ([("The reward", reward)] if reward else [])


def _cards(run: Run) -> str:
    s = run.summary
    cards = [("gold gain", f"{g.mean:+.3f}", f"[{g.low:.3f}, {g.high:.3f}]") for g in run.gains[:1]]
    reward = reward_gain(run)
    if reward:
        cards.append(("reward gain", f"{reward.mean:+.2f}", f"[{reward.low:.2f}, {reward.high:.2f}]"))
    if "kl_final" in s:
        cards.append(("KL", formatted(s["kl_final"], ".2f"), "nats per sequence"))
    if "ev_v0" in s and "ev_last" in s:
        cards.append(("critic explains", f"{s['ev_last']:.2f}", f"version 0: {s['ev_v0']:.2f}"))
    if run.critic:
        cards.append(("reloads", f"{s['reloads_swap']} + {s['reloads_triton']}", "swap + Triton"))
    cards.append(("failed requests", f"{s['failed_requests'] + s['server_failures']}", "client + server"))
    return "".join(f"<div><small>{name}</small><b>{big}</b><small>{small}</small></div>" for name, big, small in cards)


def _of_training(run: Run) -> list[str]:
    """Of a run without held-out texts: the rewards of its own rollouts, first and last."""
    _, rewards = series(run.steps, "train_rollouts/rewards")
    count = max(1, len(rewards) // 10)
    if len(rewards) < 2 * count:
        return []
    first, last = statistics.fmean(rewards[:count]), statistics.fmean(rewards[-count:])
    part = "tenth of the steps" if count > 1 else "step"
    return [f"The mean training reward was {first:.3f} in the first {part} and {last:.3f} in the last."]


def _pictures(run: Run) -> str:
    figures = "".join(
        f'<figure><img alt="{escape(caption)}" src="{_data_url(svg)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for caption, svg in panels(run)
    )
    return f'<section><h2>Curves</h2><div class="curves">{figures}</div></section>' if figures else ""


def _data_url(svg: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"


def _words(run: Run, words: Sequence[tuple[str, float]]) -> str:
    if not run.gold:
        return ""
    total = run.summary["gold_after"] - run.summary["gold_before"]
    scale = max((abs(gain) for _, gain in words), default=1.0)
    shown = list(words[:NUM_WORDS]) + [pair for pair in words[NUM_WORDS:][-5:] if pair[1] < 0]
    rows = "".join(_word_row(run, word, gain, total, scale) for word, gain in shown)
    note = (
        "A word's gain is the score of the texts minus their score without the word, after minus before, "
        "per text. The score is not linear, so the gains add up to the whole only roughly. Words that are "
        "technical terms in these texts are out of the lexicon."
    )
    return (
        f"<section><h2>The words that carry the gain</h2><p>{note}</p>"
        "<table class=words><tr><th>word</th><th class=n>gain per text</th><th></th>"
        "<th class=n>share of the gain</th><th class=n>texts with it before</th><th class=n>after</th></tr>"
        f"{rows}</table></section>"
    )


def _word_row(run: Run, word: str, gain: float, total: float, scale: float) -> str:
    pattern = word_pattern([word])
    counts = [
        sum(bool(pattern.search(text)) for text in texts)
        for texts in ([p.text_before for p in run.pairs], [p.text_after for p in run.pairs])
    ]
    # A share of a gain that is hardly there means nothing.
    share = f"{gain / total:.0%}" if total > 0.01 else "–"
    bar = f'<i class="{"up" if gain > 0 else "down"}" style="width:{100 * abs(gain) / scale:.0f}px"></i>'
    return (
        f"<tr><td>{escape(word)}</td><td class=n>{gain:+.4f}</td><td>{bar}</td><td class=n>{share}</td>"
        f"<td class=n>{counts[0]}</td><td class=n>{counts[1]}</td></tr>"
    )


def _texts(run: Run, words: Sequence[tuple[str, float]]) -> str:
    groups = pick_texts(run.pairs, run.gold)
    if not groups:
        return ""
    score = "gold score" if run.gold else "reward"
    marked = word_pattern([word for word, gain in words[:NUM_WORDS] if gain > 0])
    rows = []
    for label, group in groups:
        rows.append(f"<tr><th colspan=3>{label}</th></tr>")
        rows += [_text_row(pair, gain, run.gold, marked) for pair, gain in group]
    note = f"Prompts in grey, the same on both sides. Numbers are the {score}, ranked by its change."
    hint = " Marked are the words that gained most." if words else ""
    return (
        f"<section><h2>Texts before and after</h2><p>{note}{hint}</p><table class=texts>"
        f"<tr><th>before training</th><th>after training</th><th>change</th></tr>{''.join(rows)}</table></section>"
    )


def _text_row(pair: Pair, gain: float, gold: bool, marked: re.Pattern[str]) -> str:
    cells = []
    for text, gold_score, reward in (
        (pair.text_before, pair.gold_before, pair.reward_before),
        (pair.text_after, pair.gold_after, pair.reward_after),
    ):
        shown = highlight(f" {text}" if pair.is_chat else text[len(pair.prompt) :], marked)
        score = gold_score if gold else reward
        cells.append(f"<td><small>{score:+.2f}</small><em>{escape(pair.prompt)}</em>{shown}</td>")
    kind = "up" if gain > 0 else "down" if gain < 0 else ""
    return f'<tr>{"".join(cells)}<td class="n {kind}">{gain:+.2f}</td></tr>'


def _samples(texts: Sequence[Sample]) -> str:
    """Of a run without held-out texts: some of what it was trained on."""
    if not texts:
        return ""
    rows = [_sample_row(text) for text in texts]
    if len(rows) == 2 * MOST_TEXTS:
        rows.insert(MOST_TEXTS, "<tr><th colspan=3>Last steps</th></tr>")
        rows.insert(0, "<tr><th colspan=3>First steps</th></tr>")
    note = "Responses of training rollouts, prompts in grey; actor.logged_texts sets how many a step keeps."
    return (
        f"<section><h2>Texts</h2><p>{note}</p><table class=texts>"
        f"<tr><th class=n>step</th><th>response</th><th>reward</th></tr>{''.join(rows)}</table></section>"
    )


def _sample_row(text: Sample) -> str:
    reward = "–" if text.reward is None else formatted(text.reward, "+.2f")
    return (
        f"<tr><td class=n>{text.step}</td><td><em>{escape(text.prompt)}</em>{escape(text.response)}</td>"
        f"<td class=n>{reward}</td></tr>"
    )


def highlight(text: str, marked: re.Pattern[str]) -> str:
    """Escaped text, the matches of `marked` wrapped; split first, so that no match cuts an entity."""
    return "".join(
        f"<mark>{escape(piece)}</mark>" if i % 2 else escape(piece) for i, piece in enumerate(marked.split(text))
    )


def word_pattern(words: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern whose one group is any of the words, whole and in any case; without words, never."""
    if not words:
        return re.compile(r"(?!)()")
    return re.compile(rf"(?<!\w)({'|'.join(map(re.escape, words))})(?!\w)", re.IGNORECASE)


def _change(pair: Pair, gold: bool) -> float | None:
    sides = (pair.gold_before, pair.gold_after) if gold else (pair.reward_before, pair.reward_after)
    return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]


def _numbers(run: Run) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code></td><td class=n>{escape(_shown(value))}</td>"
        f"<td>{escape(SENTENCES.get(key, ''))}</td></tr>"
        for key, value in run.summary.items()
    )
    return f"<section><h2>The numbers of summary.json</h2><table>{rows}</table></section>"


def _training_of(settings: dict[str, Any]) -> str:
    """What was trained, and how."""
    if not settings:
        return ""
    return f" of {escape(settings['actor.algorithm'].upper())} on {escape(Path(settings['actor.checkpoint']).name)}"


def _settings(settings: dict[str, Any]) -> str:
    """Those that are not the defaults, ports aside."""
    defaults = flattened(RunConfig().model_dump(mode="json"))
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code></td><td>{escape(_shown(value))}</td></tr>"
        for key, value in settings.items()
        if value != defaults.get(key) and not key.endswith("_port")
    )
    note = f"All others have their defaults; {SETTINGS_FILE} has every one."
    return f"<section><h2>Settings</h2><p>{note}</p><table>{rows}</table></section>" if rows else ""


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    if isinstance(value, float):
        return formatted(value, ",.3f" if abs(value) < 100 else ",.0f")
    return f"{value}"


def _median(summary: dict[str, Any], key: str) -> str:
    return f" (median {summary[key]:,.0f} ms)" if key in summary else ""
