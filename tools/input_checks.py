"""Warns about prompts, chat templates and special tokens that do not fit the models of a run."""

import difflib
import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta

from rlhf_triton.actor.data.prompt_files import EMPTY
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.checkpoints.inspection import tokenizer_kind
from rlhf_triton.checkpoints.tokenization import (
    SpecialTokens,
    encode_prompt,
    ids_without_entry,
    is_encoder,
    is_special,
    load_tokenizer,
    num_embeddings,
    reply_end,
    same_tokenizer,
    special_tokens_in,
)
from rlhf_triton.config import RunConfig
from rlhf_triton.rewards.function import MESSAGES_KEY
from rlhf_triton.tools.checks import Finding, warning
from rlhf_triton.wire.chats import (
    PROBE,
    TEMPLATE_COLUMNS,
    TEMPLATE_VARIABLES,
    TOOLS,
    rendered_probe,
    template_options,
)

VLLM_BANS = 1024  # entries of `logit_bias`
QUESTION = {"role": "user", "content": PROBE}
SHORTEST_MARK = 3  # characters of the shortest mark of a turn: white space and single signs are in any text
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
RESIZE = "resize its embeddings to the tokenizer (resize_token_embeddings)"


def token_problems(config: RunConfig) -> Iterator[str]:
    """Yield a problem for each model that receives the policy's tokens but lacks an embedding for some of them."""
    folder = config.actor.policy.model
    tokenizer = load_tokenizer(folder)
    size = num_embeddings(folder)
    special = special_tokens_in(folder)
    entries = sorted(tokenizer.get_vocab().values())
    banned = {*special.banned_ids}
    sampled = [i for i in entries if (size is None or i < size) and i not in banned]
    for role, section in config.served_sections.items():
        num_rows = num_embeddings(section.model)
        lacking = [i for i in sampled if i >= (num_rows or i + 1)]
        if lacking and same_tokenizer(folder, section.model):  # another tokenizer makes other ids of a text
            yield (
                f"{role}.model: {section.model} has {num_rows} embeddings, none for {_named(tokenizer, lacking)}, "
                f"which the policy may sample; {RESIZE}, or start from a model of the policy's size"
            )


def template_problem(folder: Path) -> str | None:
    """Return which tokens of the chat template in `folder` the model cannot embed; None if there is none."""
    tokenizer = load_tokenizer(folder)
    size = num_embeddings(folder)
    ids = tokenizer(_rendered(tokenizer), add_special_tokens=False)["input_ids"]
    lacking = [i for i in sorted({*ids}) if i >= (size or i + 1)]
    if not lacking:
        return None
    named = _named(tokenizer, lacking)
    return f"{folder} has {size} embeddings, none for {named}, which its chat template writes; {RESIZE}"


def _rendered(tokenizer: Any) -> str:
    """Return a question and a reply, both `PROBE`, in the chat template; "" if there is none or it refuses them."""
    return rendered_probe(tokenizer, [QUESTION, {**QUESTION, "role": "assistant"}])


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
    behind = _rendered(tokenizer).removeprefix(prompt)
    header = behind.partition(PROBE)[0]
    if prompt and header.strip() and len(behind) < len(_rendered(tokenizer)):
        yield (
            f"actor.policy.model: its chat template ignores add_generation_prompt: prompts end before {header!r}, "
            "which the policy writes itself, and reward functions and the reward model read in the reply; write it in "
            "chat_template.jinja under `{% if add_generation_prompt %}`"
        )


