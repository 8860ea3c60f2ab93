"""Reads pickled weights for `rlhf-triton init models --convert`, with limited memory.

Reads each file with torch's weights-only loader, without allowed extras, and writes its tensors as safetensors.
"""

import contextlib
import json
import re
import resource
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf_triton.checkpoints.head_tensors import WRAPPED
from rlhf_triton.checkpoints.inspection import INDEX_FILE, WEIGHTS_FILE, CheckpointError
from rlhf_triton.checkpoints.tensor_file import STORED_AS, write_tensors
from rlhf_triton.monitoring.log_lines import say

SPARE_BYTES = 512 << 20  # for the process itself and for small files
WRAPPERS = ("state_dict", "model_state_dict", "module", "model")  # keys under which trainers save a state dict
TRAINERS = re.compile(r"\w*(optimizer|sched|rng_state)\w*|rng|hyper_parameters|hparams\w*|loops|callbacks")
"""Keys of a training's state, which is not part of the model."""
LOSS_SCALER = "growth_factor"  # key of the state of torch's GradScaler
CONSTANTS = re.compile(r"(.*[._])?(mean|std|var|variance|scale|shift|offset|temperature)s?|.*(scaler|normali[sz])\w*")
"""Names of numbers that the scores may depend on."""


@contextlib.contextmanager
def limited_memory(files: Mapping[Path, str]) -> Iterator[None]:
    """Leave the process twice the size of the largest file: the file, and a copy of a tensor that is not contiguous.

    The block computes in one thread, because each one takes some of that, and its warnings are ignored.

    Raises:
        CheckpointError: the block raised any error, such as for memory that a copy of a tensor lacks.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + 2 * max(file.stat().st_size for file in files) + SPARE_BYTES
    limits = resource.getrlimit(resource.RLIMIT_AS)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limits[1]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:  # process edge: a file may raise anything here
        raise CheckpointError(str(error) or type(error).__name__) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        torch.set_num_threads(num_threads)


def write_safetensors(files: Mapping[Path, str], folder: Path) -> None:
    """Write the tensors of each file to a file in `folder`: to `model.safetensors`, or to shards with an index.

    Args:
        files: the prefix of each file's tensor names in the result, by file.

    Raises:
        CheckpointError: a file holds anything but dense tensors, or two files have a tensor of one name.
    """
    names = {
        file: f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else WEIGHTS_FILE
        for number, file in enumerate(files, start=1)
    }
    source: dict[str, Path] = {}
    total = 0
    for number, (file, prefix) in enumerate(files.items(), start=1):
        say(f"reading {file.name} ({file.stat().st_size / 1e6:,.1f} MB, file {number} of {len(files)})")
        tensors = {prefix + name if name else file.stem: tensor for name, tensor in _read(file).items()}
        for name in tensors:
            if name in source:
                raise CheckpointError(f"{file}: {name} is in {source[name].name} as well; remove one of the two files")
            source[name] = file
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        write_tensors(folder / names[file], shapes, tensors.__getitem__)
        size = sum(tensor.nbytes for tensor in tensors.values())
        say(f"wrote {len(tensors)} tensors of {file.name} ({size / 1e6:,.1f} MB)")
        total += size
        del tensors  # before the next file: two would not fit
    say(f"converted {len(source)} tensors, {total / 1e6:,.1f} MB in {len(files)} file(s)")
    if len(files) > 1:
        weight_map = {name: names[file] for name, file in source.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name. Raises CheckpointError for any other content, or if loading fails."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=_can_be_mapped(file))
        return _tensors(file, loaded)
    except CheckpointError:
        raise
    except Exception as error:  # process edge: a file may raise anything here
        raise CheckpointError(_refusal(file, error)) from error


def _refusal(file: Path, error: Exception) -> str:
    # torch's own message recommends to load the file without protection.
    if foreign := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"{file} is refused: its pickle calls {foreign[1]}, which is no part of a tensor and could run any code; "
            "if you trust the file, load it elsewhere and save its model.state_dict() alone"
        )
    limit = resource.getrlimit(resource.RLIMIT_AS)[0] / 1e6
    text = " ".join(str(error).split()).partition(" In PyTorch ")[0]
    reason = type(error).__name__ if "weights_only" in text else f"{type(error).__name__} {text[-200:]}"
    return f"{file} is no file of tensors that torch's weights-only loader reads in {limit:,.0f} MB of memory: {reason}"


def _can_be_mapped(file: Path) -> bool:
    """Return whether the storages lie in the file as they are: it is a zip of torch's, and not compressed."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())


