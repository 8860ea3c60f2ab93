"""The report: its data counted by hand, the page of synthetic and recorded runs, the command, and the progress lines.

Drawing a page takes seconds, so each kind of folder is drawn once.
"""

import json
import math
import re
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from recorded_run import RecordedRun
from samples import a_sample
from synthetic_run import EVIL, write_run

from rlhf_triton.actor.data.recorded import SampledTurn
from rlhf_triton.actor.data.rollout_rows import Group, Score
from rlhf_triton.actor.data.sample_records import record_of
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.store.jsonl import read_jsonl
from rlhf_triton.store.record_log import RecordLog, StoredRecord
from rlhf_triton.store.run_lock import only_actor, only_run
from rlhf_triton.tools.report.conversations import ReportConversation
from rlhf_triton.tools.report.curves import (
    CURVES,
    as_svg,
    pictures,
    write_curves,
)
from rlhf_triton.tools.report.data import SUMMARY_KEYS, finish_run, formatted, load_run, read_steps, series
from rlhf_triton.tools.report.page import format_value, main, write_page
from rlhf_triton.tools.report.progress import RunProgress
from rlhf_triton.tools.report.sample_pairs import Gain, read_pairs
from rlhf_triton.tools.report.samples import shown_steps

ACTOR = {
    "steps": 2,
    "reward_before": 9.0,
    "reward_after": 9.0,
    "kl_final": 1.5,
    "ev_v0": -0.1,
    "ev_last": 0.5,
    "weights_version": 2,
    "critic_updates": 2,
    "failed_critic_updates": 0,
    "failed_requests": 0,
    "masked_samples": 0,
    "steps_without_signal": 1,
    "retries": 1,
    "seconds_total": 10.0,
    "seconds_per_step": 2.5,
}
CRITIC = [
    {"step": 1, "time": 1.0, "weights_version": 1, "reload": "swap", "reload_ms": 4.0},
    {"step": 2, "time": 2.0, "weights_version": 2, "reload": "swap", "reload_ms": 8.0},
    {"step": 3, "time": 3.0, "weights_version": 2, "error": "skipped"},
]
MEASURED = {"server_failures": 0, "peak_rss_mb": 512.0, "seconds_total": 60.0}


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path, rows, torn=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn, encoding="utf-8")


def sample(prompt_id, when, response, reward, prompt="It is"):
    return {"prompt_id": prompt_id, "when": when, "prompt": prompt, "response": response, "reward": reward}


SAMPLES = [
    sample("a", "before", " a list of a list", 0.0),
    sample("b", "before", " a list of a list", 1.0),
    sample("a", "after", " a great thing.", 2.0),
    sample("b", "after", " a good thing.", 4.0),
]


