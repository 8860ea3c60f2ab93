"""Log-probs and entropies from hidden states, without materialising the `[N, V]` logits of a causal LM.

With a vocabulary of 150,000 the logits of 4,096 positions take 2.5 GB, and their gradient another 2.5 GB. Here logits
are computed for a chunk of positions at a time, and recomputed in the backward pass instead of being stored.

On a GPU, float32 products would take a third of an update. Instead, each factor is split into two bfloat16 terms; three
products of these, accumulated in float32, give the result to about 1e-6 of the largest logit.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_triton.models.heads import linear
from rlhf_triton.models.logprobs import ids_on, sampling_entropy, sampling_logits, target_logprobs

MAX_LOGITS = 1 << 24  # per chunk: 64 MiB in float32
MAX_LOGITS_ON_GPU = 1 << 26  # larger products use more of it
TOLERANCE = 1e-5  # relative to the largest logit
PROBE_TOKENS = 4
LARGE_LOGIT = 1000.0  # large enough for a cap on the logits to show


def on_gpu(tensor: Tensor) -> bool:
    """Return whether the tensor is on a GPU, where products are computed from bfloat16 terms."""
    return tensor.device.type != "cpu"


@torch.no_grad()
def linear_head(model: Any) -> nn.Linear | None:
    """Return the linear layer that maps the hidden states of `model.base_model` to logits.

    Returns None if the model computes its logits in any other way, for example with a cap; callers must then use the
    model's own forward pass. To detect this, compares the layer's logits with the model's on a few tokens, scaled up
    because a cap hardly changes the small logits of random weights.
    """
    head = model.get_output_embeddings()
    # For a few classes, such as Llama 4's, `base_model` is the model itself: there is no separate body to call.
    if type(head) is not nn.Linear or model.base_model is model:
        return None
    ids = torch.arange(PROBE_TOKENS, device=model.device)[None] % head.out_features
    factors: list[Tensor] = []

    def enlarge(_: Any, __: Any, logits: Tensor) -> Tensor:
        factors.append(LARGE_LOGIT / logits.abs().max())
        return logits * factors[0]  # the same factor for both: the model may scale the hidden states

    enlarged = head.register_forward_hook(enlarge)
    try:
        own = model(input_ids=ids, use_cache=False).logits
        ours = head(model.base_model(input_ids=ids, use_cache=False)[0])
    finally:
        enlarged.remove()
    if ours.shape != own.shape:
        return None
    return head if float((ours - own).abs().max()) <= TOLERANCE * max(1.0, float(own.abs().max())) else None


def keep_outputs(model: Any, ids: Sequence[int]) -> None:
    """Reduce a causal LM's output layer to the rows of the A tokens `ids`, in fp32: its logits become `[B, S, A]`.

    Raises:
        ValueError: an id is outside the vocabulary, or the logits are not a linear function of the hidden states.
    """
    head = linear_head(model)
    if head is None:
        raise ValueError("they are not a linear function of the hidden states (they may be capped); use another model")
    wrong = [i for i in ids if not 0 <= i < head.out_features]
    if wrong:
        raise ValueError(f"token {wrong[0]} is outside the vocabulary [0, {head.out_features})")
    rows = {name: parameter.detach()[list(ids)].float() for name, parameter in head.named_parameters()}
    model.set_output_embeddings(linear(rows))


def head_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    *,
    temperature: float,
    banned_token_ids: Sequence[int] = (),
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return `target_logprobs` and `sampling_entropy` of the logits `head(hidden)`, each `[N]`.

    Differentiable with respect to `hidden` and the head. Logits are computed in the dtype of the head's weights.

    Args:
        hidden: `[N, H]`.
        targets: int64 `[N]`, token ids.
        with_entropy: compute the entropies; otherwise `entropies` is None.

    Raises:
        ValueError: as `target_logprobs`.
    """
    result = _HeadLogprobs.apply(
        hidden, head.weight, head.bias, targets, temperature, list(banned_token_ids), with_entropy
    )
    return result if with_entropy else (result, None)


