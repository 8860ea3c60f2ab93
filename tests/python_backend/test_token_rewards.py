"""Rewards read at single tokens, by what runs in the server, against transformers' own forward pass."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import TEXTS
from served_model import served_model
from tiny_checkpoints import save_tiny
from tiny_tokenizers import POSITIONS, VOCAB, make_text_tokenizer, save_text_reward
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from triton_python_backend_utils import InferenceResponse, Request

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.checkpoints.tokenization import single_tokens
from python_backend.config import RunConfig
from python_backend.wire.contract import REWARD_MODEL, texts_array
from tests.support.loaders import load_logit_reward, load_process_reward

TOLERANCE = 1e-5
PROMPT, STEPS = TEXTS[0], [" Open the file. ", "Read a line. ", "It returns its words"]
OUTPUTS = ("rewards", "token_rewards", "step_rewards", "step_ends")
LOGIT = {"tokens": [" the"], "against": [" it"]}
Ask = Callable[..., InferenceResponse]


def save_model(folder: Path, head: str, *, family: str = "qwen2", num_labels: int = 1) -> Any:
    """Save a causal LM (`language`) or a token classifier (`critic`) with a tokenizer; return the tokenizer."""
    tokenizer = make_text_tokenizer(family)
    config = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "pad_token_id": tokenizer.pad_token_id}
    save_tiny(folder, family, head, seed=3, num_labels=num_labels, **config)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def serve() -> Iterator[Callable[..., Ask]]:
    """Loads a reward model from its rendered configuration into this process."""
    with contextlib.ExitStack() as stack:

        def load(folder: Path, **reward: Any) -> Ask:
            data = {
                "reward": {"checkpoint": str(folder), "dtype": "float32", **reward},
                "actor": {"algorithm": {"name": "reinforce++"}},
            }
            model = stack.enter_context(served_model(RunConfig.model_validate(data), REWARD_MODEL))

            def ask(**inputs: Any) -> InferenceResponse:
                arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
                if isinstance(texts := inputs.get("sentences"), list):
                    arrays["sentences"] = texts_array(texts)
                if "metadata" in inputs:
                    arrays["metadata"] = texts_array([json.dumps(row) for row in inputs["metadata"]])
                request = Request(arrays, OUTPUTS if "process" in reward else OUTPUTS[:1])
                model.execute([request])
                return request.responses.get(timeout=60)

            return ask

        yield load


@torch.no_grad()
def logits(kind: Any, folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' own outputs `[S, A]` of one row."""
    return kind.from_pretrained(str(folder), dtype=torch.float32).eval()(input_ids=torch.tensor([ids])).logits[0]


# ---- next-token logits ----


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gpt-neox", "mixtral"])
def test_log_odds_and_logits_are_those_of_the_whole_output_layer(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family, "language", vocab_size=VOCAB)
    make_text_tokenizer("qwen2").save_pretrained(tmp_path)
    rows = [np.asarray([5, 9, 2, 11]), np.asarray([7]), np.asarray([3, 3, 8, 8, 1, 0, 12])]
    odds = load_logit_reward(tmp_path, tokens=[6, 7], against=[8, 20])
    one = load_logit_reward(tmp_path, tokens=[6])
    for row, found, single in zip(rows, odds.score(rows, width=9), one.score(rows), strict=True):
        own = logits(AutoModelForCausalLM, tmp_path, row.tolist())[-1]
        p = own.softmax(-1)
        assert found[0] == pytest.approx(float((p[6] + p[7]).log() - (p[8] + p[20]).log()), abs=TOLERANCE)
        assert single[0] == pytest.approx(float(own[6]), abs=TOLERANCE)
    assert odds.model.get_output_embeddings().weight.shape[0] == 4  # no [B, S, V] anywhere


