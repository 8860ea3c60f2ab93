"""Findings of doctor and of a run's start about tokenizers, chat templates and the prompts' texts."""

import contextlib
import json

import pytest
from live_system import make_run
from tiny_checkpoints import save_tiny
from tiny_tokenizers import CHATS, save_chat_policy, save_text_reward

from rlhf_triton.actor.data.prompt_files import read_rows
from rlhf_triton.actor.data.prompt_reader import PromptReader
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import ConfigError
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.checks.findings import Level
from rlhf_triton.tools.checks.prompt_form import prompt_warnings
from rlhf_triton.tools.checks.prompt_rows import check_prompts
from rlhf_triton.tools.checks.special_tokens import token_findings


def prompt_findings(config):
    """Return what doctor and the start of a run print about the prompts."""
    return [*preflight.prompts(preflight.CheckedRun(config))]


def warnings(config, rows, *overrides):
    """Return what doctor and the start of a run report about these rows."""
    path = config.parent / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    loaded = load_config(config, [f"actor.prompts.path={path}", *overrides])
    reader = PromptReader.from_config(loaded, load_tokenizer(loaded.actor.policy.model.absolute()), None)
    return prompt_warnings(loaded, [reader.prompt(row) for row in read_rows(path)])


QUESTION = [{"role": "user", "content": "Open it."}]
BASE = {"eos_token": "<|endoftext|>"}
ENDS = "a response ends with '<|endoftext|>' (0), '<|im_end|>' (2)"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [("ok", "ends", "a response ends with '<|im_end|>' (2)")]),
        (BASE, [("warning", "ends", f"{ENDS}; '<|im_end|>' (2) because the chat template ends a reply with it")]),
        ({**BASE, "ends": [0, 2]}, [("ok", "ends", f"{ENDS}, one of which is padding, too")]),
        (
            {"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }} END\n{% endfor %}"},
            [
                ("ok", "ends", "a response ends with '<|im_end|>' (2)"),
                ("warning", "ends", "the chat template ends a reply with 'END', which is no special token"),
            ],
        ),
        (
            {"chat_template": "{{ raise_exception('no') }}"},
            [
                ("ok", "ends", "a response ends with '<|im_end|>' (2)"),
                ("warning", "ends", "the policy's chat template refuses a question and a reply"),
            ],
        ),
        (
            {"more": 2, "ends": [2, 161, 200]},
            [
                (
                    "warning",
                    "ends",
                    "a response ends with '<|im_end|>' (2); generation_config.json or template name None (161), ",
                ),
                (
                    "ok",
                    "embeddings",
                    "actor.policy.model: 2 of 162 have no entry in the tokenizer, and are never sampled",
                ),
            ],
        ),
        (
            {"more": -2},
            [
                ("ok", "ends", "a response ends with '<|im_end|>' (2)"),
                ("warning", "embeddings", "actor.policy.model: 158, none for "),
            ],
        ),
    ],
    ids=str,
)
def test_token_findings_report_end_tokens_and_size_mismatches(tmp_path, config, settings, expected):
    save_chat_policy(tmp_path / "policy", **settings)
    overrides = [f"actor.policy.model={tmp_path / 'policy'}", "actor.algorithm.name=grpo"]
    found = [*token_findings(load_config(config, [*overrides, "actor.algorithm.responses_per_prompt=2"]))]
    assert [(each.level.value, each.name) for each in found] == [(level, name) for level, name, _ in expected]
    assert all(each.text.startswith(text) for each, (_, _, text) in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "settings", "is_told"),
    [
        ("qwen2", [], True),
        ("llama", [], True),
        ("llama", ["reward.append_eos=true"], False),  # which is what its template ends a turn with
        ("qwen2", ["reward.template='{{ text }}'"], False),
        ("bert", [], True),  # no special token, but its "\nassistant :"
    ],
)
def test_prompt_text_that_is_a_rendered_chat_is_warned_about(tmp_path, config, family, settings, *, is_told):
    """Doctor and the start of a run warn, because the reward model would read no end of the reply's turn."""
    chat = "{% for m in messages %}{{ m.role }} :\n{{ m.content }} [end]\n{% endfor %}" if family == "bert" else None
    tokenizer = save_text_reward(tmp_path / "reward", family, **({"chat_template": chat} if chat else {}))
    prompts = tmp_path / "prompts.jsonl"
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False) + "assistant :\n" * (family == "bert")
    rows = [{"text": "Open it: \n user"}, {"text": text}, {"text": text}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    given = [f"reward.model={tmp_path / 'reward'}", f"actor.prompts.path={prompts}", *settings]
    loaded = load_config(config, [*given, "actor.prompts.max_tokens=100"])
    end = {"qwen2": "<|im_end|>", "llama": "</s>", "bert": "[end]"}[family]
    told = "".join(each for each in prompt_warnings(loaded, check_prompts(loaded)) if "ends a response" not in each)
    assert bool(told) == is_told
    assert [each.text for each in prompt_findings(loaded) if each.level is Level.WARNING and "reward" in each.text] == (
        [told] if is_told else []
    )
    if is_told:
        assert told.startswith(f"{prompts}:2 is a text with ")
        assert f"so its reply is scored without {end!r}" in told
        assert told.endswith("give the chat as `messages` (2 such rows)")


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
STARTED = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
WITHOUT_HEADER = "{% for m in messages %}{{ '[INST]' if m.role == 'user' }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("template", "is_told"), [(TURNS, True), (STARTED, False), (WITHOUT_HEADER, False)])
def test_chat_template_without_a_generation_prompt_is_warned_about(tmp_path, config, template, *, is_told):
    save_chat_policy(tmp_path / "policy", chat_template=template)
    found = warnings(config, [{"messages": QUESTION}], f"actor.policy.model={tmp_path / 'policy'}")
    told = [each for each in found if "add_generation_prompt" in each]
    assert len(told) == is_told
    assert all("prompts end before '<assistant>'" in each for each in told)


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_chat_template_that_omits_the_bos_of_texts_is_warned_about(tmp_path, config, family, *, writes_bos):
    template = "{{ bos_token }}" * writes_bos + "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_text_reward(tmp_path / "reward", family, chat_template=template)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": QUESTION}))
    given = [f"reward.model={tmp_path / 'reward'}", f"actor.prompts.path={prompts}"]
    found = [each.text for each in prompt_findings(load_config(config, given)) if "writes none" in each.text]
    assert [text.partition(",")[0] for text in found] == ["reward.model begins texts with <s>"] * (
        family == "llama" and not writes_bos
    )


