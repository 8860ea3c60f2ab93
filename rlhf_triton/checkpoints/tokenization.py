"""Loads and compares checkpoints' tokenizers, finds their special tokens, and encodes texts."""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_triton.checkpoints.config_keys import read_key
from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError, model_type_of, read_config
from rlhf_triton.checkpoints.language_models import as_checkpoint_error, library_reason
from rlhf_triton.checkpoints.row_length import text_config
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.wire.chats import NEXT_PROBE, PROBE, rendered_probe, template_of_texts

MAX_ROW_TOKENS = 32_768  # row limit if neither the checkpoint nor the configuration sets one
SENTENCEPIECE_SPACE = "\u2581"  # SentencePiece puts it before a text
GENERATION_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
SAMPLE = "It's  3.14 (or 12345):\n\n\tÀ la carte, ﬁne 日本… FAQ_x2 "  # which tokenizers normalise and split differently
TYPES = "token_type_ids"
# Classes whose pairs had token types in transformers 4 by default, but have none, or not for all models, in 5.
TYPED_IN_4 = {
    "AlbertTokenizer",
    "BertJapaneseTokenizer",
    "BertTokenizer",  # Nystromformer's
    "FunnelTokenizer",
    "HerbertTokenizer",
    "PreTrainedTokenizer",
    "RealmTokenizer",
    "RemBertTokenizer",
    "RoCBertTokenizer",
    "RoFormerTokenizer",
    "TokenizersBackend",
}
# transformers 4 added BOS and EOS as tokenizer_config.json says, transformers 5 as tokenizer.json says. Whether BOS is
# added by default:
ADDED_BOS_IN_4 = {
    "CodeLlamaTokenizer": True,
    "CohereTokenizer": True,
    "GemmaTokenizer": True,
    "GPTNeoXTokenizer": False,
    "LlamaTokenizer": True,
}
BRACKETED = re.compile(r"[<\[].*[>\]]", re.DOTALL)  # how special tokens are written