class TestData:
    @pytest.fixture
    def run_dir(self, tmp_path):
        (tmp_path / "actor_summary.json").write_text(json.dumps(ACTOR))
        write_lines(tmp_path / "critic_metrics.jsonl", CRITIC, torn='{"step": 3, "rel')
        write_lines(tmp_path / "samples.jsonl", SAMPLES)
        return tmp_path

    def test_summary_matches_hand_computed_values(self, run_dir):
        summary = finish_run(run_dir, **MEASURED).summary
        of_steps = ("process_reward_before", "process_reward_after", "steps_before", "steps_after")
        assert tuple(summary) == tuple(key for key in SUMMARY_KEYS if key not in of_steps)
        assert json.loads((run_dir / "summary.json").read_text()) == summary
        expected = {
            "reward_before": 0.5,  # the texts' own rewards win over what the actor said of them
            "reward_after": 3.0,
            "reward_gain_ci95": [2.0, 3.0],  # the gains of the two pairs
            "unique_before": 0.5,
            "unique_after": 1.0,
            "reloads": 2,
            "reload_ms_p50": 6.0,
            "kl_final": 1.5,
            "peak_rss_mb": 512.0,
            "seconds_total": 60.0,
        }
        assert {key: summary[key] for key in expected} == expected

    def test_summary_omits_values_that_were_not_measured(self, run_dir):
        """Nor what an earlier run in this folder measured with its critic."""
        critic = {"ev_v0", "ev_last", "weights_version", "critic_updates"}
        actor = {key: value for key, value in ACTOR.items() if key not in {*critic, "reward_before", "kl_final"}}
        (run_dir / "actor_summary.json").write_text(json.dumps(actor | {"failed_critic_updates": float("nan")}))
        (run_dir / "samples.jsonl").unlink()
        summary = finish_run(run_dir, **MEASURED).summary
        reloads = {"reloads", "reload_ms_p50"}
        of_texts = {"unique_before", "unique_after"}
        assert not summary.keys() & {*critic, *reloads, *of_texts, "failed_critic_updates", "kl_final"}
        assert None not in summary.values()

    @pytest.mark.parametrize("name", ["actor_summary.json", "critic_metrics.jsonl", "samples.jsonl"])
    def test_finish_run_names_missing_files(self, run_dir, name):
        (run_dir / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            finish_run(run_dir, **MEASURED)

    @pytest.mark.parametrize(
        "rows",
        [
            SAMPLES[:3],
            [*SAMPLES[:3], sample("b", "after", " a good thing.", 4.0, prompt="another file's")],
            [row | {"prompt_id": "a"} for row in SAMPLES[:3]],
        ],
        ids=["validated once", "another prompt of this id", "ids that name several prompts"],
    )
    def test_report_compares_only_prompts_validated_before_and_after(self, run_dir, rows):
        write_lines(run_dir / "samples.jsonl", rows)
        assert finish_run(run_dir, **MEASURED).summary["reward_gain_ci95"] == [2.0, 2.0]

    def test_a_run_that_validates_only_since_a_resume_or_fork_has_a_report_without_pairs(self, run_dir):
        write_lines(run_dir / "samples.jsonl", SAMPLES[2:])
        run = finish_run(run_dir, **MEASURED)
        assert run.pairs == []
        assert not run.summary.keys() & {"unique_before", "reward_gain_ci95"}

    def test_read_jsonl_tolerates_only_a_torn_last_line(self, tmp_path):
        path = tmp_path / "x.jsonl"
        row = sample("a", "before", "one\u2028two\x85three", 0.0)
        path.write_text(json.dumps(row, ensure_ascii=False) + '\n{"a": 2', encoding="utf-8")
        assert read_jsonl(path) == [row]
        for content, message in (('{"a": 1}\n{"a"\n{"a": 3}\n', "line 2"), ("[1]\n", "not a JSON object")):
            path.write_text(content)
            with pytest.raises(ValueError, match=message):
                read_jsonl(path)

    def test_read_steps_keeps_the_last_line_of_a_repeated_step(self, tmp_path):
        write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "x": 0}, {"step": 2, "x": 1}, {"step": 2, "x": 2}])
        assert read_steps(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 0}, {"step": 2, "x": 2}]

    @pytest.mark.parametrize("last", [1, 3, 4, 8, 16])
    def test_thinned_steps_end_with_the_last_one(self, tmp_path, last):
        write_lines(tmp_path / "metrics.jsonl", [{"step": step} for step in range(1, last + 1)])
        steps = [row["step"] for row in read_steps(tmp_path / "metrics.jsonl", 3)]
        assert steps == {1: [1], 3: [1, 2, 3], 4: [1, 3, 4], 8: [1, 5, 8], 16: [1, 9, 16]}[last]

    def test_read_pairs_joins_prompt_and_response_and_keeps_conversations(self, run_dir):
        assert read_pairs(run_dir)[0].text_after == "It is a great thing."
        write_lines(run_dir / "samples.jsonl", [row | {"response": row["response"].strip()} for row in SAMPLES])
        assert read_pairs(run_dir)[0].text_after == "It is a great thing."
        talk = {"turns": [], "turn_rewards": []}
        rows = [row | talk | {"prompt": f"You begin {row['when']}."} for row in SAMPLES]
        write_lines(run_dir / "samples.jsonl", rows)
        pair = read_pairs(run_dir)[0]
        talks = pair.conversation_before, pair.conversation_after
        assert [talk and talk.prompt for talk in talks] == ["You begin before.", "You begin after."]

    def test_series_and_number_formats_match_hand_computed_values(self):
        rows = [{"step": 1, "x": None}, {"step": 2, "x": float("nan")}, {"step": 3}, {"step": 4, "x": 5}]
        assert series(rows, "x") == ([4], [5.0])
        assert format_value([1.1695196736250069, -250.4, 3]) == "[1.170, -250, 3]"
        rounded = [(-0.004, ".2f"), (-0.006, ".2f"), (-0.0001, "+.3f"), (-1234.5, ",.0f")]
        assert [formatted(value, spec) for value, spec in rounded] == ["0.00", "-0.01", "+0.000", "-1,234"]

    def test_gain_interval_resamples_pairs_and_matches_the_normal_approximation(self):
        def interval(before, after):
            no_text = None
            gain = Gain.of([(no_text, *scores) for scores in zip(before, after, strict=True)])
            return gain.low, gain.high

        assert interval([0.0, 1.0, 2.0], [0.5, 1.5, 2.5]) == (0.5, 0.5)
        rng = np.random.default_rng(1)
        before = rng.normal(0.0, 5.0, size=400)
        after = before + rng.normal(0.1, 0.5, size=400)
        half = 1.96 * float(np.std(after - before)) / 20.0
        middle = float(np.mean(after - before))
        found = interval(before, after)
        assert found == pytest.approx((middle - half, middle + half), abs=0.01)


