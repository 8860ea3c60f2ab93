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

from python_backend.config import RunConfig
from tools.report.curves import (
    CAPTIONS,
    draw_distinct,
    draw_ended,
    draw_explained_variance,
    draw_kl,
    draw_reward,
    draw_step_time,
    drawn,
    panels,
    svg,
    write_curves,
)
from tools.report.data import Gain, UnreadableRun, formatted, load_run, phase_seconds, series
from tools.report.page import highlight, pick_texts, shown, verdict, word_pattern, write_report
from tools.report.summary import SUMMARY_KEYS, Pair, write_summary

EVIL = " <script>alert('x')</script> & great"


def write_run(run_dir: Path, *, gold: bool, validated: bool = True, critic: bool = True, num_steps: int = 12) -> Path:
    run_dir.mkdir()
    steps = range(1, num_steps + 1)
    metrics = [
        {
            "step": k,
            "time": 100.0 + 2 * k,
            "train_rollouts/rewards": 0.1 * k,
            "train_rollouts/rewards_with_kl": 0.08 * k,
            "train_rollouts/init_policy_kl_per_sequence": 0.2 * k,
            "train_rollouts/distinct2": 0.05,
            "train_rollouts/fraction_of_samples_properly_ended": 0.9,
            "timers/generate": 1.0,
            "timers/train_time": 0.5,
            "timers/step_time": 2.0,
            **(
                {
                    "train_rollouts/explained_variance": float("nan") if k == 1 else 0.04 * k,
                    "train_rollouts/weights_version": k - 1,
                    "timers/critic_wait": 0.1,
                }
                if critic
                else {}
            ),
        }
        for k in steps
    ]
    swaps = [
        {"step": k, "time": 101.0 + 2 * k, "weights_version": k, "reload": "swap", "reload_ms": 5.0} for k in steps
    ]
    triton = {
        "step": 3,
        "time": 200.0,
        "weights_version": 3,
        "reload": "triton",
        "reload_ms": 900.0,
        "reason": "save",
    }
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 13, "ti')
    if critic:
        (run_dir / "critic_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*swaps, triton]))
    if validated:
        rows = [
            {"prompt_id": f"p{i}", "when": when, "prompt": "It <b>is</b>", "response": text, "reward": reward}
            for i in range(30)
            for when, text, reward in (
                ("before", f" thing {i}.", 0.0),
                ("after", EVIL if i == 0 else f" good thing {i}.", 1.0 + i % 3),
            )
        ]
        (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    validations = dict.fromkeys(("reward_before", "reward_after", "kl_final"), 0.5) if validated else {}
    critics = dict.fromkeys(("weights_version", "critic_updates", "failed_critic_updates"), num_steps) if critic else {}
    explained = dict.fromkeys(("ev_v0", "ev_last"), 0.5) if critic and validated else {}
    always = {"steps": num_steps, "failed_requests": 0, "masked_samples": 0, "seconds_per_step": 2.0}
    (run_dir / "actor_summary.json").write_text(json.dumps({**validations, **critics, **explained, **always}))
    write_summary(run_dir, gold=gold, server_failures=0, peak_rss_mb=100.0, seconds_total=50.0)
    return run_dir


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("full") / "demo", gold=True)


def test_of_a_long_run_the_report_reads_every_nth_step(tmp_path: Path):
    """The pictures of a run of months were a page of 77 MB, made in minutes."""
    run = load_run(write_run(tmp_path / "long", gold=False, num_steps=5000))
    steps = [row["step"] for row in run.steps]
    assert steps == list(range(1, 5000, 4))
    assert [row["step"] for row in run.critic if row["reload"] == "swap"] == steps
    assert [row["step"] for row in run.critic if row["reload"] == "triton"] == [3], "rare ones are all there"
    assert (run.summary["reloads_swap"], run.summary["reloads_triton"]) == (5000, 1)
    assert len(panels(run)) == 8


@pytest.fixture(scope="module")
def page(full_run: Path) -> str:
    return write_report(full_run).read_text(encoding="utf-8")


def test_headline_and_numbers(page: str):
    assert "The gold score, which PPO never saw, rose by 0." in page
    assert "without “good”, the word that gained most," in page
    assert "12 new critic versions by swap (median 5 ms) and 1 by Triton reload (median 900 ms)" in page
    for key in SUMMARY_KEYS:
        assert (f"<code>{key}</code>" in page) == (not key.startswith(("process_reward_", "steps_")))
    assert page.count("<figure>") == 9


def test_texts_are_escaped(page: str):
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; <mark>great</mark>" in page
    assert "<em>It &lt;b&gt;is&lt;/b&gt;</em> thing" in page


def test_the_page_needs_nothing_else_and_names_no_machine(page: str, full_run: Path):
    assert str(full_run.parent) not in page
    linked = re.findall(r'(?:src|href)="([^"]{5})', page)
    assert set(linked) == {"data:"}
    assert "url(" not in page
    assert "@import" not in page


def test_marked_words_are_escaped_too():
    # The lexicon rates emoticons.
    assert highlight("I <3 &<b>", word_pattern(["<3"])) == "I <mark>&lt;3</mark> &amp;&lt;b&gt;"
    assert highlight("I <3", word_pattern([])) == "I &lt;3"


def test_same_run_same_bytes(full_run: Path):
    first, second = (svg(draw_distinct, load_run(full_run)) for _ in range(2))
    assert first == second
    assert "<dc:date>" not in first


def test_the_page_says_what_was_trained_and_with_which_settings(tmp_path: Path):
    run_dir = write_run(tmp_path / "mine", gold=False, validated=False, num_steps=2)
    actor = {
        "algorithm": {"name": "reinforce++"},
        "policy": {"checkpoint": "models/<tiny>"},
        "optimizer": {"lr": 0.125},
    }
    given = {"actor": actor, "server": {"http_port": 8123}}
    (run_dir / "settings.json").write_text(RunConfig.model_validate(given).model_dump_json())
    (run_dir / "changes.jsonl").write_text('{"step": 1, "changed": {"actor.kl.coef": [0.5, 0]}}\n')
    (run_dir / "policy").mkdir()
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "After 2 steps of REINFORCE++, starting from &lt;tiny&gt;:" in text
    assert "<code>actor.optimizer.lr</code></td><td>0.125</td>" in text
    assert "<code>actor.kl.coef</code></td><td>0.5</td><td>0</td>" in text
    assert 'AutoModelForCausalLM.from_pretrained("mine/policy")' in text
    assert "8123" not in text
    assert "<code>actor.steps</code>" not in text, "a default"


def test_a_run_without_gold(tmp_path: Path):
    text = write_report(write_run(tmp_path / "mine", gold=False, num_steps=2)).read_text(encoding="utf-8")
    assert "which PPO never saw" not in text
    assert "The reward rose by 2.000" in text
    assert "The mean reward was 0.000 before and 2.000 after." in text
    assert "Largest gains" in text
    assert text.count("<figure>") == 8


def test_a_run_without_validation(tmp_path: Path):
    run_dir = write_run(tmp_path / "short", gold=False, validated=False, num_steps=2)
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert "The mean training reward was 0.100 in the first step and 0.200 in the last." in text
    assert "Texts before and after" not in text
    assert "held-out" not in text
    assert "<h2>Texts</h2>" not in text, "it logged none"
    write_curves(run_dir, tmp_path / "short.png")
    assert (tmp_path / "short.png").stat().st_size > 10_000


@pytest.mark.parametrize(("num_texts", "shown"), [(3, 3), (16, 16), (40, 16)])
def test_a_run_without_validation_shows_texts_of_its_rollouts(tmp_path: Path, num_texts: int, shown: int):
    run_dir = write_run(tmp_path / "short", gold=False, validated=False, num_steps=2)
    rows = [
        {"step": k, "prompt": "It <b>is</b>", "response": f"{EVIL} {k}.", "reward": None if k == 2 else -0.001}
        for k in range(1, num_texts + 1)
    ]
    (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = write_report(run_dir).read_text(encoding="utf-8")
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
    folder = write_run(tmp_path / "live", gold=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:12]]
    served = [0, 0, 0, 1, 1, 1, 1, 3, 3, 3, 2, 2]
    for line, version in zip(lines, served, strict=True):
        line["train_rollouts/reward_version"] = version
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_summary(folder, gold=False, server_failures=0, peak_rss_mb=1.0, seconds_total=1.0)
    axes = Figure().subplots()
    draw_reward(axes, load_run(folder))
    marks = [
        line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--" and len(set(line.get_xdata())) == 1
    ]
    assert marks == [4, 8, 11]
    assert [text.get_text() for text in axes.texts] == ["v1", "v3", "v2"]
    write_curves(folder, folder / "curves.png")


def test_what_an_axis_leaves_out_and_a_resume_with_other_settings_are_marked(tmp_path: Path):
    folder = write_run(tmp_path / "new", gold=False)
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
    assert "the estimate of a batch can be negative" in CAPTIONS[draw_kl]


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
    run_dir = write_run(tmp_path / "mine", gold=False, validated=validated, critic=False)
    text = write_report(run_dir).read_text(encoding="utf-8")
    assert not re.search("critic|version|reload|PPO", re.sub(r'src="[^"]*"', "", text))
    run = load_run(run_dir)
    assert drawn(run) == [draw_reward, draw_kl, draw_step_time, draw_distinct, draw_ended]
    assert text.count("<figure>") == 5
    assert "<td class=n>–</td>" not in text
    write_curves(run_dir, tmp_path / "curves.png")


def test_pictures_without_data_leave_no_axes(tmp_path: Path):
    """A run without a penalty need not measure the KL."""
    run_dir = write_run(tmp_path / "mine", gold=False, validated=False, critic=False, num_steps=3)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()[:3]]
    kept = [{key: row[key] for key in row if "kl" not in key} for row in rows]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    run = load_run(run_dir)
    assert drawn(run) == [draw_reward, draw_step_time, draw_distinct, draw_ended]
    axes = Figure().subplots()
    draw_reward(axes, run)
    assert axes.get_legend_handles_labels()[1] == ["per step"]
    assert [caption for caption, _ in panels(run)] == [CAPTIONS[draw] for draw in drawn(run)]
    write_curves(run_dir, tmp_path / "curves.png")