def load_tokenizer(folder: Path | str) -> Any:
    """Return the checkpoint's own tokenizer. Raises CheckpointError if the folder has none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(folder).absolute()  # transformers takes a relative path for a name on the Hub
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **options)
        if is_rebuilt(tokenizer, folder):
            if _named_class(folder) == PreTrainedTokenizerFast.__name__:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
            else:
                warn_once(
                    f"{folder}: transformers makes a {type(tokenizer).__name__} of its {TOKENIZER_FILE}, which splits "
                    "texts into other tokens than the file; if the model was trained with the file, as transformers 4 "
                    f"reads it, set tokenizer_class to {PreTrainedTokenizerFast.__name__} in {TOKENIZER_SETTINGS}"
                )
        if _ignores_settings(tokenizer, folder):
            warn_once(
                f"{folder}: transformers adds other special tokens to texts than add_bos_token and add_eos_token in "
                f"{TOKENIZER_SETTINGS} say; if the model was trained with those, which transformers 4 adds, assign "
                "both to the tokenizer, save it, and set tokenizer_class to "
                f"{PreTrainedTokenizerFast.__name__} in that file; otherwise remove both"
            )
    except Exception as error:  # process edge: what transformers does with a file may raise anything
        if folder.is_dir() and not (folder / TOKENIZER_FILE).exists():
            raise CheckpointError(
                f"{folder} has no tokenizer.json, nor other files of a tokenizer that transformers can load; save the "
                "tokenizer of its base model there, with tokenizer.save_pretrained(folder)"
            ) from error
        reason = library_reason(folder, error)
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {reason}") from error
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = template_of_texts(tokenizer)
    return tokenizer


def is_rebuilt(tokenizer: Any, folder: Path) -> bool:
    """Return whether a tokenizer has other ids for a text than tokenizer.json in `folder`.

    For some classes, transformers 5 reads only the vocabulary of the file, and normalises and splits texts itself.
    """
    from transformers import PreTrainedTokenizerFast

    file = folder / TOKENIZER_FILE
    is_own = type(tokenizer) is PreTrainedTokenizerFast or not isinstance(tokenizer, PreTrainedTokenizerFast)
    if is_own or not file.is_file():
        return False
    return encode_bare_text(tokenizer, SAMPLE) != _ids_by_file(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _ids_by_file(file: Path, changed_ns: int) -> list[int]:
    """Return the ids of `SAMPLE` according to tokenizer.json, last changed at `changed_ns`."""
    from tokenizers import Tokenizer

    stored = Tokenizer.from_file(str(file))
    stored.no_truncation()
    stored.no_padding()
    return list(stored.encode(SAMPLE, add_special_tokens=False).ids)


def _ignores_settings(tokenizer: Any, folder: Path) -> bool:
    """Return whether transformers 4 added other special tokens to a text, as tokenizer_config.json in `folder` says.

    A file without these settings may be of transformers 5, which writes none.
    """
    settings = _settings(folder)
    name = _named_class(folder).removesuffix("Fast")
    if name not in ADDED_BOS_IN_4 or not {"add_bos_token", "add_eos_token"} & settings.keys():
        return False
    before = [tokenizer.bos_token_id] * read_key(settings, "add_bos_token", bool, ADDED_BOS_IN_4[name])
    after = [tokenizer.eos_token_id] * read_key(settings, "add_eos_token", bool, False)
    return tokenizer(SAMPLE)["input_ids"] != [*before, *encode_bare_text(tokenizer, SAMPLE), *after]


def restore_token_types(tokenizer: Any, folder: Path) -> None:
    """Let the tokenizer of the model in `folder` give a pair's token types if transformers 4 gave them in training.

    A model that transformers 5 saved may have been trained with either; a warning says so, and nothing changes.
    `model_input_names` in tokenizer_config.json decides if it is there.
    """
    config = read_config(folder) if (folder / CONFIG_FILE).is_file() else {}
    name = (_named_class(folder) or type(tokenizer).__name__).removesuffix("Fast")
    decided = "model_input_names" in _settings(folder) or TYPES in tokenizer.model_input_names
    if decided or name not in TYPED_IN_4 or read_key(config, "type_vocab_size", int, 0) < 2:
        return
    if read_key(config, "transformers_version", str, "4.").startswith(("2.", "3.", "4.")):
        tokenizer.model_input_names = [*tokenizer.model_input_names, TYPES]
    else:
        warn_once(
            f"{folder}: its second texts get no token types, as in transformers 5, which saved the model; if it was "
            f"trained with token types, as by transformers 4, set model_input_names in {TOKENIZER_SETTINGS} to "
            f'["input_ids", "{TYPES}", "attention_mask"], otherwise to ["input_ids", "attention_mask"]'
        )


def _named_class(folder: Path) -> str:
    """Return the tokenizer's class that the folder names, "" if it names none."""
    return str(_settings(folder).get("tokenizer_class") or "")


