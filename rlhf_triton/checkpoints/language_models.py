"""Whether a folder holds a causal language model and nothing else: a policy, a reference, a reward from logits.

transformers gives missing tensors random values and ignores those that it does not know, so that a reward model could
be trained as a policy: from a random output layer.
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
    text_config,
)
from rlhf_triton.errors import RlhfError, reason_of

SHOWN = 4  # names of tensors in a message
IN_LAYER = re.compile(r"(^|\.)\d+\.")


def check_language_model(folder: Path) -> None:
    """Raise CheckpointError if the headers in `folder` show that it is no causal language model. Takes milliseconds.

    Only a load shows all: whether the embeddings are tied, which spares the output layer, may depend on the class.
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
    check_tensors(folder, ["an output layer such as lm_head.weight"] if lacks_output else [], unused)


def check_family(info: CheckpointInfo) -> None:
    """Raise CheckpointError unless transformers has models of this type."""
    from transformers import CONFIG_MAPPING

    if info.model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{info.folder}: transformers has no {info.model_type} models; the checkpoint's own code would have to be "
            "run, which is never done"
        )


def check_tensors(folder: Path, missing: Iterable[str], unused: Iterable[str]) -> None:
    """Raise CheckpointError if a causal language model lacks tensors in `folder`, or does not use some of them."""
    lacking, others = sorted(missing), sorted(unused)
    if others:
        info = inspect_checkpoint(folder)
        others = [name for name in others if not is_harmless(name, info.tensors.get(name), info.vocab_size)]
    if not lacking and not others:
        return
    what = [f"the weights lack {_names(lacking)}"] * bool(lacking) + [f"it does not use {_names(others)}"] * bool(
        others
    )
    raise CheckpointError(
        f"{folder} is not a whole causal language model: {', and '.join(what)}; give the folder of a language model, "
        "not of a reward model or critic"
    )


def _names(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


# What transformers raises, as one sentence.


def library_reason(folder: Path, error: Exception) -> str:
    """Return why transformers cannot load a folder: the key of config.json that it refuses, or what `error` says.

    Raises:
        CheckpointError: config.json is damaged.
    """
    if not (folder / CONFIG_FILE).is_file():
        return reason_of(error)
    from transformers import AutoConfig, GenerationConfig  # slow to import

    def build(keys: Mapping[str, Any]) -> None:
        GenerationConfig.from_model_config(AutoConfig.for_model(**keys))

    given = read_config(folder)
    try:
        build(given)
    except Exception as refusal:  # process edge: what transformers does with a key may raise anything
        if key := refused_key(given, build):
            return f"{CONFIG_FILE}: {key}, which transformers refuses ({reason_of(refusal)}); correct or remove it"
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
