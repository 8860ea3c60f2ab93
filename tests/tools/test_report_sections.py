"""Sections that a run's own function adds to its report."""

import json
import re
from pathlib import Path

import pytest
from synthetic_run import write_run

from tools.report.data import load_run
from tools.report.page import write_page

DOCS = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
START = "from tools.report.sections import ReportSection\n\n\ndef sections(run):\n    "


def page_of(folder: Path, code: str) -> str:
    """The page of a run whose `report` names a function in a file with this code."""
    (folder / "my_report.py").write_text(code)
    run_dir = write_run(folder / "run", report=f"{folder}/my_report.py:sections", validated=False, num_steps=2)
    texts = [{"step": 1, "prompt": "p", "response": text, "reward": 0.0} for text in ("a <b>", "a b c")]
    (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    write_page([load_run(run_dir)], folder / "page.html")
    return (folder / "page.html").read_text()


def test_the_example_of_the_docs(tmp_path: Path):
    found = re.search(r"```python\n(from tools.report.sections.*?)```", DOCS.read_text(), re.DOTALL)
    assert found is not None
    page = page_of(tmp_path, found[1])
    assert "<h2>The longest responses</h2>" in page
    assert "<table><tr><th class=n>step</th><th class=n>words</th><th>response</th></tr>" in page
    assert "<td class=n>1</td><td class=n>2</td><td>a &lt;b&gt;</td>" in page


def test_everything_that_a_section_may_have(tmp_path: Path):
    code = (
        'return [ReportSection(title="Texts", text="a < b", results=["It <rose>."], cards=[("mine", "1", "note")], '
        'figures={"mine": (0.12345, "A figure.")}, pictures={"My picture.": lambda axes, run: axes.plot([1, 2])})]'
    )
    page = page_of(tmp_path, START + code)
    expected = [
        "<p>a &lt; b</p>",
        "<li><b>It &lt;rose&gt;.</b></li>",
        "<small>mine</small><b>1</b>",
        'alt="My picture."',
    ]
    for text in expected:
        assert text in page
    assert page.count("<h2>Texts</h2>") == 1, "it takes the place of the built-in one"
    assert "<td><code>mine</code></td><td class=n>0.123</td><td>A figure.</td>" in page
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["mine"] == 0.12345


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("return run.nothing", "AttributeError"),
        ("return [1]", "TypeError: it returned int, not tools.report.sections.ReportSection"),
        ('return [ReportSection(title="x", pictures={"y": lambda axes, run: 1 / 0})]', "ZeroDivisionError"),
        ("sys.exit(", "cannot be imported: SyntaxError"),
    ],
)
def test_a_failure_is_named_and_the_page_is_there(tmp_path: Path, code: str, error: str):
    page = page_of(tmp_path, START + code)
    assert "my_report.py:sections failed: " in page
    assert error in page
    assert "<h2>Numbers</h2>" in page
