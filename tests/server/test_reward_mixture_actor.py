"""The actor where several rewards are served: what it sends, logs, masks and refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reward_functions
from live_system import (
    TEXTS,
    Checkpoints,
    System,
    direct_rewards,
    make_run,
    reload_model,
    run_actor,
    start_system,
)
from test_two_tokenizers import written

from actor.data.prompts import PromptError
from actor.data.rollout import Prompt, Rollout, Scores
from actor.scoring.metadata import check_prompts, row_metadata
from actor.scoring.scorer import Scorer
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.client.client import TritonClient
from python_backend.client.served import ServedModel
from python_backend.wire.contract import REWARD_MODEL

pytestmark = pytest.mark.slow
FUNCTIONS = Path(reward_functions.__file__)
TERMS = {
    "model": {"weight": 1.0},
    "texts": {"function": f"{FUNCTIONS}:texts_fit", "weight": 10.0},
    "verdict": {"function": f"{FUNCTIONS}:label_or_trouble", "weight": 0.5, "timeout_s": 1.0},
    "peers": {"function": f"{FUNCTIONS}:by_group", "groupwise": True, "weight": 0.0},
}
LABELS = (1, 2, "raise", 3, "loop", 0, 4, 5)
FAILED = [2, 4]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"text": " ".join(text.split()[:3]), "label": label} for text, label in zip(TEXTS, LABELS, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints, prompts: Path) -> Iterator[System]:
    actor = {"prompts_path": str(prompts), "validation_prompts": str(prompts), "steps": 2, "max_failed_fraction": 0.25}
    live = {"store": True}
    run = make_run(tmp_path_factory.mktemp("mixed-actor"), checkpoints, rewards=TERMS, actor=actor, reward=live)
    system = start_system(run)
    yield system
    system.stop()


def labelled(tokenizer: Any) -> Rollout:
    """TEXTS as responses to their first two tokens, each with its label."""
    rollout = written(tokenizer, list(TEXTS))
    prompts = [
        dataclasses.replace(prompt, text=tokenizer.decode(prompt.tokens.tolist()), metadata={"label": label})
        for prompt, label in zip(rollout.prompts, LABELS, strict=True)
    ]
    return dataclasses.replace(rollout, prompts=prompts)


def scored(
    system: System, tokenizer: object, rollout: Rollout, *, rows: int, group_size: int = 1
) -> tuple[Scorer, Scores]:
    async def ask() -> tuple[Scorer, Scores]:
        async with TritonClient(system.run.url, system.run.config.actor.client) as client:
            scorer = Scorer(client, tokenizer, rows_per_request=rows)
            await scorer.compare_tokenizers()
            return scorer, await scorer.score(rollout, group_size)

    return asyncio.run(ask())


@pytest.mark.parametrize("rows", [1, 3])
def test_components_reach_the_actor_and_failures_are_marked(mixed: System, checkpoints: Checkpoints, rows: int) -> None:
    tokenizer = load_tokenizer(checkpoints.policy)
    rollout = labelled(tokenizer)
    scorer, scores = scored(mixed, tokenizer, rollout, rows=rows)
    assert scorer.reward.components == ("model", "texts", "verdict", "peers")
    assert np.flatnonzero(~scores.scored.numpy()).tolist() == FAILED
    direct = direct_rewards(checkpoints.reward, rollout.rows())
    np.testing.assert_allclose(scores.components["model"], direct, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(scores.components["texts"], np.ones(len(TEXTS)))
    np.testing.assert_array_equal(scores.components["peers"], np.ones(len(TEXTS)))
    np.testing.assert_array_equal(scores.components["verdict"], [1, 2, np.nan, 3, np.nan, 0, 4, 5])
    assert scores.reward_versions is not None
    assert scores.reward_versions.tolist() == [0] * len(TEXTS)
    fine = [i for i in range(len(TEXTS)) if i not in FAILED]
    labels = np.asarray([float(LABELS[i]) for i in fine])
    np.testing.assert_allclose(scores.rewards[fine], direct[fine] + 10 + 0.5 * labels, atol=1e-4, rtol=0)
    raised, killed = scores.failures
    assert raised.startswith("verdict: RuntimeError: no verdict on 'raise' (reward_functions.py:")
    assert killed == "verdict: took longer than 1 s and was killed"


def test_groups_stay_whole_beside_the_reward_model_and_the_critic(mixed: System, checkpoints: Checkpoints) -> None:
    tokenizer = load_tokenizer(checkpoints.policy)
    _, scores = scored(mixed, tokenizer, labelled(tokenizer), rows=3, group_size=2)
    np.testing.assert_array_equal(scores.components["peers"], np.full(len(TEXTS), 2))
    assert scores.has_values


def test_the_run_logs_every_component_and_masks_what_failed(mixed: System) -> None:
    code, log = run_actor(mixed.run, "actor")
    assert code == 0
    lines = [json.loads(line) for line in (mixed.run.config.run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_rollouts/masked_samples"] for line in lines] == [2, 2]
    for line in lines:
        assert line["train_rollouts/reward_version"] == 0
        assert line["train_rollouts/reward_texts"] == line["train_rollouts/reward_peers"] == 1.0
        assert line["train_rollouts/reward_verdict"] == pytest.approx(15 / 6)
        assert np.isfinite(line["train_rollouts/reward_model"])
    assert "step 1: 2 of 8 rewards are unavailable: verdict: RuntimeError: no verdict on 'raise'" in log
    assert "; verdict: took longer than 1 s and was killed" in log


def test_a_column_that_the_actor_fills_is_refused(mixed: System, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "Return the", "response": "x", "label": 1}\n')
    code, log = run_actor(mixed.run, "actor-column", f"actor.prompts.path={path}", f"run.dir={tmp_path}")
    assert code == 2
    (sentence,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert "prompt 1 has a column 'response'" in sentence


def test_with_the_reward_model_alone_any_column_is_free() -> None:
    prompt = Prompt("1", "a", np.asarray([1]), {"prompt": "p", "response": "r"})
    check_prompts(ServedModel(), [prompt])
    assert row_metadata(ServedModel(), prompt, "b", 0) == {"prompt": "p", "response": "r"}
    with pytest.raises(PromptError, match="prompt 1 has a column 'prompt'"):
        check_prompts(ServedModel(components=("model",)), [prompt])


def test_the_reply_alone_is_the_sentence_of_a_chat(checkpoints: Checkpoints) -> None:
    tokenizer = load_tokenizer(checkpoints.policy)
    rollout = written(tokenizer, list(TEXTS))
    scorer = Scorer(None, tokenizer, rows_per_request=1)  # type: ignore[arg-type]
    assert scorer.render(rollout, 0) == TEXTS[0]
    rollout.prompts[0].metadata["messages"] = [{"role": "user", "content": "?"}]
    assert scorer.render(rollout, 0) == tokenizer.decode(rollout.rows()[0][2:-1].tolist())


def test_metadata_goes_along_with_sentences(mixed: System, checkpoints: Checkpoints) -> None:
    """As if the reward had another tokenizer: the fingerprint of the ensemble decides."""

    def other(config: dict) -> None:
        config["parameters"]["tokenizer_fingerprint"]["string_value"] = "other"

    reload_model(mixed.run, REWARD_MODEL, other)
    tokenizer = load_tokenizer(checkpoints.policy)
    scorer, scores = scored(mixed, tokenizer, labelled(tokenizer), rows=2)
    assert scorer.sends_sentences
    np.testing.assert_array_equal(scores.components["verdict"], [1, 2, np.nan, 3, np.nan, 0, 4, 5])
    np.testing.assert_array_equal(scores.components["texts"], np.ones(len(TEXTS)))


def test_a_run_on_functions_alone_needs_no_reward_checkpoint(
    tmp_path: Path, checkpoints: Checkpoints, prompts: Path
) -> None:
    sections = {
        "reward": {"checkpoint": str(tmp_path / "there-is-none")},
        "rewards": {"verdict": TERMS["verdict"]},
        "actor": {"prompts_path": str(prompts), "steps": 1, "max_failed_fraction": 0.25, "validation_size": 0},
    }
    system = start_system(make_run(tmp_path / "run", checkpoints, **sections))
    try:
        assert run_actor(system.run, "actor")[0] == 0
    finally:
        system.stop()
    (line,) = [json.loads(line) for line in (system.run.config.run.dir / "metrics.jsonl").read_text().splitlines()]
    assert line["train_rollouts/rewards"] == pytest.approx(0.5 * line["train_rollouts/reward_verdict"])
    assert line["train_rollouts/masked_samples"] == 2
