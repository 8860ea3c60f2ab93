"""Heads on a transformer body: applied to each token, or to each row by a classifier with its own pooling.

Outputs are fp32 and differentiable, and depend on no other row of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.errors import reason_of
from rlhf_triton.models.collation import depends_on_padding, one_by_one
from rlhf_triton.models.heads import GatedHead, ModelHead, last_match
from rlhf_triton.models.host_waits import avoid_host_waits
from rlhf_triton.models.readout import pool_last

PROBE_TOKENS = 4
CAUSAL_TOLERANCE = 1e-5  # relative to the largest hidden state


class TokenHead:
    """Forward pass of a classification model: one output per token, or per row if the model pools itself.

    The constructor measures whether the body is causal. A causal body gets no attention mask: right padding cannot
    influence earlier tokens, and attention can then use its causal kernel. If padding does influence a body's outputs,
    rows run one by one (`one_by_one`).
    """

    def __init__(self, model: Any, *, is_pooled: bool = False, like: TokenHead | None = None) -> None:
        """
        Args:
            is_pooled: the model is a classifier with its own pooling and a bidirectional body.
            like: the head of a model of the same architecture, whose measurements are reused.
        """
        self.model = model.eval()
        avoid_host_waits(model)
        head = ModelHead(model)
        self.head = head.keep_exact()
        # Tensors in a mapped file may be unaligned. Kernels then sum in another order, so the same weights give values
        # that differ in the last bits. A clone is aligned.
        for parameter in self.head.parameters():
            parameter.data = parameter.data.clone()
        self.is_causal: bool = not is_pooled and (measure_causality(model) if like is None else like.is_causal)
        self._layered = is_pooled or head.has_layers_beside
        if like is not None:  # the check depends only on the architecture
            self.one_by_one: bool = like.one_by_one
        else:
            # Hidden states show the effect more clearly than a pooled head's inputs, but padding may enter only in the
            # pooling.
            probed = (self._hidden, self._features) if is_pooled else (self._hidden,)
            masks = not self.is_causal
            self.one_by_one = any(depends_on_padding(model, each, is_masked=masks) for each in probed)

    @property
    def is_linear(self) -> bool:
        """Whether the outputs are linear in the body's hidden states."""
        return isinstance(self.head, torch.nn.Linear) and not self._layered

    def __call__(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        """Return outputs `[B, S, A]`, or `[B, A]` if the model pools them itself.

        Args:
            ids: `[B, S]`, padded on the right.
            attention: `[B, S]`, 1 at tokens, 0 at padding.
            types: `token_type_ids` `[B, S]`, for a body that has them.
        """
        return self._by_rows(self._outputs, ids, attention, **types)

    def _by_rows(self, forward: Callable[..., Tensor], ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        return one_by_one(forward, ids, attention, **types) if self.one_by_one else forward(ids, attention, **types)

    def at_last(self, ids: Tensor, attention: Tensor, lengths: Tensor, **types: Tensor) -> Tensor:
        """Return outputs `[B, A]` at index length-1 of each row; NaN where the gate's tokens are missing."""
        if isinstance(self.head, GatedHead) and self.head.pattern is not None:
            start = last_match(ids, lengths, self.head.pattern)
            hidden = self._by_rows(self._hidden, ids, attention, **types)
            at_gate = pool_last(hidden, start.clamp(min=0) + 1)
            return self.head(pool_last(hidden, lengths), at_gate).masked_fill(start[:, None] < 0, torch.nan)
        return pool_last(self(ids, attention, **types), lengths)

    def _outputs(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        if self._layered:  # layers between body and head, as in ModernBERT's token classification class
            return self.model(input_ids=ids, attention_mask=attention, **types).logits
        return self.head(self._hidden(ids, attention, **types))

    def _hidden(self, ids: Tensor, attention: Tensor, **types: Tensor) -> Tensor:
        if not self.is_causal:
            return self.model.base_model(input_ids=ids, attention_mask=attention, **types)[0]
        return self.model.base_model(input_ids=ids, use_cache=False)[0]

    def _features(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Return the head's input, to probe instead of scores: relative errors mean nothing for a score close to 0."""
        head_inputs: list[Tensor] = []
        watching = self.head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
        self._outputs(ids, attention)
        watching.remove()
        return head_inputs[0]


def measure_causality(model: Any, **inputs: Any) -> bool:
    """Return whether the body's hidden state at a token depends only on that token and earlier ones.

    In a causal body, the gradient of the first tokens' hidden states with respect to the embeddings of later tokens is
    exactly 0, because attention masks these. In any other body it is not 0, however small the weights.

    `inputs`: further arguments of the body's forward pass.

    Raises:
        CheckpointError: the model cannot compute the hidden states of token rows.
    """
    half = PROBE_TOKENS // 2
    embedded: list[Tensor] = []

    def watch(_: Any, __: Any, embeddings: Tensor) -> Tensor:
        embedded.append(embeddings.detach().requires_grad_())
        return embedded[-1].clone()  # the body may change it in place

    try:
        table = model.get_input_embeddings()
        row = torch.arange(PROBE_TOKENS, device=model.device) % min(PROBE_TOKENS, table.num_embeddings)
        if model.tp_size is not None:
            return _seems_causal(model, row, **inputs)
        watching = table.register_forward_hook(watch)
        try:
            with torch.enable_grad():
                hidden = model.base_model(input_ids=row[None], **inputs)[0][0, :half].float()
                # Not a plain sum: after a layer normalisation it is constant.
                weights = torch.linspace(1, 2, hidden.shape[-1], device=hidden.device)
                (gradient,) = torch.autograd.grad((hidden * weights).sum(), embedded[:1])
        finally:
            watching.remove()
    except AssertionError:  # Reformer has no backward pass outside training
        return _seems_causal(model, row, **inputs)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:  # raised by a model's own code
        raise CheckpointError(
            f"{model.name_or_path}: {type(model).__name__} cannot score rows of tokens: {reason_of(error)}"
        ) from error
    return not gradient.flatten(0, -2)[half:].any()  # one row: XLNet's tokens come before its rows


@torch.no_grad()
def _seems_causal(model: Any, row: Tensor, **inputs: Any) -> bool:
    """Return whether a model is causal, from forward passes only: for layers without a backward pass.

    Its modules must not set `is_causal` to False, and the first tokens' hidden states must not change with later
    tokens.
    """
    half = len(row) // 2
    changed = torch.cat([row[:half], row[half:].flip(0)])
    hidden, other = (model.base_model(input_ids=ids[None], **inputs)[0][0, :half].float() for ids in (row, changed))
    by_class = all(getattr(module, "is_causal", True) for module in model.modules())
    return by_class and float((hidden - other).abs().max()) <= CAUSAL_TOLERANCE * float(hidden.abs().max())
