"""The demo's sections of the report, on run folders small enough to count by hand."""

import json
from pathlib import Path

import pytest
from synthetic_run import write_run

from examples.demo.report import highlight, sections, word_pattern
from tools.report.curves import pictures, write_curves
from tools.report.data import load_run
from tools.report.page import write_page

SECTIONS = "examples.demo.report:sections"


def run_of(folder: Path, *texts: tuple[str, str], question: str | None = None) -> Path:
    """A run that continued "It is" by these texts, before and after."""
    write_run(folder, validated=False, num_steps=2)
    chat = {} if question is None else {"question": question, "prompt": "Be helpful, great and good."}
    rows = [
        {"prompt_id": str(i), "when": when, "prompt": "It is", "response": text, "reward": 0.0, **chat}
        for i, pair in enumerate(texts)
        for when, text in zip(("before", "after"), pair, strict=True)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_page_has_the_gold_score_the_words_and_the_texts_by_it(tmp_path: Path):
    run = load_run(write_run(tmp_path / "run", report=SECTIONS))
    write_page([run], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The gold score, which PPO never saw, rose by 0." in page
    assert "without “good”, the word that gained most," in page
    for key in ("gold_before", "gold_after", "gold_ci95", "top_word", "gold_gain_without_top_word_ci95"):
        assert f"<code>{key}</code>" in page
    assert "<tr><td>good</td>" in page
    assert page.count("<h2>Texts before and after</h2>") == 1
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; <mark>great</mark>" in page
    assert "<script" not in page
    assert page.count("<figure>") == len(pictures(run)) == 9
    assert "PPO never saw" in list(pictures(run).values())[1]
    write_curves(run, tmp_path / "curves.png")


def test_figures_counted_by_hand(tmp_path: Path):
    run = load_run(run_of(tmp_path / "run", (" a list of a list", " a great thing."), (" a list", " a good thing.")))
    figures = {name: value for name, (value, _) in sections(run)[0].figures.items()}
    # VADER's compound: s / sqrt(s^2 + 15), great 3.1, good 1.9.
    great, good = 3.1 / (3.1**2 + 15) ** 0.5, 1.9 / (1.9**2 + 15) ** 0.5
    assert figures["gold_before"] == 0.0
    assert figures["gold_after"] == pytest.approx((great + good) / 2, abs=1e-4)
    assert figures["gold_ci95"] == pytest.approx([good, great], abs=1e-4)  # of two pairs, one of each resampled
    assert figures["top_word"] == "great"
    assert figures["gold_gain_without_top_word_ci95"] == pytest.approx([0.0, good], abs=1e-4)


def test_of_a_chat_the_reply_alone_is_scored(tmp_path: Path):
    run = load_run(run_of(tmp_path / "run", (" a list", " a great thing."), question="How was it?"))
    assert sections(run)[0].figures["gold_before"][0] == 0.0


def test_the_top_word_is_one_that_the_lexicon_can_lose(tmp_path: Path):
    # "not" acts in both texts and so gains most, but is no rated word: taking it out would change nothing.
    run = load_run(run_of(tmp_path / "run", (" bad.", " not bad."), (" awful.", " not awful.")))
    assert sections(run)[0].figures["top_word"][0] == "bad"


def test_a_run_without_held_out_texts_has_no_sections(tmp_path: Path):
    assert sections(load_run(write_run(tmp_path / "run", validated=False))) == []


def test_marked_words_are_escaped():
    # The lexicon rates emoticons.
    assert highlight("I <3 &<b>", word_pattern(["<3"])) == "I <mark>&lt;3</mark> &amp;&lt;b&gt;"
    assert highlight("I <3", word_pattern([])) == "I &lt;3"
