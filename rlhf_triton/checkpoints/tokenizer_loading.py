"""Loads tokenizers as they were in training, also where transformers 5 reads a file in another way than 4."""

import functools
import json
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.config_keys import read_key
from rlhf_triton.checkpoints.inspection import CONFIG_FILE, CheckpointError, read_config
from rlhf_triton.checkpoints.language_models import library_reason
from rlhf_triton.checkpoints.tokenization import encode_bare_text, fingerprint
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.wire.chats import template_of_texts

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


def same_tokenizer(one: Path, other: Path) -> bool:
    """Return whether the tokenizers of two checkpoints have the same vocabulary. Raises CheckpointError."""
    first, second = (fingerprint(load_tokenizer(folder)) for folder in (one, other))
    return first == second
