"""Reward and critic as torch modules: Hugging Face checkpoints in, scores and values of ragged rows out.
Given: a checkpoint folder, or a version of the weights store. Returns: `RewardModel`, `CriticModel`.
The server, the sidecar's verification and the tests all run this code.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.utils import logging as transformers_logging

from python_backend.contract import Limits
from python_backend.weights import CONFIG_FILE, WEIGHTS_FILE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class CheckpointError(ValueError):
    """A folder cannot be used as a checkpoint; the message names it and says why."""


class RewardModel:
    """One score per row: the logit at the last token (index length-1), standardised, in fp32."""

    def __init__(self, model: Any, *, mean: float = 0.0, std: float = 1.0) -> None:
        self.model = model.eval()
        self.mean = mean
        self.std = std
        self.limits = limits_of(model)
        self._causal_head = getattr(model, "score", None)

    @torch.no_grad()
    def score(self, rows: Sequence[np.ndarray], width: int | None = None) -> np.ndarray:
        """Rewards float32 `[n, 1]` of n token rows (int64 `[length_i]`), one padded forward."""
        ids, attention, lengths = collate(rows, self.model.device)
        if self._causal_head is None:  # encoders pool in their own way, which padding on the right does not disturb
            logits = self.model(input_ids=ids, attention_mask=attention).logits.float()
        else:
            hidden = self.model.base_model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
            last = hidden[torch.arange(len(rows), device=hidden.device), lengths - 1]
            logits = self._causal_head(last).float()
        return ((logits - self.mean) / self.std).cpu().numpy()


class CriticModel:
    """One value per token, in fp32: the value at index t is of the state after token t."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.limits = limits_of(model)

    @torch.no_grad()
    def values(self, rows: Sequence[np.ndarray], width: int | None = None) -> list[np.ndarray]:
        """Values float32 `[length_i]` of each token row (int64 `[length_i]`), one padded forward."""
        ids, attention, _ = collate(rows, self.model.device)
        values = self.forward(ids, attention).cpu().numpy()
        return [values[i, : row.size] for i, row in enumerate(rows)]

    def forward(self, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Values `[B, S]` of `ids` `[B, S]` under the mask `attention` `[B, S]`; differentiable."""
        return self.model(input_ids=ids, attention_mask=attention).logits.squeeze(-1).float()

    def with_weights(self, folder: Path) -> CriticModel:
        """A second critic of the same architecture with the weights in `folder`: of the same dtypes as this one, and
        memory-mapped on a CPU where the file's dtypes are those.

        Raises:
            CheckpointError: names or shapes differ from this critic's, or the file is damaged.
        """
        with torch.device("meta"):
            module = type(self.model)(copy.deepcopy(self.model.config))
        _check_same_architecture(self.model.config, folder)
        dtypes = {name: tensor.dtype for name, tensor in self.model.state_dict().items()}
        tensors = _read_tensors(folder)
        _assign(module, {name: tensor.to(dtypes.get(name)) for name, tensor in tensors.items()}, folder)
        # Buffers outside the state dict (rotary frequencies) are computed from the configuration: same ones.
        for (owner, name), buffer in _unsaved_buffers(self.model).items():
            module.get_submodule(owner)._buffers[name] = buffer
        return CriticModel(module.to(self.model.device))


def load_reward(folder: Path, *, device: str = "cpu", dtype: str = "float32") -> RewardModel:
    """The reward model in a sequence classification checkpoint with one label. Raises CheckpointError."""
    check_checkpoint(folder)
    with _as_checkpoint_error(folder):
        model, info = AutoModelForSequenceClassification.from_pretrained(
            str(folder), dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    if info["missing_keys"]:
        raise CheckpointError(
            f"{folder} is no trained reward model: its weights lack {', '.join(sorted(info['missing_keys'])[:4])}; "
            "use a sequence classification checkpoint"
        )
    if model.config.num_labels != 1:
        raise CheckpointError(f"{folder} has {model.config.num_labels} labels, a reward model has 1")
    constants = getattr(model.config, "reward_standardization", None) or {}
    return RewardModel(model.to(device), mean=constants.get("mean", 0.0), std=constants.get("std", 1.0))


def load_critic(folder: Path, *, device: str = "cpu", dtype: str = "float32") -> CriticModel:
    """The critic in a token classification checkpoint; a body without such a head gets one that answers 0.

    A reward model's folder works too: its body, and its score head where both heads have one name (Llama, Qwen).

    Raises:
        CheckpointError: the folder is no checkpoint, or its body does not fit the architecture it names.
    """
    check_checkpoint(folder)
    with _as_checkpoint_error(folder):
        model, info = AutoModelForTokenClassification.from_pretrained(
            str(folder), num_labels=1, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False,
            use_safetensors=True, output_loading_info=True,
        )  # fmt: skip
    head = {name: parameter for name, parameter in model.named_parameters() if _is_head(model, name)}
    strange = sorted(set(info["missing_keys"]) - set(head))
    if strange:
        raise CheckpointError(f"{folder}: the weights lack {', '.join(strange[:4])}")
    for name in set(info["missing_keys"]):
        torch.nn.init.zeros_(head[name])
    return CriticModel(model.to(device))


def save_critic(critic: CriticModel, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Put the critic's weights and configuration into `folder` (model.safetensors, config.json)."""
    tensors = {
        name: tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
        for name, tensor in critic.model.state_dict().items()
    }
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    critic.model.config.save_pretrained(folder)


def quiet_transformers() -> None:
    """Keep transformers' progress bars and load reports out of the logs; what matters in them is checked here."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def check_checkpoint(folder: Path) -> None:
    """Raise CheckpointError, with the way out, unless `folder` holds a Hugging Face checkpoint in safetensors."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist or is no folder; give the folder of a Hugging Face checkpoint")
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} is no Hugging Face checkpoint: it has no {CONFIG_FILE}")
    if not (folder / WEIGHTS_FILE).is_file() and not (folder / f"{WEIGHTS_FILE}.index.json").is_file():
        pickled = next((name for name in PICKLED if (folder / name).is_file()), None)
        why = f"only pickled weights ({pickled}); save it again with safe_serialization" if pickled else "no weights"
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}: {why}")


