"""Rewards of texts, pairs and chats, and rewards read at single tokens, through the server's code.

The oracle is transformers: its text classification pipeline, or a plain forward pass.
"""

import contextlib
import dataclasses
import functools
import json
import math

import numpy as np
import pytest
import torch
from loaders import load_logit_reward, load_process_reward, load_reward
from run_checkpoints import TEXTS
from served_model import served_model
from tiny_checkpoints import change_config, save_tiny
from tiny_tokenizers import CHATS, PLAIN_CHAT, POSITIONS, VOCAB, make_text_tokenizer, save_text_reward
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)
from triton_python_backend_utils import Request

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.checkpoints.special_tokens import dropped_ids, reply_text, special_tokens, turn_ends
from rlhf_triton.checkpoints.tokenization import encode_text, single_tokens
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.models.modeling import quiet_transformers
from rlhf_triton.python_backend.serving.requests import RowReader
from rlhf_triton.wire.contract import (
    METADATA,
    REWARD_MODEL,
    SENTENCES,
    TEXT_PAIRS,
    TOKENS,
    ContractError,
    texts_array,
)

TOLERANCE = 1e-5
MESSAGES = [{"role": "user", "content": "Open it."}]
CHAT = [*MESSAGES, {"role": "assistant", "content": "Good day."}]
REPLY = "Good day."
LONG = " ".join(TEXTS)
families = pytest.mark.parametrize("family", CHATS)
near = functools.partial(np.testing.assert_allclose, atol=TOLERANCE, rtol=0)
quiet_transformers()


class Texts:
    """A request of texts, as the reader sees it."""

    def __init__(self, texts, metadata=None, **arrays):
        self._arrays = {SENTENCES: texts_array(texts), **arrays}
        if metadata is not None:
            self._arrays[METADATA] = texts_array([json.dumps(row) for row in metadata])

    def array(self, name):
        return self._arrays.get(name)


def read(
    folder,
    texts,
    metadata=None,
    *,
    add_special_tokens=True,
    takes_pairs=False,
    append_eos=False,
    **arrays,
):
    """Return the model and the rows of one request, through the server's code."""
    model = load_reward(folder)
    settings = {"add_special_tokens": add_special_tokens, "takes_pairs": takes_pairs, "append_eos": append_eos}
    reader = RowReader(folder, model.limits, skipped_pad_id=model.skipped_pad_id, **settings)
    return model, list(reader.read(Texts(texts, metadata, **arrays)).rows)


def score(*args, **settings):
    """Return token rows and rewards `[B]` of one request; see `read`."""
    model, rows = read(*args, **settings)
    rewards = model.score([row.tokens for row in rows], types=[row.types for row in rows])
    return [row.tokens.tolist() for row in rows], rewards[:, 0]


def classify(folder, texts):
    """Return the scores of transformers' pipeline, each text alone."""
    classifier = pipeline("text-classification", model=str(folder), device="cpu")
    settings = {"function_to_apply": "none"}
    return [found["score"] for found in classifier(texts, **settings)]


