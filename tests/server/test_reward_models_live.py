"""Reward models with other tokenizers, labels or steps than the actor's run has, and their actors."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reward_functions
import torch
from bare_client import Refused, ask
from google.protobuf import json_format
from live_system import (
    TEXTS,
    Checkpoints,
    FinishedRun,
    LlamaForSequenceClassification,
    System,
    direct_rewards,
    direct_values,
    make_run,
    make_tokenizer,
    random_rows,
    reload_model,
    run_actor,
    scoring_inputs,
    start_system,
)
from tiny_checkpoints import save_tiny
from tiny_tokenizers import save_text_reward
from transformers import LlamaForTokenClassification, pipeline

from actor.data.rollout import Prompt, Rollout, Scores
from actor.scoring.scorer import Scorer
from critic_client import CriticClient
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.client.client import TritonClient
from python_backend.client.served import ServedModel
from python_backend.errors import RlhfError
from python_backend.store.jsonl import read_jsonl
from python_backend.wire.contract import CRITIC, CRITIC_INFER, REWARD_CHECKPOINT, REWARD_MODEL, texts_array
from tools.render_configs import parse_config, render_configs
from trainer.control_plane import ControlPlane

pytestmark = pytest.mark.slow
TOLERANCE = 1e-5
FUNCTIONS = Path(reward_functions.__file__)
PROCESS = {"separator": " ", "aggregate": "mean"}
OUTPUTS = {"rewards", "token_rewards", "step_rewards", "step_ends"}
LABELS = ("helpfulness", "correctness", "verbosity")


# ---- other tokenizers, and texts ----


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

    with pytest.raises(RlhfError) as caught:
        asyncio.run(compare())
    print(caught.value)
    assert str(caught.value).startswith(f"{CRITIC} was rendered without its checkpoint's tokenizer")


# ---- process rewards ----


@pytest.fixture
def prm(finished: FinishedRun, tmp_path: Path) -> Iterator[LlamaForTokenClassification]:
    """A token classifier with two labels, as TRL trains them, in place of the finished run's reward model."""
    tokenizer, config = make_tokenizer(), finished.run.config
    save_tiny(tmp_path, "llama", "critic", num_labels=2, vocab_size=len(tokenizer), max_position_embeddings=128)
    tokenizer.save_pretrained(tmp_path)
    data = {**config.reward.model_dump(exclude_unset=True), "checkpoint": tmp_path, "process": PROCESS}
    reward = type(config.reward).model_validate(data)
    rendered = render_configs(config.model_copy(update={"reward": reward}))

    def replace(model: str, by: dict[str, Any]) -> None:
        reload_model(finished.run, model, lambda config: (config.clear(), config.update(by)))

    def parsed(model: str, text: str) -> dict[str, Any]:
        return json_format.MessageToDict(parse_config(model, text), preserving_proto_field_name=True)

    own = render_configs(config)
    try:
        for model in (REWARD_MODEL, CRITIC_INFER):
            replace(model, parsed(model, rendered[model]))
        yield LlamaForTokenClassification.from_pretrained(str(tmp_path)).eval()
    finally:
        for model in (CRITIC_INFER, REWARD_MODEL):
            replace(model, parsed(model, own[model]))