def _marks(tokenizer: Any) -> list[str]:
    """Return marks whose presence shows that a text is a chat in the tokenizer's template."""
    chat = _rendered(tokenizer)
    ids = {*tokenizer(chat, add_special_tokens=False)["input_ids"]} & {*tokenizer.added_tokens_decoder}
    ids -= {tokenizer.bos_token_id, tokenizer.unk_token_id}
    between = chat.partition(PROBE)[2].partition(PROBE)[0]  # from the end of a question to its answer
    marks = [*tokenizer.convert_ids_to_tokens(sorted(ids)), between]
    return [mark.strip() for mark in marks if len(mark.strip()) >= SHORTEST_MARK]


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
    end = _rendered(tokenizer).rpartition(PROBE)[2].strip()
    formats = {}
    if end and not (reward.append_eos and end == tokenizer.eos_token):
        formats["reward.model"] = tokenizer, f"its reply is scored without {end!r}, which ends a turn there"
    policy = load_tokenizer(config.actor.policy.model)
    if _rendered(policy) != _rendered(tokenizer):
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
    before = tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, _rendered(tokenizer))[0])
    if before and not is_encoder(reward.model) and not _rendered(tokenizer).startswith(before[0]):
        yield warning(
            "prompts",
            f"reward.model begins texts with {' '.join(before)}, but its chat template writes none, so chats are "
            "scored without, as by apply_chat_template(tokenize=True); if it was trained with it, write it in its "
            "chat_template.jinja",
        )


def token_findings(config: RunConfig) -> Iterator[Finding]:
    """Yield what ends a response of the policy, and where the sizes of a model's tokenizer and embeddings differ."""
    folder = config.actor.policy.model
    tokenizer = load_tokenizer(folder)
    size = num_embeddings(folder)
    special = special_tokens_in(folder)
    yield _ends(tokenizer, special, size)
    if tokenizer.chat_template and not _rendered(tokenizer):
        problem = "the policy's chat template refuses a question and a reply, so how it ends a turn is unknown"
        yield warning(
            "ends", f"{problem}; name that token in generation_config.json (eos_token_id), if none above is it"
        )
    behind = _rendered(tokenizer).rpartition(PROBE)[2].strip()
    if behind and reply_end(tokenizer) is None and not config.actor.generation.stop_strings:
        problem = f"the chat template ends a reply with {behind!r}, which is no special token: no response ends there"
        yield warning(
            "ends", f"{problem}; set actor.generation.stop_strings to [{behind!r}], or add it to the tokenizer"
        )
    if unused := len(ids_without_entry(tokenizer, size or 0)):
        yield Finding(
            "embeddings",
            f"actor.policy.model: {unused} of {size} have no entry in the tokenizer, and are never sampled",
        )
    if config.actor.generation.engine == "vllm" and len(special.banned_ids) > VLLM_BANS:
        text = (
            f"{len(special.banned_ids)} ids are never sampled, but some of vLLM's engines ban {VLLM_BANS} in a request"
        )
        yield warning("embeddings", f"{text}: set actor.generation.engine to slots if it refuses them")
    served = {f"{role}.model": section.model for role, section in config.served_sections.items()}
    for key, model in {"actor.policy.model": folder, **served}.items():
        num_rows = num_embeddings(model)
        if num_rows is None or not tokenizer_kind(model):
            continue
        own = load_tokenizer(model)
        if lacking := [i for i in sorted(own.get_vocab().values()) if i >= num_rows]:
            text = (
                f"{key}: {num_rows}, none for {_named(own, lacking)} of the tokenizer: no text may have them, or "
                f"{RESIZE}"
            )
            yield warning("embeddings", text)


def _ends(tokenizer: Any, special: SpecialTokens, size: int | None) -> Finding:
    dead = [i for i in special.eos_ids if i in special.banned_ids or i >= (size or i + 1)]
    ends = [i for i in special.eos_ids if i not in dead]
    text = f"a response ends with {_named(tokenizer, ends)}" if ends else "no response can end before max_new_tokens"
    if dead:
        why = "without an entry in the tokenizer or an embedding: name others there, or in its template"
        return warning("ends", f"{text}; generation_config.json or template name {_named(tokenizer, dead)}, {why}")
    if special.template_end is not None:
        end = _named(tokenizer, [special.template_end])
        why = "because the chat template ends a reply with it, though neither tokenizer nor generation_config.json does"
        return warning(
            "ends", f"{text}; {end} {why}: name it there (eos_token_id), as the run's own policy folder will"
        )
    if special.pad_id in ends:
        text += ", one of which is padding, too: it stays an end"
    return Finding("ends", text)


def _named(tokenizer: Any, ids: Sequence[int]) -> str:
    first = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in ids[:3])
    return first if len(ids) <= 3 else f"{first} and {len(ids) - 3} more"
