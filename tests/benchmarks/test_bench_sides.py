"""The sides and workloads of the benchmarks: what they send and run, and what a side that fails leaves behind."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu, trl
from benchmarks.command import parse_arguments, report
from benchmarks.measurement import Record
from benchmarks.reload import divided, on_core
from benchmarks.scoring import FORMS, ModelBench, load_contender, pack, stripped_width, unpack
from benchmarks.trl import ALGORITHMS, REQUIREMENTS, SteppedTrainer, configuration, prepare_cell, take_turns
from benchmarks.trl_sides import ppo_arguments, trl_arguments
from benchmarks.workload import LONGEST, SHORTEST, SIZES, VOCAB_SIZE, make_checkpoint, make_trace, trace_lengths
from rlhf_triton.config import load_config
from rlhf_triton.errors import RlhfError
from rlhf_triton.python_backend.models.modeling import load_reward
from rlhf_triton.store.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]

# ---- workload ----


def test_a_trace_is_log_normal_within_its_limits_and_a_prefix_of_a_longer_one():
    lengths = trace_lengths(20_000)
    assert (lengths.min(), lengths.max()) == (SHORTEST, LONGEST)
    middle = lengths[(lengths > SHORTEST) & (lengths < LONGEST)]
    assert np.log(np.median(lengths)) == pytest.approx(4.8, abs=0.02)
    assert 150 < lengths.mean() < 175
    assert middle.size > 18_000
    short, long = make_trace(5), make_trace(50)
    assert all(np.array_equal(a, b) for a, b in zip(short, long[:5], strict=True))
    assert [row.size for row in long] == trace_lengths(50).tolist()
    assert all(row.min() >= 3 and row.max() < VOCAB_SIZE for row in long)


# ---- scoring ----


def test_packed_rows_come_back():
    rows = make_trace(3)
    assert all(np.array_equal(a, b) for a, b in zip(unpack(pack(rows)), rows, strict=True))
    (alone,) = unpack(pack(rows[:1]))
    assert (alone.dtype, alone.tolist()) == (np.int64, rows[0].tolist())


def test_padded_and_ragged_forward_passes_score_alike(tmp_path: Path):
    make_checkpoint(SIZES["tiny"], tmp_path)
    rows = make_trace(4)
    expected = np.concatenate([load_reward(tmp_path).score([row]) for row in rows])
    score = load_contender(str(tmp_path), threads=1)
    np.testing.assert_allclose(score(rows), expected, atol=1e-4)
    np.testing.assert_allclose(score(rows, LONGEST), expected, atol=1e-4)
    assert np.ptp(expected) > 0.1  # rows differ, so a wrong row or position would show
    stripped = [stripped_width(*given, 500) for given in ((17, 16), (32, 16), (500, 16), (17, 0))]
    assert stripped == [32, 32, 500, 500]


def test_a_contender_that_scores_otherwise_stops_the_measurement(tmp_path: Path):
    bench = ModelBench(argparse.Namespace(), Record(tmp_path), "tiny", [0.5, 1.0, 2.0])
    assert bench.difference("ours", [0.5, 1.0]) == 0.0
    assert bench.difference("other", [0.5001, 1.0, 1.9998]) == pytest.approx(2e-4)
    with pytest.raises(RlhfError, match="other scores"):
        bench.difference("other", [0.5, 1.1])


def test_vllm_is_asked_for_the_raw_score_of_token_ids():
    path, body_of, rewards_of = FORMS["vllm"]
    assert path == "/classify"
    assert json.loads(body_of([np.array([3, 4])])) == {"input": [[3, 4]], "use_activation": False}
    assert rewards_of(b'{"data": [{"probs": [-1.5]}, {"probs": [2.0]}]}').tolist() == [-1.5, 2.0]
    assert json.loads(body_of([np.array([5]), np.array([6])]))["input"] == [[5], [6]]


# ---- reload ----


def test_cores_are_shared_only_where_they_are_few_and_pin_what_is_started_within():
    divisions = [divided(cores) for cores in ([5], [2, 3], [0, 1, 2, 3])]
    assert divisions == [(5, 5, [5]), (2, 3, [3]), (0, 1, [2, 3])]
    before = os.sched_getaffinity(0)
    core = max(before)
    with on_core(core):
        printed = "import os; print(sorted(os.sched_getaffinity(0)))"
        child = subprocess.run([sys.executable, "-c", printed], capture_output=True, text=True, check=True)
    assert child.stdout.split() == [f"[{core}]"]
    assert os.sched_getaffinity(0) == before


# ---- TRL ----

TRAINER = """
import time
from benchmarks.trl_sides import ContenderTurns
turns = ContenderTurns()
print("a library's greeting")
ends = 0
for step in range(4):
    ends += turns.begin()
    with turns.phase("generate"):
        time.sleep(0.01)
    turns.end(tokens=10 * step + ends)