def test_a_template_and_a_chat_with_its_generation_prompt(serve: Callable[..., Ask], tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path, "language")
    ids = single_tokens(tokenizer, [" the", " it"])
    template = (
        "Task: {{ prompt }} Answer: {{ response }}{% if metadata.hint is defined %} {{ metadata.hint }}{% endif %}"
    )
    ask = serve(tmp_path, logit=LOGIT, template=template)
    metadata = [{"prompt": "Open it.", "response": "a file"}, {"prompt": "Open it.", "hint": "Return"}]
    rewards = ask(sentences=["Open it. a file", "x"], metadata=metadata).outputs["rewards"]
    for text, reward in zip(["Task: Open it. Answer: a file", "Task: Open it. Answer: x Return"], rewards, strict=True):
        own = logits(AutoModelForCausalLM, tmp_path, tokenizer(text)["input_ids"])[-1]
        assert reward[0] == pytest.approx(float(own[ids[0]] - own[ids[1]]), abs=TOLERANCE)
    chat_template = (
        "{% for m in messages %}{{ m.content }}. {% endfor %}{% if add_generation_prompt %}Return{% endif %}"
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(tmp_path)
    ask = serve(tmp_path, logit=LOGIT, generation_prompt=True, score="probability")
    reward = ask(sentences=["a file"], metadata=[{"messages": [{"role": "user", "content": "Open it"}]}]).outputs[
        "rewards"
    ]
    own = logits(AutoModelForCausalLM, tmp_path, tokenizer("Open it. a file. Return")["input_ids"])[-1][ids]
    assert reward[0, 0] == pytest.approx(float(own.softmax(-1)[0]), abs=TOLERANCE)


def test_names_that_are_not_one_token(tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path, "language")
    with pytest.raises(CheckpointError, match=r"'sunshine' is . tokens of the tokenizer in .*, but must be one"):
        load_logit_reward(tmp_path, tokens=["sunshine"])
    with pytest.raises(CheckpointError, match=r"' the' and \d+ are the same token"):
        load_logit_reward(tmp_path, tokens=[" the", single_tokens(tokenizer, [" the"])[0]])
    with pytest.raises(CheckpointError, match=r"its logits cannot be a reward: token 500 is outside the vocabulary"):
        load_logit_reward(tmp_path, tokens=[500])
    assert single_tokens(tokenizer, ["Ġthe", "<|im_end|>"]) == single_tokens(tokenizer, [" the", "<|im_end|>"])
    bert = make_text_tokenizer("bert")
    with pytest.raises(CheckpointError, match="must be one"):
        single_tokens(bert, ["ж"])  # the unknown token is no name


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"tokens": np.asarray([[5, 6]])},
            "tokens: reward.template needs more than a row of tokens; send sentences and metadata",
        ),
        ({"sentences": ["x"]}, "reward.template cannot be rendered: 'prompt' is undefined"),
        ({"sentences": [""], "metadata": [{"prompt": ""}]}, "reward.template gives an empty text"),
        ({"sentences": ["x"], "metadata": [{"prompt": "the file " * 80}]}, f"{POSITIONS + 1} tokens, the model has"),
        ({"sentences": ["a" * 10_000_000], "metadata": [{"prompt": ""}]}, "10000000 bytes, must be at most 1000000"),
        ({"sentences": ["x"], "metadata": [{"prompt": "\ud800"}]}, "surrogates not allowed"),
        ({"sentences": ["x"], "metadata": [{"messages": "hello"}]}, "must be a list of"),
    ],
)
def test_bad_input_of_a_template(
    serve: Callable[..., Ask], tmp_path: Path, inputs: dict[str, Any], message: str
) -> None:
    save_model(tmp_path, "language")
    ask = serve(tmp_path, logit=LOGIT, template=" {{ prompt }}{{ response }} ")
    error = ask(**inputs).error
    assert error is not None
    assert error.startswith("INVALID_ARG: ")
    assert message in error
    assert np.isfinite(ask(sentences=["x"], metadata=[{"prompt": "y"}]).outputs["rewards"]).all()  # still served


# ---- steps ----


