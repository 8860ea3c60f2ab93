"""Merges the PEFT adapter of a reward model, as TRL's RewardTrainer saves it, into a checkpoint that can be served."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from python_backend.checkpoints.head_tensors import find_head, is_harmless
from python_backend.checkpoints.heads import NORMALISER, Head
from python_backend.checkpoints.inspection import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS,
    TOKENIZERS,
    CheckpointError,
    CheckpointInfo,
    check_pickles,
    head_files,
    inspect_checkpoint,
    read_config,
    tensors_in,
)
from python_backend.checkpoints.safetensors_header import TensorInfo
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.models.loading import placed_head, read_tensor, unused_tensors
from python_backend.store.durable import make_folder, write_folder

HEAD_FILE = "value_head.safetensors"  # as LLaMA-Factory calls it
PREFIX = "base_model.model."  # of the names of an adapter's tensors


def merge_reward_adapter(adapter: Path, base: Path | None, out: Path) -> None:
    """Write the reward model of `adapter` to the new folder `out`, in float32, with its tokenizer.

    The padding token is the tokenizer's, as in TRL: the model pools the last token before the padding.

    Args:
        base: folder of the model that the adapter was trained on; None: as adapter_config.json says.

    Raises:
        CheckpointError: a folder cannot be used, or neither the adapter nor the base model has a trained head.
    """
    if out.exists():
        raise CheckpointError(f"--merge: {out} already exists; choose another folder")
    settings = _adapter_config(adapter)
    base = base or _base_of(adapter, settings)
    inspected = inspect_checkpoint(base)
    whole = _whole_tensors(adapter)
    for folder in (adapter, base):
        check_pickles(folder)
    config = read_config(base)
    if settings.get("task_type") == "TOKEN_CLS":
        config["architectures"] = ["TokenClassification"]
    info = _with_trained_head(adapter, inspected, config, whole)
    if settings.get("task_type") == "SEQ_CLS":  # trained in transformers' own class, whatever that of the base model is
        info = replace(info, architecture=MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(info.model_type))
    assert info.head is not None
    head = placed_head(info, info.head, "auto")
    model, missing = _merged(adapter, info, head, {name for name in whole if not head.owns(name)})
    has_tokenizer = any((adapter / name).is_file() for name in TOKENIZERS)
    tokenizer = load_tokenizer(adapter if has_tokenizer else base)
    if tokenizer.pad_token_id is not None:
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    weights = {name: tensor for name, tensor in model.state_dict().items() if name not in missing}
    trained = {
        name: read_tensor(adapter if name in whole else base, tensor)
        for name, tensor in info.tensors.items()
        if head.owns(name) and (name in whole or name not in weights)  # what peft has merged stays
    }
    # What transformers' class does not have: a head of another name or of several layers, or its constants.
    apart = {name: tensor for name, tensor in trained.items() if name not in weights and name not in missing}
    weights |= {name: tensor.float() for name, tensor in trained.items() if name not in apart}

    def fill(staging: Path) -> None:
        model.save_pretrained(staging, state_dict=weights)
        if apart:
            save_file(apart, staging / HEAD_FILE)
        tokenizer.save_pretrained(staging)
        found = inspect_checkpoint(staging).head
        if found is None or (found.layers, found.gate) != (head.layers, head.gate):
            raise CheckpointError(
                f"{adapter} cannot be merged into {base}: transformers saves a {type(model).__name__} without the head "
                f"{head.prefix}; remove the settings of another head from the config.json of {base}"
            )

    make_folder(out.parent)
    write_folder(out, fill)


def _with_trained_head(
    adapter: Path, base: CheckpointInfo, config: dict[str, Any], whole: dict[str, TensorInfo]
) -> CheckpointInfo:
    """Return the base model with the tensors that the adapter replaces, and the head that both form.

    A head that the adapter has alone replaces the base model's, whatever the two are called.
    """
    try:
        own = find_head(config, whole)
    except ValueError:  # a part of a head, which the base model may complete, or a mistake, which is found again
        own = None
    old, kept = base.head, dict(base.tensors)
    if own is not None and old is not None and not {*own.layers.names} & {*old.layers.names}:
        kept = {name: info for name, info in kept.items() if name in NORMALISER or not old.owns(name)}
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
    return replace(base, head=head, tensors=tensors)


def _merged(adapter: Path, info: CheckpointInfo, head: Head, replaced: set[str]) -> tuple[Any, set[str]]:
    """Return the merged model in float32, as a language model if transformers has no class with the head, and the names
    of its tensors that neither folder has, because no score depends on them.

    Args:
        replaced: tensors outside the head that the adapter has, and the base model may lack.
    """
    try:
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    except ImportError as error:
        raise CheckpointError("--merge needs peft: pip install '.[train]'") from error
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    from python_backend.models.modeling import quiet_transformers

    quiet_transformers()
    base = info.folder
    has_class = head.form.pooled or (head.kind != "value" and len(head.layers.names) == 1)
    kind = AutoModelForTokenClassification if head.kind == "token" else AutoModelForSequenceClassification
    labels = {"num_labels": head.num_labels} if has_class else {}
    try:
        model, found = (kind if has_class else AutoModelForCausalLM).from_pretrained(
            str(base),
            dtype="float32",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **labels,
        )
        settings = PeftConfig.from_pretrained(str(adapter))
        if not (has_class and settings.task_type in ("SEQ_CLS", "TOKEN_CLS")):
            settings.task_type = None  # peft's wrapper of a language model generates, which no model with a head does
        modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        settings.modules_to_save = [name for name in settings.modules_to_save or () if name in modules] or None
        with warnings.catch_warnings():  # of tensors that are missing: see below
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(model, str(adapter), config=settings, local_files_only=True)
        report = adapted.load_adapter(str(adapter), "default")  # once more, since only this says what did not fit
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # adapter and model do not fit
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{adapter} cannot be merged into {base}: {reason[:400]}") from error
    missing = {name for name in found["missing_keys"] if is_harmless(name, None, None)}
    lost = sorted({*found["missing_keys"]} - missing - replaced - {name for name in info.tensors if head.owns(name)})
    of_base = [name for name in found["unexpected_keys"] if name in info.tensors and not head.owns(name)]
    if others := unused_tensors(info, model.config, type(model), of_base):
        raise CheckpointError(f"{base} cannot be merged: {type(model).__name__} does not use {', '.join(others[:4])}")
    if lost:
        raise CheckpointError(
            f"{base} cannot be merged: it lacks {', '.join(lost[:4])} of {type(model).__name__}, which would be "
            "random; give the model that the adapter was trained on"
        )
    unused = sorted(name for name in report.unexpected_keys if not head.owns(name.removeprefix(PREFIX)))
    expected = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    stored = tensors_in(adapter / ADAPTER_WEIGHTS).keys()
    lacking = sorted(name for name in expected - stored if not head.owns(name.removeprefix(PREFIX)))
    if unused or lacking:
        what = f"{type(model).__name__} does not use {', '.join(unused[:4])}" if unused else f"it lacks {lacking[0]}"
        raise CheckpointError(f"{adapter} cannot be merged into {base}: {what}; give the model that it was trained on")
    try:
        return adapted.merge_and_unload(), missing
    except (RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{adapter}: peft cannot merge it: {' '.join(str(error).split())[:400]}") from error


def _adapter_config(adapter: Path) -> dict[str, Any]:
    try:
        settings = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is no JSON object")
        return settings
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{adapter} is not a PEFT adapter: {ADAPTER_FILE}: {error}") from error


def _base_of(adapter: Path, settings: dict[str, Any]) -> Path:
    named = settings.get("base_model_name_or_path")
    if not isinstance(named, str) or not Path(named).is_dir():
        raise CheckpointError(f"{adapter} was trained on {named!r}, which is no folder here: give it with --base PATH")
    return Path(named)


def _whole_tensors(adapter: Path) -> dict[str, TensorInfo]:
    """Return the tensors that the adapter replaces, under the names of the model, and those of a head beside it."""
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{adapter} has no {ADAPTER_WEIGHTS}; if its weights are pickled, add `--convert NEW_FOLDER`, which writes "
            "the adapter there as safetensors first"
        )
    tensors = tensors_in(adapter / ADAPTER_WEIGHTS)
    whole = {
        name.removeprefix(PREFIX).replace(".base_layer.", "."): info
        for name, info in tensors.items()
        if ".lora_" not in name
    }
    for file in head_files(adapter):
        whole |= tensors_in(file)
    return whole
