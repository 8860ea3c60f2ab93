"""Finds the head among a checkpoint's tensors, and tensors that may be an unknown head; no torch.

Class names only tell a token `classifier` from a sequence `classifier`, which have the same tensor names.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rlhf_triton.checkpoints.config_keys import read_key
from rlhf_triton.checkpoints.head_keys import activation_of
from rlhf_triton.checkpoints.heads import FORMS, NORM, NORMALISER, TRANSFORM, AttributeGate, Form, Head, Layers
from rlhf_triton.checkpoints.safetensors_header import TensorInfo, TensorInfos

T = TypeVar("T")
PAIRWISE = "head_layer"  # PairRM's
# Tensors without effect on a score: output layers of language models, and buffers that transformers computes.
OUTPUT = re.compile(r"(lm_head|embed_out)\.(weight|bias)")  # harmless if it has an output for each token
HARMLESS = re.compile(
    r"(lm_predictions|mask_predictions|cls\.predictions|cls\.seq_relationship)\.[\w.]+"
    r"|.*(\.inv_freq|\.masked_bias|position_ids|token_type_ids)"
    r"|(\w+\.)*(global_step|steps?|epochs?|\w*num_updates|num_batches_tracked)"
)
MASK = re.compile(r".*\.(attn|attention)\.bias")  # a causal mask if it has four dimensions
LIKE_A_HEAD = re.compile(r"head|score|regress|gating|normali[sz]er|reward|value|weights|out_proj|classif|linear|cls")
IN_BODY = re.compile(r"(^|\.)\d+\.|emb|wte|wpe|norm|pooler")  # names of layers, embeddings, norms
WRAPPED = ("module.", "_orig_mod.")  # prefixes of all names from DistributedDataParallel and torch.compile


def find_head(config: Mapping[str, Any], tensors: TensorInfos) -> Head | None:
    """Return the head among the tensors of a checkpoint; None if there is none.

    Raises:
        ValueError: there are several heads, a head is incomplete, or tensor shapes and config.json contradict each
            other.
    """
    named = read_key(config, "value_head_prefix", str, "")  # written by OpenRLHF
    is_token = any("TokenClassification" in str(name) for name in read_key(config, "architectures", list, []))
    own = (Form(models="", prefixes=(named,), formula=""),) if named else ()
    distinct: list[Head] = []
    for form in (*own, *(form for form in FORMS if is_token or form.kind != "token")):
        if not (form.pooled and is_token):
            heads = _heads_of(form, config, tensors)
            distinct += [
                head for head in heads if all(head.layers.names != earlier.layers.names for earlier in distinct)
            ]
    if not distinct:
        return None
    head, *others = distinct
    prefixes = ", ".join(candidate.prefix for candidate in distinct)
    if named and head.prefix != named:
        raise ValueError(
            f"value_head_prefix: {named} in config.json names no layer; set it to {prefixes}, or remove it"
        )
    if others and not named:
        raise ValueError(
            f"it has {len(distinct)} heads, {prefixes}; set value_head_prefix in config.json to the trained one"
        )
    # Ignored because of value_head_prefix.
    unread = [name for name in tensors if any(other.owns(name) for other in others)]
    head = replace(head, others=(*head.others, *sorted(unread)))
    return replace(head, kind="token") if is_token and head.kind == "sequence" else head


def _heads_of(form: Form, config: Mapping[str, Any], tensors: TensorInfos) -> Iterator[Head]:
    """Yield the heads of this form among the tensors. Raises ValueError as `find_head`."""
    rule = form.gate
    gate = None if rule is None else _layers(rule.prefix, rule.activation, tensors, latest=0)
    if rule is not None and (gate is None or not tensors.keys() >= {*rule.others}):
        return
    for prefix in form.prefixes:
        layers = _layers(prefix, form.activation, tensors)
        if layers is None:
            continue
        if len(layers.names) > 1:
            layers = replace(layers, activation=activation_of(prefix, form.activation, config))
        outputs = tensors[f"{layers.names[-1]}.weight"].shape[0]
        others = NORMALISER if "do_normalize" in config else ()
        head = Head(form=form, kind=form.kind, prefix=prefix, layers=layers, num_labels=outputs, others=others)
        if gate is None or rule is None:
            named: Any = config.get("pooling")
            yield replace(head, pooling=named) if named in ("last", "mean") and not form.pooled else head
            continue
        yield replace(
            head,
            num_labels=1,
            gate=gate,
            group=_group(head, gate, config, tensors),
            temperature=_temperature(rule, config),
            others=(*head.others, *rule.others),
        )


def _temperature(rule: AttributeGate, config: Mapping[str, Any]) -> float | None:
    if rule.softmax is None or (rule.softmax and not read_key(config, rule.softmax, bool, False)):
        return None
    key, default = rule.temperature
    temperature = read_key(config, key, float, default)
    if temperature <= 0:
        raise ValueError(f"config.json: {key} is {temperature:g}, must be above 0")
    return temperature


def _layers(prefix: str, activation: str, tensors: TensorInfos, *, latest: int = 1) -> Layers | None:
    """Return the layer `prefix`, or the layers `prefix.0`, `prefix.2`, ... of a `Sequential`; None if there are none.

    `latest`: largest number that the first layer may have.
    """
    numbered = re.compile(re.escape(prefix) + r"\.(\d+)\.(?:weight|bias|running_\w+)")
    numbers = sorted({int(match[1]) for name in tensors if (match := numbered.fullmatch(name))})
    if f"{prefix}.weight" in tensors:
        _check_layer(prefix, tensors, None)
        return Layers((prefix,), activation)
    if not numbers:
        return None
    norms = {n for n in numbers if f"{prefix}.{n}.running_mean" in tensors}
    linear = [n for n in numbers if n not in norms]
    steps = {b - a for a, b in itertools.pairwise(linear)}
    # In a `Sequential`, there is an activation between two layers, perhaps with a dropout or a normalisation, and at
    # most a dropout before the first layer. Gates that apply their activation themselves number only linear layers.
    allowed = {2, 3} if "gating" not in prefix else {1, 3}
    if linear[0] > latest or steps - allowed or (norms and norms != {n + 2 for n in linear[:-1]}):
        raise ValueError(
            f"the head {prefix} is not a sequence of linear layers with activations in between: its tensors belong to "
            f"{', '.join(f'{prefix}.{n}' for n in numbers)}; copy the checkpoint again"
        )
    width = None
    for n in numbers:
        if n not in norms:
            width = _check_layer(f"{prefix}.{n}", tensors, width)
        elif missing := {f"{prefix}.{n}.{part}" for part in NORM} - tensors.keys():
            raise ValueError(f"the head has no {min(missing)}; copy the checkpoint again")
    return Layers(tuple(f"{prefix}.{n}" for n in numbers), activation)


def _check_layer(name: str, tensors: TensorInfos, width: int | None) -> int:
    """Return the number of outputs of a linear layer. Raises ValueError unless it has `width` inputs (None: any)."""
    weight = tensors.get(f"{name}.weight")
    bias = tensors.get(f"{name}.bias")
    if weight is None:
        raise ValueError(f"the head has no {name}.weight; copy the checkpoint again")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise ValueError(shape_error(f"{name}.weight", weight, "[num_labels, hidden], both above 0"))
    if width is not None and weight.shape[1] != width:
        raise ValueError(
            shape_error(f"{name}.weight", weight, f"[outputs, {width}] for the outputs of the layer before it")
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(shape_error(f"{name}.bias", bias, f"[{weight.shape[0]}], one number per row of {name}.weight"))
    return weight.shape[0]


def shape_error(name: str, tensor: TensorInfo, expected: str) -> str:
    """Return the error message for a head's tensor with an unexpected shape."""
    return (
        f"the head's tensor {name} has shape {list(tensor.shape)}, expected {expected}; save the checkpoint again with "
        "save_pretrained of the model that it was trained with"
    )


