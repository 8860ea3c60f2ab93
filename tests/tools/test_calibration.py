"""What `auto` settles on: the fastest of what was measured, once per model and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import save_tiny

from python_backend.config import ConfigError, RunConfig, load_config
from python_backend.config.sections import UNMEASURED, ModelSection
from tools.calibrate import calibration
from tools.calibrate.calibration import Settled, choose, settle, splits

FIXED = {"workers": 1, "threads": 1, "token_budget": 64, "forward_overhead_tokens": 8}


def result(overhead: int, speeds: dict[str, float]) -> dict[str, Any]:
    return {"overheads": dict.fromkeys(speeds, overhead), "speeds": speeds}


def test_the_fastest_is_chosen_and_of_nearly_equal_budgets_the_smallest() -> None:
    measured = {
        (1, 2): result(30, {"256": 100.0, "512": 110.0}),
        (2, 1): result(10, {"256": 117.0, "512": 120.0, "1024": 119.0}),
    }
    assert choose(measured) == Settled(2, 1, 256, 10, 117.0)


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {}, [(1, 2), (2, 1)]),
        (1, {}, [(1, 1)]),
        (8, {}, [(1, 8), (2, 4), (4, 2), (8, 1)]),
        (8, {"workers": 3}, [(3, 2)]),
        (8, {"threads": 4}, [(2, 4)]),
        (2, {"workers": 2, "threads": 2}, [(2, 2)]),
        (8, {"device": "cuda"}, [(1, 1)]),
    ],
)
def test_splits_of_the_cores(cores: int, settings: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    assert splits(cores, ModelSection(checkpoint=Path("x"), **settings)) == expected


def test_nothing_is_measured_where_all_is_fixed(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"reward": FIXED, "critic": FIXED})
    assert settle(config, lambda line: pytest.fail(line)) == []


def test_a_model_larger_than_one_device_is_not_measured() -> None:
    config = RunConfig.model_validate({"reward": FIXED, "critic": {"tensor_parallel": 2, "token_budget": 512}})
    overrides = settle(config, lambda line: pytest.fail(line))
    assert overrides == ["critic.workers=1", "critic.threads=1", "critic.forward_overhead_tokens=64"]


@pytest.mark.slow
def test_a_real_measurement_is_remembered_and_fixed_settings_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(calibration.CACHE_VARIABLE, str(tmp_path / "cache"))
    save_tiny(tmp_path / "reward", "llama", "reward")
    path = tmp_path / "run.yaml"
    path.write_text(f"reward: {{checkpoint: {tmp_path / 'reward'}, workers: 1, threads: 1}}\ncritic: {FIXED}\n")
    lines: list[str] = []
    overrides = settle(load_config(path), lines.append)
    settled = load_config(path, overrides).reward
    assert (settled.workers, settled.threads) == (1, 1)
    assert settled.token_budget in calibration.BUDGETS
    assert "auto" not in [getattr(settled, name) for name in UNMEASURED]
    assert len(lines) == 3
    monkeypatch.setattr(calibration, "_measure", lambda *_: pytest.fail("measured again"))
    assert settle(load_config(path), lines.append) == overrides
    assert len(lines) == 3


@pytest.mark.parametrize("content", ["", "[]", '{"workers": 1}', '{"workers'])
def test_a_damaged_memory_is_measured_anew(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.CACHE_VARIABLE, str(tmp_path / "cache"))
    measured = result(30, {"256": 90.0})
    monkeypatch.setattr(calibration, "_measure", lambda *_: measured)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "config.json").write_text("{}")
    config = RunConfig.model_validate({"reward": {"checkpoint": str(tmp_path / "reward")}, "critic": FIXED})
    overrides = settle(config, lambda line: None)
    (memory,) = (tmp_path / "cache").iterdir()
    memory.write_text(content)
    assert settle(config, lambda line: None) == overrides
    assert memory.read_text() != content


def test_a_checkpoint_that_cannot_be_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(calibration.CACHE_VARIABLE, str(tmp_path / "cache"))
    config = RunConfig.model_validate({"reward": {"checkpoint": str(tmp_path / "none")}, "critic": FIXED})
    with pytest.raises(ConfigError, match="none is not a Hugging Face checkpoint"):
        settle(config, lambda line: None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama"}')
    config = RunConfig.model_validate({"reward": {"checkpoint": str(tmp_path / "broken")}, "critic": FIXED})
    with pytest.raises(ConfigError, match=r"reward\.checkpoint: .*broken has no model\.safetensors"):
        settle(config, lambda line: None)