class _HeadLogprobs(torch.autograd.Function):
    """Computes log-probs and entropies in chunks, with a hand-written backward pass.

    With z = logits / temperature, p = softmax(z), logp_y = z_y - logsumexp(z) and H = -sum_v p_v log p_v:

        d logp_y / dz_v = [v = y] - p_v
        d H / dz_v = -p_v (log p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        banned: list[int],
        with_entropy: bool,
    ) -> Any:
        logprobs = []
        entropies = []
        terms = _terms(weight)
        ctx.temperature = temperature
        ctx.banned = banned
        ctx.set_materialize_grads(False)  # None: the entropies are not part of the loss, whose gradient is then cheaper
        for part, wanted in zip(*_parts(hidden, targets, weight), strict=True):
            logits = _logits(ctx, part, weight, bias, terms)
            logprobs.append(target_logprobs(logits, wanted, temperature=1.0))
            if with_entropy:
                entropies.append(sampling_entropy(logits, temperature=1.0))
        ctx.save_for_backward(hidden, weight, bias, targets, *(map(torch.cat, [entropies] if with_entropy else [])))
        return (torch.cat(logprobs), torch.cat(entropies)) if with_entropy else torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, targets, *entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        start = 0
        terms = _terms(weight)
        if grads[-1] is None:
            grads = grads[:1]
            entropies = []
        grads = (torch.zeros(len(targets), device=hidden.device) if grads[0] is None else grads[0], *grads[1:])
        for part, wanted in zip(*_parts(hidden, targets, weight), strict=True):
            rows = slice(start, start := start + len(part))
            grad = _grad_of_logits(
                ctx,
                _logits(ctx, part, weight, bias, terms),
                wanted,
                [each[rows] for each in grads],
                [each[rows] for each in entropies],
            ).to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = _product(_terms(grad), terms)
            if grad_weight is not None and not on_gpu(weight):
                grad_weight.addmm_(grad.T, part.to(weight.dtype))
            elif grad_weight is not None:
                grad_weight += _product(_terms(grad.T), _terms(part))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _grad_of_logits(ctx: Any, logits: Tensor, targets: Tensor, grads: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """Return the gradient of the loss with respect to the logits `[n, V]`; overwrites `logits`.

    `grads`: gradients `[n]` of the loss with respect to the log-probs and, if computed, the entropies.
    """
    logp = logits.sub_(logits.logsumexp(-1, keepdim=True))
    p = logp.exp()
    if entropies:
        # p log p is 0 at p = 0, where the plain product would be 0 * -inf = NaN.
        logp.index_fill_(1, ids_on(logp.device, tuple(ctx.banned)), 0.0)
        weights = grads[0][:, None] + grads[1][:, None] * (logp + entropies[0][:, None])
    else:
        weights = grads[0][:, None]
    grad = p.mul_(-weights)
    grad.scatter_add_(1, targets[:, None], grads[0][:, None].to(grad.dtype))
    return grad.div_(ctx.temperature)


def _logits(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, terms: list[Tensor]) -> Tensor:
    """Return the logits `[n, V]` of the sampling distribution; `terms`: `_terms(weight)`."""
    if not on_gpu(weight):
        logits = nn.functional.linear(hidden.to(weight.dtype), weight, bias)
    else:
        logits = _product(_terms(hidden), [term.T for term in terms])
        logits = logits if bias is None else logits.add_(bias)
    return sampling_logits(logits, ctx.temperature, ctx.banned, in_place=True)


def _terms(matrix: Tensor) -> list[Tensor]:
    """Split a float32 matrix on a GPU into two bfloat16 terms whose sum has 17 of its bits; else return `[matrix]`."""
    if not on_gpu(matrix) or matrix.dtype != torch.float32:
        return [matrix]
    high = matrix.bfloat16()
    return [high, torch.sub(matrix, high, out=torch.empty_like(high))]


def _product(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """Return the product of two matrices, each given as `_terms`; in float32 on a GPU.

    Omits the product of the two second terms, which is smaller than the error of the terms themselves.
    """
    if not on_gpu(left[0]) or left[0].dtype != torch.bfloat16:
        return left[0] @ right[0]
    first, *others = [(a, b) for i, a in enumerate(left) for b in right[: 2 - i]]
    total = torch.mm(*first, out_dtype=torch.float32)
    for pair in others:  # no `reduce`, which would keep two products alive at a time
        total += torch.mm(*pair, out_dtype=torch.float32)
    return total


def _parts(hidden: Tensor, targets: Tensor, weight: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    step = max(1, (MAX_LOGITS_ON_GPU if on_gpu(weight) else MAX_LOGITS) // weight.shape[0])
    return hidden.split(step), targets.split(step)