def _settings(folder: Path) -> dict[str, Any]:
    """Return the folder's tokenizer_config.json, {} if it has none."""
    file = folder / TOKENIZER_SETTINGS
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of `tokenizer(text)`, special tokens included, but do not add special tokens twice.

    Special tokens that the text already has at its start or end, such as in the output of a chat template, are not
    added again. The ids then equal those of `apply_chat_template(tokenize=True)`.
    """
    encoded = tokenizer(text, return_special_tokens_mask=True)
    # The mask is 0 for tokens of the text, special ones included.
    ids = encoded["input_ids"]
    added = encoded["special_tokens_mask"]
    # No token comes from the text, or the mask has another length (T5's tokenizer does not add a second </s>).
    if 0 not in added or len(added) != len(ids):
        return list(ids)
    start = added.index(0)
    end = len(ids) - added[::-1].index(0)
    has_start = text.lstrip().startswith(_literal(tokenizer, ids[:start]))
    has_end = text.rstrip().endswith(_literal(tokenizer, ids[end:]))
    return list(ids[start if has_start else 0 : end if has_end else len(ids)])


def encode_prompt(tokenizer: Any, text: str, *, special: bool = True) -> tuple[list[int], list[int]]:
    """Return two lists: the special tokens that the tokenizer puts before the text, such as BOS, and the text's ids.

    As in `encode_text`, special tokens at the start of the text are not added again. No EOS or [SEP] is added at the
    end, because the response follows. Without `special`, the first list is empty.
    """
    if not special:
        return [], encode_bare_text(tokenizer, text)
    encoded = tokenizer(text, return_special_tokens_mask=True)
    ids = encoded["input_ids"]
    added = encoded["special_tokens_mask"]
    bare = encode_bare_text(tokenizer, text)
    before = ids[: added.index(0)] if 0 in added and len(added) == len(ids) else []
    if bare[: len(before)] == before:
        return before, bare[len(before) :]
    return ([] if text.lstrip().startswith(_literal(tokenizer, before)) else before), bare


def without_embedding(tokenizer: Any, ids: Sequence[int], num_embeddings: int | None) -> str:
    """Return an error message if a token id of a text has no embedding in the policy, otherwise ""."""
    if num_embeddings is None or (largest := max(ids, default=0)) < num_embeddings:
        return ""
    return (
        f"token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) is outside the policy's {num_embeddings} "
        "embeddings; remove it, or resize the embeddings to the tokenizer (resize_token_embeddings)"
    )


def encode_bare_text(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of the text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class Encoded(NamedTuple):
    """The tokens of a row."""

    ids: list[int]
    types: list[int] | None = None  # token types of a text pair, such as 1 in BERT's second text


def _literal(tokenizer: Any, special_ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(special_ids))


def single_tokens(tokenizer: Any, names: Sequence[str | int]) -> list[int]:
    """Return the id of each name: a text that is one token, an entry of the vocabulary, or an id itself.

    Raises:
        CheckpointError: a name is not one token, or two names are the same token.
    """
    ids = [_single_token(tokenizer, name) for name in names]
    for i, token in enumerate(ids):
        if token in ids[:i]:
            raise CheckpointError(
                f"{names[ids.index(token)]!r} and {names[i]!r} are the same token, {token}; remove one"
            )
    return ids


def _single_token(tokenizer: Any, name: str | int) -> int:
    if isinstance(name, int):
        return name
    ids = encode_bare_text(tokenizer, name)
    if len(ids) == 2 and tokenizer.convert_ids_to_tokens(ids[0]) == SENTENCEPIECE_SPACE:
        return ids[1]
    # A tokenizer may drop characters, or replace them by its unknown token.
    if len(ids) == 1 and tokenizer.decode(ids).strip().casefold() == name.strip().casefold():
        return ids[0]
    entry = tokenizer.get_vocab().get(name)
    if entry is None:
        pieces = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids))) or "none"
        raise CheckpointError(
            f"{name!r} is {len(ids)} tokens ({pieces}) of the tokenizer in {tokenizer.name_or_path}, but must be one; "
            "give a text that is one token, an entry of its vocabulary, or a token id"
        )
    return int(entry)


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of the vocabulary (token -> id, added tokens included). Equal hashes mean equal token ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(vocabulary.encode()).hexdigest()


def is_encoder(folder: Path) -> bool:
    """Return whether the model in `folder` is an encoder according to transformers: its head reads a row's [CLS].

    An encoder's chats get the tokenizer's special tokens. Other models' chats get only their template's, as in
    `apply_chat_template(tokenize=True)`; even a decoder's tokenizer may have a [CLS].
    """
    from transformers.models.auto import modeling_auto

    names = {
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES,  # XLNet
    }
    config = read_config(folder) if (folder / CONFIG_FILE).is_file() else {}
    return model_type_of(config) in names and not read_key(config, "is_decoder", bool, False)


def rendering_fingerprint(tokenizer: Any) -> str:
    """Return a hash of everything that determines the ids of a text or chat. Equal hashes mean equal ids.

    It covers vocabulary, normaliser, pre-tokenizer, special tokens and chat template.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: Any = [type(tokenizer).__name__, fingerprint(tokenizer)]  # for a tokenizer written in Python
    if backend is not None:
        state = json.loads(backend.to_str())
        del state["truncation"], state["padding"]  # left there by the last call
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    whole = json.dumps([state, special, tokenizer.chat_template, tokenizer.truncation_side])
    return hashlib.sha256(whole.encode()).hexdigest()