def test_curves_are_wide_enough_for_a_readme(full_run: Path, tmp_path: Path):
    write_curves(full_run, tmp_path / "curves.png")
    header = (tmp_path / "curves.png").read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert 1200 <= width <= 1600
    assert 800 <= height <= 1200


def test_a_folder_without_a_run_is_named(tmp_path: Path):
    with pytest.raises(UnreadableRun, match=f"{tmp_path} is no run"):
        write_report(tmp_path)


def pair(gain: float | None, number: int) -> Pair:
    texts: dict[str, Any] = dict.fromkeys(("response_before", "response_after", "text_before", "text_after"), "x")
    return Pair(
        prompt_id=str(number),
        prompt="p",
        **texts,
        reward_before=0.0,
        reward_after=gain,
        gold_before=None,
        gold_after=None,
    )


@pytest.mark.parametrize(("num_pairs", "sizes"), [(100, [8, 8, 8]), (24, [8, 8, 8]), (7, [3, 2, 2]), (1, [1])])
def test_picked_texts(num_pairs: int, sizes: list[int]):
    pairs = [pair(float(i), i) for i in range(num_pairs)]
    groups = pick_texts([*pairs, pair(None, -1)], gold=False)
    assert [len(group) for _, group in groups] == sizes
    gains = [gain for _, group in groups for _, gain in group]
    assert len(set(gains)) == sum(sizes)  # none twice
    assert gains[0] == num_pairs - 1
    if len(groups) == 3:
        assert groups[2][1][0][1] == 0.0  # the largest loss comes first in its group


def test_verdicts_are_honest():
    def said(low: float, high: float) -> str:
        return verdict("It", Gain(label="", mean=(low + high) / 2, low=low, high=high))

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
