"""`tools.report.page` on synthetic run folders: whole page, no gold, no validation, and what must never show.
Given metrics made here. A page is written once per kind of folder, since drawing takes seconds.
"""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from synthetic_run import EVIL, write_run

from python_backend.config import RunConfig
from python_backend.errors import RlhfError
from tools.report.curves import (
    PICTURES,
    as_svg,
    draw_distinct,
    draw_ended,
    draw_explained_variance,
    draw_kl,
    draw_reward,
    draw_step_time,
    pictures,
    write_curves,
)
from tools.report.data import SUMMARY_KEYS, finish_run, formatted, load_run, phase_seconds, series
from tools.report.page import pick_texts, shown, verdict, write_page
from tools.report.pairs import Gain


def page_of(run_dir: Path) -> str:
    write_page([load_run(run_dir)], run_dir / "report.html")
    return (run_dir / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("full") / "demo")


def test_of_a_long_run_the_report_reads_every_nth_step(tmp_path: Path):
    """The pictures of a run of months were a page of 77 MB, made in minutes."""
    run = load_run(write_run(tmp_path / "long", num_steps=5000))
    steps = [row["step"] for row in run.steps]
    assert steps == list(range(1, 5000, 4))
    assert [row["step"] for row in run.critic if row["reload"] == "swap"] == steps
    assert [row["step"] for row in run.critic if row["reload"] == "triton"] == [3], "rare ones are all there"
    assert (run.summary["reloads_swap"], run.summary["reloads_triton"]) == (5000, 1)
    assert len(pictures(run)) == 8


@pytest.fixture(scope="module")
def page(full_run: Path) -> str:
    return page_of(full_run)


def test_headline_and_numbers(page: str):
    assert "12 new critic versions by swap (median 5 ms) and 1 by Triton reload (median 900 ms)" in page
    assert "The reward rose by 2.000" in page
    assert "The mean reward was 0.000 before and 2.000 after." in page
    assert "Largest gains" in page
    assert "PPO never saw" not in page
    for key in SUMMARY_KEYS:
        assert (f"<code>{key}</code>" in page) == (not key.startswith(("process_reward_", "steps_")))
    assert page.count("<figure>") == 8


def test_texts_are_escaped(page: str):
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; great" in page
    assert "<em>It &lt;b&gt;is&lt;/b&gt;</em> thing" in page


def test_the_page_needs_nothing_else_and_names_no_machine(page: str, full_run: Path):
    assert str(full_run.parent) not in page
    linked = re.findall(r'(?:src|href)="([^"]{5})', page)
    assert set(linked) == {"data:"}
    assert "url(" not in page
    assert "@import" not in page


def test_same_run_same_bytes(full_run: Path):
    first, second = (as_svg(draw_distinct, load_run(full_run)) for _ in range(2))
    assert first == second
    assert "<dc:date>" not in first


def test_the_page_says_what_was_trained_and_with_which_settings(tmp_path: Path):
    run_dir = write_run(tmp_path / "mine", validated=False, num_steps=2)
    actor = {
        "algorithm": {"name": "reinforce++"},
        "policy": {"checkpoint": "models/<tiny>"},
        "optimizer": {"lr": 0.125},
    }
    given = {"actor": actor, "server": {"http_port": 8123}}
    (run_dir / "settings.json").write_text(RunConfig.model_validate(given).model_dump_json())
    (run_dir / "changes.jsonl").write_text('{"step": 1, "changed": {"actor.kl.coef": [0.5, 0]}}\n')
    (run_dir / "policy").mkdir()
    text = page_of(run_dir)
    assert "After 2 steps of REINFORCE++, starting from &lt;tiny&gt;:" in text
    assert "<code>actor.optimizer.lr</code></td><td>0.125</td>" in text
    assert "<code>actor.kl.coef</code></td><td>0.5</td><td>0</td>" in text
    assert 'AutoModelForCausalLM.from_pretrained("mine/policy")' in text
    assert "8123" not in text
    assert "<code>actor.steps</code>" not in text, "a default"


