"""The reference policy: log-probs of token rows under a frozen Hugging Face causal LM.

Shared by the server and the tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.checkpoints.inspection import CheckpointError, inspect_checkpoint
from rlhf_triton.models.batching import padded_rows
from rlhf_triton.models.collation import limits_of
from rlhf_triton.models.gpu import to_device, to_host
from rlhf_triton.models.host_waits import avoid_host_waits
from rlhf_triton.models.loading import load_causal_model
from rlhf_triton.models.logprobs import target_logprobs
from rlhf_triton.models.output_head import head_logprobs, linear_head
from rlhf_triton.models.precision import computing, in_float32, use_bfloat16
from rlhf_triton.models.token_head import measure_causality

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from rlhf_triton.models.tensor_parallel import RankGroup


class LanguageModel:
    """A frozen causal LM that computes log-probs at a sampling temperature, with banned tokens excluded."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        banned_token_ids: Sequence[int] = (),
        precision: str = "float32",
    ) -> None:
        """Freeze the model and prepare its forward pass. Raises CheckpointError if the model is not causal."""
        self.model = model.eval().requires_grad_(False)
        self.limits = limits_of(model)
        avoid_host_waits(model)
        self._temperature = temperature
        self._banned = list(banned_token_ids)
        self._precision = precision
        if precision == "bfloat16":
            use_bfloat16(model, model.get_output_embeddings())
        with in_float32(model):
            self._head = linear_head(model)
        with self._computing():
            check_causal(model)

    @torch.no_grad()
    def launch(self, rows: Sequence[np.ndarray], width: int | None = None) -> Callable[[], list[np.ndarray]]:
        """Launch a forward pass, padded to `width`; return a function that waits for its results.

        The results are log-probs float32 `[length_i]` of each token row (int64 `[length_i]`). Index t is the log-prob
        of token t+1: -inf if that token is banned, and 0 at the row's last index, which has no next token.
        """
        lengths = np.array([row.size for row in rows])
        ids = padded_rows(rows, width or int(lengths.max()), np.int64)
        inside = np.arange(ids.shape[1])[None] < lengths[:, None]
        places = inside[:, 1:].nonzero()  # the N positions that predict a token of their row
        logprobs = to_host(
            self._target_logprobs(inside, *to_device(self.model.device, ids, *places, ids[:, 1:][places]))
        )

        def wait() -> list[np.ndarray]:
            parts = np.split(logprobs(), np.cumsum(lengths - 1)[:-1])
            return [np.append(part, np.float32(0)) for part in parts]

        return wait

    def _target_logprobs(
        self, inside: np.ndarray, ids: Tensor, rows: Tensor, columns: Tensor, targets: Tensor
    ) -> Tensor:
        """Return log-probs `[N]` of `targets` `[N]`, the tokens after positions (`rows`, `columns`) of `ids` `[n, S]`.

        `inside`: bool `[n, S]`, False at padding. On a GPU no mask is passed: it would disable the fast attention
        kernels, and the hidden states of a causal model do not depend on right padding.

        If the model's output layer can be called separately, logits are computed for these positions only, in chunks.
        """
        sampling: dict[str, Any] = {"temperature": self._temperature, "banned_token_ids": self._banned}
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if ids.device.type == "cpu":
            inputs["attention_mask"] = torch.from_numpy(inside).long()
        if self._head is None:
            with self._computing():
                logits = self.model(**inputs).logits[rows, columns]
            return target_logprobs(logits, targets, **sampling)
        with self._computing():
            hidden = self.model.base_model(**inputs)[0]
        return head_logprobs(hidden[rows, columns], self._head, targets, **sampling)[0]

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        return computing(self.model.device, self._precision)


def check_causal(model: Any) -> None:
    """Raise CheckpointError unless a token's log-prob depends only on the tokens before it."""
    if not measure_causality(model, use_cache=False):
        raise CheckpointError(
            f"{type(model).__name__} is not causal: its hidden state at a token depends on later tokens; use a "
            "decoder, or set is_decoder: true in its config.json if it was trained as one"
        )


def load_language_model(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    temperature: float = 1.0,
    banned_token_ids: Sequence[int] = (),
    group: RankGroup | None = None,
) -> LanguageModel:
    """Load the causal LM in a checkpoint folder.

    Args:
        dtype: precision of forward passes, with the same meaning as `actor.policy.precision`.
        temperature: sampling temperature, > 0.
        banned_token_ids: ids that are never sampled.
        group: load this rank's part of the model; `device` is then the rank's device.

    Raises:
        CheckpointError: the folder is not a checkpoint, or contains no causal LM.
    """
    info = inspect_checkpoint(folder)
    stored = dtype if set(info.dtypes) == {"BF16"} else "float32"  # without a conversion the file stays memory-mapped
    model = load_causal_model(info, stored, group).to(device)
    return LanguageModel(
        model,
        temperature=temperature,
        banned_token_ids=banned_token_ids,
        precision=dtype,
    )