def plain_ids(tokenizer, text):
    """The ids of a text without special tokens."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def score_ids(folder, ids):
    """Return the score of the pipeline's model for ids from the tokenizer's own chat template."""
    model = pipeline("text-classification", model=str(folder), device="cpu").model
    return float(model(input_ids=torch.tensor([ids])).logits[0, 0])


# ---- texts ----


@families
def test_text_scores_match_the_pipeline_and_special_tokens_can_be_turned_off(tmp_path, family):
    tokenizer = save_text_reward(tmp_path, family)
    texts = [*TEXTS, "y", *([] if family == "qwen2" else [""])]
    rows, rewards = score(tmp_path, texts)
    assert rows == [tokenizer(text)["input_ids"] for text in texts]
    near(rewards, classify(tmp_path, texts))
    bare, scores = score(tmp_path, TEXTS[:1], add_special_tokens=False)
    assert bare == [plain_ids(tokenizer, TEXTS[0])]
    assert not {*tokenizer.all_special_ids} & {*bare[0]}
    assert (abs(rewards[0] - scores[0]) > TOLERANCE) == (family != "qwen2")
    model = load_reward(tmp_path)
    assert model.skipped_pad_id == (tokenizer.pad_token_id if family in ("llama", "qwen2") else None)


@families
def test_chat_scores_match_the_models_own_chat_template(tmp_path, family):
    tokenizer = save_text_reward(tmp_path, family)
    rows, rewards = score(tmp_path, [REPLY, "", "No chat."], [{"messages": MESSAGES}, {"messages": CHAT}, {}])
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    templated = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    own = CHATS[family] != PLAIN_CHAT  # the template has the special tokens, if there are any
    assert rows[0] == rows[1] == (templated if own else tokenizer(rendered)["input_ids"])
    expected = score_ids(tmp_path, templated) if own else classify(tmp_path, [rendered])[0]
    plain = classify(tmp_path, ["No chat."])[0]
    near(rewards, [expected, expected, plain])
    assert rows == score(tmp_path, [rendered, rendered, "No chat."])[0]  # or rendered by the client


@pytest.mark.parametrize("family", ["llama", "bert", "roberta"])
@pytest.mark.parametrize("has_cls", [True, False])
def test_rendered_chat_gets_special_tokens_only_for_encoders(tmp_path, family, *, has_cls):
    cls = {"cls_token": "[CLS]" if family == "bert" else "<s>"} if has_cls else {"cls_token": None}
    tokenizer = save_text_reward(tmp_path, family, chat_template=PLAIN_CHAT, **cls)
    rows, rewards = score(tmp_path, [""], [{"messages": CHAT}])
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert rows == [tokenizer(rendered, add_special_tokens=family != "llama")["input_ids"]]
    assert rewards[0] == pytest.approx(score_ids(tmp_path, rows[0]), abs=TOLERANCE)


@families
def test_text_pair_scores_match_the_pipeline(tmp_path, family):
    tokenizer = save_text_reward(tmp_path, family)
    pairs = [(TEXTS[0], TEXTS[1]), ("", TEXTS[3]), ("y [SEP] </s> y", "[SEP] y")]
    seconds = texts_array([second for _, second in pairs])
    model, found = read(tmp_path, [first for first, _ in pairs], takes_pairs=True, text_pairs=seconds)
    tokens = [row.tokens for row in found]
    types = [row.types for row in found]
    encoded = [tokenizer(*pair) for pair in pairs]
    assert [row.tolist() for row in tokens] == [one["input_ids"] for one in encoded]
    assert [None if row is None else row.tolist() for row in types] == [one.get("token_type_ids") for one in encoded]
    for huge in [(LONG, "y"), ("y", LONG), ("word " * 199_000, "one " * 199_000)]:  # not tokenised as a whole
        with pytest.raises(ContractError, match=r"sentences\[0\]: \d+ (tokens|characters), the model takes 64"):
            read(tmp_path, [huge[0]], takes_pairs=True, text_pairs=texts_array([huge[1]]))
    given = [{"text": first, "text_pair": second} for first, second in pairs]
    near(model.score(tokens, types=types)[:, 0], classify(tmp_path, given))


@pytest.mark.parametrize("head", ["reward", "critic"])
def test_rows_with_and_without_a_second_text_share_a_forward_pass(tmp_path, head):
    """The models have a head on each token, and an encoder's own head."""
    save_text_reward(tmp_path, "bert")
    if head == "critic":
        save_tiny(tmp_path, "bert", "critic", vocab_size=VOCAB, pooling="last", max_position_embeddings=POSITIONS)
    texts = [TEXTS[0], TEXTS[1], TEXTS[0]]
    pairs = texts_array([TEXTS[2], "", ""])
    rows, rewards = score(tmp_path, texts, takes_pairs=True, text_pairs=pairs)
    assert rows[1:] == score(tmp_path, texts[1:])[0]
    model = load_reward(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with torch.no_grad():
        for i, pair in enumerate([(TEXTS[0], TEXTS[2]), (TEXTS[1],), (TEXTS[0],)]):
            logits = model.model(**tokenizer(*pair, return_tensors="pt").to(model.model.device)).logits
            expected = logits[0, -1, 0] if head == "critic" else logits[0, 0]
            assert rewards[i] == pytest.approx(float(expected), abs=TOLERANCE)
    untyped = [np.asarray(row) for row in rows]
    assert abs(model.score(untyped)[0, 0] - rewards[0]) > 1e-4


@pytest.mark.parametrize(
    ("named", "version", "inputs", "expected"),
    [
        ("PreTrainedTokenizerFast", "4.57.3", None, "types"),
        ("TokenizersBackend", None, None, "types"),  # a config.json that names no version is older
        ("FunnelTokenizerFast", "4.57.3", None, "types"),
        ("BertTokenizerFast", "5.23.0", None, "types"),
        ("DistilBertTokenizerFast", "4.57.3", None, "none"),
        ("PreTrainedTokenizerFast", "4.57.3", ["input_ids", "attention_mask"], "none"),
        ("TokenizersBackend", "5.23.0", None, "warning"),
        ("TokenizersBackend", "5.23.0", ["input_ids", "attention_mask"], "none"),
        ("TokenizersBackend", "5.23.0", ["input_ids", "token_type_ids", "attention_mask"], "types"),
    ],
)
def test_pairs_have_the_token_types_of_transformers_4(tmp_path, caplog, named, version, inputs, expected):
    save_text_reward(tmp_path, "bert", model={"type_vocab_size": 3})  # Funnel gives three types
    change_config(tmp_path, transformers_version=version)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["model_input_names"]
    settings |= {"tokenizer_class": named, **({"model_input_names": inputs} if inputs else {})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    pair = (TEXTS[0], TEXTS[1])
    model, (row,) = read(tmp_path, pair[:1], takes_pairs=True, text_pairs=texts_array(pair[1:]))
    encoded = AutoTokenizer.from_pretrained(tmp_path)(*pair, return_token_type_ids=True, return_tensors="pt")
    assert row.tokens.tolist() == encoded["input_ids"][0].tolist()
    if expected == "types":
        assert row.types.tolist() == encoded["token_type_ids"][0].tolist() != [0] * len(row.tokens)
    else:
        assert row.types is None
        del encoded["token_type_ids"]
    with torch.no_grad():
        near(model.score([row.tokens], types=[row.types])[0], model.model(**encoded.to(model.model.device)).logits[0])
    warnings = [message for message in caplog.messages if "second texts get no token types" in message]
    assert len(warnings) == (expected == "warning")


def test_append_eos_ends_texts_and_a_pairs_prompt_may_be_a_chat(tmp_path):
    tokenizer = save_text_reward(tmp_path / "qwen2", "qwen2")
    eos = [tokenizer.eos_token_id]
    metadata = [{}, {}, {"messages": MESSAGES}]
    rows, _ = score(tmp_path / "qwen2", ["y", "y<|im_end|>", "y"], metadata, append_eos=True)
    assert rows[0] == rows[1] == tokenizer("y")["input_ids"] + eos
    assert rows[2] == score(tmp_path / "qwen2", ["y"], metadata[2:])[0][0]
    pair = {"takes_pairs": True, "text_pairs": texts_array(["one"])}
    assert score(tmp_path / "qwen2", ["y"], append_eos=True, **pair)[0] == [tokenizer("y", "one")["input_ids"] + eos]
    tokenizer = save_text_reward(tmp_path, "bert", chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    rows, _ = score(tmp_path, [""], metadata[2:], **pair)
    assert rows == [tokenizer(MESSAGES[0]["content"], "one")["input_ids"]]
    for family in ("llama", "roberta"):  # both begin the pair, and so do their templates
        tokenizer = save_text_reward(tmp_path / family, family)
        rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
        rows, _ = score(tmp_path / family, [""], metadata[2:], **pair)
        assert rows == [tokenizer(rendered, "one")["input_ids"]]
        assert rows[0][:2] == [tokenizer.bos_token_id] * 2
    with pytest.raises(ContractError, match=r"append_eos is set, but the tokenizer of .* has no end-of-sequence"):
        score(tmp_path, ["y"], append_eos=True)


def test_invalid_sentences_and_text_pairs_are_refused(tmp_path):
    save_text_reward(tmp_path, "qwen2", chat_template=None)
    ones = texts_array(["y"])
    pairs = {"takes_pairs": True}
    cases = [
        (r"sentences\[0\]: '' has no tokens", "", None, {}),
        (r"has no chat template; save one in that folder", "y", [{"messages": MESSAGES}], {}),
        (r"text_pairs: this model scores one text per row, unless reward.text is pair", "y", None, {TEXT_PAIRS: ones}),
        *(
            (message, "y", None, {**pairs, TEXT_PAIRS: ones, **arrays})
            for message, arrays in {
                r"text_pairs: only valid with sentences, and not with tokens": {TOKENS: np.ones((1, 2), np.int64)},
                r"text_pairs: shape \[2, 1\], must be \[1, 1\]": {TEXT_PAIRS: texts_array(["y", "y"])},
                r"text_pairs\[0\]: not UTF-8": {TEXT_PAIRS: np.asarray([[b"\xff"]], np.object_)},
            }.items()
        ),
    ]
    for message, text, metadata, settings in cases:
        with pytest.raises(ContractError, match=message):
            score(tmp_path, [text], metadata, **settings)


@pytest.mark.parametrize(
    ("num_labels", "problem"),
    [(1, None), (1, "regression"), (3, None), (3, "regression"), (3, "multi_label_classification")],
)
def test_probabilities_match_the_pipeline(tmp_path, num_labels, problem):
    save_text_reward(tmp_path, "bert", num_labels=num_labels, model={"problem_type": problem})
    classifier = pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    model = load_reward(tmp_path, standardization=(0.5, 2.0), attribute_weights=[1] * num_labels)
    rows = [np.asarray(classifier.tokenizer(text)["input_ids"]) for text in TEXTS]
    outputs = model.launch(rows)()
    np.testing.assert_array_equal(outputs[:, :1], model.score(rows))
    for found, expected in zip(model.probabilities(outputs[:, 1:]), classifier([*TEXTS]), strict=True):
        by_label = {item["label"]: item["score"] for item in expected}
        np.testing.assert_allclose(found, [by_label[f"LABEL_{i}"] for i in range(num_labels)], atol=1e-6)


def test_trailing_padding_tokens_are_skipped_as_in_the_pipeline(tmp_path):
    """end-of-text is also the padding token: transformers pools the token before it."""
    settings = {"added": ("<s>", "</s>"), "pad_token": "</s>"}
    tokenizer = save_text_reward(tmp_path, "llama", **settings)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tokenizer("y")["input_ids"][-1]
    texts = [*TEXTS, "", "</s></s>"]
    rows, rewards = score(tmp_path, texts)
    assert rows[0] == tokenizer(texts[0])["input_ids"][:-1]
    near(rewards, classify(tmp_path, texts))
    bare = [texts[0], f"{texts[0]}</s>", f"{texts[0]}</s></s>"]  # the pipeline's model skips padding of any origin
    kept, rewards = score(tmp_path, bare, add_special_tokens=False)
    assert kept == [plain_ids(tokenizer, texts[0])] * 3
    ids = [plain_ids(tokenizer, text) for text in bare]
    near(rewards, [score_ids(tmp_path, row) for row in ids])
    assert [load_reward(tmp_path, pooling=each).skipped_pad_id for each in ("last", "mean")] == [None, None]


BY_TURN = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("text", "metadata", "pair"),
    [
        (REPLY, {"messages": [*CHAT, {"role": "user", "content": "Read it."}]}, ""),
        ("Open it. Good day.", {}, ""),
        ("Open it.", {}, REPLY),
    ],
)
def test_text_one_token_too_long_is_refused_with_its_token_count(tmp_path, text, metadata, pair):
    """The end-of-turn token is also the padding token, and still counts."""
    save_text_reward(tmp_path, "llama", chat_template=BY_TURN, pad_token="</s>")
    model = load_reward(tmp_path)
    pairs = {"takes_pairs": True, TEXT_PAIRS: texts_array([pair])} if pair else {}
    _, (whole,) = read(tmp_path, [text], [metadata], **pairs)
    size = whole.tokens.size
    for most in (size, size - 1):
        limits = dataclasses.replace(model.limits, max_length=most)
        reader = RowReader(tmp_path, limits, skipped_pad_id=model.skipped_pad_id, add_special_tokens=True)
        if most == size:
            np.testing.assert_array_equal(reader.row_of_text(0, text, metadata, pair).tokens, whole.tokens)
        else:
            with pytest.raises(ContractError, match=rf"sentences\[0\]: {size} tokens, the model takes {most} "):
                reader.row_of_text(0, text, metadata, pair)


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ROLES = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, []),
        (PLAIN_CHAT, []),
        (CHATML, ["<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "{{ eos_token }}"), ["</s>"]),
        (ROLES + "<|im_end|>\n{% endfor %}{% if not add_generation_prompt %}</s>{% endif %}", ["<|im_end|>"]),
        (ROLES + "<|return|>{{ eos_token }}\n{% endfor %}", ["</s>"]),  # the first one is part of the reply
        (CHATML + "<|im_start|>assistant\n<|return|>", ["<|im_end|>"]),
        (ROLES + "{% endfor %}", ["<|user|>"]),
        (ROLES + "{{ '<|return|>' if loop.last else '<|im_end|>' }}{% endfor %}", ["<|im_end|>", "<|return|>"]),
        (ROLES + " END {% endfor %}", []),
        ("{{ tools[0].function.name }}" + CHATML, ["<|im_end|>"]),  # it needs tools
        ({"tool_use": CHATML}, ["<|im_end|>"]),  # for chats with tools alone
        ({"default": CHATML, "tool_use": ROLES + "<|return|>{% endfor %}"}, ["<|im_end|>"]),
        ({"rag": CHATML}, []),
        ("{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}", []),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_turn_ends_finds_the_templates_end_tokens(template, ends):
    tokenizer = make_text_tokenizer("llama", chat_template=template)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>", "<|return|>")])
    tokenizer.add_tokens([AddedToken("<|user|>", special=False), AddedToken("\n", special=False)])
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer)) == ends


def test_reply_text_keeps_special_tokens_except_ends_and_padding(tmp_path):
    """Neither BOS, padding, the end of a turn in the template, nor one that generation_config.json names."""
    tokenizer = make_text_tokenizer("llama", chat_template=CHATML)
    names = ("<|im_start|>", "<|im_end|>", "<|return|>", "<think>")
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, len(tokenizer) - 2]}))
    reply = tokenizer("<s><pad><think>Good day.<|im_start|></s><|im_end|><|return|>", add_special_tokens=False)[
        "input_ids"
    ]
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("<s>", "</s>", "<pad>", "<|im_end|>", "<|return|>")]
    assert dropped_ids(loaded) == {*ids}
    assert reply_text(loaded, reply) == "<think>Good day.<|im_start|>"
    parts = "<think>A.<|im_end|><|im_start|>B.</s><pad>"  # as of gpt-oss, where <|end|> also ends a part of a reply
    assert reply_text(loaded, plain_ids(tokenizer, f"{parts}.<|return|><|im_end|>")) == f"{parts}."


