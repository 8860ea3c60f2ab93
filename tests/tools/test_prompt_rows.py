"""Checks before a run that read its first prompts: their form, chat templates, and lengths that every model takes."""

import json
import re

import pytest
from live_system import make_run
from run_checkpoints import TEXTS, make_tokenizer
from run_yaml import write_yaml

from rlhf_triton.config.loading import load_config
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.tools.checks import preflight
from rlhf_triton.tools.checks.findings import Level
from rlhf_triton.tools.checks.prompt_rows import check_prompts

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
SHOP = '''
class Shop:
    def reset(self, **columns): ...

    def buy(self, item: str) -> str:
        """
        Buy something.

        Args:
            item: What to buy.
        """
'''
CHATS = "actor.prompts.path={chats}"
TRUNCATED = (CHATS, "actor.prompts.too_long=truncate")  # for the policy; the reward model reads the whole chat


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "{} has no prompts"),
        (
            '{"text": "a"}\n{"text": "' + "a " * 2000 + '"}\n',
            "{}:2: 2001 tokens, but a prompt must have 1 to 512 (actor.prompts.max_tokens); "
            "set actor.prompts.too_long: skip to leave out longer prompts",
        ),
    ],
)
def test_empty_and_too_long_prompts_are_refused(text, words, tmp_path, checkpoints):
    prompts = tmp_path / "empty.jsonl"
    prompts.write_text(text)
    config = load_config(
        write_yaml(tmp_path, "rloo", "functions", checkpoints),
        [f"actor.prompts.path={prompts}", "actor.prompts.max_tokens=512"],
    )
    with pytest.raises(ConfigError) as caught:
        check_prompts(config)
    assert str(caught.value) == f"actor.prompts.path: {words.format(prompts)}"


def test_chat_prompts_need_chat_templates_of_policy_and_reward(tmp_path):
    """The policy's, and the reward model's, which renders them itself whatever its vocabulary."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    for name in ("policy", "same"):
        tokenizer.save_pretrained(tmp_path / name)
    tokenizer.add_tokens(["unheard"])
    tokenizer.save_pretrained(tmp_path / "other")
    prompts = tmp_path / "prompts.jsonl"
    actor = {"policy": {"model": tmp_path / "policy"}, "prompts": {"path": prompts}}

    def check(reward, prompt, **settings):
        prompts.write_text(json.dumps({"text": "first"}) + "\n" + json.dumps({"prompt": prompt}) + "\n")
        config = {"actor": actor, "reward": {"model": str(tmp_path / reward), **settings}}
        check_prompts(RunConfig.model_validate(config))

    check("other", "a text")
    (tmp_path / "empty.jsonl").touch()
    actor["validation"] = {"prompts": tmp_path / "empty.jsonl", "size": 0}
    check("other", "a text")  # they would not be read
    conversation = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ConfigError, match=r"actor\.policy\.model: .*policy has no chat template, but actor"):
        check("same", conversation)
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("same", "other"):
        for settings in ({}, {"text": "pair"}, {"process": {"separator": ".", "mark": "!"}}):
            with pytest.raises(ConfigError, match=rf"reward\.model: .*{name} has no chat template.*'content'"):
                check(name, conversation, **settings)
    check("same", conversation, logit={"tokens": [1]}, template="{{ response }}")
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages }}")
    check("other", conversation)
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ raise_exception('no ' + messages[1].role) }}")
    refused = r"jsonl:2: reward\.model: messages: the chat template rejects the messages: no assistant"
    with pytest.raises(ConfigError, match=refused):
        check("other", conversation)
    (tmp_path / "other" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    left_out = (
        r"jsonl:2: reward\.model: messages\[1\]: the reward model's chat template omits messages of the role 'assi"
    )
    with pytest.raises(ConfigError, match=left_out):
        check("other", conversation)
    check("other", conversation, process={"separator": ".", "mark": "!"})  # which reads the reply without the template
    (tmp_path / "other" / "chat_template.jinja").write_text(CHAT)
    (tmp_path / "policy" / "chat_template.jinja").write_text("{{ (tools or []) | length }}" + CHAT)
    (tmp_path / "shop.py").write_text(SHOP)
    environment = {"class": f"{tmp_path / 'shop.py'}:Shop", "max_tokens": 600}
    for settings, problems in (({}, 1), ({"template": "{{ response }}"}, 0)):
        prompts.write_text(json.dumps({"prompt": conversation}))
        reward = {"model": str(tmp_path / "other"), **settings}
        sections = {"actor": actor, "reward": reward, "rewards": {"model": {}}, "environment": environment}
        config = RunConfig.model_validate(sections)
        found = [*preflight.environment(preflight.CheckedRun(config))]
        refused = [one.text for one in found if one.level is Level.FAILED]
        assert all("reward.model: messages: the reward model's chat template omits the tools" in one for one in refused)
        assert len(refused) == problems
    undefined = r"jsonl:1: reward\.model: reward\.template cannot be rendered: .* has no attribute 'hint'"
    with pytest.raises(ConfigError, match=undefined):
        check("other", conversation, logit={"tokens": [1]}, template="{{ response }}{{ metadata.hint }}")


@pytest.mark.parametrize(
    ("settings", "refused"),  # 100 tokens of a prompt, and as many positions as the models of the tests have: 128
    [
        (["actor.generation.max_new_tokens=28"], ""),
        (["actor.generation.max_new_tokens=29"], "reward 128 critic 128"),
        (["actor.generation.max_new_tokens=9", "critic.max_length=108"], "critic 108"),
        (["actor.generation.max_new_tokens=29", "reward.model={other_reward}"], "critic 128"),  # receives texts
        (["actor.generation.max_new_tokens=29", "reward.text=pair"], "reward 128 critic 128"),
        (["actor.generation.max_new_tokens=28", "reward.append_eos=true"], "reward 128"),  # a cut reply has none
        (["actor.generation.max_new_tokens=27", "reward.append_eos=true"], ""),
        (["actor.generation.max_new_tokens=26", CHATS], "reward 128"),  # `a`, ` ` and `</s>`
        (["actor.generation.max_new_tokens=25", CHATS], ""),
        ([*TRUNCATED, "actor.prompts.max_tokens=9", "actor.generation.max_new_tokens=100"], ""),
        ([*TRUNCATED, "actor.prompts.max_tokens=9", "actor.generation.max_new_tokens=118"], "reward 128"),
        (["actor.generation.max_new_tokens=29", "actor.kl.reference=triton"], "reward 128 critic 128 reference 128"),
    ],
)
def test_rows_must_fit_every_model_that_receives_them(settings, refused, tmp_path, checkpoints):
    """Otherwise reward model and critic refuse the longest responses, and the run masks them."""
    run = make_run(tmp_path, checkpoints, actor={"prompts_max_tokens": 100})
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": [{"role": "user", "content": TEXTS[0]}]}))
    names = {**vars(checkpoints), "chats": chats}
    config = load_config(run.path, [each.format(**names) for each in settings])
    found = ""
    try:
        check_prompts(config)
    except ConfigError as error:
        found = str(error)
    lines = re.findall(r"(\w+)\.model: takes rows of at most (\d+) tokens", found)
    assert " ".join(f"{role} {limit}" for role, limit in lines) == refused
    assert found.count("\n") == max(0, len(lines) - 1)
