"""Merges the PEFT adapter of a reward model, as TRL's RewardTrainer saves it, into a checkpoint that can be served."""

import json
import warnings
from pathlib import Path
from typing import Any

from python_backend.checkpoints.inspection import (
    ADAPTER_FILE,
    TOKENIZERS,
    CheckpointError,
    check_checkpoint,
    inspect_checkpoint,
    tensors_in,
)
from python_backend.checkpoints.safetensors_header import TensorInfo
from python_backend.checkpoints.tokenization import load_tokenizer

ADAPTER_WEIGHTS = "adapter_model.safetensors"
VALUE_HEAD_FILE = "value_head.safetensors"  # of LLaMA-Factory, beside adapters as well: on a language model
HEADS = ("score.weight", "classifier.weight")


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
    tensors = _adapter_tensors(adapter)
    head = next((info for name, info in tensors.items() if name.endswith(HEADS)), None)
    value_head = adapter / VALUE_HEAD_FILE if (adapter / VALUE_HEAD_FILE).is_file() else None
    if head is None and value_head is None and inspect_checkpoint(base).head is None:
        others = ", ".join(name for name in tensors if ".lora_" not in name)
        found = f" that can be merged, only {others}," if others else ""
        raise CheckpointError(
            f"{adapter} has no trained head{found} and neither has {base}: the rewards would come from random weights. "
            'Train the adapter with LoraConfig(task_type="SEQ_CLS"), or with modules_to_save=["score"]'
        )
    merged = _merged(adapter, base, value_head, {} if head is None else {"num_labels": head.shape[0]})
    has_tokenizer = any((adapter / name).is_file() for name in TOKENIZERS)
    tokenizer = load_tokenizer(adapter if has_tokenizer else base)
    if tokenizer.pad_token_id is not None:
        merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    merged.save_pretrained(out, state_dict=_with_head(merged, value_head))
    tokenizer.save_pretrained(out)


def _with_head(model: Any, value_head: Path | None) -> dict[str, Any]:
    """Return the tensors of a model with those of its value head."""
    from safetensors.torch import load_file

    heads = {} if value_head is None else load_file(value_head)
    return {**model.state_dict(), **{name: tensor.float() for name, tensor in heads.items()}}


def _merged(adapter: Path, base: Path, value_head: Path | None, labels: dict[str, int]) -> Any:
    """Return the merged model in float32, a language model below a value head; `labels`: settings of another head."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise CheckpointError("--merge needs peft: pip install '.[train]'") from error
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from python_backend.models.modeling import quiet_transformers

    quiet_transformers()

    kind = AutoModelForSequenceClassification if value_head is None else AutoModelForCausalLM
    try:
        model = kind.from_pretrained(
            str(base), dtype="float32", local_files_only=True, trust_remote_code=False, use_safetensors=True, **labels
        )
        with warnings.catch_warnings():  # of tensors that are missing: see below
            warnings.simplefilter("ignore")
            adapted = PeftModel.from_pretrained(model, str(adapter), local_files_only=True)
        report = adapted.load_adapter(str(adapter), "default")  # once more, since only this says what did not fit
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:  # adapter and model do not fit
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{adapter} cannot be merged into {base}: {reason[:400]}") from error
    unused = sorted(report.unexpected_keys)
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


def _adapter_tensors(adapter: Path) -> dict[str, TensorInfo]:
    if not (adapter / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{adapter} has no {ADAPTER_WEIGHTS}; if its weights are pickled, add `--convert NEW_FOLDER`, which writes "
            "the adapter there as safetensors first"
        )
    return tensors_in(adapter / ADAPTER_WEIGHTS)