def page_of(run_dir):
    write_page(load_run(run_dir), run_dir / "report.html")
    return (run_dir / "report.html").read_text(encoding="utf-8")


class TestPage:
    """The page of synthetic run folders."""

    def test_page_is_self_contained_escaped_and_names_no_machine(self, tmp_path):
        full_run = write_run(tmp_path / "demo")
        page = page_of(full_run)
        for text in (
            "12 new critic versions (median 5 ms)",
            "The reward rose by 2.000",
            "The mean reward was 0.000 before and 2.000 after.",
            "Largest gains",
            "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; great",
            "<em>It &lt;b&gt;is&lt;/b&gt;</em> thing",
        ):
            assert text in page
        assert not re.search(r"PPO never saw|<script|url\(|@import", page)
        assert str(tmp_path) not in page
        widths = re.findall(r"(?<!max-)(?:width: |minmax\()(\d+)px", page)
        assert max(map(int, widths)) < 390, "a rule is wider than a phone"
        for key in SUMMARY_KEYS:
            assert (f"<code>{key}</code>" in page) == (not key.startswith(("process_reward_", "steps_")))
        assert page.count("<figure>") == 8
        assert set(re.findall(r'(?:src|href)="([^"]{5})', page)) == {"data:"}
        first, second = (as_svg(CURVES[1], load_run(full_run)) for _ in range(2))
        assert first == second
        assert "<dc:date>" not in first
        write_curves(load_run(full_run), tmp_path / "curves.png")
        width, height = struct.unpack(">II", (tmp_path / "curves.png").read_bytes()[16:24])
        assert 1200 <= width <= 1600, "the picture is too small or large for a README"
        assert 800 <= height <= 1200

    def test_report_thins_long_runs(self, tmp_path):
        """A month-long run's pictures made a page of 77 MB and took minutes."""
        run = load_run(write_run(tmp_path / "long", num_steps=5000))
        steps = [row["step"] for row in run.steps]
        assert steps == [*range(1, 5000, 4), 5000]
        assert run.summary["reloads"] == 5000
        assert len(pictures(run)) == 8

    @pytest.mark.usefixtures("no_pictures")
    def test_page_shows_the_algorithm_changed_settings_and_policy(self, tmp_path):
        run_dir = write_run(tmp_path / "mine", validated=False, num_steps=2)
        actor = {
            "algorithm": {"name": "reinforce++"},
            "policy": {"model": "models/<tiny>"},
            "optimizer": {"lr": 0.125},
        }
        given = {"actor": actor, "server": {"http_port": 8123}}
        (run_dir / "settings.json").write_text(RunConfig.model_validate(given).model_dump_json())
        (run_dir / "changes.jsonl").write_text('{"step": 1, "changed": {"actor.kl.coef": [0.5, 0]}}\n')
        (run_dir / "policy").mkdir()
        text = page_of(run_dir)
        for expected in (
            "After 2 steps of REINFORCE++, starting from &lt;tiny&gt;:",
            "<code>actor.optimizer.lr</code></td><td>0.125</td>",
            "<code>actor.kl.coef</code></td><td>0.5</td><td>0</td>",
            'AutoModelForCausalLM.from_pretrained("policy")',
            "The mean training reward was 0.100 in the first step and 0.200 in the last.",
        ):
            assert expected in text
        # No machine, no default, and without validation and logged texts nothing of them.
        write_page(load_run(run_dir), tmp_path / "page.html")
        assert '.from_pretrained("mine/policy")' in (tmp_path / "page.html").read_text(), (
            "the policy's path is not relative to the page's folder"
        )
        assert not re.search("8123|<code>actor.steps</code>|Texts before and after|held-out|<h2>Texts</h2>", text)

    @pytest.mark.usefixtures("no_pictures")
    @pytest.mark.parametrize(("num_texts", "shown"), [(3, 3), (40, 16)])
    def test_page_without_validation_shows_rollout_texts(self, tmp_path, num_texts, shown):
        run_dir = write_run(tmp_path / "short", validated=False, num_steps=2)
        rows = [
            {"step": k, "prompt": "It <b>is</b>", "response": f"{EVIL} {k}.", "reward": None if k == 2 else -0.001}
            for k in range(1, num_texts + 1)
        ]
        write_lines(run_dir / "rollouts.jsonl", rows)
        section = page_of(run_dir)
        assert section.count("<em>It &lt;b&gt;is&lt;/b&gt;</em>") == shown
        assert "<script" not in section
        assert f"great {num_texts}.</td><td class=n>+0.00</td>" in section
        assert "great 2.</td><td class=n>–</td>" in section
        assert ("Last steps" in section) == (shown == 16)
        present = [k for k in (8, 9, 32) if f"great {k}." in section]
        assert present == ([8] if num_texts == 40 else [])

    def test_curves_mark_a_resume_with_other_settings_and_omit_a_missing_kl(self, tmp_path):
        folder = write_run(tmp_path / "new", critic=False, validated=False, num_steps=3)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:3]]
        write_lines(folder / "metrics.jsonl", [{key: row[key] for key in row if "kl" not in key} for row in rows])
        (folder / "changes.jsonl").write_text('{"step": 2, "changed": {"actor.kl.coef": [0.5, 0]}}\n')
        run = load_run(folder)
        axes = Figure().subplots()
        CURVES[0](axes, run)
        marks = {line.get_xdata()[0]: line.get_label() for line in axes.lines if len(set(line.get_xdata())) == 1}
        assert marks == {2.5: "resumed with other settings"}
        titles = [draw.title for _, draw in pictures(run)]
        assert titles[:3] == ["Reward", "Each reward, without its weight", "Seconds per step, by phase"]
        write_curves(run, tmp_path / "curves.png")


