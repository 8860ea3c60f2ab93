"""The demo's gold score: VADER's human-rated lexicon, without words that are technical terms in these texts."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

# Everyday words with a human rating that are programming terms here. If they were rated, PPO would earn
# nearly its whole gain with the word "values".
TECHNICAL_WORDS: tuple[str, ...] = (
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
)


def gold_scorer(dropped: Iterable[str] = TECHNICAL_WORDS, extra_dropped: Iterable[str] = ()) -> Callable[[str], float]:
    """Return a function from text to VADER's compound score in [-1, 1] that treats the dropped words as neutral."""
    analyzer = _analyzer(frozenset(dropped) | frozenset(extra_dropped))

    def score(text: str) -> float:
        return float(analyzer.polarity_scores(text)["compound"])

    return score


def words_that_gained(before: list[str], after: list[str]) -> list[tuple[str, float]]:
    """Return (word, gain per text) of each word whose gain is not 0, largest gain first.

    Measured by leave-one-word-out rescoring: a word contributes score(text) - score(text without that word)
    to a text; its gain is the mean contribution over `after` minus that over `before`. Only three kinds of words are
    tried: those in VADER's lexicon, boosters and negations; others only change the distances between these. The score
    is not linear, so the gains add up to the total gain only roughly.
    """
    old, new = _mean_contributions(before), _mean_contributions(after)
    gains = {word: new.get(word, 0.0) - old.get(word, 0.0) for word in {*old, *new}}
    return sorted(((w, g) for w, g in gains.items() if g != 0.0), key=lambda pair: (-pair[1], pair[0]))


@lru_cache(maxsize=8)
def _analyzer(dropped: frozenset[str]) -> Any:
    # Imported late: importing this module must not need the demo's extra package.
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    for word in dropped:
        analyzer.lexicon.pop(word.lower(), None)
    return analyzer


def _mean_contributions(texts: list[str]) -> dict[str, float]:
    """Return {word: mean over all texts of score(text) - score(text without the word)}."""
    from vaderSentiment.vaderSentiment import BOOSTER_DICT, NEGATE

    acting = {*_analyzer(frozenset(TECHNICAL_WORDS)).lexicon, *BOOSTER_DICT, *NEGATE}
    score = gold_scorer()
    totals: defaultdict[str, float] = defaultdict(float)
    for text in texts:
        pieces = text.split()
        words = [_as_vader_reads(piece) for piece in pieces]
        whole = score(text)
        for word in sorted(acting.intersection(words)):
            without = " ".join(piece for piece, w in zip(pieces, words, strict=True) if w != word)
            totals[word] += whole - score(without)
    return {word: total / len(texts) for word, total in totals.items()}


def _as_vader_reads(piece: str) -> str:
    """Return the word as VADER reads it: lower case, without outer punctuation if more than two characters remain."""
    stripped = piece.strip("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
    return (piece if len(stripped) <= 2 else stripped).lower()
