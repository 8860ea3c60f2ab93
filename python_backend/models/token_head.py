"""Heads on a transformer body: a linear one on each token, or that of a classifier with its own pooling.

Outputs are in fp32, differentiable, and those of each row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from python_backend.checkpoints.inspection import CheckpointError
from python_backend.models.card.inspections import skip_inspections
from python_backend.models.collation import depends_on_padding, one_by_one
from python_backend.models.heads import pool_last
from python_backend.models.lean_decoder import LeanDecoder, lean_decoder

PROBE_TOKENS = 4
CAUSAL_TOLERANCE = 1e-5  # relative to the largest hidden state; attention to later tokens changes it far more


class TokenHead:
    """The per-token forward pass of a classification model with a linear head.

    The constructor measures whether the body is causal. A causal body gets no attention mask: padding on the right
    cannot influence earlier tokens; this saves building masks and lets attention use its causal kernel. If padding
    influences the tokens of a body all the same, rows run one by one (`one_by_one`).
    """

    def __init__(self, model: Any, *, compile_forward: bool = False, like: TokenHead | None = None) -> None:
        """Wrap `model`; `like` is the head of a model of the same architecture, whose measurements are reused."""
        self.model = model.eval()
        skip_inspections(model)
        self.head = keep_head_exact(model)
        # Tensors in a mapped file may be unaligned. Kernels then sum in another order, and the same weights give values
        # that differ in the last bits. A clone is aligned.
        for parameter in self.head.parameters():
            parameter.data = parameter.data.clone()
        self.is_causal: bool = measure_causality(model) if like is None else like.is_causal
        self.is_compiled = compile_forward
        self._layered = _has_layers_of_its_own(model, self.head)
        self.lean: LeanDecoder | None = None
        if like is not None:  # the checks depend only on the architecture
            on_host = model.device.type == "cpu"  # `like` may be: a trained critic's first version is
            self.lean = LeanDecoder(model.base_model) if like.lean is not None and on_host else None
            self.one_by_one: bool = like.one_by_one
        else:
            if self.is_causal and not self._layered and not compile_forward:
                self.lean = lean_decoder(model)
            masks = not self.is_causal
            # The lean pass is causal by construction.
            self.one_by_one = self.lean is None and depends_on_padding(model, self._hidden, is_masked=masks)
        if compile_forward:
            compile_body(model, self)

    def __call__(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        """Return outputs `[B, S, A]` of `ids` `[B, S]`, padded on the right; `attention` `[B, S]` is 1 at tokens.

        `types`: `token_type_ids` `[B, S]`, for a body that has them.
        """
        if self.one_by_one:
            return one_by_one(self._outputs, ids, attention, **types)
        return self._outputs(ids, attention, **types)

    def at_last(self, ids: Tensor, attention: Tensor, lengths: Tensor, **types: Tensor) -> Tensor:
        """Return outputs `[B, A]` at index length-1 of each row."""
        if self.lean is not None and not torch.is_grad_enabled():
            return self.head(self.lean.last_hidden(ids, lengths))
        return pool_last(self(ids, attention, **types), lengths)

    def _outputs(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        if self._layered:  # layers between body and head, as in ModernBERT's token classification class
            return self.model(input_ids=ids, attention_mask=attention, **types).logits
        return self.head(self._hidden(ids, attention, **types))

    def _hidden(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        if not self.is_causal:
            return self.model.base_model(input_ids=ids, attention_mask=attention, **types)[0]
        if self.lean is not None and not torch.is_grad_enabled():
            return self.lean.hidden(ids)
        return self.model.base_model(input_ids=ids, use_cache=False)[0]


class PooledHead:
    """The forward pass of a classifier with its own pooling, one row at a time if its outputs depend on padding."""

    def __init__(self, model: Any, *, like: PooledHead | None = None) -> None:
        """Wrap `model`; `like` is the head of a model of the same architecture, whose measurement is reused."""
        self.model = model.eval()
        skip_inspections(model)
        self._head = keep_head_exact(model)
        probed = (self._hidden, self._features)  # tokens show it more clearly, but only the pooling may read padding
        self.one_by_one: bool = like.one_by_one if like else any(depends_on_padding(model, each) for each in probed)

    def __call__(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        """Return outputs `[B, A]` of `ids` and `attention` as for `TokenHead`."""
        if self.one_by_one:
            return one_by_one(self._outputs, ids, attention, **types)
        return self._outputs(ids, attention, **types)

    def _outputs(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=attention, **types).logits

    def _hidden(self, ids: Tensor, attention: Tensor) -> Tensor:
        return self.model.base_model(input_ids=ids, attention_mask=attention)[0]

    def _features(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Return the input of the head: a score itself may be close to 0, and its rounding is then no measure."""
        found: list[Tensor] = []
        watching = self._head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
        self._outputs(ids, attention)
        watching.remove()
        return found[0]


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
def measure_causality(model: Any, **inputs: Any) -> bool:
    """Return whether the body's hidden state at a token depends only on that token and earlier ones.

    `inputs`: further arguments of the body's forward pass.

    Compares two rows that differ only in their second half: hidden states of the first half must agree, those of the
    second must differ.

    Raises:
        CheckpointError: the model cannot compute the hidden states of token rows.
    """
    half = PROBE_TOKENS // 2
    try:
        size = min(PROBE_TOKENS, model.get_input_embeddings().num_embeddings)
        row = torch.arange(PROBE_TOKENS, device=model.device) % size
        changed = torch.cat([row[:half], row[half:].flip(0)])
        hidden, other = (model.base_model(input_ids=ids[None], **inputs)[0].float() for ids in (row, changed))
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:  # raised by a model's own code
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{type(model).__name__} cannot score rows of tokens: {reason[:300]}") from error
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
            f"torch.compile does not work here: {reason[:300]}; install a C++ compiler (g++) and Python's headers, and "
            "PyTorch in a folder whose path has no space, or set compile: false"
        ) from error


def _has_layers_of_its_own(model: Any, head: torch.nn.Linear) -> bool:
    body = f"{model.base_model_prefix}."
    ours = {id(parameter) for parameter in head.parameters()}
    return any(id(p) not in ours for name, p in model.named_parameters() if not name.startswith(body))


def _to_weight_dtype(head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.to(head.weight.dtype) for x in inputs)  # type: ignore[arg-type]
