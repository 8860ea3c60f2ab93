"""Models that count tokens in other vocabularies: a reward model is sent text, a critic is an error at start."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare_client import Refused, ask
from live_system import (
    TEXTS,
    Checkpoints,
    FinishedRun,
    System,
    direct_rewards,
    direct_values,
    reload_model,
    run_actor,
    scoring_inputs,
)
from tiny_tokenizers import save_text_reward
from transformers import pipeline

from actor.data.rollout import Prompt, Rollout, Scores
from actor.scoring.scorer import ModelMismatch, Scorer
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.client.client import TritonClient
from python_backend.client.served import ServedModel
from python_backend.wire.contract import CRITIC, REWARD_MODEL, texts_array
from tools.render_configs import parse_config, render_configs
from trainer.control_plane import ControlPlane

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5


def written(tokenizer: Any, texts: list[str]) -> Rollout:
    """Texts as a policy would have written them, with its end-of-sequence token; prompts of two tokens."""
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    prompts = [Prompt(str(i), text, np.asarray(rows[i][:2])) for i, text in enumerate(texts)]
    lengths = torch.tensor([len(row) for row in rows])
    return Rollout(prompts, tokens, lengths, torch.full((len(rows),), 2), torch.ones(len(rows), dtype=torch.bool))


async def compare_and_score(system: System, tokenizer: Any, rollout: Rollout) -> tuple[Scorer, Scores]:
    async with TritonClient(system.run.url, system.run.config.actor.client) as client:
        scorer = Scorer(client, tokenizer, rows_per_request=2)
        await scorer.compare_tokenizers()
        return scorer, await scorer.score(rollout)


@pytest.fixture
def serve_reward(finished: FinishedRun, checkpoints: Checkpoints) -> Iterator[Callable[..., FinishedRun]]:
    """Loads another reward model into the finished run's server, rendered as the configuration would."""

    def serve(checkpoint: Path, **settings: Any) -> FinishedRun:
        reward = finished.run.config.reward.model_copy(update={"checkpoint": checkpoint, **settings})
        text = render_configs(finished.run.config.model_copy(update={"reward": reward}))[REWARD_MODEL]
        rendered = parse_config(REWARD_MODEL, text).parameters
        parameters = {key: {"string_value": rendered[key].string_value} for key in rendered}
        reload_model(finished.run, REWARD_MODEL, lambda config: config["parameters"].update(parameters))

        return finished

    yield serve
    serve(checkpoints.reward)


def test_a_reward_model_with_another_tokenizer_is_sent_sentences(
    serve_reward: Callable[..., FinishedRun], checkpoints: Checkpoints
) -> None:
    other_reward = serve_reward(checkpoints.other_reward)
    ours, theirs = load_tokenizer(checkpoints.policy), load_tokenizer(checkpoints.other_reward)
    rollout = written(ours, list(TEXTS))
    scorer, scores = asyncio.run(compare_and_score(other_reward, ours, rollout))
    assert scorer.sends_sentences
    assert scores.scored.all()
    their_rows = [np.asarray(theirs(text)["input_ids"]) for text in TEXTS]
    assert {row[0] for row in their_rows} == {theirs.bos_token_id}
    assert [row.tolist()[1:] for row in their_rows] != [row.tolist()[:-1] for row in rollout.rows()]
    direct = direct_rewards(checkpoints.other_reward, their_rows)
    np.testing.assert_allclose(scores.rewards, direct, atol=TOLERANCE, rtol=0)
    # The values still belong to the policy's own tokens.
    folder = other_reward.run.store.folder(int(scores.versions[0]))
    for row, values, expected in zip(rollout.rows(), scores.values, direct_values(folder, rollout.rows()), strict=True):
        np.testing.assert_allclose(values[: row.size], expected, atol=TOLERANCE, rtol=0)


