"""Merges the PEFT adapter of a reward model, as TRL's RewardTrainer saves it, into a checkpoint that can be served."""

import json
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from python_backend.checkpoints.heads import Head, find_head
from python_backend.checkpoints.inspection import (
    ADAPTER_FILE,
    TOKENIZERS,
    CheckpointError,
    check_checkpoint,
    head_files,
    inspect_checkpoint,
    tensors_in,
)
from python_backend.checkpoints.safetensors_header import TensorInfo
from python_backend.checkpoints.tokenization import load_tokenizer
from python_backend.models.loading import read_tensor

ADAPTER_WEIGHTS = "adapter_model.safetensors"
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
    base = base or _base_of(adapter)
    check_checkpoint(base)
    whole = _whole_tensors(adapter)
    head = _found_in(adapter, whole)
    left = {name: (adapter, info) for name, info in whole.items()}
    if head is None:
        inspected = inspect_checkpoint(base)
        head = inspected.head
        left |= {name: (base, info) for name, info in inspected.tensors.items() if head and head.owns(name)}
    if head is None:
        raise CheckpointError(
            f"{adapter} has no trained head, and neither has {base}: the rewards would come from random weights. Train "
            'the adapter with LoraConfig(task_type="SEQ_CLS"), or with modules_to_save=["score"]'
        )
    merged = _merged(adapter, base, head)
    has_tokenizer = any((adapter / name).is_file() for name in TOKENIZERS)
    tokenizer = load_tokenizer(adapter if has_tokenizer else base)
    if tokenizer.pad_token_id is not None:
        merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    merged.save_pretrained(out)
    # What transformers' class does not have: a head of another name or of several layers, or its constants.
    own = merged.state_dict()
    apart = {name: read_tensor(*place) for name, place in left.items() if name not in own}
    if apart:
        save_file(apart, out / HEAD_FILE)
    tokenizer.save_pretrained(out)


def _merged(adapter: Path, base: Path, head: Head) -> Any:
    """Return the merged model in float32; as a language model if transformers has no class with the head."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise CheckpointError("--merge needs peft: pip install '.[train]'") from error
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from python_backend.models.modeling import quiet_transformers

    quiet_transformers()

    has_class = head.form.pooled or (head.kind != "value" and len(head.layers.names) == 1)
    kind = AutoModelForSequenceClassification if has_class else AutoModelForCausalLM
    labels = {"num_labels": head.num_labels} if has_class else {}
    try:
        model = kind.from_pretrained(
            str(base), dtype="float32", local_files_only=True, trust_remote_code=False, use_safetensors=True, **labels
        )
        settings = PeftConfig.from_pretrained(str(adapter))
        modules = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        settings.modules_to_save = [name for name in settings.modules_to_save or () if name in modules] or None
        with warnings.catch_warnings():  # of tensors that are missing: see below
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(model, str(adapter), config=settings, local_files_only=True)
        report = adapted.load_adapter(str(adapter), "default")  # once more, since only this says what did not fit
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:  # adapter and model do not fit
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{adapter} cannot be merged into {base}: {reason[:400]}") from error
    unused = sorted(name for name in report.unexpected_keys if not head.owns(name.removeprefix(PREFIX)))
    lacking = sorted(name for name in report.missing_keys if ".lora_" in name)
    if unused or lacking:
        what = f"{type(model).__name__} does not use {', '.join(unused[:4])}" if unused else f"it lacks {lacking[0]}"
        raise CheckpointError(f"{adapter} cannot be merged into {base}: {what}; give the model that it was trained on")
    return adapted.merge_and_unload()


def _base_of(adapter: Path) -> Path:
    try:
        named = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"]
        base = Path(named)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{adapter} is not a PEFT adapter: {ADAPTER_FILE}: {error}") from error
    if not base.is_dir():
        raise CheckpointError(f"{adapter} was trained on {named!r}, which is no folder here: give it with --base PATH")
    return base


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


def _found_in(adapter: Path, tensors: dict[str, TensorInfo]) -> Head | None:
    try:
        return find_head({}, tensors)
    except ValueError as error:
        raise CheckpointError(f"{adapter}: {error}") from error
