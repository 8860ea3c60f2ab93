"""Warns about the form of prompts: rendered chats, answers in prompts, columns and headers that no model reads."""

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from rlhf_triton.actor.data.prompt_files import EMPTY
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.checkpoints.special_tokens import is_special, special_tokens_in
from rlhf_triton.checkpoints.tokenization import encode_prompt, is_encoder
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.rewards.sample import MESSAGES_KEY
from rlhf_triton.tools.checks.findings import Finding, warning
from rlhf_triton.tools.checks.special_tokens import QUESTION, rendered_exchange
from rlhf_triton.wire.chats import (
    PROBE,
    TEMPLATE_COLUMNS,
    TEMPLATE_VARIABLES,
    TOOLS,
    rendered_probe,
    template_options,
)

MIN_MARK_CHARACTERS = 3  # characters of the shortest mark of a turn: white space and single signs are in any text
ANSWER = re.compile(
    r"(\w+_)?(answer|output|response|completion|reply|solution|label|summary|chosen|gold|ground_truth)s?(_text)?",
    re.IGNORECASE,
)
TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")  # as special tokens are written
# A file's prompts contain the answers if this share of rows, with this many characters of different answers, do.
GIVEN_SHARE = 0.75
GIVEN_CHARACTERS = 12
# Columns beside the prompt that trainers, or chat templates, put into it: of LLaMA-Factory, Alpaca, TRL, transformers.
PARTS_OF_PROMPTS = (
    "system",
    "system_prompt",
    "input",
    "history",
    "documents",
    "functions",
    "image",
    "images",
    "videos",
    "audios",
)