def of_trl(tokenizer: Any, prompt: str, steps: list[str], separator: str) -> tuple[list[int], list[int]]:
    """Ids and the labelled positions, as TRL's PRMTrainer makes them of prompt, completions and separator."""
    ids, labelled = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]], []
    for step in steps:
        ids += tokenizer(step, add_special_tokens=False)["input_ids"]
        ids += tokenizer.encode(separator, add_special_tokens=False)
        labelled.append(len(ids) - 1)
    return ids, labelled


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_steps_of_texts_as_trl_trains_them(serve: Callable[..., Ask], tmp_path: Path, family: str) -> None:
    tokenizer = save_model(tmp_path, "critic", family=family, num_labels=2)
    ask = serve(tmp_path, process={"separator": ". ", "aggregate": "min"})
    text = PROMPT + "".join(STEPS)
    got = ask(sentences=[text, PROMPT + STEPS[0]], metadata=[{"prompt": PROMPT}, {"response": STEPS[0]}])
    assert got.error is None
    contents = [step.removesuffix(". ") for step in STEPS]
    ids, at = of_trl(tokenizer, PROMPT, contents, ". ")
    right = logits(AutoModelForTokenClassification, tmp_path, ids).softmax(-1)[at, 1].numpy()
    np.testing.assert_allclose(got.outputs["step_rewards"][0], right, atol=TOLERANCE, rtol=0)
    assert got.outputs["rewards"][0, 0] == got.outputs["step_rewards"][0].min()
    ends = np.cumsum([len(step) for step in STEPS]) + len(PROMPT)
    assert got.outputs["step_ends"].tolist() == [ends.tolist(), [len(PROMPT) + len(STEPS[0]), -1, -1]]
    assert got.outputs["step_rewards"][1, 1:].tolist() == [0, 0]
    assert np.flatnonzero(got.outputs["token_rewards"][0]).tolist() == at
    np.testing.assert_allclose(got.outputs["step_rewards"][1, 0], right[0], atol=TOLERANCE, rtol=0)


def test_steps_of_tokens(serve: Callable[..., Ask], tmp_path: Path) -> None:
    """The separator stays where the policy wrote it; the last step is read at one put behind its text."""
    tokenizer = save_model(tmp_path, "critic", num_labels=2)
    ask = serve(tmp_path, process={"separator": ".", "aggregate": "mean"}, score="logit")
    prompt = tokenizer(PROMPT)["input_ids"]  # ends in a separator, which is none of the response's
    row = [*prompt, *tokenizer(" Open the file. Read a line. It is good")["input_ids"], tokenizer.eos_token_id]
    dot = single_tokens(tokenizer, ["."])[0]
    tokens, lengths = np.asarray([row, [*row[: len(prompt) + 4], *[0] * (len(row) - len(prompt) - 4)]]), [[len(row)]]
    inputs = {"tokens": tokens, "sequence_lengths": np.asarray([*lengths, [len(prompt) + 4]])}
    got = ask(**inputs, prompt_lengths=np.asarray([[len(prompt)], [len(prompt)]])).outputs
    ends = [i for i, token in enumerate(row) if token == dot and i >= len(prompt)]
    assert got["step_ends"][0].tolist() == [*ends, len(row) - 1]
    own = logits(AutoModelForTokenClassification, tmp_path, [*row[:-1], dot])
    expected = (own[:, 1] - own[:, 0])[[*ends, len(row) - 1]].numpy()
    np.testing.assert_allclose(got["step_rewards"][0], expected, atol=TOLERANCE, rtol=0)
    assert got["token_rewards"].shape == tokens.shape
    assert np.flatnonzero(got["token_rewards"][0]).tolist() == [*ends, len(row) - 1]
    assert got["rewards"][0, 0] == pytest.approx(float(expected.mean()), abs=TOLERANCE)
    assert got["step_ends"][1].tolist() == [len(prompt) + 3, -1, -1]
    given = ask(**inputs, metadata=[{"step_ends": [1, 4]}, {"step_ends": [0]}]).outputs
    np.testing.assert_allclose(
        given["step_rewards"][0, :2], (own[:, 1] - own[:, 0])[[1, 4]].numpy(), atol=TOLERANCE, rtol=0
    )
    finished = np.asarray([[*prompt, *tokenizer(" Open the file.")["input_ids"], tokenizer.eos_token_id]])
    got = ask(tokens=finished, prompt_lengths=np.asarray([[len(prompt)]])).outputs
    assert got["step_ends"].tolist() == [[finished.shape[1] - 2]]  # no step of an end of sequence alone


