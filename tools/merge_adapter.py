"""Merges the PEFT adapter of a reward model, as TRL's RewardTrainer saves it, into a checkpoint that can be served.

The base model, with the tensors that the adapter has whole, is loaded as every reward model is; peft merges the rest.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from python_backend.checkpoints.head_tensors import find_head, is_harmless, layers_path
from python_backend.checkpoints.heads import NORMALISER, Head
from python_backend.checkpoints.inspection import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    CONFIG_FILE,
    TOKENIZERS,
    CheckpointError,
    CheckpointInfo,
    check_pickles,
    described,
    head_files,
    inspect_checkpoint,
    model_type_of,
    read_config,
    reward_head,
    tensors_in,
)
from python_backend.checkpoints.language_models import as_checkpoint_error
from python_backend.checkpoints.safetensors_header import TensorInfo
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.models.heads import head_path
from python_backend.models.loading import (
    load_classifier,
    load_token_model,
    placed_head,
    read_head,
    read_tensor,
)
from python_backend.store.durable import make_folder, write_folder

PREFIX = "base_model.model."  # of the names of an adapter's tensors
NAMING = ("target_modules", "exclude_modules", "feedforward_modules", "rank_pattern", "alpha_pattern")
CLASSES = {
    "SEQ_CLS": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


def merge_reward_adapter(adapter: Path, base: Path | None, out: Path) -> None:
    """Write the reward model of `adapter` to the new folder `out`, in float32, with its tokenizer.

    A config.json beside the adapter is that of the trained model: its keys replace the base model's. The padding token
    of a decoder is the tokenizer's, as in TRL: the model pools the last token before the padding.

    Args:
        base: folder of the model that the adapter was trained on; None: as adapter_config.json says.

    Raises:
        CheckpointError: a folder cannot be used, or neither the adapter nor the base model has a trained head.
    """
    if out.exists():
        raise CheckpointError(f"--merge: {out} already exists; choose another folder")
    settings = _settings(adapter)
    base = base or _base_of(adapter, settings)
    inspected = inspect_checkpoint(base)
    for folder in (adapter, base):
        check_pickles(folder)
    config = _config_of(adapter, base, settings)
    whole, added = _tensors_of(adapter, settings)
    tensors = _with_whole(adapter, inspected, config, whole)
    tokenizer = load_tokenizer(adapter if any((adapter / name).is_file() for name in TOKENIZERS) else base)

    def fill(staging: Path) -> None:
        tokenizer.save_pretrained(staging)
        try:
            _write(staging, config, tensors, settings, added, tokenizer.pad_token_id)
        except ValueError as error:
            told = str(error).replace(str(staging), f"{adapter}, merged into {base}")
            raise CheckpointError(told) from error

    make_folder(out.parent)
    write_folder(out, fill)


def _write(
    folder: Path,
    config: dict[str, Any],
    tensors: Mapping[str, TensorInfo],
    settings: Any,
    added: dict[str, Tensor],
    pad_token_id: int | None,
) -> None:
    """Write the checkpoint of these tensors, with the adapter's `added` ones merged in, to a folder."""
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    info = described(folder, config, tensors)
    model, head = _load(info)
    path = head_path(model)
    merged = _merged(folder, model, path, head, settings, added)
    state = merged.state_dict()
    weights = {name: tensor for name, tensor in state.items() if not name.startswith(f"{path}.")}
    for name, tensor in info.tensors.items():
        if head.owns(name):  # as the adapter left it in the model, if that has it as a tensor
            own = state.get(f"{path}{name.removeprefix(head.prefix)}")
            weights[name] = read_tensor(folder, tensor).float() if own is None else own
    merged.save_pretrained(folder, state_dict=weights)
    config = {**config, "num_labels": head.num_labels}  # not the one of the class that was loaded
    if pad_token_id is not None and not head.form.pooled:  # from which RoBERTa, for one, counts the positions
        (config.get("text_config") or config)["pad_token_id"] = pad_token_id
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
    again, found = _load(inspect_checkpoint(folder))
    differing = [name for name, tensor in again.state_dict().items() if not torch.equal(tensor, state[name])]
    if found != head or differing:
        raise CheckpointError(f"{folder} would be another model when loaded: {', '.join(differing[:4]) or head.prefix}")


def _load(info: CheckpointInfo) -> tuple[Any, Head]:
    """Return the reward model in float32, and its head."""
    head = placed_head(info, reward_head(info), "auto")
    if head.form.pooled:
        return load_classifier(info, head, "float32", "auto"), head
    return load_token_model(info, read_head(info, head), "float32"), head


