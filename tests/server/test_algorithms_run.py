"""Runs without a critic on the real server: no requests to it, prompts from several files, and how they resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_system import System, run_actor
from settled import settled_statistics
from transformers import AutoModelForCausalLM

from python_backend.config import PromptFileSection
from python_backend.store.jsonl import read_jsonl
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import CRITIC_INFER
from tests.support.prompts import inputs_of, write_prompts
from tools.server.child import Child
from trainer.control_plane import ControlPlane

pytestmark = pytest.mark.slow
SETTINGS = {
    "actor.algorithm.responses_per_prompt": 2,
    "actor.kl.target": 0.001,
    "actor.kl.horizon": 100,
    "actor.kl.coef": 0.1,
    "actor.rewards.normalization": "running",
    "actor.rewards.clip": 2,
    "actor.rewards.missing_eos_penalty": 0.5,
}


def run_to_its_end(live: System, folder: Path, name: str, **overrides: Any) -> None:
    """An actor of a run of its own on the live server, to its end."""
    values = {"run.dir": folder, **SETTINGS, "actor.algorithm.name": name, **overrides}
    actor: Child = live.run.start(f"actor-{name}", *(f"{key}={value}" for key, value in values.items()), module="actor")
    assert actor.process.wait(120) == 0, actor.log_path.read_text()


def reward_version(live: System) -> int | None:
    return WeightsStore(live.run.config.run.reward_weights_dir).current()


def test_a_run_without_a_critic_its_validations_and_a_limit_of_time(live: System, tmp_path: Path) -> None:
    """It ends after its first step, with a checkpoint; started again without the limit it goes on from there."""
    folder = tmp_path / "run"
    settings = {"actor.validation.every": 1, "actor.checkpoint_every": 100, "actor.validation.greedy": True}
    with ControlPlane(live.run.config.server.grpc_url) as control:
        before, last = settled_statistics(control, CRITIC_INFER).inference_count, live.run.journal.last_step()
        run_to_its_end(live, folder, "reinforce++", **settings, **{"actor.max_minutes": 1e-6})
        log = (live.run.config.run.logs_dir / "actor-reinforce++.log").read_text()
        assert "actor.max_minutes (1e-06) reached at step 1 of 3; the next start continues from here" in log
        assert [path.name for path in (folder / "checkpoints" / "actor").iterdir()] == ["1"]
        assert json.loads((folder / "actor_summary.json").read_text())["steps"] == 1
        run_to_its_end(live, folder, "reinforce++", **settings)
        assert settled_statistics(control, CRITIC_INFER).inference_count == before
        assert live.run.journal.last_step() == last
    lines, texts = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "rollouts"))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["train_rollouts/reward_version"] for line in lines] == [reward_version(live)] * 3
    assert {text["reward_version"] for text in texts} == {reward_version(live)}
    assert not any("weights_version" in key or "explained" in key or "staleness" in key for key in lines[0])
    coefs = [line["train_rollouts/kl_coef"] for line in lines]
    assert (coefs[0], len(set(coefs))) == (0.1, 3)  # it follows
    assert all(line["train_optim/grad_norm"] > 0 for line in lines)
    assert lines[-1]["train_rollouts/consumed_samples"] == 3 * 8 // 2
    summary = json.loads((folder / "actor_summary.json").read_text())
    assert not summary.keys() & {"critic_updates", "weights_version", "ev_v0", "ev_last"}
    assert None not in summary.values()
    assert summary["failed_requests"] == 0
    rows, best = read_jsonl(folder / "validations.jsonl"), json.loads((folder / "best" / "best.json").read_text())
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert best["reward"] == max(row["reward"] for row in rows)
    assert best["step"] == next(row["step"] for row in rows if row["reward"] == best["reward"])
    for policy in ("policy", "best"):
        AutoModelForCausalLM.from_pretrained(folder / policy)


def test_one_step_off_policy(live: System, tmp_path: Path) -> None:
    """The next rollout is written beside the update, by the policy before it and by no older one; it resumes."""
    folder = tmp_path / "run"
    settings = {"actor.one_step_off_policy": True, "actor.validation.every": 2}
    run_to_its_end(live, folder, "grpo", **settings, **{"actor.steps": 3})
    run_to_its_end(live, folder, "grpo", **settings, **{"actor.steps": 6})
    lines, spans = (read_jsonl(folder / f"{name}.jsonl") for name in ("metrics", "timeline"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["train_rollouts/policy_staleness"] for line in lines] == [0, 1, 1, 0, 1, 1]
    begins = {span["step"]: span["start"] for span in spans if span["phase"] == "generate"}
    ends = {span["step"]: span["end"] for span in spans if span["phase"] == "train_time"}
    kl = [line["train_rollouts/init_policy_kl_per_sequence"] for line in lines]
    assert kl[:2] == pytest.approx([0, 0], abs=1e-5)  # both by the policy that the run began with
    assert min(map(abs, kl[2:])) > 1e-5  # the fourth too, which the resumed run begins with: by the checkpoint's policy
    assert [begins[step + 1] < ends[step] for step in range(1, 6)] == [True, True, False, True, True]


def test_a_bad_row_in_the_middle_of_a_curriculum(live: System, tmp_path: Path) -> None:
    """With prompts that are read ahead of their step."""
    one, other, late = (
        write_prompts(tmp_path / f"{name}.jsonl", [f"{verb} the {noun}" for noun in ("file", "list", "number")])
        for name, verb in (("one", "Open"), ("other", "Read"), ("late", "Return"))
    )
    files = [
        PromptFileSection(path=one, weight=3),
        PromptFileSection(path=other, until_step=3),
        PromptFileSection(path=late, weight=5, from_step=4),
    ]
    expected = inputs_of(*files, per_step=4, max_tokens=512)
    whole = late.read_text()
    late.write_text("".join(whole.splitlines(keepends=True)[:2]) + "{broken\n")  # a step reads two or three of its rows
    settings = {
        "run.dir": tmp_path / "run",
        "actor.prompts.path": "data/prompts.jsonl",
        "actor.steps": 6,
        "actor.prompts.files": yaml.safe_dump(
            [file.model_dump(mode="json") for file in files], default_flow_style=True, width=10_000
        ).strip(),
        "actor.algorithm.name": "grpo",
        "actor.algorithm.responses_per_prompt": 2,
        "actor.logged_texts": 8,
        "actor.checkpoint_every": 50,
        "actor.validation.size": 0,
        "actor.one_step_off_policy": True,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    code, log = run_actor(live.run, "actor-prompts", *overrides)
    assert code == 2
    (sentence,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert f"{late}:3: not JSON" in sentence
    done = max(step for step in range(1, 7) if f"stopped after step {step}, whose checkpoint is written" in sentence)
    assert done in (3, 4)
    late.write_text(whole)
    code, log = run_actor(live.run, "actor-prompts", *overrides)
    assert code == 0, log
    assert f"resuming from the checkpoint of step {done}" in log
    texts = read_jsonl(tmp_path / "run" / "rollouts.jsonl")
    assert [text["prompt"] for text in texts] == [
        prompt.text for step in range(1, 7) for prompt in expected.prompts_of(step) for _ in range(2)
    ]
    assert f"{late} has changed since the checkpoint" in log