def test_an_encoder_scores_texts_and_chats_as_in_the_pipeline(
    serve_reward: Callable[..., FinishedRun], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    theirs = save_text_reward(tmp_path, "bert")
    system = serve_reward(tmp_path)
    ours = load_tokenizer(checkpoints.policy)
    rollout = written(ours, list(TEXTS[:4]))
    messages = [{"role": "user", "content": "Open the file."}]
    rollout.prompts[1] = dataclasses.replace(rollout.prompts[1], metadata={"messages": messages})
    scorer, scores = asyncio.run(compare_and_score(system, ours, rollout))
    reply = {"role": "assistant", "content": scorer.render(rollout, 1)}
    chat = theirs.apply_chat_template([*messages, reply], tokenize=False)
    classifier = pipeline("text-classification", model=str(tmp_path), device="cpu")
    expected = classifier([TEXTS[0], chat, *TEXTS[2:4]], function_to_apply="none", truncation=True)
    np.testing.assert_allclose(scores.rewards, [found["score"] for found in expected], atol=TOLERANCE, rtol=0)


def test_a_classifier_of_text_pairs(
    serve_reward: Callable[..., FinishedRun], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """From the actor and from any client; with probabilities and times, if requested."""
    save_text_reward(tmp_path, "bert", num_labels=3, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    system = serve_reward(tmp_path, text="pair", attribute_weights=[1.0, 0.0, -2.0])
    ours = load_tokenizer(checkpoints.policy)
    rollout = written(ours, list(TEXTS[:4]))
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    rollout.prompts[1] = dataclasses.replace(rollout.prompts[1], metadata=chat)
    prompts = [ours.decode(row[:2], skip_special_tokens=True) for row in rollout.rows()]
    prompts[1] = "Hi"
    responses = [ours.decode(row[2:], skip_special_tokens=True) for row in rollout.rows()]
    classifier = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    given = [{"text": prompt, "text_pair": response} for prompt, response in zip(prompts, responses, strict=True)]

    def by_label(found: list[dict[str, Any]]) -> list[float]:
        return [item["score"] for item in sorted(found, key=lambda item: item["label"])]

    rewards = np.asarray([by_label(found) for found in classifier(given, function_to_apply="none")]) @ [1.0, 0.0, -2.0]
    _, found = asyncio.run(compare_and_score(system, ours, rollout))
    np.testing.assert_allclose(found.rewards, rewards, atol=TOLERANCE, rtol=0)
    url, inputs = system.run.url, {"sentences": texts_array(prompts), "text_pairs": texts_array(responses)}
    assert set(ask(url, REWARD_MODEL, inputs)) == {"rewards"}
    answer = ask(url, REWARD_MODEL, inputs, ["probabilities", "rewards", "queue_us", "compute_us"])
    np.testing.assert_allclose(answer["rewards"][:, 0], rewards, atol=TOLERANCE, rtol=0)
    probabilities = [by_label(found) for found in classifier(given)]
    np.testing.assert_allclose(answer["probabilities"], probabilities, atol=TOLERANCE, rtol=0)
    assert min(answer["queue_us"].min(), answer["compute_us"].min()) > 0
    pairs = {"text_pairs": texts_array(["y"]), **scoring_inputs([np.asarray([5, 6])])}
    with pytest.raises(Refused, match="HTTP 400: text_pairs: only valid with sentences"):
        ask(url, REWARD_MODEL, pairs)


def test_a_template_is_sent_texts_and_its_refusal_of_tokens_is_a_sign_of_life(
    serve_reward: Callable[..., FinishedRun], checkpoints: Checkpoints
) -> None:
    system = serve_reward(checkpoints.reward, template="{{ response }}, said {{ prompt }}")
    ours = load_tokenizer(checkpoints.policy)
    rollout = written(ours, list(TEXTS[:3]))
    scorer, scores = asyncio.run(compare_and_score(system, ours, rollout))
    assert scorer.sends_sentences
    texts = [f"{scorer._response(rollout, i)}, said {text}" for i, text in enumerate(TEXTS[:3])]
    rows = [np.asarray(ours(text)["input_ids"]) for text in texts]
    np.testing.assert_allclose(scores.rewards, direct_rewards(checkpoints.reward, rows), atol=TOLERANCE, rtol=0)
    with ControlPlane(system.run.config.server.grpc_url) as control:
        assert control.probe_scoring(REWARD_MODEL, ("rewards",), 30.0) == {}
        assert control.probe_scoring(CRITIC, ("values",), 30.0)


def test_one_tokenizer_is_sent_tokens(live: System, checkpoints: Checkpoints) -> None:
    ours = load_tokenizer(checkpoints.policy)
    rollout = written(ours, list(TEXTS))
    scorer, scores = asyncio.run(compare_and_score(live, ours, rollout))
    assert not scorer.sends_sentences
    np.testing.assert_allclose(
        scores.rewards, direct_rewards(checkpoints.reward, rollout.rows()), atol=TOLERANCE, rtol=0
    )


def test_a_critic_with_another_tokenizer_stops_the_actor_at_its_start(live: System, checkpoints: Checkpoints) -> None:
    last = live.run.journal.last_step()
    code, log = run_actor(live.run, "actor-other", f"actor.policy.checkpoint={checkpoints.other_policy}")
    assert code == 2
    (sentence,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert "the critic's tokenizer differs from the policy's" in sentence
    assert str(checkpoints.critic) in sentence
    assert "Traceback" not in log
    assert live.run.journal.last_step() == last
    assert not [entry for entry in live.run.journal.entries() if entry.kind == "rewind"]


def test_a_model_rendered_without_a_fingerprint_is_named(live: System, checkpoints: Checkpoints) -> None:
    """A fingerprint is missing when a config was rendered far from its checkpoint; only the answer can say so."""
    ours = load_tokenizer(checkpoints.policy)

    class Forgetful(TritonClient):
        async def describe(self, name: str) -> ServedModel:
            found = await super().describe(name)
            return ServedModel() if name == CRITIC else found

    async def compare() -> None:
        async with Forgetful(live.run.url, live.run.config.actor.client) as client:
            await Scorer(client, ours, rows_per_request=1).compare_tokenizers()

    with pytest.raises(ModelMismatch) as caught:
        asyncio.run(compare())
    print(caught.value)
    assert str(caught.value).startswith(f"{CRITIC} was rendered without its checkpoint's tokenizer")