def _group(head: Head, gate: Layers, config: Mapping[str, Any], tensors: TensorInfos) -> int:
    """Return the number of outputs per attribute of a gated head. Raises ValueError if head and gate do not fit."""
    count = tensors[f"{gate.names[-1]}.weight"].shape[0]
    size = head.form.size
    group = read_key(config, size, int, 1) if isinstance(size, str) else size
    transform = tensors[TRANSFORM].shape if TRANSFORM in tensors else (count, count)
    width, gate_width = (tensors[f"{layers.names[0]}.weight"].shape[1] for layers in (head.layers, gate))
    if width != gate_width:
        raise ValueError(
            f"the gate {gate.names[0]} has {gate_width} inputs, but {head.prefix} has {width}; copy the checkpoint "
            "again"
        )
    if head.num_labels != count * group or transform != (count, count):
        raise ValueError(
            f"{head.prefix} has {head.num_labels} outputs, the gate {gate.names[-1]} has {count} with {group} outputs "
            f"each, and {TRANSFORM} is {list(transform)}: these shapes do not fit; copy the checkpoint again"
        )
    return group


def layers_path(names: Iterable[str]) -> str:
    """Return the path of a body's list of layers, such as `model.layers` for `model.layers.0.mlp...`; "" if none."""
    paths = Counter(match[1] for name in names if (match := re.match(r"(.+?)\.\d+\.", name)))
    return paths.most_common(1)[0][0] if paths else ""