def same_tokenizer(one: Path, other: Path) -> bool:
    """Return whether the tokenizers of two checkpoints have the same vocabulary. Raises CheckpointError."""
    first, second = (fingerprint(load_tokenizer(folder)) for folder in (one, other))
    return first == second


@dataclass(frozen=True)
class SpecialTokens:
    """Special token ids used in generation."""

    eos_ids: list[int]  # ascending; each ends a response; from tokenizer, generation config and chat template
    pad_id: int
    banned_ids: list[int]
    """Ascending ids that are never sampled: ids without a tokenizer entry, and padding and BOS, unless they end
    responses or occur in ordinary text."""
    template_end: int | None = None  # the one of `eos_ids` that only the chat template defines


def special_tokens(tokenizer: Any, eos: int | list[int] | None, *, vocab_size: int | None = None) -> SpecialTokens:
    """Return the special tokens of a language model.

    Args:
        eos: `eos_token_id` of the model's generation config.
        vocab_size: number of rows of the model's embedding table; None: the tokenizer's number of entries. A tokenizer
            may define ids beyond it, which the model can neither generate nor embed. `banned_ids` omits these, and
            `pad_id` is a different id if the padding token is one of them.

    Raises:
        CheckpointError: neither the tokenizer nor `eos` nor the chat template has an end-of-sequence token.
    """
    ids = eos if isinstance(eos, list) else [eos]
    named = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    end = reply_end(tokenizer)
    eos_ids = sorted(named if end is None else named | {end})
    if not eos_ids:
        raise CheckpointError(
            "actor.policy.model: tokenizer, generation config and chat template define no end-of-sequence token; set "
            "eos_token_id in its generation_config.json"
        )

    def has_embedding(token: int | None) -> bool:
        return token is not None and (vocab_size is None or token < vocab_size)

    pad_id = next(i for i in (tokenizer.pad_token_id, *eos_ids, 0) if has_embedding(i))
    roles = {i for i in (tokenizer.pad_token_id, tokenizer.bos_token_id) if has_embedding(i)} - set(eos_ids)
    banned = {i for i in roles if is_special(tokenizer, i)}
    banned.update(ids_without_entry(tokenizer, vocab_size or 0))
    return SpecialTokens(eos_ids, pad_id, sorted(banned), None if end in named else end)