SENTENCE = "Paris is the capital of France."
ALPACA = "### Instruction:\nName it.\n\n### Response:\n"
SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
STARTS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
THINKING = CHATS["qwen2"] + STARTS + "{% if enable_thinking %}<think>{% endif %}"
COUNTDOWN = [{"prompt": f"Make an equation of [3, 4, 7] that equals {i}.", "target": i} for i in range(20)]
LARGER = [{"text": f"Which is larger, {i} or {i + 1}", "answer": str(i + i % 2)} for i in range(40)]
COUNTED = [{"text": f"Count to {i}.\n#### {i}", "reward_model": {"ground_truth": i}} for i in range(20)]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        *(
            ([{"text": f"{ALPACA}{SENTENCE}{end}", "output": SENTENCE}], "'output'")
            for end in ("", "</s>", "\n[END]\n")
        ),
        ([{"prompt": f"{ALPACA}{SENTENCE}", "completion": f" {SENTENCE}\n</s>"}], "'completion'"),
        ([{"prompt": f"{ALPACA}{SENTENCE}\n\n{SENTENCE}", "output": f"{SENTENCE}\r\n{SENTENCE}"}], "'output'"),
        ([{"prompt": f"Q: Where?\nA: {SENTENCE}", "reference_answers": ["Rome", SENTENCE]}], "'reference_answers'"),
        ([{"text": f"Q: Where?\nA: {SENTENCE}", "extra_info": {"answer": SENTENCE}}], "'extra_info.answer'"),
        ([{"messages": [{**QUESTION[0], "content": f"Where? {SENTENCE}"}], "answer": SENTENCE}], "'answer'"),
        (
            [{"messages": [QUESTION[0], {"role": "assistant", "content": SENTENCE}, QUESTION[0]], "output": SENTENCE}],
            "'output'",
        ),
        (
            [
                {
                    "prompt": f"Q: Where? {SENTENCE}",
                    "chosen": [QUESTION[0], {"role": "assistant", "content": SENTENCE}],
                    "rejected": [QUESTION[0]],
                }
            ],
            "'chosen'",
        ),
        (
            COUNTED,
            "'reward_model.ground_truth', the answer that the policy is to write (in 20 of 20 rows with that column)",
        ),
        (COUNTED[:1], None),
        (LARGER, None),
        (COUNTDOWN, None),
        ([{"text": "Is 3 or 5 larger, 3 or 5", "answer": "5"}], None),
        ([{"text": "Is 3 or 15 larger?", "answer": "5", "output": None}], None),
        (
            [
                {"text": f"Repeat: {SENTENCE}", "output": SENTENCE},
                *({"text": f"Name {i}.", "output": "x"} for i in "abc"),
            ],
            None,
        ),
        ([{"text": f"### Input:\n{SENTENCE}\n\n### Response:\n", "output": SENTENCE}], None),
    ],
)
def test_prompts_that_contain_the_answer_are_warned_about(config, rows, told):
    found = [each for each in warnings(config, rows) if "the answer that the policy is to write" in each]
    assert len(found) == (told is not None)
    assert all(f"prompts.jsonl:1: the prompt ends with the row's {told}" in each for each in found)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {"text": "Hi", "tools": [SCHEMA], "system": "Be brief.", "environment": "x"},
            "the column 'tools' is not in the",
        ),
        ({"text": f"Use {json.dumps(SCHEMA)}", "tools": [SCHEMA]}, None),
        (
            {"text": "Hi", "chat_template_kwargs": {"enable_thinking": False}},
            "the column 'chat_template_kwargs' is not",
        ),
        ({"prompt": QUESTION, "chat_template_kwargs": {"enable_thinking": True}}, None),
        # Of SmolTalk 2, whose rows have all variables of SmolLM3's template.
        ({"prompt": QUESTION, "chat_template_kwargs": {"enable_thinking": False, "xml_tools": []}}, None),
        (
            {"prompt": QUESTION, "chat_template_kwargs": {"enable_thinkin": True}},
            "no chat template of this run reads 'enable_thinkin' (did you mean 'enable_thinking'?)",
        ),
        (
            {"prompt": QUESTION, "chat_template_kwargs": '{"documents": [{"text": "x"}]}'},
            "reads 'documents'; remove it",
        ),
        ({"prompt": QUESTION, "system": "Be brief."}, "the column 'system' is not in the prompt"),
        ({"prompt": [{"role": "system", "content": "Be brief."}, *QUESTION], "system": "Be brief. "}, None),
        ({"prompt": QUESTION, "system": "", "documents": [], "images": None}, None),
        ({"prompt": QUESTION, "documents": [{"title": "x", "text": "A long one."}]}, "the column 'documents' is not"),
        ({"prompt": "Translate.\nBonjour", "input": "Bonjour", "id": 7, "question": "?"}, None),
        ({"prompt": QUESTION, "history": [["Hello.", "Yes?"]]}, "the column 'history' is not in the prompt"),
    ],
)
def test_unused_prompt_column_is_warned_about(tmp_path, config, row, told):
    save_chat_policy(tmp_path / "policy", chat_template=THINKING)
    environment = ["environment.class=there.py:Game", "rewards={model: {weight: 1.0}}"] if "environment" in row else []
    found = warnings(config, [row, row], f"actor.policy.model={tmp_path / 'policy'}", *environment)
    assert len(found) == (told is not None), found
    for each in found:
        assert each.startswith(f"{config.parent / 'prompts.jsonl'}:1: ")
        assert told in each
        assert each.endswith(" (2 such rows)")