def _merged(folder: Path, model: Any, path: str, head: Head, settings: Any, added: Mapping[str, Tensor]) -> Any:
    """Return the model with the adapter merged in by peft. Raises CheckpointError unless each tensor is used.

    Args:
        folder: for errors.
        path: of the head in the model.
    """
    from peft import PeftModel
    from peft.utils import set_peft_model_state_dict

    modules = {name for name, _ in model.named_modules()}

    def placed(name: str) -> str:
        """Return the model's name of a module: it may differ in what the class of the training put before it."""
        if f"{name}.".startswith(f"{head.prefix}."):
            return path + name.removeprefix(head.prefix)
        return _place(name, modules, model.base_model_prefix)

    _rename(settings, lambda name: placed(name) if "." in name or name == head.prefix else name, modules)
    part = _part_of(settings)
    named = {name: part.split(name.removeprefix(PREFIX))[0] for name in added}
    tensors = {name.replace(module, placed(module), 1): added[name] for name, module in named.items()}
    if len(tensors) < len(added):
        raise CheckpointError(f"{folder}: two tensors of the adapter have the name of one layer")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = PeftModel(model, settings)
            report: Any = set_peft_model_state_dict(adapted, tensors)
            state = adapted.state_dict()
            merged = adapted.merge_and_unload()
    except Exception as error:  # process edge: what does not fit, or cannot be merged, may raise anything in peft
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: peft cannot merge the adapter: {reason[:400]}") from error
    read = {tensor.data_ptr() for name, tensor in state.items() if name not in report.missing_keys}
    # Some types share a tensor among all layers.
    lacking = [name for name in report.missing_keys if part.search(name) and state[name].data_ptr() not in read]
    if report.unexpected_keys or lacking:
        unused = ", ".join(sorted(report.unexpected_keys)[:4])
        what = f"{type(model).__name__} does not use {unused}" if unused else f"it lacks {lacking[0]}"
        raise CheckpointError(f"{folder}: {what}; give the model that it was trained on")
    return merged


def _rename(settings: Any, renamed: Callable[[str], str], modules: Iterable[str]) -> None:
    """Change the names of layers in peft's configuration to those of a model that has its whole modules already."""
    for key in NAMING:
        names = getattr(settings, key, None)
        if isinstance(names, dict):
            setattr(settings, key, {renamed(name): value for name, value in names.items()})
        elif isinstance(names, set | list):
            setattr(settings, key, sorted({renamed(name) for name in names}))
    whole = {name for name in modules if {*name.split(".")} & {*(getattr(settings, "modules_to_save", None) or ())}}
    if not isinstance(excluded := getattr(settings, "exclude_modules", None), str):
        settings.exclude_modules = sorted(whole.union(excluded or ()))
    settings.modules_to_save = settings.task_type = None  # nor a class of peft's around the model
    settings.inference_mode = True


def _place(name: str, known: Collection[str], root: str) -> str:
    """Return the one of the known names that ends as `name` does, perhaps below `root`; `name` if there is none."""
    parts = name.split(".")
    rests = [".".join(parts[i:]) for i in range(len(parts))]
    return next((each for rest in rests for each in (rest, f"{root}.{rest}") if each in known), name)


