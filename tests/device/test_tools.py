"""The tools on simulated cards: calibration, and the check of a GPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from simulated_cuda.device import memory_limit
from tiny_checkpoints import save_tiny

from benchmarks import gpu as parts
from python_backend.config import RunConfig
from python_backend.models.modeling import load_reward
from python_backend.wire.contract import Limits
from tools.calibrate import calibration, worker
from tools.calibrate.calibration import CARD_BUDGETS, choose, settle

# ---- calibration: a launch is not mistaken for its tokens, and budgets that do not fit are left out ----

LAUNCH_S, TOKENS_PER_S = 0.012, 200_000.0  # a pass of up to 2,400 tokens takes no longer than its launch
SPEC = {
    "role": "reward",
    "options": {},
    "model": "",
    "device": "cuda",
    "dtype": "float32",
    "workers": 1,
    "threads": 1,
    "max_length": None,
    "budgets": CARD_BUDGETS,
}
FIXED = {"workers": 1, "threads": 1, "token_budget": 64, "forward_overhead_tokens": 8}


class CostModel:
    """A model whose forward pass only advances the clock, by noisy times."""

    limits = Limits(vocab_size=100, max_length=None)

    def __init__(self, seed: int = 0, *, fits: int = 1 << 30, tokens_per_s: float = TOKENS_PER_S) -> None:
        self.now, self.largest, self.refused = 0.0, 0, 0
        self._fits, self._tokens_per_s = fits, tokens_per_s
        self._noise = np.random.default_rng(seed)

    def score(self, rows: list[np.ndarray]) -> None:
        tokens = len(rows) * max(row.size for row in rows)
        if tokens > self._fits:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.largest = max(self.largest, tokens)
        self.now += max(LAUNCH_S, tokens / self._tokens_per_s) * self._noise.lognormal(0, 0.03)


def measured(monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any] = SPEC) -> dict[str, Any]:
    """Return what the worker prints, in this process."""
    printed: list[str] = []
    monkeypatch.setattr(worker, "print", lambda line, **_: printed.append(line), raising=False)
    monkeypatch.setattr(worker.sys, "argv", ["worker", json.dumps(spec)])
    assert worker.main() == 0, printed
    return json.loads(printed[-1])


def use(monkeypatch: pytest.MonkeyPatch, model: CostModel) -> CostModel:
    """Let the worker measure this model, by its clock."""
    monkeypatch.setitem(worker.ROLES, "reward", (lambda *_, **__: model, "score"))
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: model.now))
    return model


def test_nine_noisy_runs_agree_on_the_cost_of_a_launch(monkeypatch: pytest.MonkeyPatch):
    overheads = []
    for seed in range(9):
        model = use(monkeypatch, CostModel(seed))
        result = measured(monkeypatch)
        assert set(map(int, result["speeds"])) == set(CARD_BUDGETS)
        assert all(overhead <= int(budget) // 8 for budget, overhead in result["overheads"].items())
        assert model.largest > CARD_BUDGETS[-2]
        assert choose({(1, 1): result}).token_budget >= 4096  # a smaller pass may take no longer than its launch
        overheads.append(result["overheads"]["65536"])
    assert 0.8 * LAUNCH_S * TOKENS_PER_S < min(overheads) <= max(overheads) < 1.2 * LAUNCH_S * TOKENS_PER_S, overheads


def test_budgets_that_do_not_fit_are_skipped_and_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    model = use(monkeypatch, CostModel(fits=10_000))
    result = measured(monkeypatch)
    assert (list(result["speeds"]), result["too_many"]) == (["1024", "2048", "4096", "8192"], 16_384)
    assert (model.largest <= 10_000, model.refused) == (True, 1)


def test_a_card_with_little_memory_gets_a_small_budget_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(calibration.CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = tmp_path / "reward"
    save_tiny(folder, "llama", "reward", max_position_embeddings=4096)
    model = load_reward(folder, device="cuda")
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model.score([np.arange(1800) % 7])
    limit = torch.cuda.max_memory_allocated()
    del model
    monkeypatch.setitem(worker.SCALES, "cuda", (2048, 4, 1e9, 10_000))
    with memory_limit(0, limit):
        result = measured(monkeypatch, {**SPEC, "model": str(folder), "budgets": [2048, 4096]})
        assert torch.cuda.memory_allocated() <= weights  # nothing of a pass that did not fit is left
    assert (list(result["speeds"]), 2048 < result["too_many"] <= 4096) == (["2048"], True)
    measurements = []
    monkeypatch.setattr(calibration, "_measure", lambda *_: measurements.append(1) or result)
    config = RunConfig.model_validate({"reward": {"model": str(folder), "device": "cuda"}, "critic": FIXED})
    lines: list[str] = []
    for _ in range(2):
        assert f"reward.token_budget={choose({(1, 1): result}).token_budget}" in settle(config, lines.append)
    assert any(f"budgets from {result['too_many']} tokens do not fit into the GPU's" in line for line in lines)
    assert len(measurements) == 1
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card: "Another")  # of a node that shares the cache
    settle(config, lines.append)
    assert len(measurements) == 2


# ---- the check of a GPU: nothing meets on two devices ----


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[parts.Job]:
    """All parts share its checkpoints; `device_tests` starts pytest and runs no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "IN_FLIGHT", 16)
        yield parts.Job("cuda", small=True, scratch=str(tmp_path_factory.mktemp("scratch")), tests="--version")


@pytest.mark.parametrize(
    "part", ["environment", "device_tests", "served_score", "scoring", "swap", "ppo_step", "mixed_requests"]
)
def test_a_part_of_the_check_finds_no_number_outside_its_limits(job: parts.Job, part: str):
    """Without `tritonserver`: a real server sees that there is no GPU."""
    found = list(getattr(parts, part)(job))
    assert found
    assert [number for number in found if number.verdict == "miss"] == []