def test_a_response_without_text_has_no_reward(serve: Callable[..., Ask], tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path, "critic", num_labels=2)
    ask = serve(tmp_path, process={"separator": "."})
    row = np.asarray([[*tokenizer(PROMPT)["input_ids"], tokenizer.eos_token_id]])
    got = ask(tokens=row, prompt_lengths=np.asarray([[row.size - 1]])).outputs
    assert math.isnan(got["rewards"][0, 0])
    assert got["step_ends"].tolist() == [[-1]]
    blank = ask(sentences=[PROMPT + " Open. \n "], metadata=[{"response": " Open. \n "}]).outputs
    assert blank["step_ends"].tolist() == [[len(PROMPT) + 6]]  # no step of white space behind the separator
    got = ask(sentences=[PROMPT], metadata=[{"response": ""}]).outputs
    assert math.isnan(got["rewards"][0, 0])


@pytest.mark.parametrize("head", ["critic", "reward"])
def test_a_reward_at_every_token(serve: Callable[..., Ask], tmp_path: Path, head: str) -> None:
    """Of a token classifier, and of a decoder's sequence classification head applied at each token."""
    if head == "critic":
        save_model(tmp_path, head)
    else:
        save_text_reward(tmp_path, "qwen2")
    ask = serve(tmp_path, process={"granularity": "token", "aggregate": "last"})
    row = np.asarray([[5, 9, 12, 30, 7]])
    got = ask(tokens=row, prompt_lengths=np.asarray([[2]])).outputs
    expected = logits(AutoModelForTokenClassification, tmp_path, row[0].tolist())[:, 0].numpy()
    np.testing.assert_allclose(got["token_rewards"][0, 2:], expected[2:], atol=TOLERANCE, rtol=0)
    assert got["token_rewards"][0, :2].tolist() == [0, 0]
    assert got["rewards"][0, 0] == got["token_rewards"][0, 4]
    assert got["step_ends"].tolist() == [[2, 3, 4]]


def test_marks_and_next_token_logits_as_math_shepherd(serve: Callable[..., Ask], tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path, "language")
    ids = single_tokens(tokenizer, [" the", " it"])
    ask = serve(tmp_path, logit=LOGIT, process={"separator": ". ", "mark": "<|im_end|> "})
    got = ask(sentences=[PROMPT + "".join(STEPS)], metadata=[{"prompt": PROMPT}]).outputs
    text = PROMPT + "<|im_end|> ".join(step.removesuffix(". ") for step in STEPS) + "<|im_end|>"
    row = tokenizer(text)["input_ids"]
    at = [i for i, token in enumerate(row) if token == tokenizer.eos_token_id]
    expected = logits(AutoModelForCausalLM, tmp_path, row)[at][:, ids].softmax(-1)[:, 0].numpy()
    np.testing.assert_allclose(got["step_rewards"][0], expected, atol=TOLERANCE, rtol=0)
    assert got["step_ends"][0].tolist() == (np.cumsum([len(step) for step in STEPS]) + len(PROMPT)).tolist()
    with pytest.raises(CheckpointError, match="must be one"):
        serve(tmp_path, logit=LOGIT, process={"separator": "the words"})
    merges = serve(tmp_path, logit=LOGIT, process={"separator": "e"}).__call__(sentences=["the words are here"])
    assert merges.error is not None
    assert "as a token of its own" in merges.error