def wrapper_of(config: Mapping[str, Any], tensors: TensorInfos) -> str:
    """Return the prefix that a wrapper such as DistributedDataParallel has added to all names; "" if none.

    The body's own name, if all names start with it, is a wrapper only if the head's names start with it as well.
    """
    prefix = ""
    while (common := _common_root(tensors, prefix)) in WRAPPED:
        prefix += common
    wrapper = prefix
    while (common := _common_root(tensors, prefix)) and find_head(config, unwrapped(tensors, prefix)) is None:
        prefix += common
    return prefix if find_head(config, unwrapped(tensors, prefix)) is not None else wrapper


def unwrapped(tensors: Mapping[str, T], wrapper: str) -> dict[str, T]:
    """Return the tensors by their names without the prefix `wrapper`."""
    return {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}


def _common_root(names: Iterable[str], prefix: str) -> str:
    """Return the part that follows `prefix` in all names, including its dot; "" if the names differ there."""
    roots = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    return f"{roots.pop()}." if len(roots) == 1 and all("." in name.removeprefix(prefix) for name in names) else ""


def copies(head: Head | None, names: Iterable[str]) -> dict[str, str]:
    """Return name -> original name of the tensors that duplicate a model's body or head under another name.

    Starling's class, for example, stores the layers of its language model twice. The loader compares whether the
    tensors are in fact equal.
    """
    rest = {*names}
    owned = {name for name in rest if head is not None and head.owns(name)}
    originals = {name: own for own in owned for name in rest if name.endswith(f".{own}")}
    for root in sorted({name.partition(".")[0] for name in rest}):
        here = {name for name in rest if name.startswith(f"{root}.")}
        inner = {name[dot.end() :]: name for name in sorted(rest - here) for dot in re.finditer(r"^|\.", name)}
        again = {name: own for name in here if (own := inner.get(name.removeprefix(f"{root}."))) is not None}
        if again.keys() == here and "." in layers_path(here):
            originals |= again
            rest -= here
    return originals


def may_be_head(tensors: TensorInfos, vocab_size: int | None) -> list[str]:
    """Return the prefixes of linear layers, single or in sequence, outside the body, which may be an unknown head."""
    prefixes = {
        re.sub(r"(\.\d+)?\.weight$", "", name)
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.shape[0] < (vocab_size or math.inf)
        and not is_harmless(name, tensor, vocab_size)
    }
    return sorted(prefix for prefix in prefixes if not IN_BODY.search(f"{prefix}."))


def is_harmless(name: str, tensor: TensorInfo | None, vocab_size: int | None) -> bool:
    """Return whether a tensor that a model does not use has no effect on its outputs."""
    shape = () if tensor is None else tensor.shape
    if OUTPUT.fullmatch(name):
        return not shape or shape[0] >= (vocab_size or 0)
    return bool(HARMLESS.fullmatch(name) or (len(shape) == 4 and MASK.fullmatch(name)))