raise SystemExit("out of memory")
"""


def test_a_trainer_steps_on_request_and_its_log_explains_an_early_end(tmp_path: Path):
    trainer = SteppedTrainer("fake", [sys.executable, "-c", TRAINER], tmp_path / "fake.log", {"PYTHONPATH": str(ROOT)})
    try:
        measured = trainer.steps(3)
        assert (measured["tokens"], measured["steps"]) == (21, 3)  # of the last step, the only one that ends the turn
        assert 0.01 <= measured["phases"]["generate"] <= measured["seconds_per_step"]
        assert measured["peak_rss_mb"] > 1
        assert "greeting" in (tmp_path / "fake.log").read_text()  # and not among the answers
        with pytest.raises(RlhfError, match=r"(?s)fake ended with exit code 1.*out of memory"):
            trainer.steps(2)
    finally:
        trainer.stop()


def test_turns_alternate_after_the_warm_up(tmp_path: Path):
    taken: list[tuple[str, int]] = []

    def steps(name: str, seconds: float) -> Any:
        return lambda count: taken.append((name, count)) or {"seconds_per_step": seconds}

    record, cell = Record(tmp_path), {"model": "tiny", "algorithm": "grpo", "rows": 16, "new_tokens": 8}
    contenders = {"trl": steps("trl", 2.0), "ours": steps("ours", 1.0)}
    take_turns(contenders, argparse.Namespace(rounds=2, warmup=1, seconds=3.0), cell, record)
    assert taken == [("trl", 1), ("ours", 1), ("trl", 3), ("ours", 3), ("ours", 3), ("trl", 3)]
    noted = [(sample["contender"], sample["round"]) for sample in record.result["samples"]]
    assert noted == [("trl", 0), ("ours", 0), ("ours", 1), ("trl", 1)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_both_sides_take_one_optimizer_step_on_the_same_rollout(algorithm: str, tmp_path: Path):
    options = parse_arguments("trl", trl, ["--out", str(tmp_path), "--trl-micro-batch", "16"])
    cell = {"model": "135m", "algorithm": algorithm, "rows": 64, "new_tokens": 8}
    settings = prepare_cell(options, tmp_path, cell, Path("policy"), Path("scoring"))
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(configuration(settings)))
    config, is_ppo = load_config(path), algorithm == "ppo"
    theirs = ppo_arguments(settings) if is_ppo else trl_arguments(settings)
    assert config.actor.is_one_update
    assert theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"] == 64
    lengths = config.actor.generation.min_new_tokens, config.actor.generation.max_new_tokens
    assert lengths == (8, theirs["response_length" if is_ppo else "max_completion_length"])
    assert is_ppo or theirs["generation_kwargs"] == {"min_new_tokens": 8}
    assert config.actor.kl.coef == theirs["kl_coef" if is_ppo else "beta"]
    prompts = {line["text"] for line in read_jsonl(Path(settings["prompts"]))}
    assert (len(prompts), config.actor.algorithm.responses_per_prompt) == ((64, 1) if is_ppo else (8, 8))
    assert (config.serves_critic, config.uses_reward_model) == (is_ppo, is_ppo)


def test_trl_runs_with_our_torch_and_transformers():
    pins = [
        {line.split(" ;")[0] for line in path.read_text().splitlines()}
        for path in (REQUIREMENTS, ROOT / "constraints.txt")
    ]
    assert {"torch", "transformers", "tokenizers"} <= {pin.split("==")[0] for pin in pins[0] & pins[1]}


# ---- the GPU check ----


def sample_of(name: str, tmp_path: Path, *, device: str = "cpu", limit_s: float = 300) -> dict[str, Any]:
    job = {"device": device, "small": True, "scratch": str(tmp_path)}
    return gpu.run_part(name, job, limit_s, tmp_path / f"{name}.log")


@pytest.mark.slow
def test_a_part_that_fails_keeps_its_numbers_and_says_why(tmp_path: Path):
    sample = sample_of("environment", tmp_path, device="nowhere")
    assert [row["name"] for row in sample["rows"]] == ["GPUs"]
    assert sample["state"] == "FAILED"
    assert "nowhere" in sample["why"]
    assert gpu.has_failed({"samples": [sample]})
    late = sample_of("environment", tmp_path, limit_s=0.05)
    assert (late["state"], late["why"]) == ("TIMED OUT", "it did not end within 0 s")
    text = report(gpu, {"samples": [sample, late]}, tmp_path)
    assert all(words in text for words in ("FAILED", "nowhere", "TIMED OUT"))


def test_a_number_outside_its_limits_fails_the_check():
    row = {"name": "error", "value": 2.0, "low": None, "high": 1.0, "detail": "largest"}
    assert gpu.judged([row]) == ("OUTSIDE ITS LIMITS", "")
    assert gpu.judged([{**row, "value": 1.0}, {**row, "value": None}]) == ("passed", "")
    assert gpu.judged([{**row, "value": None}]) == ("skipped", "largest")
    assert gpu.has_failed({"samples": [{"state": "OUTSIDE ITS LIMITS"}]})
    assert not gpu.has_failed({"samples": [{"state": "passed"}, {"state": "skipped"}]})
