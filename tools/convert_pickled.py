"""Converts a folder of pickled weights to safetensors; `unpickle` reads them."""

import shutil
from pathlib import Path

from rlhf_triton.checkpoints.inspection import (
    ADAPTER_FILE,
    CONFIG_FILE,
    INDEX_FILE,
    ONLY_ADAPTER,
    WEIGHTS_FILE,
    CheckpointError,
    head_files,
    pickles,
    pickles_beside,
    tensors_in,
    weight_map_of,
)
from rlhf_triton.monitoring.log_lines import say
from rlhf_triton.store.durable import make_folder, write_folder

PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
# What a checkpoint has beside its weights: configuration, tokenizer, template, model card.
COPIED_SUFFIXES = (".json", ".jinja", ".md", ".model", ".tiktoken", ".txt")
TEMPLATES = "additional_chat_templates"
WHOLE_NAMES = ("value_head",)  # files whose tensors have the names of the whole model, as LLaMA-Factory writes them


def convert_pickled(source: Path, out: Path) -> None:
    """Write the checkpoint `source`, a folder or one of its files, to the new folder `out`, with safetensors weights.

    Heads in separate pickles become part of the weights, with their file's name as prefix (`regression_layer.` for
    `regression_layer.pt`). Dtypes stay; tied weights are stored under each of their names.

    Raises:
        CheckpointError: there is nothing to convert, or a file holds anything but tensors; the message names the file.
    """
    if out.exists():
        raise CheckpointError(f"--convert: {out} already exists; choose another folder")
    folder = source.parent if source.is_file() else source
    if (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{folder} {ONLY_ADAPTER}")
    weights = [source] if source.is_file() else _weights_in(folder)
    heads = _heads_beside(source, folder, weights)
    if weights[0].suffix == ".safetensors" and not heads:
        raise CheckpointError(f"{folder} has nothing to convert: its weights are safetensors; use it as it is")
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {CONFIG_FILE}; copy it and the tokenizer's files there "
            "from the model that this one was trained from, then convert again"
        )
    make_folder(out.parent)
    size = sum(file.stat().st_size for file in [*weights, *heads])
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise CheckpointError(
            f"--convert: {out} needs {size / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free; make room"
        )

    def fill(staging: Path) -> None:
        from rlhf_triton.tools.unpickle import limited_memory, write_safetensors  # deferred: imports torch

        files = dict.fromkeys(weights, "")
        files |= {file: "" if file.stem in WHOLE_NAMES else f"{file.stem}." for file in heads}
        with limited_memory(files):
            write_safetensors(files, staging)
        _check_index(folder, staging)
        for file in _files_to_copy(folder, weights):
            shutil.copyfile(file, staging / file.name)
        if (folder / TEMPLATES).is_dir():
            shutil.copytree(folder / TEMPLATES, staging / TEMPLATES)

    write_folder(out, fill)


def _weights_in(folder: Path) -> list[Path]:
    """Return the files of a checkpoint's weights, pickled or not. Raises CheckpointError if several could be meant."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist; give the folder of a checkpoint, or its file of weights")
    names = (WEIGHTS_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX)
    file_name = next((name for name in names if (folder / name).is_file()), None)
    if file_name is None:
        files = pickles(folder)
        if len(files) != 1:
            what = ", ".join(file.name for file in files) or "no weights"
            raise CheckpointError(f"{folder} has {what}, not one file to convert; give the path of the weights' file")
        return files
    if not file_name.endswith(".json"):
        return [folder / file_name]
    return [folder / name for name in sorted(set(weight_map_of(folder / file_name).values()))]


def _heads_beside(source: Path, folder: Path, weights: list[Path]) -> list[Path]:
    """Return the pickles beside the weights: a head of the model may be in a separate file."""
    others = [file for file in pickles_beside(folder) if file not in weights]
    if source.is_file() and others:
        say(f"left out, since {source.name} alone was given: {', '.join(file.name for file in others)}")
    return [] if source.is_file() else others


def _check_index(folder: Path, converted: Path) -> None:
    """Raise CheckpointError if the index of the pickled shards lists a tensor that none of them had."""
    if (folder / PICKLED_FILE).is_file() or not (folder / PICKLED_INDEX).is_file():
        return
    tensors = {name for file in converted.glob("*.safetensors") for name in tensors_in(file)}
    listed = weight_map_of(folder / PICKLED_INDEX)
    lacking = sorted(name for name in listed if name not in tensors and name.removeprefix("module.") not in tensors)
    if lacking:
        raise CheckpointError(
            f"{folder}: {PICKLED_INDEX} lists {lacking[0]}, which no file contains; copy the files again"
        )


def _files_to_copy(folder: Path, weights: list[Path]) -> list[Path]:
    """Return the files to copy: configuration files, and heads that are safetensors already."""
    files = [file for file in sorted(folder.iterdir()) if file.is_file()]
    return [
        *(file for file in files if file.suffix in COPIED_SUFFIXES and not file.name.endswith(".index.json")),
        *(file for file in head_files(folder) if file not in weights),
    ]