def test_a_run_without_validation(tmp_path: Path):
    run_dir = write_run(tmp_path / "short", validated=False, num_steps=2)
    text = page_of(run_dir)
    assert "The mean training reward was 0.100 in the first step and 0.200 in the last." in text
    assert "Texts before and after" not in text
    assert "held-out" not in text
    assert "<h2>Texts</h2>" not in text, "it logged none"
    write_curves(load_run(run_dir), tmp_path / "short.png")
    assert (tmp_path / "short.png").stat().st_size > 10_000


@pytest.mark.parametrize(("num_texts", "shown"), [(3, 3), (16, 16), (40, 16)])
def test_a_run_without_validation_shows_texts_of_its_rollouts(tmp_path: Path, num_texts: int, shown: int):
    run_dir = write_run(tmp_path / "short", validated=False, num_steps=2)
    rows = [
        {"step": k, "prompt": "It <b>is</b>", "response": f"{EVIL} {k}.", "reward": None if k == 2 else -0.001}
        for k in range(1, num_texts + 1)
    ]
    (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = page_of(run_dir)
    assert section.count("<em>It &lt;b&gt;is&lt;/b&gt;</em>") == shown
    assert "<script" not in section
    assert f"great {num_texts}.</td><td class=n>+0.00</td>" in section
    assert "great 2.</td><td class=n>–</td>" in section
    assert ("Last steps" in section) == (shown == 16)
    if num_texts == 40:
        assert "great 8." in section
        assert "great 9." not in section
        assert "great 32." not in section


def test_each_share_has_a_scale_of_its_own(full_run: Path):
    """Distinct bigrams of 0.05 were a flat line at the bottom of an axis up to 1.25."""
    tops = []
    for draw in (draw_distinct, draw_ended):
        axes = Figure().subplots()
        draw(axes, load_run(full_run))
        tops.append(axes.get_ylim()[1])
    assert tops == pytest.approx([0.055, 1.03])


def test_each_change_of_a_live_reward_model_is_marked(tmp_path: Path):
    folder = write_run(tmp_path / "live")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:12]]
    served = [0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 2, 2]
    for line, version in zip(lines, served, strict=True):
        line["train_rollouts/reward_version"] = version
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    finish_run(folder, server_failures=0, peak_rss_mb=1.0, seconds_total=1.0)
    axes = Figure().subplots()
    draw_reward(axes, load_run(folder))
    marks = [
        line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--" and len(set(line.get_xdata())) == 1
    ]
    assert marks == [4, 8, 11]
    assert [text.get_text() for text in axes.texts] == ["v1", "v3", "v2"]
    write_curves(load_run(folder), folder / "curves.png")


def test_what_an_axis_leaves_out_and_a_resume_with_other_settings_are_marked(tmp_path: Path):
    folder = write_run(tmp_path / "new")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:12]]
    lines[1]["train_rollouts/explained_variance"] = -1234.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "changes.jsonl").write_text('{"step": 7, "changed": {"actor.kl.coef": [0.5, 0]}}\n')
    labels = {}
    for draw in (draw_explained_variance, draw_reward):
        axes = Figure().subplots()
        draw(axes, load_run(folder))
        labels |= {line.get_label(): line.get_xdata()[0] for line in axes.lines}
    assert "training batch, served version, lowest -1,234" in labels
    assert labels["resumed with other settings"] == 7.5
    assert "the estimate of a batch can be negative" in PICTURES[draw_kl][0]


def test_figures_of_a_table_are_rounded():
    assert shown([1.1695196736250069, -250.4, 3]) == "[1.170, -250, 3]"


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [(-0.004, ".2f", "0.00"), (-0.006, ".2f", "-0.01"), (-0.0001, "+.3f", "+0.000"), (-1234.5, ",.0f", "-1,234")],
)
def test_what_rounds_to_0_has_no_minus(value: float, spec: str, text: str):
    assert formatted(value, spec) == text