@families
@pytest.mark.parametrize("pad", ["!", "the"])
def test_padding_token_that_is_ordinary_text_is_sampled_and_kept_in_replies(tmp_path, family, pad):
    """Published tokenizers pad with "!", which transformers then lists among the special tokens."""
    texts = [*TEXTS, "y!"]
    (token,) = make_text_tokenizer(family, texts)("y " + pad, add_special_tokens=False)["input_ids"][-1:]
    piece = make_text_tokenizer(family, texts).convert_ids_to_tokens(token)
    make_text_tokenizer(family, texts, pad_token=piece).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.pad_token_id == token in tokenizer.all_special_ids
    text = f"the {pad} the {pad} words"
    ids = plain_ids(tokenizer, text)
    assert reply_text(tokenizer, ids) == tokenizer.decode(ids)
    special = special_tokens(tokenizer, 7)
    assert token not in special.banned_ids
    assert token not in dropped_ids(tokenizer)
    own = make_text_tokenizer(family)
    assert {own.pad_token_id, own.bos_token_id} - {None, own.eos_token_id} <= {*special_tokens(own, 7).banned_ids}
    assert dropped_ids(own) >= {own.pad_token_id}


@pytest.mark.filterwarnings("ignore:This sequence already has </s>")
def test_encode_text_works_with_a_slow_tokenizer():
    # ids are bytes + 3; </s> is 1
    a = 100
    b = 101
    for text in ("ab", "ab</s>"):
        assert encode_text(ByT5Tokenizer(), text) == [a, b, 1]


