"""The demos' gold score, VADER's human-rated lexicon without technical terms, and its section of the report.

For a text, the score is of prompt + response, like the reward model's training labels: a negation or a booster at the
end of the prompt affects the response. For a chat, it is of the reply alone, which is what the reward model reads.
"""

from collections.abc import Callable
from typing import Any

from rlhf_triton import ReportSection
from rlhf_triton.tools.report.data import RunRecord
from rlhf_triton.tools.report.page import verdict
from rlhf_triton.tools.report.sample_pairs import Gain

# Everyday words with a human rating that are programming terms here. If they were rated, PPO would earn
# nearly its whole gain with the word "values".
TECHNICAL_WORDS = [
    "value",
    "values",
    "true",
    "like",
    "no",
    "number",
    "argument",
    "arguments",
    "error",
    "errors",
    "create",
    "created",
    "creates",
    "creating",
    "empty",
    "block",
    "blocks",
    "string",
    "null",
    "top",
    "shared",
]


def gold_scorer() -> Callable[[str], float]:
    """Return a function from text to VADER's compound score in [-1, 1] that treats technical words as neutral."""
    # Imported late: importing this module must not need the demo's extra package.
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    for word in TECHNICAL_WORDS:
        analyzer.lexicon.pop(word, None)

    def score(text: str) -> float:
        return float(analyzer.polarity_scores(text)["compound"])

    return score


def sections(run: RunRecord) -> list[ReportSection]:
    """Return the gold score before and after of a finished run; [] for a run without held-out texts."""
    if not run.pairs:
        return []
    score = gold_scorer()
    scored = [(pair, score(pair.text_before), score(pair.text_after)) for pair in run.pairs]
    gain = Gain.of(scored)

    def draw(axes: Any, _: RunRecord) -> None:
        error = [[gain.mean - gain.low], [gain.high - gain.mean]]
        axes.errorbar(["gain per text, 95 % interval"], [gain.mean], yerr=error, fmt="o", capsize=6)
        axes.axhline(0, color="#3C4043", lw=1)
        axes.set_title(f"Gain in gold score: {gain.before:.3f} → {gain.after:.3f}")

    return [
        ReportSection(
            title="The gold score",
            text=f"VADER's score of the texts, which PPO never sees: {gain.before:.3f} before, {gain.after:.3f} after.",
            pictures={"The gold score, which PPO never saw, on held-out prompts, with the 95 % interval.": draw},
            results=[verdict("The gold score, which PPO never saw,", gain)],
            cards=[("gold gain", f"{gain.mean:+.3f}", f"[{gain.low:.3f}, {gain.high:.3f}]")],
            figures={
                "gold_before": (gain.before, "Mean gold score of the initial policy's texts; PPO never sees it."),
                "gold_after": (gain.after, "The same for the final policy."),
                "gold_ci95": ([gain.low, gain.high], "95 % interval of the gold gain: paired bootstrap."),
            },
        )
    ]
