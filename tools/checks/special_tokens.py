"""Checks the tokenizers of a run: what ends a response, and tokens without an embedding."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.inspection import tokenizer_kind
from rlhf_triton.checkpoints.special_tokens import SpecialTokens, ids_without_entry, reply_end, special_tokens_in
from rlhf_triton.checkpoints.tokenization import num_embeddings
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer, same_tokenizer
from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.tools.checks.findings import Finding, warning
from rlhf_triton.wire.chats import (
    PROBE,
    rendered_probe,
)

VLLM_BANS = 1024  # entries of `logit_bias`
QUESTION = {"role": "user", "content": PROBE}
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
    ids = tokenizer(rendered_exchange(tokenizer), add_special_tokens=False)["input_ids"]
    lacking = [i for i in sorted({*ids}) if i >= (size or i + 1)]
    if not lacking:
        return None
    named = _named(tokenizer, lacking)
    return f"{folder} has {size} embeddings, none for {named}, which its chat template writes; {RESIZE}"


def rendered_exchange(tokenizer: Any) -> str:
    """Return a question and a reply, both `PROBE`, in the chat template; "" if there is none or it refuses them."""
    return rendered_probe(tokenizer, [QUESTION, {**QUESTION, "role": "assistant"}])


def token_findings(config: RunConfig) -> Iterator[Finding]:
    """Yield what ends a response of the policy, and where the sizes of a model's tokenizer and embeddings differ."""
    folder = config.actor.policy.model
    tokenizer = load_tokenizer(folder)
    size = num_embeddings(folder)
    special = special_tokens_in(folder)
    yield _ends(tokenizer, special, size)
    if tokenizer.chat_template and not rendered_exchange(tokenizer):
        problem = "the policy's chat template refuses a question and a reply, so how it ends a turn is unknown"
        yield warning(
            "ends", f"{problem}; name that token in generation_config.json (eos_token_id), if none above is it"
        )
    behind = rendered_exchange(tokenizer).rpartition(PROBE)[2].strip()
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
