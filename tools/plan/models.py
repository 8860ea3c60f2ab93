"""Builds the models of a run from their config.json alone, and counts the memory of a computation without using it."""

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
)

from python_backend.models import output_head
from python_backend.models.heads import head_of, keep_head_exact
from python_backend.models.lean_decoder import FAMILIES, LeanDecoder
from python_backend.models.logprobs import target_logprobs
from python_backend.models.output_head import head_logprobs
from python_backend.models.precision import computing

CPU = torch.device("cpu")


def causal_model(folder: Path) -> Any:
    """Return the causal LM that a folder's config.json describes, in float32 and without weights; see `placed`."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_config(folder), dtype=torch.float32).eval()


def token_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a body with one output per token, whose head is in float32, without weights; see `placed`."""
    config = _config(folder, num_labels=1)
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    kind = kind or MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    with torch.device("meta"):
        model = kind._from_config(config, dtype=dtype).eval()
    head = keep_head_exact(model)
    for name, parameter in list(head.named_parameters()):
        setattr(head, name, torch.nn.Parameter(parameter.float()))
    return model


def placed(model: Any) -> Any:
    """Give the model tensors of the CPU, where `live_bytes.counting` counts them; tied weights stay tied."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                empty = torch.nn.Parameter(torch.empty_like(parameter, device=CPU), parameter.requires_grad)
                module._parameters[name] = known.setdefault(id(parameter), empty)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = known.setdefault(id(buffer), torch.empty_like(buffer, device=CPU))
    return model


def values_of(model: Any, ids: Tensor, *, lean: bool = False) -> Tensor:
    """Return the head's outputs at every token; `lean`: by the faster forward pass where the family has one."""
    if lean and model.config.model_type in FAMILIES and model.dtype == torch.float32:
        return head_of(model)(LeanDecoder(model.base_model).packed(ids.flatten(), [ids.shape[1]] * len(ids)))
    takes = inspect.signature(model.base_model.forward).parameters
    return head_of(model)(model.base_model(input_ids=ids, **({"use_cache": False} if "use_cache" in takes else {}))[0])


def logprobs_of(
    model: Any, ids: Tensor, responses: int, precision: str, *, with_entropy: bool = False, is_linear: bool = True
) -> Tensor:
    """Return the log-probs of the last `responses` tokens of every row, as the policy's update computes them."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    targets = ids[:, -responses:].reshape(-1)
    with computing(CPU, precision):
        outputs = model.base_model(**inputs)[0] if is_linear else model(**inputs).logits
    wanted = outputs[:, -responses - 1 : -1].reshape(-1, outputs.shape[-1])
    if not is_linear:
        return target_logprobs(wanted, targets, temperature=1.0)
    return head_logprobs(wanted, model.get_output_embeddings(), targets, temperature=1.0, with_entropy=with_entropy)[0]


@torch.no_grad()
def has_linear_head(model: Any) -> bool:
    """Return whether the model's logits are what its head returns, without a cap or scale after it."""
    head, seen = model.get_output_embeddings(), []
    hook: Callable[..., None] = lambda _, __, out: seen.append(out)  # noqa: E731
    handle = head.register_forward_hook(hook)
    logits = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=False).logits
    handle.remove()
    return bool(seen) and logits is seen[-1]


def _config(folder: Path, **settings: Any) -> Any:
    return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)


# Counts the memory that a computation needs, without the memory: its tensors have shapes and dtypes but no values.


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that are alive: `live` now, `peak` at most since the last `reset`.

    Counts what autograd saves, what operations allocate, and gradients; not the scratch memory inside a kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def reset(self) -> None:
        """Start a new peak from the tensors alive now."""
        self.peak = self.live

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._sizes:  # a view shares the storage of its base
            self._sizes[key] = storage.nbytes()
            self.live += self._sizes[key]
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


@contextlib.contextmanager
def counting(device: str = "cpu") -> Iterator[LiveBytes]:
    """Run the block with tensors that have no values, and count the bytes that they would need on `device`.

    They behave as CPU tensors, with which torch plans for GPUs that it was not built for: kernels that save other
    tensors on a GPU differ slightly.
    """
    # No Mock, which would keep the tensors of its calls.
    head = mock.patch.object(output_head, "on_card", lambda tensor: tensor.device.type != device)
    with head, FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        yield live


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, counting each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def model_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return num_bytes([*model.parameters(), *model.buffers()])