def limits_of(model: Any) -> Limits:
    """Vocabulary and positions of a Hugging Face model."""
    positions = getattr(model.config, "max_position_embeddings", None)
    for name, module in model.named_modules():  # RoBERTa's positions begin behind its padding index
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            positions = module.num_embeddings - module.padding_idx - 1
    return Limits(model.get_input_embeddings().num_embeddings, int(positions) if positions else None)


def collate(rows: Sequence[np.ndarray], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids `[n, S]`, padded on the right with 0, attention mask `[n, S]` and lengths `[n]` of n token rows."""
    lengths = torch.tensor([row.size for row in rows], dtype=torch.int64)
    ids = torch.zeros((len(rows), int(lengths.max())), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : row.size] = torch.from_numpy(row)
    attention = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
    return ids.to(device), attention.to(device), lengths.to(device)


def _is_head(model: Any, name: str) -> bool:
    return not name.startswith(f"{model.base_model_prefix}.")


def _check_same_architecture(config: Any, folder: Path) -> None:
    try:
        theirs = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: unreadable {CONFIG_FILE}: {error}") from error
    if theirs.model_type != config.model_type:
        raise CheckpointError(f"{folder} is a {theirs.model_type} model, the served critic is {config.model_type}")


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: unreadable {WEIGHTS_FILE}: {error}") from error


def _assign(module: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder} does not fit the served critic: {reason[:400]}") from error
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def _unsaved_buffers(module: torch.nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (owner, name): buffer
        for owner, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if name in part._non_persistent_buffers_set and buffer is not None
    }


@contextlib.contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder} cannot be loaded: {reason[:400]}") from error