def _settings(adapter: Path) -> Any:
    """Return peft's configuration of the adapter. Raises CheckpointError."""
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise CheckpointError("--merge needs peft: pip install '.[train]'") from error
    if not (adapter / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{adapter} is not a PEFT adapter: it has no {ADAPTER_FILE}")
    with as_checkpoint_error(adapter / ADAPTER_FILE):
        settings = PeftConfig.from_pretrained(str(adapter))
    layers = getattr(settings, "layer_replication", None)
    if settings.is_prompt_learning or settings.is_adaption_prompt or layers:
        what = f"layer_replication {layers}" if layers else f"peft_type {settings.peft_type.value}"
        raise CheckpointError(f"{adapter} adds inputs or layers ({what}), which cannot be merged into weights")
    return settings


def _base_of(adapter: Path, settings: Any) -> Path:
    named = settings.base_model_name_or_path
    if not isinstance(named, str) or not Path(named).is_dir():
        raise CheckpointError(f"{adapter} was trained on {named!r}, which is no folder here: give it with --base PATH")
    return Path(named)


def _config_of(adapter: Path, base: Path, settings: Any) -> dict[str, Any]:
    """Return config.json of the merged model: the base model's, with the keys of one beside the adapter."""
    config = read_config(base)
    if (adapter / CONFIG_FILE).is_file():
        config |= {**read_config(adapter), "quantization_config": None}  # how the base model was held in training
    kind = CLASSES.get(settings.task_type or "", {}).get(model_type_of(config))
    if kind is not None:  # trained in transformers' own class, whatever that of the base model is
        config["architectures"] = [kind]
    return {**config, "dtype": "float32"}


def _part_of(settings: Any) -> re.Pattern[str]:
    """Return where the name of an adapter's tensor goes on behind that of its module."""
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(settings.peft_type, "lora_").removesuffix("lambda_")  # VeRA shares some
    return re.compile(rf"(\.base_layer|\.token_adapter)*\.({prefix}|trainable_tokens_)")


def _tensors_of(adapter: Path, settings: Any) -> tuple[dict[str, TensorInfo], dict[str, Tensor]]:
    """Return the tensors that the adapter has whole, under the names of the trained model, and those to merge.

    The former are of `modules_to_save`, biases, embeddings, and of a head beside the adapter.
    """
    file = adapter / ADAPTER_WEIGHTS
    if not file.is_file():
        raise CheckpointError(
            f"{adapter} has no {ADAPTER_WEIGHTS}; if its weights are pickled, add `--convert NEW_FOLDER`, which writes "
            "the adapter there as safetensors first"
        )
    part = _part_of(settings)
    stored = {name: _in(adapter, tensor) for name, tensor in tensors_in(file).items()}
    added = {name: read_tensor(adapter, stored.pop(name)) for name in [*stored] if part.search(name)}
    around = re.compile(r"(\.token_adapter)?\.base_layer\b|\.modules_to_save(\.default)?\b")
    named = {name: around.sub("", name.removeprefix(PREFIX)) for name in stored if ".original_module." not in name}
    whole = {named[name]: stored[name] for name in named}
    for beside in head_files(adapter):
        found = {name: _in(adapter, tensor) for name, tensor in tensors_in(beside).items()}
        if twice := sorted(found.keys() & whole.keys()):
            raise CheckpointError(
                f"{adapter}: {twice[0]} is in {Path(whole[twice[0]].file).name} and in {beside.name}; remove one"
            )
        whole |= found
    return whole, added


def _with_whole(
    adapter: Path, base: CheckpointInfo, config: dict[str, Any], whole: dict[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Return the base model's tensors with those that the adapter has whole; resize the vocabulary in `config` to them.

    A head that the adapter has alone replaces the base model's, whatever the two are called.
    """
    root = layers_path(base.tensors).partition(".")[0]
    whole = {_place(name.removeprefix(base.wrapper), base.tensors, root): tensor for name, tensor in whole.items()}
    try:
        own = find_head(config, whole)
    except ValueError:  # a part of a head, which the base model may complete, or a mistake, which is found again
        own = None
    old, size = base.head, base.vocab_size
    kept = {name: _in(base.folder, each) for name, each in base.tensors.items() if not is_harmless(name, each, size)}
    if own is not None and old is not None and not {*own.layers.names} & {*old.layers.names}:
        kept = {name: tensor for name, tensor in kept.items() if name in NORMALISER or not old.owns(name)}
    tensors = {**kept, **whole}
    try:
        head = find_head(config, tensors)
    except ValueError as error:
        raise CheckpointError(f"{adapter}, merged into {base.folder}: {error}") from error
    if head is None:
        raise CheckpointError(
            f"{adapter} has no trained head, and neither has {base.folder}: the rewards would come from random "
            'weights. Train the adapter with LoraConfig(task_type="SEQ_CLS"), or with modules_to_save=["score"]'
        )
    for name in sorted(kept.keys() & whole.keys()):
        old_shape, shape = kept[name].shape, whole[name].shape
        if head.owns(name):
            continue
        if (file := Path(whole[name].file)).name != ADAPTER_WEIGHTS:
            raise CheckpointError(
                f"{file} has {name}, and so has {base.folder}; remove the one that is not to be merged"
            )
        if shape == old_shape:
            continue
        if len(shape) != 2 or shape[1:] != old_shape[1:] or old_shape[0] < (size or math.inf):
            raise CheckpointError(
                f"{adapter}: {name} has shape {list(shape)}, but {list(old_shape)} in {base.folder}; give the model "
                "that it was trained on with --base PATH"
            )
        (config.get("text_config") or config)["vocab_size"] = shape[0]  # as `resize_token_embeddings` did
    return tensors


def _in(folder: Path, tensor: TensorInfo) -> TensorInfo:
    """Return a tensor's description with the whole path of its file, for a checkpoint of several folders."""
    return replace(tensor, file=str(folder.absolute() / tensor.file))
