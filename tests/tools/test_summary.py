"""`tools.report.data` on run folders small enough to count by hand.
Given nothing but files written here; the gold lexicon is the real one.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from python_backend.store.jsonl import read_jsonl
from tools.report.data import SUMMARY_KEYS, finish_run, read_steps
from tools.report.pairs import distinct2, paired_ci95, read_pairs

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
    "retries": 1,
    "seconds_total": 10.0,
    "seconds_per_step": 2.5,
}
CRITIC = [
    {"step": 1, "time": 1.0, "weights_version": 1, "reload": "swap", "reload_ms": 4.0},
    {"step": 2, "time": 2.0, "weights_version": 2, "reload": "swap", "reload_ms": 8.0},
    {"step": 2, "time": 3.0, "weights_version": 2, "reload": "triton", "reload_ms": 900.0, "reason": "save"},
]
MEASURED = {"server_failures": 0, "peak_rss_mb": 512.0, "seconds_total": 60.0}


def write_lines(path: Path, rows: list[dict[str, Any]], torn: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn, encoding="utf-8")


def sample(prompt_id: str, when: str, response: str, reward: float | None, prompt: str = "It is") -> dict[str, Any]:
    return {"prompt_id": prompt_id, "when": when, "prompt": prompt, "response": response, "reward": reward}


SAMPLES = [
    sample("a", "before", " a list of a list", 0.0),
    sample("b", "before", " a list of a list", 1.0),
    sample("a", "after", " a great thing.", 2.0),
    sample("b", "after", " a good thing.", 4.0),
]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "actor_summary.json").write_text(json.dumps(ACTOR))
    write_lines(tmp_path / "critic_metrics.jsonl", CRITIC, torn='{"step": 3, "rel')
    write_lines(tmp_path / "samples.jsonl", SAMPLES)
    return tmp_path


def test_summary_counted_by_hand(run_dir: Path):
    summary = finish_run(run_dir, **MEASURED).summary
    of_steps = ("process_reward_before", "process_reward_after", "steps_before", "steps_after")
    assert tuple(summary) == tuple(key for key in SUMMARY_KEYS if key not in of_steps)
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    # The texts' own rewards win over what the actor said of them.
    assert (summary["reward_before"], summary["reward_after"]) == (0.5, 3.0)
    assert summary["reward_gain_ci95"] == [2.0, 3.0]  # the gains of the two pairs
    # Twice a-list, list-of, of-a, a-list: 3 distinct of 8. After: a-great, great-thing., a-good, good-thing.
    assert (summary["distinct2_before"], summary["distinct2_after"]) == (3 / 8, 1.0)
    assert (summary["unique_before"], summary["unique_after"]) == (0.5, 1.0)
    assert (summary["reloads_swap"], summary["reloads_triton"]) == (2, 1)
    assert (summary["swap_ms_p50"], summary["triton_reload_ms_p50"]) == (6.0, 900.0)
    assert (summary["kl_final"], summary["peak_rss_mb"], summary["seconds_total"]) == (1.5, 512.0, 60.0)


def test_without_validation(run_dir: Path):
    validated = {"reward_before", "reward_after", "kl_final", "ev_v0", "ev_last"}
    actor = {key: value for key, value in ACTOR.items() if key not in validated}
    (run_dir / "actor_summary.json").write_text(json.dumps(actor))
    (run_dir / "samples.jsonl").unlink()
    summary = finish_run(run_dir, **MEASURED).summary
    assert None not in summary.values()
    of_texts = {f"{what}_{when}" for what in ("distinct2", "unique") for when in ("before", "after")}
    assert not summary.keys() & (validated | of_texts)


def test_without_a_critic(run_dir: Path):
    """Not even where an earlier run in this folder had one."""
    critic = {"ev_v0", "ev_last", "weights_version", "critic_updates"}
    (run_dir / "actor_summary.json").write_text(json.dumps({k: v for k, v in ACTOR.items() if k not in critic}))
    summary = finish_run(run_dir, **MEASURED).summary
    reloads = {"reloads_swap", "reloads_triton", "swap_ms_p50", "triton_reload_ms_p50"}
    assert not summary.keys() & (critic | reloads)
    assert summary["reward_after"] == 3.0


def test_what_is_no_number_is_left_out(run_dir: Path):
    (run_dir / "actor_summary.json").write_text(json.dumps(ACTOR | {"kl_final": float("nan")}))
    assert "kl_final" not in finish_run(run_dir, **MEASURED).summary


@pytest.mark.parametrize("when", ["before", "after"])
def test_masked_rewards_do_not_count(run_dir: Path, when: str):
    masked = [row | {"reward": None} if (row["prompt_id"], row["when"]) == ("b", when) else row for row in SAMPLES]
    write_lines(run_dir / "samples.jsonl", masked)
    summary = finish_run(run_dir, **MEASURED).summary
    assert (summary["reward_before"], summary["reward_after"]) == (0.0, 2.0)
    assert summary["reward_gain_ci95"] == [2.0, 2.0]


@pytest.mark.parametrize("name", ["actor_summary.json", "critic_metrics.jsonl", "samples.jsonl"])
def test_a_missing_file_is_named(run_dir: Path, name: str):
    (run_dir / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        finish_run(run_dir, **MEASURED)


def test_missing_key_of_the_actor_is_named(run_dir: Path):
    (run_dir / "actor_summary.json").write_text(json.dumps({k: v for k, v in ACTOR.items() if k != "steps"}))
    with pytest.raises(ValueError, match="lacks steps"):
        finish_run(run_dir, **MEASURED)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (SAMPLES[:3], "2 texts before, 1 after; texts without a counterpart: b"),
        ([*SAMPLES, SAMPLES[0]], "'a' occurs twice with when='before'"),
        ([*SAMPLES[:3], sample("b", "after", " x", 0.0, prompt="Other")], "prompt 'b' differs"),
        ([SAMPLES[0] | {"when": "later"}], "'later', not 'before' or 'after'"),
        ([], "0 texts before, 0 after"),
    ],
)
def test_texts_that_do_not_pair(run_dir: Path, rows: list[dict[str, Any]], message: str):
    write_lines(run_dir / "samples.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        finish_run(run_dir, **MEASURED)


def test_only_the_last_line_may_be_torn(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    write_lines(path, [{"a": 1}], torn='{"a": 2')
    assert read_jsonl(path) == [{"a": 1}]
    write_lines(path, [{"a": 1}], torn='{"a": 2}')
    assert read_jsonl(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(path)
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="not a JSON object"):
        read_jsonl(path)


def test_unusual_line_ends_inside_texts_do_not_split_lines(tmp_path: Path):
    row = sample("a", "before", "one\u2028two\x85three", 0.0)
    (tmp_path / "x.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_jsonl(tmp_path / "x.jsonl") == [row]


def test_a_step_done_again_counts_once(tmp_path: Path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "x": 0}, {"step": 2, "x": 1}, {"step": 2, "x": 2}])
    assert read_steps(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 0}, {"step": 2, "x": 2}]


def test_responses_without_their_leading_space_are_not_fused_with_the_prompt(run_dir: Path):
    assert read_pairs(run_dir)[0].text_after == "It is a great thing."
    write_lines(run_dir / "samples.jsonl", [row | {"response": row["response"].strip()} for row in SAMPLES])
    assert read_pairs(run_dir)[0].text_after == "It is a great thing."


def test_distinct2():
    assert distinct2(["a b a b"]) == 2 / 3  # ab ba ab
    assert distinct2(["a", ""]) is None


def test_the_interval_of_a_constant_difference_is_that_difference() -> None:
    assert paired_ci95([0.0, 1.0, 2.0], [0.5, 1.5, 2.5]) == (0.5, 0.5)


def test_the_interval_agrees_with_the_normal_approximation_and_keeps_pairs() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(0.0, 5.0, size=400)
    after = before + rng.normal(0.1, 0.5, size=400)
    low, high = paired_ci95(list(before), list(after))
    half = 1.96 * float(np.std(after - before)) / 20.0
    middle = float(np.mean(after - before))
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=0.01)
    assert paired_ci95(list(before), list(after)) == (low, high)


@pytest.mark.parametrize(("before", "after"), [([], []), ([1.0], [1.0, 2.0])])
def test_scores_without_pairs_are_refused(before: list[float], after: list[float]) -> None:
    with pytest.raises(ValueError, match="paired"):
        paired_ci95(before, after)
