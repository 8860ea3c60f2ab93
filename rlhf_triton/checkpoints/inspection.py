"""Inspects a Hugging Face checkpoint folder, reading only its JSON files and safetensors headers.

Imports neither torch nor transformers, and never opens a pickled file.
"""

import contextlib
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.checkpoints.config_keys import read_key
from rlhf_triton.checkpoints.head_tensors import (
    LIKE_A_HEAD,
    PAIRWISE,
    find_head,
    is_harmless,
    may_be_head,
    unwrapped,
    wrapper_of,
)
from rlhf_triton.checkpoints.heads import MODEL_TYPES, NORMALISER, Head
from rlhf_triton.checkpoints.label_polarity import is_good
from rlhf_triton.checkpoints.row_length import max_positions, text_config
from rlhf_triton.checkpoints.safetensors_header import TensorInfo, TensorInfos, read_header, read_numbers
from rlhf_triton.errors import RlhfError, reason_of

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
ADAPTERS_KEY = "critic_adapters"  # in config.json of a weights version that has only adapters
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
ADAPTER_FILE = "adapter_config.json"
ONLY_ADAPTER = (
    "contains only a PEFT adapter; merge it into its model first, with PEFT's merge_and_unload, as docs/your-models.md "
    "shows"
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
OTHER_WEIGHTS = (".pkl", ".npz", ".npy", ".h5", ".msgpack")  # formats that this project does not read
# Files that are not part of a model: the state of a training run, and copies of the weights in other formats.
TRAINER_STATE = re.compile(r"(optimizer|scheduler|scaler|sampler|training_args|rng_state|random_states)[-_\d]*\.\w+")
OTHER_FORMATS = re.compile(
    r"pytorch_model([-_]\d+-of-\d+)?\.bin|(tf_model|flax_model)([-_]\d+-of-\d+)?\.(h5|msgpack)"
    r"|consolidated[-_.\d]*(of-\d+)?\.(safetensors|pth)"
)
FLOATS = ("F64", "F32", "F16", "BF16")
TOKENIZERS = {
    "tokenizer.json": "fast (tokenizer.json)",
    "tokenizer.model": "SentencePiece (tokenizer.model)",
    "spiece.model": "SentencePiece (spiece.model)",
    "spm.model": "SentencePiece (spm.model)",
    "sentencepiece.bpe.model": "SentencePiece (sentencepiece.bpe.model)",
    "vocab.txt": "WordPiece (vocab.txt)",
    "vocab.json": "BPE (vocab.json)",
    "tokenizer_config.json": "without a vocabulary (tokenizer_config.json)",  # such as ByT5's
}
TOKENIZER_FILES = (  # which decide the ids of texts and chats
    *TOKENIZERS,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# pieces of each weights file that `fingerprint_model` hashes
NUM_PIECES = 256
PIECE_BYTES = 4096
# keys of config.json that change no output and that saving a model again may change
RECORDS = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")

LOCAL_FOLDERS = {"checkpoints", "models", "runs", ".."}  # a relative path that starts like this is not a Hub id


class CheckpointError(RlhfError, ValueError):
    """A folder cannot be used as a checkpoint; the message names the folder and the cause."""


@dataclass(frozen=True)
class Constants:
    """Constants of reward standardisation: the model returns `(score - mean) / std`."""

    mean: float = 0.0
    std: float = 1.0


@dataclass(frozen=True)
class StoredAdapters:
    """Description of a weights version that holds LoRA adapters and the value head instead of all weights."""

    base: int  # version with all weights, in the same store
    scale: float  # factor of the adapters' product
    transposed: tuple[str, ...]  # weights that are stored transposed, as in GPT-2
    rounded: tuple[str, ...]  # weights that were rounded to bfloat16 in training


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Result of `inspect_checkpoint`."""

    folder: Path
    model_type: str
    architecture: str | None
    head: Head | None
    is_encoder_decoder: bool
    labels: tuple[str, ...]  # from config.json's id2label; empty if they are only LABEL_0, LABEL_1, ...
    tensors: TensorInfos  # by name, without `wrapper`
    wrapper: str  # prefix of all tensor names in the files, see `wrapper_of`
    vocab_size: int | None
    max_positions: int | None
    tokenizer: str | None  # kind of tokenizer; None: the folder has none
    constants: Constants | None  # reward standardisation in config.json, if any
    adapters: StoredAdapters | None = None

    @property
    def label_names(self) -> list[str]:
        """Names of the head's outputs: `labels`, or LABEL_0, LABEL_1, ... as in transformers."""
        count = 0 if self.head is None else self.head.num_labels
        return list(self.labels) if len(self.labels) == count else [f"LABEL_{i}" for i in range(count)]

    @property
    def good_label(self) -> int | None:
        """Index of the label for a good row or step, if there are two labels and their names tell; otherwise None.

        It is 1 for unnamed labels: TRL's `PRMTrainer` and Qwen2.5-Math-PRM train label 1 as correct, without names.
        """
        if self.head is None or self.head.num_labels != 2 or len(self.labels) not in (0, 2):
            return None
        if not self.labels:
            return 1
        polarities = [is_good(name) for name in self.labels]
        return polarities.index(True) if {*polarities} == {True, False} else None

    @property
    def dtypes(self) -> dict[str, int]:
        """Number of parameters by dtype, most frequent first."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.dtype] += math.prod(tensor.shape)
        return dict(counts.most_common())

    @property
    def num_parameters(self) -> int:
        """Total number of elements of all tensors."""
        return sum(self.dtypes.values())

    @property
    def num_bytes(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def files(self) -> list[Path]:
        """The safetensors files, sorted."""
        return [self.folder / name for name in sorted({tensor.file for tensor in self.tensors.values()})]


def check_checkpoint(folder: Path) -> None:
    """Raise CheckpointError with a remedy unless `folder` is a Hugging Face checkpoint in safetensors format."""
    try:
        _check_contents(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {reason_of(error)}") from error


def _check_contents(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{_as_written(folder)} does not exist or is not a folder; give the folder of a Hugging Face checkpoint"
            f"{_download(folder)}"
        )
    has_weights = (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()
    if (folder / ADAPTER_FILE).is_file() and has_weights:
        raise CheckpointError(
            f"{folder} contains both a model and a PEFT adapter ({ADAPTER_FILE}), so one would be ignored; move the "
            "adapter's files into a separate folder"
        )
    if (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{folder} {ONLY_ADAPTER}")
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} is not a Hugging Face model: it has no {CONFIG_FILE}")
    if not has_weights:
        pickled = next((file.name for file in pickles(folder)), None)
        why = (
            f"it contains only pickled weights ({pickled}), which could run code when loaded; convert them with "
            "`rlhf-triton init models --reward FOLDER --convert NEW_FOLDER` (--critic or --policy for such a model)"
            if pickled
            else "it contains no weights"
        )
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}: {why}")


def _as_written(path: Path) -> str:
    """Return the path's text; that of a URL with both slashes, of which Path removes one."""
    return re.sub(r"^(https?:)/", r"\1//", str(path))


def _download(path: Path) -> str:
    """Return a hint how to download `path` if it looks like a Hugging Face Hub id or URL; otherwise ""."""
    if path.parts and path.parts[0] in ("https:", "http:"):
        path = Path(*path.parts[2:4])
    elif "$" in str(path):
        return "; write it without variables, which only a shell expands"
    elif len(path.parts) != 2 or path.is_absolute() or path.parent.exists() or path.parts[0] in LOCAL_FOLDERS:
        return ""
    return f". If it is a model on the Hub: `hf download {path} --local-dir models/{path.name}`, then give that folder"


def inspect_checkpoint(folder: Path) -> CheckpointInfo:
    """Describe the checkpoint in `folder` from its JSON files and headers. Takes milliseconds for any model size.

    Raises:
        CheckpointError: `folder` is not a checkpoint or has only pickled weights, a file is damaged, or the head is
            incomplete.
    """
    check_checkpoint(folder)
    config = read_config(folder)
    tensors = _read_tensors(folder)
    try:
        return described(folder, config, tensors)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


# Keys of config.json with objects, in addition to those that end in _config.
OBJECTS = (
    "rope_scaling",
    "rope_parameters",
    "id2label",
    "label2id",
)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json. Raises CheckpointError if it is damaged, or a part that must be an object is not one."""
    config = _read_object(folder / CONFIG_FILE)
    try:
        for key in config:
            if key.endswith("_config") or key in OBJECTS:
                read_key(config, key, dict, None)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}; correct or remove it") from error
    return config


def refused_key(config: Mapping[str, Any], build: Callable[[Mapping[str, Any]], object]) -> str | None:
    """Return the key that makes `build(config)` fail, with its value, as text; None if no single key does."""
    for key, value in config.items():
        with contextlib.suppress(Exception):
            build({name: other_value for name, other_value in config.items() if name != key})
            return f"{key} is {str(value)[:80]!r}"
    return None


def described(folder: Path, config: Mapping[str, Any], tensors: TensorInfos) -> CheckpointInfo:
    """Return the result of `inspect_checkpoint` for the given config.json and tensors. Raises ValueError."""
    wrapper = wrapper_of(config, tensors)
    tensors = unwrapped(tensors, wrapper)
    head = find_head(config, tensors)
    vocab_size = read_key(text_config(config), "vocab_size", int, None)
    for name, tensor in tensors.items():
        is_weight = len(tensor.shape) > 1 or name.endswith((".weight", ".bias"))  # not a counter or mask
        if tensor.dtype not in FLOATS and is_weight and not is_harmless(name, tensor, None):
            raise ValueError(f"{tensor.file} is quantised: {name} is of type {tensor.dtype}; use the unquantised model")
    read_key(config, "quantization_config", dict, None)  # transformers reads it
    ids = read_key(config, "label2id", dict, {})
    names = read_key(config, "id2label", dict, {}) or {str(ids[name]): name for name in ids}
    mismatched = sorted(str(name) for key, name in names.items() if str(ids.get(str(name), key)) != str(key))
    if head is not None and head.num_labels > 1 and mismatched:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: id2label {names} and label2id {ids} contradict each other ({mismatched[0]}); "
            "correct the wrong one"
        )
    # transformers sorts the keys in the file as strings, "10" before "2".
    keys = sorted(names, key=lambda key: (len(key), key))
    if wrong := [key for i, key in enumerate(keys) if key != str(i)]:
        raise ValueError(
            f"config.json: id2label has the key {wrong[0]!r}, but its keys must be label numbers, from 0 on"
        )
    labels = tuple(str(names[key]) for key in keys)
    return CheckpointInfo(
        folder=folder,
        model_type=model_type_of(config),
        architecture=next(map(str, read_key(config, "architectures", list, [])), None),
        head=head,
        is_encoder_decoder=read_key(config, "is_encoder_decoder", bool, False),
        labels=() if labels == tuple(f"LABEL_{i}" for i in range(len(labels))) else labels,
        tensors=tensors,
        wrapper=wrapper,
        vocab_size=vocab_size,
        max_positions=max_positions(config),
        tokenizer=tokenizer_kind(folder),
        constants=_constants(folder, config, tensors),
        adapters=stored_adapters(folder),
    )


def tokenizer_kind(folder: Path) -> str | None:
    """Return the kind of the folder's tokenizer; None without one, where transformers may construct one itself."""
    return next((kind for name, kind in TOKENIZERS.items() if (folder / name).is_file()), None)


def stored_adapters(folder: Path) -> StoredAdapters | None:
    """Return the description of the adapters in a weights version, or None if it holds all weights.

    Raises:
        CheckpointError: config.json is damaged.
    """
    stored = read_config(folder).get(ADAPTERS_KEY) if (folder / CONFIG_FILE).is_file() else None
    if stored is None:
        return None
    try:
        names = {key: tuple(map(str, read_key(stored, key, list, None) or ())) for key in ("transposed", "rounded")}
        return StoredAdapters(base=int(stored["base"]), scale=float(stored["scale"]), **names)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {ADAPTERS_KEY} is damaged: {error!r}") from error


def reward_head(info: CheckpointInfo) -> Head:
    """Return the head whose output is the reward. Raises CheckpointError if the checkpoint has none."""
    if info.is_encoder_decoder or any(name.startswith(PAIRWISE) for name in info.tensors):
        how = "is an encoder-decoder" if info.is_encoder_decoder else "compares two candidates in one row (PairRM)"
        raise CheckpointError(f"{info.folder} {how}, so it cannot score one text; use another reward model")
    if info.head is None and (pickled := pickles(info.folder)):
        raise CheckpointError(
            f"{info.folder} has no head in its safetensors files, but {', '.join(file.name for file in pickled)} may "
            "contain one; convert it with `rlhf-triton init models --reward FOLDER --convert NEW_FOLDER`"
        )
    check_pickles(info.folder)
    if info.head is None and (others := may_be_head(info.tensors, info.vocab_size)):
        raise CheckpointError(
            f"{info.folder} has no head with a known name, but unknown layers {', '.join(others[:6])}; if {others[0]} "
            f"is the head, set value_head_prefix: {others[0]} in {CONFIG_FILE}"
        )
    if info.head is None:
        raise CheckpointError(
            f"{info.folder} is not a trained reward model: its weights have no head (such as score.weight); "
            "use a checkpoint with a classification or value head, or score with a language model's logits "
            "(reward.logit); a critic can start from this one"
        )
    if info.labels and info.head.kind != "value" and len(info.labels) != info.head.num_labels > 1:
        raise CheckpointError(
            f"{info.folder}: id2label in {CONFIG_FILE} names {len(info.labels)} labels ({', '.join(info.labels)}), but "
            f"the head {info.head.prefix} has {info.head.num_labels} outputs; correct id2label"
        )
    return info.head


def check_pickles(folder: Path) -> None:
    """Raise CheckpointError if an additional pickled file may contain a part of the model, such as the head."""
    if unread := [file.name for file in pickles_beside(folder)]:
        raise CheckpointError(
            f"{folder}: {', '.join(unread)} is not read, but may contain a part of the model, such as its head; if "
            "torch wrote it, convert it with `rlhf-triton init models --reward FOLDER --convert NEW_FOLDER`, "
            "otherwise remove it"
        )


def pickles(folder: Path, suffixes: Collection[str] = PICKLES) -> list[Path]:
    """Return the pickled files in `folder` that may contain weights, sorted."""
    files = sorted(file for file in folder.iterdir() if file.suffix in suffixes and file.is_file())
    return [file for file in files if not TRAINER_STATE.fullmatch(file.name)]


def pickles_beside(folder: Path) -> list[Path]:
    """Return the pickled files that are not copies of the folder's safetensors weights."""
    return [file for file in pickles(folder, PICKLES + OTHER_WEIGHTS) if not OTHER_FORMATS.fullmatch(file.name)]


def model_type_of(config: Mapping[str, Any]) -> str:
    """Return the model type of a configuration, as transformers calls it."""
    model_type = read_key(config, "model_type", str, "unknown")
    return MODEL_TYPES.get(model_type, model_type)


def stored_dtypes(folder: Path) -> set[str]:
    """Return the dtypes of the tensors of a checkpoint, such as {"BF16"}. Raises CheckpointError if it is damaged."""
    return {tensor.dtype for tensor in _read_tensors(folder).values()}


def fingerprint_model(folder: Path) -> str:
    """Return hashes that tell models apart, `<weights>.<details>.<tokenizer>`. Takes milliseconds for most sizes.

    The first is of the weights files' sizes and of evenly spaced pieces of them: training changes every piece, and two
    dtypes of one model differ. The second is of config.json without `RECORDS` and of the start of each tensor: no piece
    may contain a small tensor, such as a head that was trained alone. The third is of `TOKENIZER_FILES`; a
    folder without any, such as a version in a store, has two hashes. A damaged copy can have the same fingerprint.

    Raises:
        CheckpointError: `folder` is not a checkpoint or has only pickled weights, or a file is damaged.
    """
    check_checkpoint(folder)
    weights = hashlib.sha256()
    details = hashlib.sha256(json.dumps(_without_records(read_config(folder)), sort_keys=True).encode())
    tensors = sorted(_read_tensors(folder).values(), key=lambda tensor: (tensor.file, tensor.start))
    for name, stored in itertools.groupby(tensors, lambda tensor: tensor.file):
        size = (folder / name).stat().st_size
        weights.update(f"{name} {size} ".encode())
        with (folder / name).open("rb") as stream:
            for i in range(NUM_PIECES):
                stream.seek(max(0, size - PIECE_BYTES) * i // (NUM_PIECES - 1))
                weights.update(stream.read(PIECE_BYTES))
            for tensor in stored:
                stream.seek(tensor.start)
                details.update(stream.read(min(PIECE_BYTES, tensor.num_bytes)))
    hashes = [weights, details]
    files = [*(folder / name for name in TOKENIZER_FILES), *sorted(folder.glob("additional_chat_templates/*"))]
    if files := [file for file in files if file.is_file()]:
        hashes.append(hashlib.sha256())
        for file in files:
            content = file.read_bytes()
            hashes[-1].update(f"{file.name} {len(content)} ".encode() + content)
    return ".".join(each.hexdigest() for each in hashes)


def is_same_model(stored: str, now: str) -> bool:
    """Return whether a stored fingerprint is that of a model; hashes that it lacks are not compared.

    Releases up to 0.1.0 stored only the first hash.
    """
    return now.startswith(stored)


def _without_records(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_records(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in RECORDS
    }


def _constants(folder: Path, config: Mapping[str, Any], tensors: TensorInfos) -> Constants | None:
    constants = config.get("reward_standardization")
    if constants is None and read_key(config, "do_normalize", bool, False):
        return _moments(folder, config, tensors)
    if constants is None and read_key(config, "normalize_reward", bool, False) and config.get("mean") is not None:
        constants = {"mean": config["mean"], "std": config.get("std")}  # written by OpenRLHF
    if constants is None or constants == {}:
        return None
    try:
        mean, std = (read_key(constants, key, float, default) for key, default in (("mean", 0.0), ("std", 1.0)))
    except (AttributeError, ValueError):
        mean = 0.0
        std = 0.0
    if std <= 0:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: reward_standardization is {constants!r}, but must be {{mean, std}} with std "
            "above 0"
        )
    return Constants(mean, std)


def _moments(folder: Path, config: Mapping[str, Any], tensors: TensorInfos) -> Constants | None:
    """Return the constants that Safe RLHF's classes (beaver) store in buffers or in config.json.

    Depending on `score_type`, rewards are shifted and scaled, costs are only scaled, and values are unchanged.
    """
    kind = read_key(config, "score_type", str, "reward")
    if kind == "critic":
        return None
    moments = []
    for name in NORMALISER[:2]:
        key = name.partition(".")[2]
        value = config.get(key)
        listed = value if isinstance(value, list) else [value]
        stored = read_numbers(folder, tensors[name]) if name in tensors else listed
        moments.append(read_key({key: stored[0] if len(stored) == 1 else stored}, key, float, math.nan))
    mean, var = moments
    if kind not in ("reward", "cost") or not math.isfinite(mean) or not var >= 0:
        raise CheckpointError(
            f"{folder}: do_normalize in {CONFIG_FILE} needs score_type reward, cost or critic, and one finite number "
            f"each for mean and var; got {kind!r}, {mean:g} and {var:g}; correct them, or remove do_normalize"
        )
    return Constants(mean if kind == "reward" else 0.0, math.sqrt(var) + 1e-8)


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in head_files(folder):
        infos = tensors_in(file)
        # LDL's files contain one module each, without its name in the tensor names.
        alone = not any(LIKE_A_HEAD.search(name.partition(".")[0]) for name in infos)
        named = {f"{file.stem}.{name}" if alone else name: info for name, info in infos.items()}
        tensors = _joined(folder, tensors, named)
    return _joined(folder, _read_body(folder), tensors)


def _joined(folder: Path, tensors: dict[str, TensorInfo], more: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of several files. Raises CheckpointError if one is in two of them."""
    if twice := sorted(tensors.keys() & more):
        name = twice[0]
        raise CheckpointError(
            f"{folder}: {name} is in {tensors[name].file} and in {more[name].file}; remove one of the files"
        )
    return tensors | more


def head_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a separate head, such as LLaMA-Factory's value_head.safetensors."""
    own = {WEIGHTS_FILE}
    if not (folder / WEIGHTS_FILE).is_file() and (folder / INDEX_FILE).is_file():
        own |= set(weight_map_of(folder / INDEX_FILE).values())
    others = (file for file in sorted(folder.glob("*.safetensors")) if file.name not in own)
    ignored = (TRAINER_STATE, OTHER_FORMATS)
    return [file for file in others if not any(pattern.fullmatch(file.name) for pattern in ignored)]


def _read_body(folder: Path) -> dict[str, TensorInfo]:
    if (folder / WEIGHTS_FILE).is_file():
        return tensors_in(folder / WEIGHTS_FILE)
    weight_map = weight_map_of(folder / INDEX_FILE)
    tensors: dict[str, TensorInfo] = {}
    for name in sorted(set(weight_map.values())):
        tensors = _joined(folder, tensors, tensors_in(folder / name))
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{folder} cannot be loaded: {INDEX_FILE} lists {missing[0]}, which no file contains; copy the folder again"
        )
    return tensors


def weight_map_of(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by an index of the shards beside it. Raises CheckpointError if one is missing."""
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index.parent} cannot be loaded: {index.name} has no weight_map; copy the file again")
    for name in set(weight_map.values()):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(
                f"{index.parent} cannot be loaded: {index.name} names {name}, which is no file in this folder; copy it"
            )
    return weight_map


def tensors_in(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file by name. Raises CheckpointError if it is damaged."""
    try:
        return read_header(file)
    except OSError as error:
        raise CheckpointError(f"{file.parent} cannot be loaded: {reason_of(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{file.parent} cannot be loaded: {error}; copy it again") from error


def _decoded_float(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}; any other object unchanged."""
    return float(value["__float__"]) if [*value] == ["__float__"] else value


def _read_object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"), object_hook=_decoded_float)
    except OSError as error:
        raise CheckpointError(f"{file.parent} cannot be loaded: {reason_of(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {reason_of(error)}; copy it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not a JSON object; copy it again")
    return data