# ---- rewards at single tokens ----

PROMPT = TEXTS[0]
STEPS = [" Open the file. ", "Read a line. ", "It returns its words"]
OUTPUTS = ("rewards", "token_rewards", "step_rewards", "step_ends")
LOGIT = {"tokens": [" the"], "against": [" it"]}


def save_model(folder, head, *, family="qwen2", num_labels=1):
    """Save a causal LM (`language`) or a token classifier (`critic`) with a tokenizer; return the tokenizer."""
    tokenizer = make_text_tokenizer(family)
    config = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "pad_token_id": tokenizer.pad_token_id}
    save_tiny(folder, family, head, seed=3, num_labels=num_labels, **config)
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def serve():
    """Return a function that loads a reward model from its rendered configuration into this process."""
    with contextlib.ExitStack() as stack:

        def load(folder, *, server=None, **reward):
            data = {
                "server": server or {},
                "reward": {"model": str(folder), "dtype": "float32", **reward},
                "actor": {"algorithm": {"name": "reinforce++"}},
            }
            model = stack.enter_context(served_model(RunConfig.model_validate(data), REWARD_MODEL))

            def ask(**inputs):
                texts = {name: value for name, value in inputs.items() if not isinstance(value, np.ndarray)}
                if "metadata" in texts:
                    texts["metadata"] = [json.dumps(row) for row in texts["metadata"]]
                arrays = {**inputs, **{name: texts_array(value) for name, value in texts.items()}}
                request = Request(arrays, OUTPUTS if "process" in reward else OUTPUTS[:1])
                model.execute([request])
                return request.responses.get(timeout=120)

            return ask

        yield load