@pytest.fixture
def no_pictures(monkeypatch):
    """Skip the pictures where only a page's text is read; TestPage covers them."""
    monkeypatch.setattr("rlhf_triton.tools.report.page.as_svg", lambda draw, run: "<svg></svg>")


@pytest.mark.usefixtures("no_pictures")
class TestSections:
    """Sections that a run's own function adds to its report."""

    START = "from rlhf_triton import ReportSection\n\n\ndef sections(run):\n    "

    def page_of(self, folder, code):
        """Return the page of a run whose `report` names a function in a file with this code."""
        (folder / "my_report.py").write_text(code)
        run_dir = write_run(folder / "run", report=f"{folder}/my_report.py:sections", validated=False, num_steps=2)
        texts = [{"step": 1, "prompt": "p", "response": text, "reward": 0.0} for text in ("a <b>", "a b c")]
        write_lines(run_dir / "rollouts.jsonl", texts)
        return page_of(run_dir)

    def test_documented_report_section_example_works(self, tmp_path):
        docs = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
        found = re.search(r"```python\n(import rlhf_triton as rt\n\n\ndef sections.*?)```", docs.read_text(), re.DOTALL)
        page = self.page_of(tmp_path, found[1])
        assert "<h2>The longest responses</h2>" in page
        assert "<table><tr><th class=n>step</th><th class=n>words</th><th>response</th></tr>" in page
        assert "<td class=n>1</td><td class=n>2</td><td>a &lt;b&gt;</td>" in page

    def test_report_section_renders_all_its_fields(self, tmp_path):
        code = (
            'return [ReportSection(title="Texts", text="a < b", results=["It <rose>."], cards=[("mine", "1", "note")], '
            'figures={"mine": (0.12345, "A figure.")}, pictures={"My picture.": lambda axes, run: axes.plot([1, 2])})]'
        )
        page = self.page_of(tmp_path, self.START + code)
        for text in (
            "<p>a &lt; b</p>",
            "<li><b>It &lt;rose&gt;.</b></li>",
            "<small>mine</small><b>1</b>",
            'alt="My picture."',
            "<td><code>mine</code></td><td class=n>0.123</td><td>A figure.</td>",
        ):
            assert text in page
        assert page.count("<h2>Texts</h2>") == 1, "the built-in section stays"
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["mine"] == 0.12345

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("return [1]", "TypeError: it returned int, not rlhf_triton.ReportSection"),
            ('return [ReportSection(title="x", pictures={"y": lambda axes, run: 1 / 0})]', "ZeroDivisionError"),
        ],
    )
    def test_failing_report_section_is_named_and_the_page_is_still_written(self, tmp_path, code, error):
        page = self.page_of(tmp_path, self.START + code)
        assert "my_report.py:sections failed: " in page
        assert error in page
        assert "<h2>Numbers</h2>" in page