@pytest.mark.parametrize("validated", [True, False])
def test_a_run_without_a_critic_has_no_words_and_no_pictures_of_it(tmp_path: Path, validated: bool):
    run_dir = write_run(tmp_path / "mine", validated=validated, critic=False)
    text = page_of(run_dir)
    assert not re.search("critic|version|reload|PPO", re.sub(r'src="[^"]*"', "", text))
    run = load_run(run_dir)
    assert list(pictures(run)) == [draw_reward, draw_kl, draw_step_time, draw_distinct, draw_ended]
    assert text.count("<figure>") == 5
    assert "<td class=n>–</td>" not in text
    write_curves(load_run(run_dir), tmp_path / "curves.png")


def test_pictures_without_data_leave_no_axes(tmp_path: Path):
    """A run without a penalty need not measure the KL."""
    run_dir = write_run(tmp_path / "mine", validated=False, critic=False, num_steps=3)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()[:3]]
    kept = [{key: row[key] for key in row if "kl" not in key} for row in rows]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    run = load_run(run_dir)
    assert list(pictures(run)) == [draw_reward, draw_step_time, draw_distinct, draw_ended]
    axes = Figure().subplots()
    draw_reward(axes, run)
    assert axes.get_legend_handles_labels()[1] == ["per step"]
    write_curves(load_run(run_dir), tmp_path / "curves.png")


def test_curves_are_wide_enough_for_a_readme(full_run: Path, tmp_path: Path):
    write_curves(load_run(full_run), tmp_path / "curves.png")
    header = (tmp_path / "curves.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert 1200 <= width <= 1600
    assert 800 <= height <= 1200


def test_a_folder_without_a_run_is_named(tmp_path: Path):
    with pytest.raises(RlhfError, match=f"{tmp_path} is no run"):
        load_run(tmp_path)


@pytest.mark.parametrize(("num_pairs", "sizes"), [(100, [8, 8, 8]), (24, [8, 8, 8]), (7, [3, 2, 2]), (1, [1])])
def test_picked_texts(num_pairs: int, sizes: list[int]):
    pair: Any = None  # only its scores matter
    groups = list(pick_texts([(pair, 1.0, 1.0 + i) for i in range(num_pairs)]).values())
    assert [len(group) for group in groups] == sizes
    gains = [after - before for group in groups for _, before, after in group]
    assert len(set(gains)) == sum(sizes)  # none twice
    assert gains[0] == num_pairs - 1
    if len(groups) == 3:
        assert groups[2][0][2] == 1.0  # the largest loss comes first in its group


def test_verdicts_are_honest():
    def said(low: float, high: float) -> str:
        return verdict("It", Gain(mean=(low + high) / 2, low=low, high=high))

    assert said(0.1, 0.3) == "It rose by 0.200, 95 % interval [0.100, 0.300]."
    assert said(-0.3, -0.1) == "It fell by 0.200, 95 % interval [-0.300, -0.100]."
    assert said(-0.1, 0.3) == "It did not change measurably: +0.100, and the 95 % interval [-0.100, 0.300] includes 0."


def test_phases_add_up_to_the_step():
    row = {"timers/generate": 1.0, "timers/train_time": 0.5, "timers/step_time": 2.0}
    seconds = phase_seconds(row)
    assert (seconds["generate"], seconds["policy update"], seconds["other"]) == (1.0, 0.5, 0.5)
    assert sum(seconds.values()) == 2.0
    assert phase_seconds({"timers/generate": 3.0, "timers/step_time": 2.0})["other"] == 0.0  # phases may overlap


def test_series_leaves_out_what_is_no_number():
    rows = [{"step": 1, "x": None}, {"step": 2, "x": float("nan")}, {"step": 3}, {"step": 4, "x": 5}]
    assert series(rows, "x") == ([4], [5.0])