@torch.no_grad()
def logits(kind, folder, ids):
    """Return transformers' outputs `[S, A]` of one row."""
    return kind.from_pretrained(str(folder), dtype=torch.float32).eval()(input_ids=torch.tensor([ids])).logits[0]


def assert_refused(ask, cases):
    for inputs, message in cases:
        error = ask(**inputs).error
        assert error is not None, inputs
        assert error.startswith("INVALID_ARG: "), error
        assert message in error


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "mixtral"])
def test_logit_reward_matches_the_full_output_layer(tmp_path, family):
    save_tiny(tmp_path, family, "language", vocab_size=VOCAB)
    make_text_tokenizer("qwen2").save_pretrained(tmp_path)
    rows = [np.asarray([5, 9, 2, 11]), np.asarray([7]), np.asarray([3, 3, 8, 8, 1, 0, 12])]
    odds = load_logit_reward(tmp_path, tokens=[6, 7], against=[8, 20])
    own = [logits(AutoModelForCausalLM, tmp_path, row.tolist())[-1] for row in rows]
    p = [each.softmax(-1) for each in own]
    near(odds.score(rows, width=9)[:, 0], [float((q[6] + q[7]).log() - (q[8] + q[20]).log()) for q in p])
    near(load_logit_reward(tmp_path, tokens=[6]).score(rows)[:, 0], [float(each[6]) for each in own])
    assert odds.model.get_output_embeddings().weight.shape[0] == 4  # no [B, S, V] anywhere


def test_logit_reward_reads_reward_template_and_generation_prompt(serve, tmp_path):
    tokenizer = save_model(tmp_path, "language")
    ids = single_tokens(tokenizer, [" the", " it"])
    hint = "{% if metadata.hint is defined %} {{ metadata.hint }}{% endif %}"
    ask = serve(tmp_path, logit=LOGIT, template="Task: {{ prompt }} Answer: {{ response }}" + hint)
    metadata = [{"prompt": "Open it.", "response": "a file"}, {"prompt": "Open it.", "hint": "Return"}]
    rewards = ask(sentences=["Open it. a file", "x"], metadata=metadata).outputs["rewards"]
    for text, reward in zip(["Task: Open it. Answer: a file", "Task: Open it. Answer: x Return"], rewards, strict=True):
        own = logits(AutoModelForCausalLM, tmp_path, tokenizer(text)["input_ids"])[-1]
        near(reward[0], own[ids[0]] - own[ids[1]])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}. {% endfor %}{% if add_generation_prompt %}Return{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path)
    ask = serve(tmp_path, logit=LOGIT, generation_prompt=True, score="probability")
    messages = [{"role": "user", "content": "Open it"}]
    reward = ask(sentences=["a file"], metadata=[{"messages": messages}]).outputs["rewards"]
    own = logits(AutoModelForCausalLM, tmp_path, tokenizer("Open it. a file. Return")["input_ids"])[-1][ids]
    near(reward[0, 0], own.softmax(-1)[0])