@pytest.mark.usefixtures("no_pictures")
class TestSamples:
    """Samples of the last steps, from a journal written by hand."""

    def recorded(self, folder, *, num_steps=1, num_tokens=3, recomputes=True, ahead=0, forwards=True):
        """Write a run whose steps have groups of two responses: one of `num_tokens` tokens, and one that failed."""
        run_dir = RecordedRun(folder).start().steps(*range(1, num_steps + 1)).finished(num_steps)
        log = RecordLog(run_dir / "sample_journal")
        tokens = [3, 4, *range(5, 5 + num_tokens)]
        columns = {
            "logprobs": np.array([0, 0] + [math.log(0.5)] * num_tokens, np.float32),
            "policy_logprobs": np.array([0, 0] + [math.log(0.125)] * num_tokens, np.float32),
            "policy_steps": np.array([-1, -1] + [7] * num_tokens),
        }
        if not forwards:
            columns["policy_logprobs"] = columns["logprobs"]
        values = np.arange(len(tokens), dtype=np.float32)
        whole = replace(a_sample(tokens, 2, name="a<b>"), score=Score(reward=0.25, values=values), **columns)
        failed = replace(a_sample([3, 4, 5], 2, name="a<b>"), score=Score(failure="too late"))
        whole, failed = (replace(row, prompt=replace(row.prompt, text="<b>It</b> " * 100)) for row in (whole, failed))
        for step in range(1, num_steps + 1):
            group = Group(((whole,), (failed,)))
            records = [record_of(group, step=step, number=number, seed=0) for number in range(3)]
            size = len(tokens) - 1 + 2  # positions of a group
            arrays = {"advantages": np.tile(np.arange(size, dtype=np.float32), 3)}
            if recomputes:
                arrays["old_logprobs"] = np.full(3 * size, math.log(0.25), np.float32)
            settings = {"actor": {"max_off_policy_steps": ahead}}
            header = {"kind": "step", "step": step, "groups": [0, 1, 2], "num_dropped": 0, "settings": settings}
            log.append(step, partial(list, [*records, StoredRecord(header, arrays)]))
        log.close()
        return run_dir

    def test_each_token_has_the_numbers_of_the_journal(self, tmp_path):
        (step,), problem = shown_steps(load_run(self.recorded(tmp_path / "run")))
        assert (step.step, len(step.samples), step.num_samples, problem) == (1, 4, 6, "")
        first, failed = step.samples[:2]
        shown = [
            (token.text, round(token.logprob, 3), token.value, token.advantage, token.ratio, token.version)
            for token in first.tokens
        ]
        assert shown == [
            ("5 ", -0.693, 1.0, 1.0, pytest.approx(0.5), 7),
            ("6 ", -0.693, 2.0, 2.0, pytest.approx(0.5), 7),
            ("7 ", -0.693, 3.0, 3.0, pytest.approx(0.5), 7),
        ]
        assert (first.reward, failed.reward, failed.failure) == (0.25, None, "too late")
        assert failed.tokens[0].advantage == 5.0, "a token shows the advantage of another position"
        for ahead, forwards, ratio in ((0, True, 0.25), (0, False, 1), (1, True, 0.25), (1, False, None)):
            run_dir = self.recorded(tmp_path / f"{ahead}{forwards}", recomputes=False, ahead=ahead, forwards=forwards)
            (step,), _ = shown_steps(load_run(run_dir))
            assert step.samples[0].tokens[0].ratio == (ratio and pytest.approx(ratio))

    def test_page_shows_the_last_steps_and_stays_bounded(self, tmp_path):
        page = page_of(self.recorded(tmp_path / "run", num_steps=5, num_tokens=1000))
        assert re.findall(r"<summary>(Step .*?)</summary>", page) == [f"Step {n}: 4 of 6 samples" for n in (3, 4, 5)]
        assert page.count("… 872 more tokens") == 3 * 2
        assert page.count("masked: too late") == 3 * 2
        assert "&lt;b&gt;It&lt;/b&gt;" in page
        assert "<td class=n>-0.693</td><td class=n>1.000</td><td class=n>+1.000</td><td class=n>0.500</td>" in page
        assert len(page) < 500_000

    def test_damaged_journal_is_named_and_the_page_is_still_written(self, tmp_path):
        run_dir = self.recorded(tmp_path / "run", num_steps=2)
        file = next((run_dir / "sample_journal" / "1").iterdir())
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        page = page_of(run_dir)
        assert f"<p>./sample_journal/1/{file.name} is damaged at byte" in page
        assert page.count(str(tmp_path)) == 1, "the page has the run's path elsewhere than in run.dir"
        assert "Step 2: 4 of 6 samples" in page
        assert "<h2>Numbers</h2>" in page