def prompt_warnings(config: RunConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Describe oddities in the form of these prompts, as policy and reward model read them."""
    return [
        *([*_rendered_texts(config, prompts)] or _ended_texts(config, prompts)),
        *_headers(config, prompts),
        *_given_answers(prompts),
        *_unused_columns(config, prompts),
    ]


def _ended_texts(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning about text prompts that already end with a response's end, such as texts rendered for SFT."""
    folder = config.actor.policy.model
    tokenizer = load_tokenizer(folder)
    ends = [i for i in special_tokens_in(folder).eos_ids if is_special(tokenizer, i)]
    marks = tuple(mark for mark in tokenizer.convert_ids_to_tokens(ends) if mark)
    ended = [
        prompt for prompt in prompts if MESSAGES_KEY not in prompt.metadata and prompt.text.rstrip().endswith(marks)
    ]
    if ended:
        yield (
            f"{ended[0].where}: the text ends with what ends a response ({', '.join(map(repr, marks))}), so the answer "
            f"may be in the prompt ({len(ended)} such rows); end it where the policy is to begin, or give the chat as "
            "`messages`"
        )


def _given_answers(prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning for each column whose values are at the end of a file's prompts, as in files for SFT.

    A short answer may be there by accident ("Is 5 or 3 larger, 3 or 5"), in one row or in some of a file.
    """
    answers: dict[tuple[str, str], list[tuple[Prompt, str]]] = defaultdict(list)
    for prompt in prompts:
        for name, answer in _answers(prompt.metadata):
            answers[prompt.where.rstrip("0123456789"), name].append((prompt, answer))
    for (_, name), rows in answers.items():
        repeated = [(prompt, answer) for prompt, answer in rows if _ends_with(prompt, answer)]
        is_known = len("".join({answer for _, answer in repeated})) >= GIVEN_CHARACTERS
        if is_known and len(repeated) >= GIVEN_SHARE * len(rows):
            yield (
                f"{repeated[0][0].where}: the prompt ends with the row's {name!r}, the answer that the policy is to "
                f"write (in {len(repeated)} of {len(rows)} rows with that column); end the prompt before it, or rename "
                "the column if the policy is to repeat it"
            )


def _answers(columns: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in columns.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", answer) for key, answer in _answers(value))
        elif ANSWER.fullmatch(name):
            last = value[-1] if isinstance(value, list) and value else value
            text = last.get("content") if isinstance(last, dict) else last
            answer = re.sub(r"(\s*<[^<>]*>)+$", "", _collapse_space(str(text)))
            if isinstance(text, (str, int)) and answer:
                yield name, answer


def _ends_with(prompt: Prompt, answer: str) -> bool:
    """Return whether the prompt, or a message of it, ends with the answer, ignoring trailing tags and punctuation."""
    chat = prompt.metadata.get(MESSAGES_KEY)
    for text in [prompt.text] if chat is None else [message.get("content") or "" for message in chat]:
        before, matched, behind = _collapse_space(text).rpartition(answer)
        if matched and not before[-1:].isalnum() and not re.search(r"\w", TAG.sub("", behind)):
            return True
    return False


def _collapse_space(text: str) -> str:
    return " ".join(text.split())


def _unused_columns(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning for each column, or variable of a chat template, that should change a prompt but does not."""
    tokenizers = [load_tokenizer(config.actor.policy.model)]
    if config.uses_reward_model and config.reward.template is None:
        tokenizers.append(load_tokenizer(config.reward.model))
    rows_by_problem: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        columns = prompt.metadata
        is_chat = MESSAGES_KEY in columns
        # An environment may make its prompts of any column, but refuses those for the template.
        parts = PARTS_OF_PROMPTS if config.environment is None else ()
        for name in (*parts, *(() if is_chat else TEMPLATE_COLUMNS)):
            value = columns.get(name)
            if value not in (*EMPTY, {}) and not _is_within(prompt.text, value):
                form = " as `messages`" if name in TEMPLATE_COLUMNS else ""
                rows_by_problem[
                    f"the column {name!r} is not in the prompt, and no model reads it; put it into the prompt{form}, "
                    "or rename it if a reward function reads it"
                ].append(prompt)
        options = template_options(tokenizers[0], columns) if is_chat and columns.get(TEMPLATE_VARIABLES) else {}
        tools = options.pop(TOOLS, None)
        with_template = [tokenizer for tokenizer in tokenizers if options and tokenizer.chat_template]
        read = {name for tokenizer in with_template for name in _variables(tokenizer.get_chat_template(tools=tools))}
        for name in sorted(name for name in options.keys() - read if options[name] not in (*EMPTY, {})):
            near = "".join(f" (did you mean {other!r}?)" for other in difflib.get_close_matches(name, read, 1))
            rows_by_problem[
                f"{TEMPLATE_VARIABLES}: no chat template of this run reads {name!r}{near}; remove it"
            ].append(prompt)
    for problem, rows in rows_by_problem.items():
        yield f"{rows[0].where}: {problem} ({len(rows)} such rows)" if len(rows) > 1 else f"{rows[0].where}: {problem}"


def _is_within(text: str, value: Any) -> bool:
    """Return whether the longest text in the value is a part of `text`, which may leave out keys and numbers."""
    longest = max(_texts_in(value), key=len, default="")
    return bool(longest) and longest.strip() in text


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_in(inner)


@functools.cache
def _variables(template: str) -> set[str]:
    """Return the names that a chat template reads, which it does not define itself."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    without = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag of transformers' own
    return meta.find_undeclared_variables(environment.parse(without))


def _headers(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning if the policy has to write the header of its own turn, which then becomes part of each reply."""
    if not any(MESSAGES_KEY in prompt.metadata for prompt in prompts):
        return
    tokenizer = load_tokenizer(config.actor.policy.model)
    prompt = rendered_probe(tokenizer, [QUESTION], add_generation_prompt=True)
    behind = rendered_exchange(tokenizer).removeprefix(prompt)
    header = behind.partition(PROBE)[0]
    if prompt and header.strip() and len(behind) < len(rendered_exchange(tokenizer)):
        yield (
            f"actor.policy.model: its chat template ignores add_generation_prompt: prompts end before {header!r}, "
            "which the policy writes itself, and reward functions and the reward model read in the reply; write it in "
            "chat_template.jinja under `{% if add_generation_prompt %}`"
        )


def _marks(tokenizer: Any) -> list[str]:
    """Return marks whose presence shows that a text is a chat in the tokenizer's template."""
    chat = rendered_exchange(tokenizer)
    ids = {*tokenizer(chat, add_special_tokens=False)["input_ids"]} & {*tokenizer.added_tokens_decoder}
    ids -= {tokenizer.bos_token_id, tokenizer.unk_token_id}
    between = chat.partition(PROBE)[2].partition(PROBE)[0]  # from the end of a question to its answer
    marks = [*tokenizer.convert_ids_to_tokens(sorted(ids)), between]
    return [mark.strip() for mark in marks if len(mark.strip()) >= MIN_MARK_CHARACTERS]


def _rendered_texts(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a warning about text prompts that are chats in the format of a model.

    Of a text, the reward model reads the text alone: nothing ends the reply's turn, as in each chat of its training,
    and a chat in the policy's format is none of its own.
    """
    reward = config.reward
    texts = [prompt for prompt in prompts if MESSAGES_KEY not in prompt.metadata]
    if not config.uses_reward_model or reward.template is not None or reward.process or reward.logit:
        return
    tokenizer = load_tokenizer(reward.model)
    end = rendered_exchange(tokenizer).rpartition(PROBE)[2].strip()
    formats = {}
    if end and not (reward.append_eos and end == tokenizer.eos_token):
        formats["reward.model"] = tokenizer, f"its reply is scored without {end!r}, which ends a turn there"
    policy = load_tokenizer(config.actor.policy.model)
    if rendered_exchange(policy) != rendered_exchange(tokenizer):
        formats["actor.policy.model"] = policy, "reward.model does not read a chat in its own format"
    own = _marks(tokenizer)
    for key, (owner, consequence) in formats.items():
        marks = own if owner is tokenizer else [mark for mark in _marks(owner) if mark not in own]
        matches = [(prompt, mark) for prompt in texts for mark in marks if mark in prompt.text]
        if matches:
            prompt, mark = matches[0]
            rows = len({id(prompt) for prompt, _ in matches})
            more = f" ({rows} such rows)" if rows > 1 else ""
            yield (
                f"{prompt.where} is a text with {mark!r} of {key}'s chat template, so {consequence}; give the chat as "
                f"`messages`{more}"
            )
            return


def reward_findings(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Yield warnings where the reward model's rendering of prompts may differ from its training."""
    yield from (warning("prompts", text) for text in prompt_warnings(config, prompts))
    reward = config.reward
    is_rendered = config.uses_reward_model and reward.template is None and reward.add_special_tokens
    if not is_rendered or not any(MESSAGES_KEY in prompt.metadata for prompt in prompts):
        return
    tokenizer = load_tokenizer(reward.model)
    before = tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, rendered_exchange(tokenizer))[0])
    if before and not is_encoder(reward.model) and not rendered_exchange(tokenizer).startswith(before[0]):
        yield warning(
            "prompts",
            f"reward.model begins texts with {' '.join(before)}, but its chat template writes none, so chats are "
            "scored without, as by apply_chat_template(tokenize=True); if it was trained with it, write it in its "
            "chat_template.jinja",
        )
