"""The gold score and the words that carry a gain, against cases worked out by hand."""

import pytest

from examples.demo.gold import TECHNICAL_WORDS, gold_scorer, words_that_gained


def test_the_score_knows_good_from_bad_and_stays_in_its_range() -> None:
    score = gold_scorer()
    assert score("This is a useful and safe method.") > 0.3
    assert score("This is a terrible failure.") < -0.3
    assert score("This method returns the object.") == 0.0
    assert -1.0 <= score("good " * 200) <= 1.0


@pytest.mark.parametrize("word", TECHNICAL_WORDS)
def test_a_technical_word_counts_for_nothing(word: str) -> None:
    assert gold_scorer()(f"The {word} of the object.") == 0.0


def test_dropping_is_the_caller_s_choice_and_does_not_leak() -> None:
    assert gold_scorer(dropped=())("The value of the object.") > 0.0
    assert gold_scorer(extra_dropped=["Useful"])("The useful object.") == 0.0
    assert gold_scorer()("The useful object.") > 0.0


def test_a_gain_is_laid_to_the_words_that_made_it() -> None:
    before = ["The object is here.", "The object is bad."]
    after = ["The object is useful, really.", "The object is here."]
    score = gold_scorer()
    gains = dict(words_that_gained(before, after))
    assert gains["useful"] == pytest.approx(score(after[0]) / 2)
    assert gains["bad"] == pytest.approx(-score(before[1]) / 2)
    assert set(gains) == {"useful", "bad"}


def test_gains_are_sorted_and_words_in_both_cancel() -> None:
    gains = words_that_gained(["a safe thing", "a thing"], ["a safe thing", "a useful, helpful thing"])
    assert [word for word, _ in gains] == ["useful", "helpful"]
    assert gains[0][1] >= gains[1][1] > 0.0


def test_a_repeated_word_is_left_out_as_a_whole() -> None:
    text = "Good, good GOOD thing."
    assert dict(words_that_gained(["A thing."], [text]))["good"] == pytest.approx(gold_scorer()(text))
