"""Tests of `wire.chats`: a chat template renders a conversation and must include all that its messages say."""

import json
import re

import pytest
from jinja2 import TemplateError
from tiny_tokenizers import make_text_tokenizer

from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.wire.chats import render_chat, template_options
from rlhf_triton.wire.messages import BadMessages, plain_messages

SYSTEM, USER, REPLY = ({"role": role, "content": "Hi"} for role in ("system", "user", "assistant"))
TOOL = {"role": "tool", "content": '{"a": 1}'}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
SPOKEN_CALL = {**CALL, "content": "I look."}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FEW = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# Of Mistral: the system message is in the last message, if that is the user's.
LAST_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}"
    "{% if loop.last and m.role == 'user' and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
JSON_TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson if m.role == 'ipython' else m.content }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
CHANGED = "{% for m in messages %}{{ m.content | trim | upper | replace('</THINK>', '') | truncate(20) }}{% endfor %}"
LOST = "the policy's chat template omits it in messages of the role 'assistant'"
CALLS_OF = [{"function": {"name": name, "arguments": {"at": "it"}}} for name in ("look", "see")]
TWO_CALLS = {**CALL, "tool_calls": CALLS_OF}
REASONED = {**REPLY, "reasoning_content": "Hm."}
NAMES = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% endfor %}"
)
FIRST_CALL = "{% for m in messages %}{{ m.tool_calls[0] | tojson if m.tool_calls else m.content }}{% endfor %}"
# As Qwen3's and gpt-oss', only of the last message and without a prompt for the next; R1 writes none at all.
THINKING = (
    "{% for m in messages %}{% if loop.last and m.reasoning_content and not add_generation_prompt %}"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
)
R1 = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "left_out"),
    [
        (CHATML, [SYSTEM, USER, REPLY, TOOL], None),
        (
            CHATML,
            [{**USER, "role": "human"}, REPLY],
            "[0]: the role 'human' is neither one of system, user, assistant, tool nor",
        ),
        (
            FEW,
            [SYSTEM, USER, REPLY],
            "[0]: the policy's chat template omits messages of the role 'system'; give the message",
        ),
        (FEW, [USER, TOOL, REPLY], "[1]: the policy's chat template omits messages of the role 'tool'"),
        (FIRST_SYSTEM, [USER, SYSTEM, USER], "[1]: the policy's chat template omits messages of the role 'system'"),
        (FIRST_SYSTEM, [SYSTEM, USER, {**SYSTEM, "content": " "}], None),  # which says nothing
        (LAST_SYSTEM, [SYSTEM, USER, REPLY], "[0]: the policy's chat template omits messages of the role 'system'"),
        (JSON_TOOLS, [USER, {**TOOL, "role": "ipython"}], None),
        (CHANGED, [{**USER, "content": "a long question </think>" * 9}, REPLY], None),
        (R1, [USER, {**REPLY, "content": "<think>Hm.</think>"}, USER], None),
        ("{{ messages[-1].content }}", [SYSTEM, USER, REPLY], None),  # it chooses by position
        (
            "{{ messages[0].content }}",
            [USER, REPLY],
            "[1]: the policy's chat template omits messages of the role 'assistant'",
        ),
        (CALLS, [USER, CALL, TOOL], None),
        (CALLS, [USER, SPOKEN_CALL, TOOL], f"[1].content: {LOST}; move it to a separate message"),
        (CHATML, [USER, CALL, TOOL], f"[1].tool_calls[0].function.name: {LOST}; move it to the content"),
        (NAMES, [USER, CALL], None),
        (NAMES, [USER, TWO_CALLS], f"[1].tool_calls[0].function.arguments: {LOST}"),
        (FIRST_CALL, [USER, TWO_CALLS], f"[1].tool_calls[1].function.name: {LOST}"),
        (CHATML, [USER, {**TOOL, "name": "look", "tool_call_id": "1"}, {**REPLY, "refusal": "", "weight": 1}], None),
        (CHATML, [USER, {**REPLY, "refusal": "No."}], f"[1].refusal: {LOST}; move it to the content, remove it, or"),
        (CHATML, [USER, {**REPLY, "notes": {"seen": ["it"]}}], f"[1].notes.seen[0]: {LOST}"),
        (CHATML, [USER, REASONED, USER], f"[1].reasoning_content: {LOST}"),
        (THINKING, [USER, REASONED], None),
        (R1, [USER, REASONED], f"[1].reasoning_content: {LOST}"),
    ],
)
def test_render_chat_refuses_a_message_that_the_template_leaves_out(template, messages, left_out):
    tokenizer = make_text_tokenizer("qwen2", chat_template=template)
    for _ in range(2):  # also when the template is known for another conversation
        if left_out is None:
            whole = tokenizer.apply_chat_template(messages, tokenize=False)
            assert render_chat(tokenizer, messages, {}, owner="policy") == whole
        else:
            with pytest.raises(BadMessages, match=re.escape(left_out)):
                render_chat(tokenizer, messages, {}, owner="policy")
        render_chat(tokenizer, [USER], {}, owner="policy")


@pytest.mark.parametrize(
    ("template", "reply", "said"),
    [
        (THINKING, REASONED, "reasoning_content in earlier messages"),
        (R1, {**REPLY, "content": "<think>Hm.</think>Hi"}, "the reasoning in contents, before </think>"),
        (CHATML, {**REPLY, "content": "<think>Hm.</think>Hi"}, None),
        (CHATML, {**REPLY, "name": "Ada"}, "the name in messages of the role 'assistant'"),
    ],
)
def test_names_and_reasoning_left_out_by_the_template_are_warned_about_once(template, reply, said, caplog):
    tokenizer = make_text_tokenizer("qwen2", chat_template=template)
    for messages in ([USER, reply, USER], [USER, reply, USER, REPLY, USER]):
        whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert render_chat(tokenizer, messages, {}, owner="policy", generation_prompt=True) == whole
    assert caplog.messages == ([f"the policy's chat template omits {said}"] if said else [])


