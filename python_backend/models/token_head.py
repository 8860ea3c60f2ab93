"""A body with the linear head on top of it: per-token outputs [B, S, A] in fp32; differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.heads import pool_last
from python_backend.models.lean_decoder import LeanDecoder, lean_decoder

PROBE_TOKENS = 4
CAUSAL_TOLERANCE = 1e-5  # of the hidden states' largest value; a look ahead changes far more


class TokenHead:
    """The forward of a classification model that has a linear head, token by token.

    Whether the body is causal is measured, once: causal bodies get no attention mask, as padding on the right cannot
    reach a token before it. That saves building masks and lets attention run its own causal kernel.
    """

    def __init__(self, model: Any, *, compile_forward: bool = False, like: TokenHead | None = None) -> None:
        """`like`: the head of another model of the same architecture, whose findings hold for this one, too."""
        self.model = model.eval()
        self.head = keep_head_exact(model)
        for parameter in self.head.parameters():  # mapped, they lie at odd addresses, where sums are rounded otherwise
            parameter.data = parameter.data.clone()
        self.is_causal: bool = measure_causality(model) if like is None else like.is_causal
        self.is_compiled = compile_forward
        self._layered = _has_layers_of_its_own(model, self.head)
        self.lean: LeanDecoder | None = None
        if like is not None:
            self.lean = None if like.lean is None else LeanDecoder(model.base_model)
        elif self.is_causal and not self._layered and not compile_forward:
            self.lean = lean_decoder(model)
        if compile_forward:
            compile_body(model, self)

    def __call__(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Outputs `[B, S, A]` of `ids` `[B, S]`, padded on the right; `attention` `[B, S]` is 1 at tokens."""
        if self._layered:  # ModernBERT's token class
            return self.model(input_ids=ids, attention_mask=attention).logits
        if self.lean is not None and not torch.is_grad_enabled():
            hidden = self.lean.hidden(ids)
        elif self.is_causal:
            hidden = self.model.base_model(input_ids=ids, use_cache=False)[0]
        else:
            hidden = self.model.base_model(input_ids=ids, attention_mask=attention)[0]
        return self.head(hidden)

    def at_last(self, ids: Tensor, attention: Tensor, lengths: Tensor) -> Tensor:
        """Outputs `[B, A]` at index length-1 of each row."""
        if self.lean is not None and not torch.is_grad_enabled():
            return self.head(self.lean.last_hidden(ids, lengths))
        return pool_last(self(ids, attention), lengths)


def head_of(model: Any) -> torch.nn.Linear:
    """The last linear layer outside the body: the one whose outputs are the logits."""
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
    """The model's head, which from now on computes in the type of its own weights whatever the body runs in."""
    head = head_of(model)
    if _to_weight_dtype not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_to_weight_dtype)
    return head


@torch.no_grad()
def measure_causality(model: Any) -> bool:
    """Whether the body's hidden state at a token depends on that token and those before it only.

    Two rows that differ in their later half alone: the earlier half must stay, and the later must change.
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
    """torch.compile the body, lengths dynamic, and run `forward` (ids, attention) for the graphs that serving needs.

    Raises:
        CheckpointError: there is no working compiler; the message says what to do.
    """
    model.base_model.compile(dynamic=True)
    try:
        with torch.no_grad():
            for rows in (1, 2):  # of one row dynamo makes a graph of its own
                ids = torch.zeros((rows, PROBE_TOKENS), dtype=torch.int64, device=model.device)
                forward(ids, torch.ones_like(ids))
    except Exception as error:  # dynamo and inductor have many errors; all of them mean that it does not work here
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
