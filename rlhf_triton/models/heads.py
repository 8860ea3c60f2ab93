"""Builds the layers of a head in float32 from its entry in `checkpoints.heads.FORMS` and its tensors."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_triton.checkpoints.heads import BINS, NORM, SCALE, TRANSFORM, Head, Layers
from rlhf_triton.checkpoints.inspection import CheckpointError

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
}


class LayeredHead(nn.Sequential):
    """A head of several layers, whose submodules have the layer numbers of the checkpoint."""


class GatedHead(nn.Module):
    """A head whose reward is the sum of its attributes, each weighted by a gate: `[..., H]` to `[..., 1]`."""

    def __init__(self, head: Head, tensors: dict[str, Tensor], pattern: tuple[int, ...] | None) -> None:
        super().__init__()
        assert head.gate is not None
        self.layers = _build(head.layers, tensors)
        self.gate = _build(head.gate, tensors)
        self.register_buffer("pattern", None if pattern is None else torch.tensor(pattern), persistent=False)
        self.pattern: Tensor | None
        """Token ids: the gate reads the hidden state at their last occurrence in a row; None: at the scored token."""
        self._reduction = head.form.reduction
        self._group = head.group
        self._temperature = head.temperature
        self.register_buffer("transform", tensors.get(TRANSFORM))
        self.register_buffer("scale", tensors.get(SCALE))
        self.transform: Tensor | None
        self.scale: Tensor | None

    def forward(self, hidden: Tensor, at_gate: Tensor | None = None) -> Tensor:
        """Return the rewards `[..., 1]`; `at_gate`: hidden states that the gate reads, by default `hidden`."""
        attributes = self._reduce(self.layers(hidden).unflatten(-1, (-1, self._group)))
        if self.transform is not None:
            attributes = attributes @ self.transform
        weights = self.gate(hidden if at_gate is None else at_gate)
        if self._temperature is not None:
            weights = (weights / self._temperature).softmax(-1)
        if self.scale is not None:
            weights = weights * self.scale
        return (weights * attributes).sum(-1, keepdim=True)

    def _reduce(self, outputs: Tensor) -> Tensor:
        """Reduce each attribute's group of outputs `[..., A, group]` to one number, `[..., A]`."""
        if self._reduction == "bins":
            return outputs.softmax(-1) @ torch.linspace(0, 1, BINS, device=outputs.device)
        return outputs.mean(-1) if self._reduction == "mean" else outputs[..., 0]


HEADS = (nn.Linear, LayeredHead, GatedHead)


def build_head(head: Head, tensors: dict[str, Tensor], pattern: tuple[int, ...] | None = None) -> nn.Module:
    """Return the layers of a head from its stored `tensors`, in float32 regardless of their dtype."""
    owned = {name: tensor.float() for name, tensor in tensors.items() if head.owns(name)}
    return _build(head.layers, owned) if head.gate is None else GatedHead(head, owned, pattern)


def _build(layers: Layers, tensors: dict[str, Tensor]) -> nn.Module:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name in layers.names:
        own = {part: tensors[f"{name}.{part}"] for part in NORM if f"{name}.{part}" in tensors}
        number = name.rpartition(".")[2]
        if "running_mean" in own:
            parts[number] = nn.BatchNorm1d(len(own["weight"]))
            own["num_batches_tracked"] = torch.tensor(0)
            parts[number].load_state_dict(own, assign=True)
        else:
            parts[number] = linear(own)
        if "running_mean" not in own and name != layers.names[-1]:
            parts[f"{number}_{layers.activation}"] = ACTIVATIONS[layers.activation]()
    head = LayeredHead(parts) if len(parts) > 1 else next(iter(parts.values()))
    return head.eval()


def linear(tensors: Mapping[str, Tensor]) -> nn.Linear:
    """Return the linear layer with the given `weight` and optional `bias`."""
    outputs, inputs = tensors["weight"].shape
    layer = nn.Linear(inputs, outputs, bias="bias" in tensors, device="meta")
    layer.load_state_dict(tensors, assign=True)
    return layer


@torch.no_grad()
def merged(module: nn.Module, weights: Tensor) -> nn.Module:
    """Merge the head's A outputs into one, their sum weighted by `weights` `[A]`. Changes and returns `module`."""
    last = module if isinstance(module, nn.Linear) else list(module.children())[-1]
    assert isinstance(last, nn.Linear)
    last.weight = nn.Parameter(weights[None] @ last.weight)
    last.bias = None if last.bias is None else nn.Parameter((last.bias * weights).sum()[None])
    last.out_features = 1
    return module


class ModelHead:
    """The head of a model: its last head layer outside the body, whose outputs are the logits.

    All code that replaces, trains, stores or swaps a head finds its module here.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.path = ""
        body = f"{model.base_model_prefix}."
        for name, module in model.named_modules():
            inside = name.startswith(body) or (self.path and name.startswith(f"{self.path}."))
            if isinstance(module, HEADS) and not inside:
                self.path = name

    @property
    def module(self) -> nn.Module:
        """The head's layers. Raises CheckpointError if the model has no head."""
        if not self.path:
            raise CheckpointError(f"{type(self._model).__name__} has no linear head; use a model with one")
        return self._model.get_submodule(self.path)

    @property
    def names(self) -> set[str]:
        """Names of the head's parameters in the model's state dict."""
        return {f"{self.path}.{name}" for name, _ in self.module.named_parameters()}

    @property
    def has_layers_beside(self) -> bool:
        """Whether the model has parameters outside its body and its head."""
        apart = (f"{self._model.base_model_prefix}.", f"{self.path}.")
        return any(not name.startswith(apart) for name, _ in self._model.named_parameters())

    def fitted(self, head: nn.Module) -> nn.Module:
        """Return `head`, ready to replace this one.

        If this head has a bias and the linear `head` has none, `head` gets a bias of 0, so that transformers can load a
        saved model.
        """
        if isinstance(head, nn.Linear) and head.bias is None and getattr(self.module, "bias", None) is not None:
            head.bias = nn.Parameter(torch.zeros(head.out_features))
        return head

    def replace(self, head: nn.Module) -> None:
        """Replace this head in the model."""
        self._model.set_submodule(self.path, self.fitted(head))

    def keep_exact(self) -> nn.Module:
        """Make the head compute in its weights' dtype, regardless of the body's; return the head."""
        head = self.module
        if _to_weight_dtype not in head._forward_pre_hooks.values():
            head.register_forward_pre_hook(_to_weight_dtype)
        return head


def _to_weight_dtype(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(head.parameters()).dtype
    return tuple(x.to(dtype) for x in inputs)


def last_match(ids: Tensor, lengths: Tensor, pattern: Tensor) -> Tensor:
    """Return int64 `[B]`: the start of the last occurrence of `pattern` in each row of `ids` `[B, S]`; -1 if none."""
    count = ids.shape[1] - len(pattern) + 1
    if count < 1:
        return torch.full_like(lengths, -1)
    windows = ids.unfold(1, len(pattern), 1) == pattern
    starts = torch.arange(count, device=ids.device)
    inside = starts[None] + len(pattern) <= lengths[:, None]
    return ((windows.all(-1) & inside) * (starts + 1)).amax(1) - 1