def test_a_template_is_checked_once_for_each_kind_of_conversation(monkeypatch):
    tokenizer = make_text_tokenizer("qwen2", chat_template=CHATML)
    calls = []
    render = tokenizer.apply_chat_template

    def counted(*messages, **options):
        calls.append(messages)
        return str(render(*messages, **options))

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for i in range(9):
        render_chat(tokenizer, [{**USER, "content": f"question {i}"}, REPLY], {}, owner="policy")
    assert len(calls) == 9 + 1


SCHEMA = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
)


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)]])
@pytest.mark.parametrize("variables", [{"enable_thinking": False, "effort": None}, '{"enable_thinking": false}'])
def test_trl_columns_tools_and_chat_template_kwargs_reach_the_template(tools, variables):
    tokenizer = make_text_tokenizer("qwen2", chat_template=WITH_TOOLS)
    options = template_options(tokenizer, {"tools": tools, "chat_template_kwargs": variables, "other": 1})
    found = render_chat(tokenizer, [USER], options, owner="policy")
    own = tokenizer.apply_chat_template([USER], tokenize=False, tools=[SCHEMA], enable_thinking=False)
    assert found == own
    assert "look" in own
    assert own.endswith("<no thoughts>")
    assert template_options(tokenizer, {"tools": [], "chat_template_kwargs": None}) == {}


STRINGS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments + '!' }}"
    "{% endfor %}"
    "{{ m.content or '' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (CALLS, '"arguments": {"at": "Rome"}'),
        (STRINGS, '{"at": "Rome"}!'),
        (STRINGS.replace("m.content or ''", "m.content + '.'"), '{"at": "Rome"}!.'),
    ],
)
def test_tool_call_arguments_are_rendered_once_as_text_or_object(template, written):
    """Arguments are JSON texts (as OpenAI's) or objects; DeepSeek's templates accept only texts and need a content."""
    tokenizer = make_text_tokenizer("qwen2", chat_template=template)
    for arguments in ('{"at": "Rome"}', {"at": "Rome"}):
        messages = [USER, {**CALL, "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}]
        assert written in render_chat(tokenizer, plain_messages(messages), {}, owner="policy")


# As LLaVA, Idefics3 and SmolVLM publish them; the last one reads the system message as a text.
LLAVA = (
    "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ c['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endfor %}"
)
IDEFICS = (
    "\n{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}"
)
MIXED = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '!' }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content[0].text + '!' }}{% endfor %}"
)
GEMMA = MIXED.replace("{{ messages[0].content + '!' }}", "{{ raise_exception('no system') }}")
NO_SYSTEM = CHATML.replace("{{ m.content }}", "{{ raise_exception('no') if m.role == 'system' else m.content }}")


@pytest.mark.parametrize(
    ("template", "messages", "written"),
    [
        (LLAVA, [SYSTEM, USER, REPLY, USER], "SYSTEM: Hi USER: Hi ASSISTANT: Hi USER: Hi "),
        (
            IDEFICS,
            [USER, {**REPLY, "content": "No"}],
            "\nUser: Hi<end_of_utterance>\nAssistant: No<end_of_utterance>\n",
        ),
        (MIXED, [SYSTEM, USER, REPLY, TOOL], 'Hi!<user>Hi!<assistant>Hi!<tool>{"a": 1}!'),
        (GEMMA, [USER, REPLY], "<user>Hi!<assistant>Hi!"),
        (GEMMA, [SYSTEM, USER], None),
        *((each, [USER, REPLY], "") for each in (CHATML, FEW, FIRST_SYSTEM, CHANGED, THINKING, ALTERNATING, NO_SYSTEM)),
    ],
)
def test_template_that_expects_content_parts_receives_them(tmp_path, template, messages, written):
    make_text_tokenizer("qwen2", chat_template=template).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    if written is None:
        with pytest.raises(TemplateError, match="no system"):
            render_chat(tokenizer, messages, {}, owner="policy")
        return
    assert (tokenizer.chat_template == template) == (not written)
    found = render_chat(tokenizer, messages, {}, owner="policy")
    whole = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    assert found == written or not written
    if template in (LLAVA, IDEFICS):
        assert found == make_text_tokenizer("qwen2", chat_template=template).apply_chat_template(whole, tokenize=False)
    tokenizer.save_pretrained(tmp_path)  # as a run saves its policy
    assert load_tokenizer(tmp_path).chat_template == tokenizer.chat_template


def test_several_text_parts_are_joined_with_a_warning(caplog):
    """A template that reads lists might join them without newlines."""
    for texts, joined, warnings in ((["a"], "a", 0), (["a", "b"], "a\nb", 1), (["c", "d"], "c\nd", 1)):
        (message,) = plain_messages([{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}])
        assert (message["content"], len(caplog.records)) == (joined, warnings)


def test_nulls_inside_tool_calls_are_left_out_with_a_warning(caplog):
    """Arrow adds such nulls, and templates write them; arguments sent as JSON text keep theirs."""
    warn_once.cache_clear()
    for arguments, read, warnings in (
        ({"at": "Rome"}, {"at": "Rome"}, 0),
        ('{"at": null}', {"at": None}, 0),
        ({"at": None, "in": ["x", None]}, {"in": ["x", None]}, 1),
    ):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        (message,) = plain_messages([{"role": "assistant", "content": None, "name": None, "tool_calls": [call]}])
        assert message["tool_calls"][0]["function"]["arguments"] == read
        assert len(caplog.records) == warnings