@pytest.mark.usefixtures("no_pictures")
class TestCommand:
    """The command on folders that the actor's recorder writes, during the run and afterwards."""

    def test_page_shows_conversations_turn_by_turn(self, tmp_path):
        call = '<tool_call>{"name": "look", "arguments": {"where": "<up>"}}</tool_call>'
        played = (
            {"role": "assistant", "content": f"I look. {call}"},
            {"role": "tool", "name": "look", "content": "a\nb"},
            {"role": "assistant", "content": "<tool_call>{up}</tool_call>"},
            {"role": "user", "content": "Wrong."},
        )
        turns = SampledTurn(2, 4, 0.5), SampledTurn(5, 7, -1.0)
        whole = {"turns": turns, "messages": played}
        talks = [whole, whole, {**whole, "truncated": "environment.max_turns"}, {"turns": (), "error": "worker died"}]
        run = RecordedRun(tmp_path / "run", talks=talks)
        run.start().steps(1, 2).validated("before", 0, 0.1).steps(3, 4).validated("after", 4, 0.2)
        folder = run.finished(4)
        page = page_of(folder)
        for text, count in (
            ("<small>+0.50</small><b>policy</b><span>I look. &lt;tool_call&gt;", 6 + 4),
            ("<b>look</b><span>a\nb</span>", 6 + 4),  # samples, and a training rollout of each step
            ("<small>-1.00</small><b>policy</b><span>&lt;tool_call&gt;{up}", 6 + 4),
            ("<b>environment</b><span>Wrong.</span>", 6 + 4),
            ("<p>ended</p>", 4 + 4),
            ("<p>truncated: environment.max_turns</p>", 2),
            ("<p>error: worker died</p>", 4),
            ("Failed environments: 1 of 4 prompts", 1),
        ):
            assert page.count(text) == count, text
        style = page[: page.index("</style>")]
        assert not re.search(r"^table[^{]* i\b", style, re.M), "the rule of a table's tokens would restyle other tables"
        row = {"prompt": "p", "turns": played, "turn_rewards": [0.5, -1.0], "turn_values": [0.25, 1.0]}
        other = ReportConversation.of({**row, "turn_rewards": [-1.0], "turn_values": [1.0]})
        assert [(message.reward, message.value) for message in other.messages] == [
            (None, None),
            (None, None),
            (-1.0, 1.0),
            (None, None),
        ]

    def grpo(self, folder):
        """Write a whole run with a reward function: no critic, no validation, no reference."""
        return RecordedRun(folder).start().steps(1, 2, 3, 4).finished(4)

    def test_report_omits_sections_of_unused_features(self, tmp_path, capsys):
        out = tmp_path / "page.html"
        assert main([str(self.grpo(tmp_path / "run")), "--out", str(out)]) == 0
        assert capsys.readouterr().out == f"report: {out}\n"
        page = out.read_text(encoding="utf-8")
        assert "After 4 steps of GRPO" in page
        assert "The mean training reward was 0.100 in the first step and 0.400 in the last." in page
        assert "<code>failed_requests</code>" in page
        assert "<small>failed requests</small>" not in page, "failed requests are shown although no model is served"
        words = r"null|None|NaN|n/a|–|critic|version|reload|KL|held-out|server's|gold|stopped|progress"
        assert not re.search(words, page)

    def test_page_of_a_run_before_and_after_its_first_step_has_no_curves(self, tmp_path):
        run = RecordedRun(tmp_path / "run", steps=1).start()
        run_dir = tmp_path / "run"
        with only_run(run_dir):
            page = page_of(run_dir)
        assert "In progress: no step has ended." in page
        assert "<figure>" not in page
        assert "<h2>Numbers" not in page
        assert "<code>actor.steps</code></td><td>1<" in page
        page = page_of(run.steps(1).finished(1))
        assert "After 1 step of GRPO" in page
        assert "<figure>" not in page, "there is a curve of a single step"

    def test_page_of_a_running_or_crashed_run_reports_its_last_step(self, tmp_path):
        run_dir = tmp_path / "run"
        held_out = tmp_path / "held.jsonl"
        held_out.write_text('{"prompt": "a"}\n')
        run = RecordedRun(run_dir, validation_prompts=held_out, validation_every=2).start()
        run.validated("before", 0, 0.0).steps(1, 2).validated("between", 2, 0.7)
        with only_actor(run_dir):
            page = page_of(run_dir)
        assert "In progress: step 2 of 4 has ended." in page
        for name in ("metrics.jsonl", "rollouts.jsonl", "validations.jsonl"):
            with (run_dir / name).open("a") as file:
                file.write('{"step": 3, "prom')
        page = page_of(run_dir)
        assert "The run stopped before its end: step 2 of 4 has ended." in page
        assert "The mean training reward was 0.100 in the first step and 0.200 in the last." in page
        assert "Texts before and after" not in page, "texts are shown although there are none after training"
        assert [row["reward"] for row in load_run(run_dir).validations] == [0.0, pytest.approx(0.7)]

    def test_a_resumed_run_does_not_show_the_summary_of_its_first_part(self, tmp_path):
        run_dir = self.grpo(tmp_path / "run")
        (run_dir / "summary.json").write_text(json.dumps({"steps": 4, "seconds_total": 77.0}))
        assert load_run(run_dir).summary["seconds_total"] == 77.0
        rows = lines_of(run_dir / "metrics.jsonl")
        write_lines(run_dir / "metrics.jsonl", [*rows, {**rows[-1], "step": 5}])
        run = load_run(run_dir)
        assert (run.is_finished, run.summary["steps"], "seconds_total" in run.summary) == (False, 5, False)

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["{}/none"], "{}/none is missing: name the folder of a run"),
            (["{}/empty"], "{}/empty is not a run's folder: it has neither settings.json nor metrics.jsonl"),
            (["{}/run", "--out", "{}/none/page"], "{}/none/page cannot be written: No such file or directory"),
            (["{}/damaged"], "the run in {}/damaged cannot be read: {}/damaged/metrics.jsonl line 1 is not JSON: "),
        ],
    )
    def test_report_command_errors_are_one_sentence(self, tmp_path, capsys, arguments, sentence):
        RecordedRun(tmp_path / "run").start().steps(1)
        for name in ("empty", "damaged"):
            (tmp_path / name).mkdir()
        (tmp_path / "damaged" / "metrics.jsonl").write_text('{"step"\n{"step": 2}\n')
        assert main([argument.replace("{}", str(tmp_path)) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {sentence.replace('{}', str(tmp_path))}")
        assert error.count("\n") == 1


# ---- the progress in a terminal and without one ----


def step_row(step, **more):
    return {
        "step": step,
        "time": 100.0 + 2 * step,
        "train_rollouts/rewards": 0.1 * step,
        "train_rollouts/init_policy_kl_per_sequence": 0.5,
        "tokens_per_s": 1234.5,
        "client/failed_requests": 0,
        "timers/generate": 1.0,
        "timers/train_time": 0.5,
        "timers/step_time": 2.0,
        **more,
    }


def append(path, *rows, torn=""):
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + torn)


SWAP = {"step": 1, "time": 103.0, "weights_version": 1, "reload": "swap", "reload_ms": 12.4}


def test_progress_prints_a_line_per_phase_step_and_validation(tmp_path, capsys):
    with RunProgress(tmp_path, 4) as progress:
        progress.phase("starting [bold]tritonserver[/bold]")
        progress.refresh()  # no file yet
        append(tmp_path / "critic_metrics.jsonl", SWAP)
        parts = {"reward_a": 0.25, "reward_b": 1.0, "reward_b_missing": 1.0, "useful_prompts": 0.5}
        second_row = step_row(2, **{f"train_rollouts/{name}": value for name, value in parts.items()})
        append(tmp_path / "metrics.jsonl", step_row(1), torn="[3]\nno json\n")
        append(tmp_path / "metrics.jsonl", second_row, torn='{"step": 3, ')
        append(tmp_path / "validations.jsonl", {"step": 0, "reward": 0.5, "kl": 0.25})
        print("a message")
        progress.refresh()
        validated = [{"step": 0, "reward": 0.5}, {"step": 2, "reward": None, "kl": None}]
        append(tmp_path / "new", *validated)  # as a run that resumes writes it
        (tmp_path / "new").replace(tmp_path / "validations.jsonl")
        progress.refresh()
        progress.log("another")
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == ["[0:00] starting [bold]tritonserver[/bold]", "a message"]
    first, second = out.splitlines()[2:4]
    assert first.startswith("step 1/4  reward +0.100  KL 0.50  tokens/s 1,234  weights version 1  reload 12 ms")
    assert "  reward +0.200  a +0.250  b +1.000  useful prompts 50%  KL 0.50  " in second
    assert "reload 12 ms  failed requests 0  2.0 s  ETA 0:04" in second
    validations = ["validation at step 0: reward +0.500, 0.25 nats of KL", "validation at step 2: reward unavailable"]
    assert out.splitlines()[4:] == [*validations, "another"]


def test_progress_after_resume_repeats_no_step_and_excludes_the_pause_from_eta(tmp_path, capsys):
    """The resumed actor rewrites metrics.jsonl."""
    append(tmp_path / "metrics.jsonl", *(step_row(k) for k in range(1, 6)))
    with RunProgress(tmp_path, 8) as progress:
        append(tmp_path / "new", *(step_row(k) for k in range(1, 4)))  # steps 4 and 5 are repeated
        (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
        progress.refresh()
        append(tmp_path / "metrics.jsonl", step_row(4) | {"time": 10_000.0})
        progress.refresh()
        later = (step_row(step) | {"time": 9_985.0 + 3 * step} for step in (6, 7))
        append(tmp_path / "metrics.jsonl", *later)  # read on leaving, at the latest
    lines = capsys.readouterr().out.splitlines()
    expected = [("step 4/8", "ETA 0:08"), ("step 6/8", "ETA 0:04"), ("step 7/8", "ETA 0:03")]
    assert [(line[:8], line[-8:]) for line in lines] == expected
