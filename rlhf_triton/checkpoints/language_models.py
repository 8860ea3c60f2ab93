"""Checks that a folder holds exactly a causal language model: for a policy, a reference, or a reward from logits.

transformers gives missing tensors random values and ignores unknown ones. Without these checks, a reward model could be
trained as a policy, with a random output layer.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.head_tensors import is_harmless
from rlhf_triton.checkpoints.inspection import (
    CONFIG_FILE,
    CheckpointError,
    CheckpointInfo,
    inspect_checkpoint,
    read_config,
    refused_key,
)
from rlhf_triton.checkpoints.row_length import text_config
from rlhf_triton.errors import RlhfError, reason_of

SHOWN = 4  # names of tensors in a message
IN_LAYER = re.compile(r"(^|\.)\d+\.")


def check_language_model(folder: Path) -> None:
    """Raise CheckpointError if the headers in `folder` show that it is not a causal language model. Takes milliseconds.

    Only loading the model finds all errors: whether embeddings and output layer are tied may depend on the class.
    """
    info = inspect_checkpoint(folder)
    config = read_config(folder)
    parts = [config, text_config(config)]
    if any(part.get("quantization_config") for part in parts):
        raise CheckpointError(f"{folder} is quantised; use the unquantised checkpoint")
    prefixes = () if info.head is None else (f"{info.head.prefix}.",)
    unused = [name for name in info.tensors if name.startswith(prefixes)] if prefixes else []
    tied = [part.get("tie_word_embeddings") for part in parts]
    lacks_output = False
    if info.vocab_size and False in tied and True not in tied:
        shapes = [tensor.shape for name, tensor in info.tensors.items() if not IN_LAYER.search(name)]
        by_token = [shape for shape in shapes if len(shape) == 2 and shape[0] >= info.vocab_size]
        lacks_output = len(by_token) < 2  # embeddings and output layer have a row for each token
    check_tensors(folder, ["output layer such as lm_head.weight"] if lacks_output else [], unused)


def check_family(info: CheckpointInfo) -> None:
    """Raise CheckpointError unless transformers has models of this type."""
    from transformers import CONFIG_MAPPING

    if info.model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{info.folder}: transformers has no {info.model_type} models, and the checkpoint's own code is never run; "
            "use a model of a supported type"
        )


def check_tensors(folder: Path, missing: Iterable[str], unused: Iterable[str]) -> None:
    """Raise CheckpointError if tensors of a causal language model are missing, or unused tensors may matter."""
    absent = sorted(missing)
    others = sorted(unused)
    if others:
        info = inspect_checkpoint(folder)
        others = [name for name in others if not is_harmless(name, info.tensors.get(name), info.vocab_size)]
    problems = []
    if absent:
        problems.append(f"the weights have no {_names(absent)}")
    if others:
        problems.append(f"it does not use {_names(others)}")
    if not problems:
        return
    raise CheckpointError(
        f"{folder} is not a complete causal language model: {', and '.join(problems)}; give the folder of a language "
        "model, not of a reward model or critic"
    )


def _names(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def library_reason(folder: Path, error: Exception) -> str:
    """Return why transformers cannot load a folder: the key of config.json that it rejects, or else `error`.

    Raises:
        CheckpointError: config.json is damaged.
    """
    if not (folder / CONFIG_FILE).is_file():
        return reason_of(error)
    from transformers import AutoConfig, GenerationConfig  # slow to import

    def build(keys: Mapping[str, Any]) -> None:
        GenerationConfig.from_model_config(AutoConfig.for_model(**keys))

    config = read_config(folder)
    try:
        build(config)
    except Exception as refusal:  # process edge: what transformers does with a key may raise anything
        if key := refused_key(config, build):
            return f"{CONFIG_FILE}: {key}, which transformers rejects ({reason_of(refusal)}); correct or remove it"
    return reason_of(error)


@contextlib.contextmanager
def as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert exceptions from transformers and safetensors to a CheckpointError that names the folder."""
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:  # process edge: what transformers does with a file, or with a key, may raise anything
        raise CheckpointError(f"{folder} cannot be loaded: {library_reason(folder, error)}") from error
