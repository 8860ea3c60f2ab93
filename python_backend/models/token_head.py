"""A transformer body with a linear head on each token: outputs `[B, S, A]` in fp32; differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.heads import pool_last
from python_backend.models.lean_decoder import LeanDecoder, lean_decoder

PROBE_TOKENS = 4
CAUSAL_TOLERANCE = 1e-5  # relative to the largest hidden state; attention to later tokens changes it far more


class TokenHead:
    """The per-token forward pass of a classification model with a linear head.

    The constructor measures whether the body is causal. A causal body gets no attention mask: padding on the right
    cannot influence earlier tokens; this saves building masks and lets attention use its causal kernel.
    """

    def __init__(self, model: Any, *, compile_forward: bool = False, like: TokenHead | None = None) -> None:
        """Wrap `model`; `like` is the head of a model of the same architecture, whose measurements are reused."""
        self.model = model.eval()
        self.head = keep_head_exact(model)
        # Tensors in a mapped file may be unaligned. Kernels then sum in another order, and the same weights give values
        # that differ in the last bits. A clone is aligned.
        for parameter in self.head.parameters():
            parameter.data = parameter.data.clone()
        self.is_causal: bool = measure_causality(model) if like is None else like.is_causal
        self.is_compiled = compile_forward
        self._layered = _has_layers_of_its_own(model, self.head)
        self.lean: LeanDecoder | None = None
        if like is not None:  # the lean pass was checked for `like`; the check depends only on the architecture
            self.lean = None if like.lean is None else LeanDecoder(model.base_model)
        elif self.is_causal and not self._layered and not compile_forward:
            self.lean = lean_decoder(model)
        if compile_forward:
            compile_body(model, self)

    def __call__(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        """Return outputs `[B, S, A]` of `ids` `[B, S]`, padded on the right; `attention` `[B, S]` is 1 at tokens.

        `types`: `token_type_ids` `[B, S]`, for a body that has them.
        """
        if self._layered:  # layers between body and head, as in ModernBERT's token classification class
            return self.model(input_ids=ids, attention_mask=attention, **types).logits
        if self.lean is not None and not torch.is_grad_enabled():
            hidden = self.lean.hidden(ids)
        elif self.is_causal:
            hidden = self.model.base_model(input_ids=ids, use_cache=False)[0]
        else:
            hidden = self.model.base_model(input_ids=ids, attention_mask=attention, **types)[0]
        return self.head(hidden)

    def at_last(self, ids: Tensor, attention: Tensor, lengths: Tensor, **types: Tensor) -> Tensor:
        """Return outputs `[B, A]` at index length-1 of each row."""
        if self.lean is not None and not torch.is_grad_enabled():
            return self.head(self.lean.last_hidden(ids, lengths))
        return pool_last(self(ids, attention, **types), lengths)


def head_of(model: Any) -> torch.nn.Linear:
    """Return the last linear layer outside the body, whose outputs are the logits. Raises CheckpointError if none."""
    body = f"{model.base_model_prefix}."
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith(body)
    ]
    if not layers:
        raise CheckpointError(f"{type(model).__name__} has no linear head")
    return layers[-1]


def keep_head_exact(model: Any) -> torch.nn.Linear:
    """Make the head compute in the dtype of its own weights, regardless of the body's dtype, and return it."""
    head = head_of(model)
    if _to_weight_dtype not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_to_weight_dtype)
    return head


@torch.no_grad()
def measure_causality(model: Any) -> bool:
    """Return whether the body's hidden state at a token depends only on that token and earlier ones.

    Compares two rows that differ only in their second half: hidden states of the first half must agree, those of the
    second must differ.
    """
    size = min(PROBE_TOKENS, model.get_input_embeddings().num_embeddings)
    half = PROBE_TOKENS // 2
    row = torch.arange(PROBE_TOKENS, device=model.device) % size
    changed = torch.cat([row[:half], row[half:].flip(0)])
    hidden, other = (model.base_model(input_ids=ids[None])[0].float() for ids in (row, changed))
    difference = (hidden - other).abs().amax(dim=(0, 2))
    scale = float(hidden.abs().max())
    return bool((difference[:half] <= CAUSAL_TOLERANCE * scale).all() and (difference[half:] > 0).all())


def compile_body(model: Any, forward: Callable[[Tensor, Tensor], Any]) -> None:
    """Apply torch.compile to the body with dynamic lengths, and call `forward(ids, attention)` to compile it now.

    Raises:
        CheckpointError: there is no working compiler; the message says what to do.
    """
    model.base_model.compile(dynamic=True)
    try:
        with torch.no_grad():
            for rows in (1, 2):  # dynamo specialises sizes of 1, so a single row has its own graph
                ids = torch.zeros((rows, PROBE_TOKENS), dtype=torch.int64, device=model.device)
                forward(ids, torch.ones_like(ids))
    except Exception as error:  # dynamo and inductor raise many types; any of them means compilation does not work
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"torch.compile does not work here: {reason[:300]}; install a C++ compiler (g++) and Python's headers, or "
            "set compile: false"
        ) from error


def _has_layers_of_its_own(model: Any, head: torch.nn.Linear) -> bool:
    body = f"{model.base_model_prefix}."
    ours = {id(parameter) for parameter in head.parameters()}
    return any(id(p) not in ours for name, p in model.named_parameters() if not name.startswith(body))


def _to_weight_dtype(head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.to(head.weight.dtype) for x in inputs)  # type: ignore[arg-type]