BAD_ENDS: dict[str, tuple[Any, str]] = {
    "unsorted": ([4, 2], "step_ends: 2, must be between 1 and 12, and above the step's before"),
    "twice": ([2, 2], "step_ends: 2, must be between"),
    "out of range": ([2, 13], "step_ends: 13, must be between 1 and 12"),
    "negative": ([-1], "step_ends: -1, must be between"),
    "empty": ([], "step_ends: [], must be a list of integers"),
    "texts": (["2"], "must be a list of integers"),
    "true": ([True], "must be a list of integers"),
    "no list": (7, "step_ends: 7, must be a list of integers"),
}


def test_bad_input_of_steps(serve: Callable[..., Ask], tmp_path: Path) -> None:
    tokenizer = save_model(tmp_path, "critic", num_labels=2)
    ask = serve(tmp_path, process={})
    cases = [
        ({"sentences": ["Open a file."], "metadata": [{"step_ends": ends}]}, text) for ends, text in BAD_ENDS.values()
    ]
    cases += [
        ({"sentences": ["Open a file."]}, "metadata[0].step_ends: missing; a process reward without"),
        ({"tokens": np.asarray([[5, 6]]), "metadata": [{"step_ends": [2]}]}, "must be between 0 and 1"),
        ({"sentences": ["x " * 200], "metadata": [{"step_ends": [9, 400]}]}, "tokens, the model has 64 positions"),
        ({"sentences": ["x"], "metadata": [{"response": "y", "step_ends": [1]}]}, "response: 'y' is not the end"),
        ({"sentences": ["x"], "metadata": [{"prompt": 3, "step_ends": [1]}]}, "prompt: '3' is not the start"),
        ({"sentences": ["a" * 10_000_000]}, "must be at most 1000000 (max_sentence_bytes)"),
        ({"sentences": np.asarray([[b"\xff"]], np.object_), "metadata": [{}]}, "sentences[0]: not UTF-8"),
        (
            {"sentences": ["x"], "text_pairs": texts_array(["y"]), "metadata": [{"step_ends": [1]}]},
            "text_pairs: this model scores one text per row",
        ),
    ]
    for inputs, message in cases:
        error = ask(**inputs).error
        assert error is not None, inputs
        assert error.startswith("INVALID_ARG: "), error
        assert message in error
    good = ask(sentences=["Open a file."], metadata=[{"step_ends": [4, 12]}])
    assert np.isfinite(good.outputs["step_rewards"]).all()
    full = np.asarray([[5] * POSITIONS])
    assert "65 tokens, the model has 64 positions" in str(
        serve(tmp_path, process={"separator": "."})(tokens=full).error
    )
    marked = serve(tmp_path, process={"separator": ".", "mark": tokenizer.eos_token})
    assert "takes the place of the separator in texts, needs more than a row of tokens; send sentences" in str(
        marked(tokens=full).error
    )
    each = serve(tmp_path, process={"granularity": "token"}, max_request_tokens=64)
    assert "(max_request_tokens)" in str(each(sentences=["Open a file."] * 63 + ["Open it. " * 4]).error)


def test_checkpoints_that_score_no_tokens(tmp_path: Path) -> None:
    save_text_reward(tmp_path / "pooled", "bert")
    with pytest.raises(CheckpointError, match="has its own pooling, so it cannot score single tokens"):
        load_process_reward(tmp_path / "pooled")
    save_model(tmp_path / "three", "critic", num_labels=3)
    with pytest.raises(CheckpointError, match=r"3 labels needs reward\.attribute_weights"):
        load_process_reward(tmp_path / "three")
    weighted = load_process_reward(tmp_path / "three", attribute_weights=[-1, 0, 1])
    own = logits(AutoModelForTokenClassification, tmp_path / "three", [5, 6, 7]).numpy()
    np.testing.assert_allclose(
        weighted.token_scores([np.asarray([5, 6, 7])])[0], own[:, 2] - own[:, 0], atol=TOLERANCE, rtol=0
    )