def ids_without_entry(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the ids below `vocab_size` without a tokenizer entry, ascending: they neither encode nor decode to text.

    Embeddings are often padded to a multiple of a power of two, and a vocabulary may have gaps.
    """
    entries = set(tokenizer.get_vocab().values())
    return [i for i in range(vocab_size) if i not in entries and not _has_entry(tokenizer, i)]


def _has_entry(tokenizer: Any, token: int) -> bool:
    """Return whether the token has an entry that `get_vocab` omits, because another token has the same text."""
    try:
        entry = tokenizer.convert_ids_to_tokens(token)
    except (LookupError, ValueError):  # raised by tokenizers outside the `tokenizers` library
        return False
    return entry is not None and entry != tokenizer.unk_token


def special_tokens_in(folder: Path) -> SpecialTokens:
    """Return the special tokens of the language model in `folder`, without loading it; see `special_tokens`.

    Raises:
        CheckpointError: see `special_tokens`; or the folder has no tokenizer or no configuration.
    """
    return special_tokens(load_tokenizer(folder), end_of_sequence(folder), vocab_size=num_embeddings(folder))


def num_embeddings(folder: Path) -> int | None:
    """Return the size of the embedding table from config.json in `folder`; None if it is not stated."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    try:
        return read_key(text_config(read_config(folder)), "vocab_size", int, None)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def turn_ends(tokenizer: Any) -> list[int]:
    """Return the ids, ascending, of the tokens with which the chat template ends a reply; [] if it has none.

    A template may end the last reply and earlier ones with different tokens, or only start the next message with one.
    """
    return sorted({end for end in _turn_ends(tokenizer) if end is not None})


def reply_end(tokenizer: Any) -> int | None:
    """Return the token that ends a policy's reply in its chat template; None if there is none.

    In some templates, the token that ends earlier replies only ends a part of a reply, such as gpt-oss's <|end|>.
    """
    last, earlier = _turn_ends(tokenizer)
    return earlier if last is None else last


def _turn_ends(tokenizer: Any) -> tuple[int | None, int | None]:
    """Return the tokens that end the last reply of a conversation and earlier replies."""
    if not getattr(tokenizer, "chat_template", None):
        return None, None
    named = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    named -= {tokenizer.bos_token_id, tokenizer.unk_token_id} - {tokenizer.eos_token_id}
    added = {i for i in named if tokenizer.decode([i]).strip()}  # some tokenizers have whitespace as added tokens
    question, reply = ({"role": role, "content": PROBE} for role in ("user", "assistant"))

    def first_added(messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the added tokens between a reply and any following text."""
        behind = [i for i in _behind_reply(tokenizer, messages) if i in added or tokenizer.decode([i]).strip()]
        return [*itertools.takewhile(added.__contains__, behind)]

    def end(tokens: list[int]) -> int | None:
        """Return the token that ends the reply: EOS if present, because tokens before it may belong to the reply."""
        return tokenizer.eos_token_id if tokenizer.eos_token_id in tokens else next(iter(tokens), None)

    last = first_added([question, reply])
    earlier = end(first_added([question, reply, {**question, "content": NEXT_PROBE}]))
    return earlier if earlier in last else end(last), earlier


def _behind_reply(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Return the ids of the template's text between the last `PROBE` and `NEXT_PROBE`; [] if the template fails."""
    text = rendered_probe(tokenizer, messages)
    behind = text.rpartition(PROBE)[2] if PROBE in text else ""
    return encode_bare_text(tokenizer, behind.partition(NEXT_PROBE)[0])


def end_of_sequence(folder: Path) -> int | list[int] | None:
    """Return `eos_token_id` of the generation config of the language model in `folder`.

    Raises:
        CheckpointError: the folder has no model configuration.
    """
    from transformers import AutoConfig, GenerationConfig

    with as_checkpoint_error(folder):
        try:
            if (folder / GENERATION_FILE).is_file():
                return GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
            return GenerationConfig.from_model_config(config).eos_token_id
        except ValueError:  # a class that transformers does not know, such as many reward models'
            return read_config(folder).get("eos_token_id")


@functools.lru_cache(maxsize=8)
def dropped_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids to drop at the end of a reply: BOS, padding, and tokens that end a sequence or a turn.

    Excludes tokens that occur in ordinary text, such as "!" as padding.
    """
    folder = Path(str(tokenizer.name_or_path))
    has_settings = tokenizer.name_or_path and any((folder / name).is_file() for name in (GENERATION_FILE, CONFIG_FILE))
    eos = end_of_sequence(folder) if has_settings else None
    ends = eos if isinstance(eos, list) else [eos]
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, *ends, *turn_ends(tokenizer)}
    return frozenset(i for i in named if i is not None and is_special(tokenizer, i))


def is_special(tokenizer: Any, token: int) -> bool:
    """Return whether a token with a role such as padding never occurs in ordinary text.

    The role alone does not prove it: a tokenizer lists every token with a role as special, even "!".
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # written in Python; its special tokens are separate from its vocabulary
        return True
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None or BRACKETED.fullmatch(piece):  # Unigram and WordPiece also have these in their vocabulary
        return True
    return [each.id for each in backend.model.tokenize(piece)] != [token]


def without_end(tokenizer: Any, ids: Sequence[int]) -> Sequence[int]:
    """Return the ids without the `dropped_ids` at the end. Inside a reply they are kept: they end a part (gpt-oss)."""
    dropped = dropped_ids(tokenizer)
    end = len(ids)
    while end and ids[end - 1] in dropped:
        end -= 1
    return ids[:end]


def reply_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode a policy's sampled ids, including special tokens with a meaning, such as `<think>`.

    Omits only the `dropped_ids` at the end, and BOS and padding at the start. Functions, judges, environments, parsers,
    reports and reward models read this text.
    """
    padding = {tokenizer.bos_token_id, tokenizer.pad_token_id} & dropped_ids(tokenizer)
    content = itertools.dropwhile(padding.__contains__, without_end(tokenizer, ids))
    return str(tokenizer.decode([*content], skip_special_tokens=False))