def test_a_process_reward_is_served_and_trained_on(
    finished: FinishedRun, prm: LlamaForTokenClassification, tmp_path: Path
) -> None:
    url, tokenizer = finished.run.url, make_tokenizer()
    row = np.asarray(tokenizer("Open the file, read it")["input_ids"])
    ends = [i for i, token in enumerate(row) if tokenizer.decode([int(token)]).startswith(" ")]
    inputs = {**scoring_inputs([row, row[:3]]), "prompt_lengths": np.asarray([[1], [1]])}
    with torch.no_grad():
        right = prm(torch.from_numpy(row)[None]).logits[0].softmax(-1)[:, 1].numpy()
    for model in (REWARD_MODEL, CRITIC_INFER):
        found = ask(url, model, inputs)
        assert found.keys() >= OUTPUTS
        steps = [end for end in found["step_ends"][0].tolist() if end >= 0]
        assert steps == [*ends[1:-1], row.size - 1]  # no step before the first word; the last ends with the row
        np.testing.assert_allclose(found["step_rewards"][0, : len(steps) - 1], right[steps[:-1]], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(found["token_rewards"][0, steps], found["step_rewards"][0, : len(steps)])
        assert found["rewards"][0, 0] == pytest.approx(float(found["step_rewards"][0, : len(steps)].mean()), abs=1e-6)
    with CriticClient(url, run_id="test") as client:
        scores = client.score([row.tolist()], prompt_lengths=[1])
    assert scores.rewards[0] == pytest.approx(float(found["rewards"][0, 0]), abs=1e-6)
    metadata = texts_array([json.dumps({"step_ends": [9, 4]})])
    with pytest.raises(Refused, match=r"metadata\[0\]\.step_ends: 4, must be between"):
        ask(url, REWARD_MODEL, {"sentences": texts_array(["Open the file"]), "metadata": metadata})
    grpo = {"name": "grpo", "responses_per_prompt": 2}
    settings = [f"actor.algorithm.{key}={value}" for key, value in grpo.items()]
    code, log = run_actor(finished.run, "actor-process", f"run.dir={tmp_path / 'run'}", "actor.steps=2", *settings)
    assert code == 0, log
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert 0 < line["train_rollouts/process_rewards"] < 1
        assert line["train_rollouts/steps_per_response"] >= 1
        assert line["train_rollouts/masked_samples"] == 0
        assert line["train_optim/grad_norm"] > 0
    validation = read_jsonl(tmp_path / "run" / "validations.jsonl")[-1]
    assert validation["reward"] != validation["process_rewards"]
    assert 0 < validation["process_rewards"] < 1
    sample = read_jsonl(tmp_path / "run" / "samples.jsonl")[0]
    assert sample["reward"] == pytest.approx(np.mean(sample["step_rewards"]), abs=1e-5)
    summary = json.loads((tmp_path / "run" / "actor_summary.json").read_text())
    assert summary["process_reward_after"] == validation["process_rewards"]


def test_a_process_reward_in_a_weighted_sum(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Steps count times the model's weight; what the functions give is the outcome, at the response's end."""
    tokenizer, folder = make_tokenizer(), tmp_path / "prm"
    save_tiny(folder, "llama", "critic", num_labels=2, vocab_size=len(tokenizer), max_position_embeddings=128)
    tokenizer.save_pretrained(folder)
    rewards = {"model": {"weight": 2.0}, "length": {"function": f"{FUNCTIONS}:num_tokens", "weight": -0.5}}
    reward = {"checkpoint": str(folder), "process": PROCESS}
    run = make_run(tmp_path / "run", checkpoints, reward=reward, rewards=rewards)
    system, rollout = start_system(run), written(tokenizer, list(TEXTS))
    try:
        scores = asyncio.run(compare_and_score(system, tokenizer, rollout))[1]
        sent = {**scoring_inputs(rollout.rows()), "prompt_lengths": rollout.prompt_lengths.numpy()[:, None]}
        found = ask(run.url, REWARD_CHECKPOINT, sent)
    finally:
        system.stop()
    assert scores.process is not None
    assert scores.scored.all()
    lengths = rollout.lengths.numpy().astype(np.float32)
    for i, ends in enumerate(found["step_ends"]):
        steps = ends[ends >= 0]
        assert scores.process.ends[i].nonzero()[:, 0].tolist() == sorted(set(steps.tolist()))
        given = scores.process.rewards[i, : found["token_rewards"].shape[1]].numpy()
        np.testing.assert_allclose(given[steps], 2 * found["step_rewards"][i, : steps.size], atol=1e-5, rtol=0)
        assert scores.process.rewards[i].sum() == pytest.approx(float(given[steps].sum()), abs=1e-5)
    np.testing.assert_allclose(scores.process.outcome, -0.5 * lengths, atol=1e-5, rtol=0)
    np.testing.assert_allclose(scores.rewards, 2 * found["rewards"][:, 0] - 0.5 * lengths, atol=1e-5, rtol=0)


# ---- several attributes ----


def three_labels(folder: Path, like: Path) -> LlamaForSequenceClassification:
    """The reward checkpoint `like` with a head of three labels."""
    model = LlamaForSequenceClassification.from_pretrained(str(like), num_labels=3, ignore_mismatched_sizes=True)
    model.config.id2label = dict(enumerate(LABELS))
    torch.nn.init.normal_(model.score.weight, 0.0, 0.3)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model.eval()


def test_attributes_that_are_not_merged(tmp_path: Path, checkpoints: Checkpoints) -> None:
    model = three_labels(tmp_path / "reward", checkpoints.reward)
    reward = {"checkpoint": str(tmp_path / "reward"), "merge_attributes": False, "standardization": "off"}
    run = make_run(tmp_path / "run", checkpoints, reward=reward)
    system = start_system(run)
    try:
        for name in (REWARD_MODEL, CRITIC_INFER):
            config = parse_config(name, (run.config.run.repository_dir / name / "config.pbtxt").read_text())
            assert [list(tensor.dims) for tensor in config.output if tensor.name == "rewards"] == [[3]]
        rows = random_rows([4, 19], seed=1)
        with torch.no_grad():
            expected = np.concatenate([model(torch.from_numpy(row)[None]).logits.numpy() for row in rows])
        for name in (REWARD_MODEL, CRITIC_INFER):
            np.testing.assert_allclose(ask(run.url, name, scoring_inputs(rows))["rewards"], expected, atol=1e-5)
        code, log = run_actor(run, "actor")
        assert code == 2
        assert log.splitlines()[-1].startswith("error: reward_model returns 3 rewards per row, but the actor needs one")
    finally:
        system.stop()