def test_logit_reward_refuses_names_that_are_not_one_token(tmp_path):
    tokenizer = save_model(tmp_path, "language")
    for tokens, message in (
        (["sunshine"], r"'sunshine' is . tokens \(.*\) of the tokenizer in .*, but must be one"),
        ([" the", *single_tokens(tokenizer, [" the"])], r"' the' and \d+ are the same token"),
        ([500], r"its logits cannot be a reward: token 500 is outside the vocabulary"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_logit_reward(tmp_path, tokens=tokens)
    assert single_tokens(tokenizer, ["Ġthe", "<|im_end|>"]) == single_tokens(tokenizer, [" the", "<|im_end|>"])
    with pytest.raises(CheckpointError, match="must be one"):
        single_tokens(make_text_tokenizer("bert"), ["ж"])  # the unknown token is no name


def test_reward_template_refuses_bad_input_and_keeps_serving(serve, tmp_path):
    save_model(tmp_path, "language")
    ask = serve(tmp_path, logit=LOGIT, template=" {{ prompt }}{{ response }} ")
    needs = "tokens: reward.template needs more than a row of tokens; send sentences and metadata"
    long = [{"prompt": "the file " * 80}]
    cases = [
        ({"tokens": np.asarray([[5, 6]])}, needs),
        ({"sentences": ["x"]}, "reward.template cannot be rendered: 'prompt' is undefined"),
        ({"sentences": [""], "metadata": [{"prompt": ""}]}, "reward.template gives an empty text"),
        ({"sentences": ["x"], "metadata": long}, f"tokens, the model takes {POSITIONS} (max_length)"),
        ({"sentences": ["x"], "metadata": [{"prompt": "\ud800"}]}, "surrogates not allowed"),
    ]
    assert_refused(ask, cases)
    assert np.isfinite(ask(sentences=["x"], metadata=[{"prompt": "y"}]).outputs["rewards"]).all()  # still served


@pytest.mark.parametrize(
    ("template", "is_told"),
    [
        ("{{ prompt }} {{ response }}", True),
        ("{{ response }}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ response }}", False),
    ],
)
def test_reward_template_that_reads_only_the_last_message_is_warned_about(serve, tmp_path, caplog, template, is_told):
    save_model(tmp_path, "language")
    ask = serve(tmp_path, logit=LOGIT, template=template)
    for messages, told in ((MESSAGES, False), ([*CHAT, *MESSAGES], is_told)):
        ask(sentences=["a file"] * 2, metadata=[{"messages": messages}] * 2)
        warned = ["reward.template reads the prompt, which of a chat is only its last message" in caplog.text]
        assert warned == [told]


# ---- steps ----


def of_trl(tokenizer, prompt, steps, separator):
    """Return ids and labelled positions as TRL's PRMTrainer makes them from prompt, completions and separator."""
    ids = [tokenizer.bos_token_id, *plain_ids(tokenizer, prompt)]
    labelled = []
    for step in steps:
        ids += plain_ids(tokenizer, step)
        ids += tokenizer.encode(separator, add_special_tokens=False)
        labelled.append(len(ids) - 1)
    return ids, labelled


def test_texts_are_read_with_the_tokenizer_of_the_start(serve, tmp_path):
    tokenizer = save_text_reward(tmp_path, "qwen2")
    ask = serve(tmp_path)
    make_text_tokenizer("qwen2", chat_template="{{ messages[0].content }}").save_pretrained(tmp_path)
    got = ask(sentences=[REPLY], metadata=[{"messages": MESSAGES}]).outputs["rewards"]
    near(got, [[score_ids(tmp_path, tokenizer.apply_chat_template(CHAT, return_dict=False))]])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_process_reward_of_texts_reads_steps_as_trl_trains_them(serve, tmp_path, family):
    tokenizer = save_model(tmp_path, "critic", family=family, num_labels=2)
    ask = serve(tmp_path, process={"separator": ". "})
    text = PROMPT + "".join(STEPS)
    got = ask(sentences=[text, PROMPT + STEPS[0]], metadata=[{"prompt": PROMPT}, {"response": STEPS[0]}]).outputs
    ids, at = of_trl(tokenizer, PROMPT, [step.removesuffix(". ") for step in STEPS], ". ")
    right = logits(AutoModelForTokenClassification, tmp_path, ids).softmax(-1)[at, 1].numpy()
    near(got["step_rewards"], [right, [right[0], 0, 0]])
    assert got["rewards"][0, 0] == got["step_rewards"][0].min()
    ends = np.cumsum([len(step) for step in STEPS]) + len(PROMPT)
    assert got["step_ends"].tolist() == [ends.tolist(), [len(PROMPT) + len(STEPS[0]), -1, -1]]
    assert np.flatnonzero(got["token_rewards"][0]).tolist() == at


@pytest.mark.parametrize("template", [PLAIN_CHAT, CHATS["llama"]])
@pytest.mark.parametrize("process", [{"separator": ". "}, {"separator": "<pad>"}, {"granularity": "token"}], ids=str)
def test_process_reward_of_a_chat_starts_with_the_templates_rendering(serve, tmp_path, template, process):
    tokenizer = save_model(tmp_path, "critic", family="llama", num_labels=1)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    got = serve(tmp_path, process=process, score="logit")(sentences=[REPLY], metadata=[{"messages": MESSAGES}]).outputs
    per_token = "granularity" in process
    messages = CHAT if per_token else MESSAGES
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=not per_token, return_dict=False)
    if not per_token:
        ids += plain_ids(tokenizer, REPLY)
        ids += plain_ids(tokenizer, process["separator"])
    near(got["step_rewards"][0, -1], logits(AutoModelForTokenClassification, tmp_path, ids)[-1, 0])


@pytest.mark.parametrize("separator", [". ", " Read", "."])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_process_reward_finds_the_same_steps_in_text_and_tokens(serve, tmp_path, family, separator):
    """SentencePiece, as in Llama 2, puts the space before a word into the word's token."""
    tokenizer = save_model(tmp_path, "critic", family=family, num_labels=2)
    ask = serve(tmp_path, process={"separator": separator})
    text = "Open the file. Read a line. Read it again. It is good."
    counts = [
        (ask(**row).outputs["step_ends"] >= 0).sum()
        for row in ({"sentences": [text]}, {"tokens": np.asarray([tokenizer(text)["input_ids"]])})
    ]
    assert counts[0] == counts[1] > 2


@pytest.mark.parametrize("spelling", ["bytes", "parts of two characters", "byte fallback"])
def test_process_reward_of_tokens_finds_a_separator_that_several_tokens_spell(serve, tmp_path, spelling):
    """Byte-level BPE and SentencePiece's byte fallback spell what they have no entry for."""
    save_model(tmp_path, "critic", num_labels=2)
    text = "one。二。\ufffdé"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = [*byte_level.pre_tokenize_str(text)[0][0]]
    has_fallback = spelling == "byte fallback"
    if has_fallback:
        names = [f"<0x{byte:02X}>" for byte in text.encode()]
    merged = [(names[5], names[6])] if spelling == "parts of two characters" else []
    entries = ["<pad>", *"aone", *names, *map("".join, merged)]
    vocabulary = {entry: i for i, entry in enumerate(dict.fromkeys(entries))}
    spelled = Tokenizer(models.BPE(vocabulary, merged, byte_fallback=has_fallback))
    spelled.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    if not has_fallback:
        spelled.pre_tokenizer = byte_level
        spelled.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelled, pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path)
    stray = vocabulary[names[-1]]  # a byte that no character starts with
    ids = [stray, *tokenizer(text)["input_ids"]]
    got = serve(tmp_path, process={"separator": "。"})(tokens=np.asarray([ids])).outputs
    last = len(ids) - 1
    assert got["step_ends"].tolist() == [[6, last - 5, last]]