@pytest.mark.parametrize(
    ("end", "is_told"),
    [("<|im_end|>\n", True), ("<|endoftext|>", True), ("<|im_end|>\n<|im_start|>assistant\n", False)],
)
def test_prompt_text_that_ends_with_an_end_token_is_warned_about(tmp_path, config, end, *, is_told):
    save_chat_policy(tmp_path / "policy", **BASE)
    text = f"<|im_start|>user\nOpen it.<|im_end|>\n<|im_start|>assistant\nDone.{end}"
    settings = [f"actor.policy.model={tmp_path / 'policy'}", "reward.template='{{ text }}'"]
    found = [each for each in warnings(config, [{"text": text}], *settings) if "ends a response" in each]
    assert len(found) == is_told
    assert all("prompts.jsonl:1: the text ends with what ends a response ('<|endoftext|>', " in each for each in found)


def test_models_with_too_few_embeddings_for_the_policys_tokens_are_refused(tmp_path, config):
    """They are named before the start; the run would fail at the first such token."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    tokenizer = save_chat_policy(tmp_path / "policy", more=8)
    added = {"extra_special_tokens": ["<end>"], "chat_template": CHATS["qwen2"].replace("<|im_end|>", "<end>")}
    save_chat_policy(tmp_path / "added", more=-1, **added)
    for name, size in {"small": 156, "enough": 160}.items():
        save_tiny(tmp_path / name, "llama", "critic", vocab_size=size, max_position_embeddings=64)
        tokenizer.save_pretrained(tmp_path / name)
    grpo = ["actor.algorithm.name=grpo", "actor.algorithm.responses_per_prompt=2"]
    for model, changes, told in (
        ("policy", [f"critic.model={tmp_path / 'enough'}"], None),
        (
            "policy",
            [f"critic.model={tmp_path / 'small'}"],
            "critic.model: .*small has 156 embeddings, none for .* and 1 ",
        ),
        ("added", grpo, None),  # the template is not used
        (
            "added",
            [*grpo, f"actor.prompts.path={chats}"],
            r"added has 160 embeddings, none for '<end>' \(160\), which its",
        ),
    ):
        settings = ["actor.prompts.max_tokens=40", f"actor.policy.model={tmp_path / model}", *changes]
        with contextlib.nullcontext() if told is None else pytest.raises(ConfigError, match=told):
            preflight.check(load_config(config, settings), "run")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["critic.model={other_policy}"], "critic.model: the tokenizer of {other_policy} differs"),
        (
            ["actor.policy.lora_rank=2", "actor.policy.lora_targets=[v_proj,q_porj]"],
            "actor.policy.lora_targets: 'q_porj' matches no linear layer of {policy} that supports adapters "
            "(did you mean q_proj?); choose from down_proj, ",
        ),
        (
            ["trainer.lora_rank=2", "trainer.lora_targets=[score]"],
            "trainer.lora_targets: 'score' matches no linear layer of {critic} that supports adapters; choose from ",
        ),
    ],
)
def test_models_that_do_not_fit_the_run_are_refused_in_one_line(settings, problem, tmp_path, checkpoints):
    run = make_run(tmp_path, checkpoints)
    names = vars(checkpoints)
    with pytest.raises(ConfigError) as caught:
        preflight.check(load_config(run.path, [setting.format(**names) for setting in settings]), "run")
    (line,) = str(caught.value).splitlines()
    assert problem.format(**names) in line