def _tensors(file: Path, loaded: Any) -> dict[str, Tensor]:
    """Return the tensors of a loaded file by name, dense and without the wrappers that trainers put around them."""
    tensors: dict[str, Tensor] = {}
    left_out: list[str] = []
    _collect(file, loaded, "", tensors, left_out, set())
    for prefix in WRAPPED:
        if tensors and all(name.startswith(prefix) for name in tensors):
            say(f"{file.name}: removed {prefix} from all names")
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if not tensors:
        raise CheckpointError(f"{file} has no tensors; give the file of the model's weights")
    if left_out:
        say(f"{file.name}: left out {', '.join(left_out)}")
    checked = {name: _checked(file, name, tensor) for name, tensor in tensors.items()}
    # Tied weights share a storage, and are written under each of their names: at most twice what the file has.
    most = 2 * file.stat().st_size + SPARE_BYTES
    if sum(tensor.nbytes for tensor in checked.values()) > most:
        raise CheckpointError(f"{file} is refused: its tensors have more than {most / 1e6:,.0f} MB, the file far less")
    return checked


def _collect(
    file: Path, value: Any, path: str, tensors: dict[str, Tensor], left_out: list[str], visited: set[int]
) -> None:
    """Add the tensors in nested dicts to `tensors`, named by their keys; other names go to `left_out`."""
    if isinstance(value, Tensor):
        tensors[path] = value
    elif isinstance(value, Mapping):
        if id(value) in visited:
            raise CheckpointError(f"{file} is refused: it has the dict {path!r} more than once")
        visited.add(id(value))
        for key, entry in value.items():
            name = str(key) if not path else f"{path}.{key}"
            if not path and (TRAINERS.fullmatch(name) or (isinstance(entry, Mapping) and LOSS_SCALER in entry)):
                left_out.append(name)
            elif not path and name in WRAPPERS and isinstance(entry, Mapping):
                _collect(file, entry, "", tensors, left_out, visited)
            elif name in tensors:
                raise CheckpointError(f"{file} is refused: it has the tensor {name} twice; remove one")
            else:
                _collect(file, entry, name, tensors, left_out, visited)
    elif isinstance(value, list | tuple) and any(isinstance(entry, Tensor | Mapping) for entry in value):
        raise CheckpointError(
            f"{file} is refused: {path or 'all of it'} is a list of tensors without names; save model.state_dict()"
        )
    elif CONSTANTS.fullmatch(path) and type(value) in (int, float, list, tuple):
        raise CheckpointError(
            f"{file} is refused: {path} is {str(value)[:80]}, no tensor, and the scores may depend on it; write mean "
            "and std into config.json (reward_standardization), and save model.state_dict() alone"
        )
    else:
        left_out.append(f"{path} ({type(value).__name__})")


def _checked(file: Path, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor that can be written. Raises CheckpointError unless it is dense, complete and without NaN."""
    what = None
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type != "cpu":
        what = "is not a dense tensor with data"
    elif tensor.dtype not in STORED_AS or name == "__metadata__":
        what = f"of type {tensor.dtype} cannot be stored as safetensors"
    elif tensor.nbytes > tensor.untyped_storage().nbytes():
        what = f"claims {tensor.nbytes:,} bytes, and has {tensor.untyped_storage().nbytes():,}"
    elif tensor.is_floating_point() and (tensor.float() if tensor.itemsize == 1 else tensor).isnan().any():
        what = "has values that are not a number: its training had diverged, or the file is damaged"
    if what is not None:
        raise CheckpointError(f"{file} is refused: its tensor {name} {what}")
    return tensor.detach()