def test_process_reward_of_tokens_splits_steps_at_the_separator(serve, tmp_path):
    """The separator stays where the policy wrote it; the last step is read at one put behind its text."""
    tokenizer = save_model(tmp_path, "critic", num_labels=2)
    ask = serve(tmp_path, process={"separator": "."}, score="logit")
    prompt = tokenizer(PROMPT)["input_ids"]  # ends in a separator, which is none of the response's
    start = len(prompt)
    eos = tokenizer.eos_token_id
    row = [*prompt, *tokenizer(" Open the file. Read a line. It is good")["input_ids"], eos]
    dot = single_tokens(tokenizer, ["."])[0]
    short = start + 4
    tokens = np.asarray([row, [*row[:short], *[0] * (len(row) - short)]])
    inputs = {"tokens": tokens, "sequence_lengths": np.asarray([[len(row)], [short]])}
    got = ask(**inputs, prompt_lengths=np.asarray([[start], [start]])).outputs
    ends = [*(i for i, token in enumerate(row) if token == dot and i >= start), len(row) - 1]
    assert got["step_ends"].tolist() == [ends, [short - 1, -1, -1]]
    own = logits(AutoModelForTokenClassification, tmp_path, [*row[:-1], dot])
    expected = (own[:, 1] - own[:, 0]).numpy()
    near(got["step_rewards"][0], expected[ends])
    assert got["token_rewards"].shape == tokens.shape
    assert np.flatnonzero(got["token_rewards"][0]).tolist() == ends
    near(got["rewards"][0, 0], expected[ends].min())
    given = ask(**inputs, metadata=[{"step_ends": [1, 4]}, {"step_ends": [0]}]).outputs
    near(given["step_rewards"][0, :2], expected[[1, 4]])
    finished = np.asarray([[*prompt, *tokenizer(" Open the file.")["input_ids"], eos]])
    got = ask(tokens=finished, prompt_lengths=np.asarray([[start]])).outputs
    assert got["step_ends"].tolist() == [[finished.shape[1] - 2]]  # no step of an end of sequence alone
    empty = np.asarray([[*prompt, eos]])
    for inputs in (
        {"tokens": empty, "prompt_lengths": np.asarray([[start]])},
        {"sentences": [PROMPT], "metadata": [{"response": ""}]},
    ):
        got = ask(**inputs).outputs
        assert (math.isnan(got["rewards"][0, 0]), got["step_ends"].tolist()) == (True, [[-1]])
    blank = ask(sentences=[PROMPT + " Open. \n "], metadata=[{"response": " Open. \n "}]).outputs
    assert blank["step_ends"].tolist() == [[len(PROMPT) + 6]]  # no step of white space behind the separator


