"""The demo's sections of the report: gold score before and after, and the words that carry the gain.

The gold score is computed on prompt + response, like the reward model's training labels: a negation or a booster at the
end of the prompt affects the response, and what the prompt contributes is the same before and after. For a chat it is
computed on the reply, which is what the reward model reads.
"""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from examples.demo.gold import gold_scorer, words_that_gained
from tools.report.data import Gain, Pair, ReportSection, RunRecord, Scored
from tools.report.page import pick_texts, render, verdict

NUM_WORDS = 15
BLUE, RED, GREY = "#0072B2", "#D55E00", "#8A8F98"


def sections(run: RunRecord) -> list[ReportSection]:
    """Return the sections of a finished run; [] for a run without held-out texts."""
    if not run.pairs:
        return []
    words = words_that_gained([pair.text_before for pair in run.pairs], [pair.text_after for pair in run.pairs])
    # Negations and boosters can gain too, but cannot be removed from the lexicon: alone they score 0.
    score = gold_scorer()
    top_word = next((word for word, _ in words if score(word)), None)
    scored = gold_scored(run.pairs)
    before, after = statistics.fmean(s for _, s, _ in scored), statistics.fmean(s for _, _, s in scored)
    gain, without = Gain.of(scored), Gain.of(gold_scored(run.pairs, [top_word] if top_word else []))
    gains = {"all words": gain, **({f"without “{top_word}”": without} if top_word else {})}
    marked = word_pattern([word for word, gain in words[:NUM_WORDS] if gain > 0])
    results = [verdict("The gold score, which PPO never saw,", gain)]
    if top_word:
        results.append(verdict(f"The gold score without “{top_word}”, the word that gained most,", without))

    def draw(axes: Any, run: RunRecord) -> None:
        draw_gold(axes, gains, f"Gold score {before:.3f} → {after:.3f}", len(run.pairs))

    carrying = ReportSection(
        title="The words that carry the gain",
        text=_html("words", words=_words(run.pairs, words, after - before)),
        pictures={"The gold score, which PPO never saw, on held-out prompts, with 95 % intervals.": draw},
        results=results,
        cards=[("gold gain", f"{gain.mean:+.3f}", f"[{gain.low:.3f}, {gain.high:.3f}]")],
        figures={
            "gold_before": (before, "Mean gold score of the initial policy's texts; PPO never sees it."),
            "gold_after": (after, "The same for the final policy."),
            "gold_ci95": ([gain.low, gain.high], "95 % interval of the gold gain: paired bootstrap over the prompts."),
            "top_word": (top_word, "The rated word that contributed most to the gold gain."),
            "gold_gain_without_top_word_ci95": (
                [without.low, without.high],
                "The gain's 95 % interval when that word is removed from the lexicon.",
            ),
        },
    )
    groups = pick_texts(scored)
    texts = _html("texts_by_gold", groups=groups, words=words, mark=lambda text: highlight(text, marked))
    return [carrying, ReportSection(title="Texts before and after", text=texts)]


def gold_scored(pairs: Sequence[Pair], extra_dropped: Sequence[str] = ()) -> list[Scored]:
    """Return the pairs with the gold scores of their texts, with the words `extra_dropped` not in the lexicon."""
    score = gold_scorer(extra_dropped=extra_dropped)
    return [(pair, score(pair.text_before), score(pair.text_after)) for pair in pairs]


def draw_gold(axes: Any, gains: dict[str, Gain], title: str, num_prompts: int) -> None:
    """Draw each gain with its interval, and a line at zero."""
    rows = list(gains.items())[::-1]
    for y, (_, gain) in enumerate(rows):
        colour = BLUE if gain.low > 0 else RED if gain.high < 0 else GREY
        error = [[gain.mean - gain.low], [gain.high - gain.mean]]
        axes.errorbar([gain.mean], [y], xerr=error, fmt="o", color=colour, ms=8, lw=2.5, capsize=6)
        text = f"{gain.mean:+.3f}  [{gain.low:.3f}, {gain.high:.3f}]"
        over_the_line = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.annotate(
            text, (gain.mean, y), (0, 12), textcoords="offset points", ha="center", color=colour, bbox=over_the_line
        )
    axes.axvline(0, color="#3C4043", lw=1)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.margins(x=0.3)
    axes.grid(axis="y", visible=False)
    axes.set_title(title)
    axes.set_xlabel(f"gain per text, 95 % interval, {num_prompts} held-out prompts")


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


def _words(pairs: Sequence[Pair], words: Sequence[tuple[str, float]], total: float) -> list[dict[str, Any]]:
    """Return table rows for the words that gained most, and for up to five that lost most."""
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
                "before": sum(bool(pattern.search(pair.text_before)) for pair in pairs),
                "after": sum(bool(pattern.search(pair.text_after)) for pair in pairs),
            }
        )
    return rows


def _html(template: str, **values: Any) -> Markup:
    return Markup(render(f"{template}.html.j2", folder=Path(__file__).parent, **values))
