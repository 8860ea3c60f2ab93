"""Functions beside the reward model on the real server, and what an actor sends, logs, masks and refuses there."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reward_functions
from bare_client import ask
from live_system import (
    TEXTS,
    Checkpoints,
    System,
    direct_rewards,
    make_run,
    random_rows,
    reload_model,
    run_actor,
    scoring_inputs,
    start_system,
)
from test_reward_mixture import errors_of
from test_reward_models_live import written

from actor.data.prompts import PromptError
from actor.data.rollout import Prompt, Rollout, Scores
from actor.scoring.metadata import check_prompts, row_metadata
from actor.scoring.scorer import Scorer
from chaos.fuzz.client import grpc_sender, send_http
from chaos.fuzz.requests import Request, array_tensor
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.client.client import TritonClient
from python_backend.client.served import ServedModel
from python_backend.wire.contract import (
    CRITIC_INFER,
    REWARD_COMPONENTS,
    REWARD_ERRORS,
    REWARD_MODEL,
    REWARDS,
    VALUES,
    texts_array,
)
from trainer.control_plane import ControlPlane

pytestmark = pytest.mark.slow
FUNCTIONS = Path(reward_functions.__file__)
TERMS = {
    "model": {"weight": 1.0},
    "texts": {"function": f"{FUNCTIONS}:texts_fit", "weight": 10.0},
    "verdict": {"function": f"{FUNCTIONS}:label_or_trouble", "weight": 0.5, "timeout_s": 1.0},
    "peers": {"function": f"{FUNCTIONS}:by_group", "groupwise": True, "weight": 0.0},
}
NUM_BAD, NUM_SENDERS = 20_000, 16
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


def test_components_reach_the_actor_and_failures_are_marked(mixed: System, checkpoints: Checkpoints) -> None:
    tokenizer = load_tokenizer(checkpoints.policy)
    rollout = labelled(tokenizer)
    scorer, scores = scored(mixed, tokenizer, rollout, rows=3)
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


# ---- beside the reward model ----


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC_INFER])
def test_model_and_functions_add_up(mixed: System, checkpoints: Checkpoints, model: str) -> None:
    rows = random_rows([3, 9, 5, 7], seed=3)
    metadata = [json.dumps({"label": label, "prompt": str(label)}) for label in (1, "raise", 2, "loop")]
    answer = ask(mixed.run.url, model, {**scoring_inputs(rows), "metadata": texts_array(metadata)})
    direct = direct_rewards(checkpoints.reward, rows)
    np.testing.assert_allclose(answer[REWARD_COMPONENTS][:, 0], direct, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(answer[REWARD_COMPONENTS][:, 1:], [[0, label, 1] for label in (1, np.nan, 2, np.nan)])
    expected = [direct[0] + 0.5, np.nan, direct[2] + 1.0, np.nan]
    np.testing.assert_allclose(answer[REWARDS][:, 0], expected, atol=1e-5, rtol=0)
    assert [bool(error) for error in errors_of(answer)] == [False, True, False, True]


def test_bad_rows_over_grpc_do_not_lock_the_server_up(mixed: System) -> None:
    """tritonserver 2.51 deadlocks when a step fails over gRPC while another one of its request is running."""
    at = mixed.run.config.server
    bad = Request(CRITIC_INFER, [array_tensor("tokens", np.full((1, 5), 4711))])
    statuses: collections.Counter[str | None] = collections.Counter()

    def send() -> None:
        with grpc_sender(at.grpc_url) as send_grpc:
            for _ in range(NUM_BAD // NUM_SENDERS):
                for model in (REWARD_MODEL, CRITIC_INFER):
                    answer = send_grpc(dataclasses.replace(bad, model=model))
                    statuses[answer.status] += 1
                    if answer.hung:
                        return

    with ThreadPoolExecutor(NUM_SENDERS) as executor:
        for sent in [executor.submit(send) for _ in range(NUM_SENDERS)]:
            sent.result()
    assert set(statuses) == {"INVALID_ARGUMENT"}, statuses
    with ControlPlane(at.grpc_url) as control:
        assert control.answers_inference(10.0)
        probed = control.probe_scoring(CRITIC_INFER, (REWARDS, VALUES, REWARD_ERRORS), 10.0)
    assert errors_of(probed) == [""], "a function would miss the label"


@pytest.mark.parametrize("model", [REWARD_MODEL, CRITIC_INFER])
def test_a_text_as_sequence_id_changes_nothing(mixed: System, model: str) -> None:
    """It kills tritonserver 2.51 where a step of an ensemble is an ensemble itself."""
    rows = array_tensor("tokens", np.stack(random_rows([5, 5], seed=3)))
    for sequence_id in ("x", "x" * 100):
        request = Request(model, [rows], parameters={"sequence_id": sequence_id})
        assert send_http(mixed.run.url, request).status == "200"


# ---- the last test changes the model ----


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