@pytest.mark.parametrize("head", ["critic", "reward"])
def test_token_granularity_gives_a_reward_at_every_response_token(serve, tmp_path, head):
    """The models are a token classifier, and a decoder whose sequence classification head is applied at each token."""
    if head == "critic":
        save_model(tmp_path, head)
    else:
        save_text_reward(tmp_path, "qwen2")
    ask = serve(tmp_path, process={"granularity": "token"})
    row = np.asarray([[5, 9, 12, 30, 7]])
    got = ask(tokens=row, prompt_lengths=np.asarray([[2]])).outputs
    expected = logits(AutoModelForTokenClassification, tmp_path, row[0].tolist())[:, 0].numpy()
    near(got["token_rewards"][0], [0, 0, *expected[2:]])
    assert got["rewards"][0, 0] == got["token_rewards"][0, 2:].min()
    assert got["step_ends"].tolist() == [[2, 3, 4]]


def test_process_reward_reads_logits_at_marks_as_math_shepherd(serve, tmp_path):
    tokenizer = save_model(tmp_path, "language")
    ids = single_tokens(tokenizer, [" the", " it"])
    ask = serve(tmp_path, logit=LOGIT, process={"separator": ". ", "mark": "<|im_end|> "})
    got = ask(sentences=[PROMPT + "".join(STEPS)], metadata=[{"prompt": PROMPT}]).outputs
    row = tokenizer(PROMPT + "<|im_end|> ".join(step.removesuffix(". ") for step in STEPS) + "<|im_end|>")["input_ids"]
    at = [i for i, token in enumerate(row) if token == tokenizer.eos_token_id]
    near(got["step_rewards"][0], logits(AutoModelForCausalLM, tmp_path, row)[at][:, ids].softmax(-1)[:, 0].numpy())
    assert got["step_ends"][0].tolist() == (np.cumsum([len(step) for step in STEPS]) + len(PROMPT)).tolist()
    with pytest.raises(CheckpointError, match="must be one"):
        serve(tmp_path, logit=LOGIT, process={"separator": "the words"})
    message = "merges with the text before or behind it"
    merges = serve(tmp_path, logit=LOGIT, process={"separator": "e"})
    assert_refused(merges, [({"sentences": ["the words are here"]}, message)])
    tokenizer.add_tokens(["\n\n"])
    tokenizer.save_pretrained(tmp_path)
    lines = serve(tmp_path, logit=LOGIT, process={"mark": "\n\n"})  # in "a\n" + "\n\n", found too early
    assert_refused(lines, [({"sentences": ["a\nb"], "metadata": [{"step_ends": [2, 3]}]}, message)])


BAD_ENDS = [
    ([4, 2], "step_ends: 2, must be between 1 and 12, and above the previous one"),
    ([-1], "step_ends: -1, must be between"),
    ([], "step_ends: [], must be a list of integers"),
    ([True], "must be a list of integers"),
]


def test_process_reward_refuses_bad_step_ends_and_keeps_serving(serve, tmp_path):
    tokenizer = save_model(tmp_path, "critic", num_labels=2)
    ask = serve(tmp_path, process={})
    full = {"tokens": np.asarray([[5] * POSITIONS])}
    cases = [
        *(({"sentences": ["Open a file."], "metadata": [{"step_ends": ends}]}, text) for ends, text in BAD_ENDS),
        ({"sentences": ["Open a file."]}, "metadata[0].step_ends: missing; a process reward without"),
        ({"tokens": np.asarray([[5, 6]]), "metadata": [{"step_ends": [2]}]}, "must be between 0 and 1"),
        ({"sentences": ["x " * 200], "metadata": [{"step_ends": [9, 400]}]}, "tokens, the model takes 64 (max_length)"),
        ({"sentences": ["x"], "metadata": [{"response": "y", "step_ends": [1]}]}, "response: 'y' is not the end"),
        ({"sentences": ["x"], "metadata": [{"prompt": 3, "step_ends": [1]}]}, "prompt: '3' is not the start"),
    ]
    assert_refused(ask, cases)
    good = ask(sentences=["Open a file."], metadata=[{"step_ends": [4, 12]}])
    assert np.isfinite(good.outputs["step_rewards"]).all()
    mark = "replaces the separator in texts, needs more than a row of tokens; send sentences"
    each = {"sentences": ["Open a file."] * 63 + ["Open it. " * 4]}
    for process, settings, inputs, message in (
        ({"separator": "."}, {}, full, "65 tokens, but the model has 64 positions"),
        ({"separator": ".", "mark": tokenizer.eos_token}, {}, full, mark),
        ({"granularity": "token"}, {"server": {"max_request_tokens": 64}}, each, "(max_request_tokens)"),
    ):
        assert_refused(serve(tmp_path, process=process, **settings), [(inputs, message)])


def test_process_reward_refuses_checkpoints_without_token_scores(tmp_path):
    save_text_reward(tmp_path / "pooled", "bert")
    with pytest.raises(CheckpointError, match="has its own pooling or gate, so it cannot score single tokens"):
        load_process_reward(tmp_path / "pooled")
    save_model(tmp_path / "three", "critic", num_labels=3)
    with pytest.raises(CheckpointError, match=r"which of its 3 labels .* set reward\.attribute_weights"):
        load_process_reward(tmp_path / "three")
    weighted = load_process_reward(tmp_path / "three", attribute_weights=[-1, 0, 1])
    own = logits(AutoModelForTokenClassification, tmp_path / "three", [5, 6, 7]).numpy()
    near(weighted.launch_token_scores([np.asarray([5, 6, 7])])()[0], own[:, 2] - own[:, 0])
