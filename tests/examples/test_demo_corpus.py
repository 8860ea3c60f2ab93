"""The corpus: which sentences pass, what unreadable files do, and that the split is fixed."""

from pathlib import Path

import pytest

from examples.demo.corpus import corpus_fingerprint, load_corpus, sentences_of, stdlib_sources

GOOD = "Return the number of items in the given mapping."


@pytest.mark.parametrize(
    "text",
    [
        "Too short.",
        "this one does not begin with a capital letter.",
        "This one has no full stop at its end",
        "This one calls a setUp method of the class.",
        "This one names os.path among its words.",
        "This one runs main() when it is started.",
        "This one shouts about HTTP in the middle.",
        "This one holds 3 digits or another sign.",
        "This one is " + "very " * 40 + "long.",
    ],
)
def test_code_and_fragments_are_left_out(text: str) -> None:
    assert list(sentences_of(text)) == []


def test_a_paragraph_is_cut_into_its_sentences_across_line_breaks() -> None:
    text = "Return the number of items\n    in the given mapping.  Raise an error if it is closed.\n\nA heading\n"
    assert list(sentences_of(text)) == [GOOD, "Raise an error if it is closed."]


def test_docstrings_comments_and_topics_are_read_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text('topics = {"a": "A topic has a sentence of its own."}\n')
    (tmp_path / "tests" / "test_a.py").write_text('"""A sentence of a test is left out here."""\n')
    (tmp_path / "a.py").write_text(
        '"""The module has a docstring of its own."""\n'
        "# A comment block may run over\n# two lines of the file.\n"
        'x = """\n# A comment inside a string is no comment.\n"""\n'
        'y = "A plain string is not documentation at all."\n'
        "def f():\n    '''The function has a docstring of its own.'''\n"
        "    return 1  # A comment after code is left out.\n"
    )
    corpus = load_corpus(tmp_path)
    assert {*corpus.train, *corpus.held_out} == {
        "A topic has a sentence of its own.",
        "The module has a docstring of its own.",
        "The function has a docstring of its own.",
        "A comment block may run over two lines of the file.",
    }


def test_files_that_are_not_python_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text('"""Some documentation of an old file."""\nprint "hello"\n')
    (tmp_path / "bytes.py").write_bytes(b'"""Some documentation \xff of a broken file."""\n')
    (tmp_path / "null.py").write_bytes(b'"""Some documentation of a file with nulls."""\n\x00')
    (tmp_path / "good.py").write_text(f'"""{GOOD}"""\n')
    assert load_corpus(tmp_path).train == (GOOD,)


def test_the_order_is_fixed_and_a_sentence_stands_once(tmp_path: Path) -> None:
    lines = [f"The sentence with the letter {letter} in it." for letter in "abcdefghij"]
    for folder, order in (("one", lines), ("two", lines[::-1] + lines)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text('"""\n' + "\n\n".join(order) + '\n"""\n')
    one, two = load_corpus(tmp_path / "one"), load_corpus(tmp_path / "two")
    assert one == two
    assert (len(one.train), len(one.held_out)) == (8, 2)
    assert sorted([*one.train, *one.held_out]) == lines


def test_the_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""One."""\n')
    before = corpus_fingerprint(tmp_path)
    assert corpus_fingerprint(tmp_path) == before
    (tmp_path / "a.py").write_text('"""Two."""\n')
    assert corpus_fingerprint(tmp_path) != before


def test_the_sources_are_the_library_alone() -> None:
    names = {path.parent.name for path in stdlib_sources()}
    assert "asyncio" in names
    assert not names & {"site-packages", "test", "tests", "idle_test"}
