"""The table of published heads: the tensors of each, how they are computed, and what its outputs mean; no torch.

A head is found by its tensors. A class name decides nothing but the position of a `classifier`, which transformers'
token and sequence classes share.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from python_backend.checkpoints.config_keys import read_key
from python_backend.checkpoints.safetensors_header import TensorInfo

T = TypeVar("T")
HeadKind = Literal["sequence", "token", "value"]
Pooling = Literal["auto", "last", "mean"]  # of a head on each token; the functions are in `models.token_head.POOLS`
Reading = Literal["mean", "first", "bins"]
ACTIVATIONS = ("relu", "selu", "gelu", "tanh", "leaky_relu", "silu")
BINS = 10  # of LDL's distribution of an attribute
TRANSFORM, SCALE = "reward_transform_matrix", "gating.logit_scale"
MODEL_TYPES = {"gpt_neox_reward_model": "gpt_neox"}  # of checkpoints' own classes -> of their bodies
NORMALISER = ("normalizer.mean", "normalizer.var", "normalizer.count")  # beaver's; see `inspection.Constants`
NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A gate: layers that compute, from a hidden state, the weight of each attribute in the reward."""

    prefix: str  # of its layers
    activation: str
    at_turn: bool = False  # it reads the start of the last answer's header, otherwise the token of the score
    others: tuple[str, ...] = ()  # its further tensors
    softmax: str | None = None  # key of config.json that says whether its weights are a softmax; "": they are; None: no
    temperature: tuple[str, float] = ("", 1.0)  # key of the softmax's temperature in config.json, and default


@dataclass(frozen=True, kw_only=True)
class Form:
    """A published form of head; a row of the table in docs/your-models.md."""

    models: str  # checkpoints or trainers that have it, for the documentation
    prefixes: tuple[str, ...]  # of the layers that compute the outputs; the first that a folder has counts
    formula: str  # for the documentation
    kind: HeadKind = "value"
    activation: str = "relu"  # between layers, unless config.json names another one
    reading: Reading = "mean"  # how the outputs of an attribute, if it has several, become one
    size: str | int = 1  # outputs of an attribute, or the key of config.json that has their number
    gate: Gate | None = None
    pooled: bool = False  # behind layers of transformers' own class, which also chooses the token


LAST = "the layers at the last token"
FORMS = (
    Form(
        models="ArmoRM; QRM for Llama 3 and 3.1",
        prefixes=("regression_layer",),
        size="num_quantiles",
        gate=Gate(
            prefix="gating.layers",
            activation="relu",
            at_turn=True,
            others=(TRANSFORM, SCALE),
            softmax="",
            temperature=("gating_temperature", 10.0),
        ),
        formula="sum of `outputs @ reward_transform_matrix` (of QRM the means of `num_quantiles` outputs), weighted by "
        "`logit_scale * softmax(gating / gating_temperature)`, computed where the header of the last answer begins",
    ),
    Form(
        models="URM-LLaMa-3.1-8B",
        prefixes=("score",),
        reading="first",
        size=2,
        gate=Gate(prefix="weights.fc", activation="selu"),
        formula="sum of every other output (means and standard deviations alternate), weighted by `weights.fc` (SELU)",
    ),
    Form(
        models="LDL-Reward-Gemma-2-27B, converted to `regression_layer.safetensors` and `gating_layer.safetensors`",
        prefixes=("regression_layer.network",),
        activation="leaky_relu",
        reading="bins",
        size=BINS,
        gate=Gate(
            prefix="gating_layer.network",
            activation="leaky_relu",
            softmax="softmax",
            temperature=("temperature", 1.0),
        ),
        formula=f"sum of the attributes' expected values over {BINS} bins from 0 to 1, weighted by `gating_layer`",
    ),
    Form(
        models="TRL, trlX, LLaMA-Factory, GRM (sftreg), Skywork-o1-Open-PRM, Starling, Athene, DeepSpeed-Chat",
        prefixes=("v_head.summary", "v_head"),
        formula=LAST,
    ),
    Form(
        models="OpenRLHF (or as the config's `value_head_prefix` says), Eurus-RM, UltraRM, beaver",
        prefixes=("value_head", "regression_head", "score_head", "reward_head", "rm_head", "regression_layer"),
        formula=LAST,
    ),
    Form(
        models="OpenAssistant's reward models on Pythia",
        prefixes=("out_proj",),
        formula=f"{LAST}, or their mean over all, as the config's `pooling` says",
    ),
    Form(
        models="transformers' classes for sequences; TRL, Skywork-Reward, GRM (ft), INF-ORM, Qwen2.5-Math-RM and -PRM, "
        "WorldPM, HALOs, Tülu, AceMath, FsfairX and many more",
        prefixes=("score",),
        kind="sequence",
        formula=LAST,
    ),
    Form(
        models="transformers' classes for tokens; TRL's `PRMTrainer`",
        prefixes=("classifier",),
        kind="token",
        formula="the layers at the last token, or at each step",
    ),
    Form(
        models="transformers' classes for sequences on encoders: BERT, DeBERTa, RoBERTa, ModernBERT, XLNet, ...",
        prefixes=("classifier", "classifier.out_proj", "logits_proj"),
        kind="sequence",
        pooled=True,
        formula="the class's own pooling, with its layers (`pooler.dense`, `head.dense`, `head.norm`, ...)",
    ),
)
# model_type -> header of an answer in its chat template, and the header's token ids in the published checkpoints
GATES = {
    "llama": ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", (128009, 128006, 78191, 128007, 271)),
    "gemma2": ("<end_of_turn>\n<start_of_turn>model\n", (107, 108, 106, 2516, 108)),
}
PAIRWISE = "head_layer"  # PairRM's
# Tensors without effect on a score: output layers of language models, and buffers that transformers computes.
OUTPUT = re.compile(r"(lm_head|embed_out)\.(weight|bias)")  # if it has an output for each token
HARMLESS = re.compile(
    r"(lm_predictions|mask_predictions|cls\.predictions|cls\.seq_relationship)\.[\w.]+"
    r"|.*(\.inv_freq|\.masked_bias|position_ids|token_type_ids)"
    r"|(\w+\.)*(global_step|steps?|epochs?|\w*num_updates|num_batches_tracked)"
)
MASK = re.compile(r".*\.(attn|attention)\.bias")  # a causal mask, if it has four dimensions
LIKE_A_HEAD = re.compile(r"head|score|regress|gating|normali[sz]er|reward|value|weights|out_proj|classif|linear|cls")
IN_BODY = re.compile(r"(^|\.)\d+\.|emb|wte|wpe|norm|pooler")  # of names of layers, embeddings, norms
WRAPPED = ("module.", "_orig_mod.")  # before every name: of DistributedDataParallel, of torch.compile
# Keys of config.json that say what a head computes beside its layers: how it pools, an activation, a normalisation.
SAYS = re.compile(
    r"(?!hidden_|activation_function|gelu_activation|\w*dropout)(?:\w+_)?"
    r"(?:pool\w*|summary_type|act|act_fn|activation\w*|sigmoid|tanh|normali[sz]\w*)|function_to_apply"
    r"|(?:\w+_)?(?:reward|score|v?head|value|classifier)_"
    r"(?:layer_?|batch_?)?(?:norm|mean|std|var|scale|shift|offset|clip|temperature)"
)
# Values of such keys that change nothing: BERT's class has a pooler of the first token, and GPT's has `cls_index`.
NOTHING = ("", "none", "identity", "linear", "last", "lasttoken", "firsttokentransform", "clsindex")
OF_TRAINING = ("normalizer_type", "normalize_function")  # Safe RLHF's, of how the constants were found


@dataclass(frozen=True)
class Layers:
    """Linear layers of a head, in order, with an activation between them."""

    names: tuple[str, ...]  # prefixes of the layers' tensors, those of normalisations included
    activation: str


@dataclass(frozen=True, kw_only=True)
class Head:
    """The trained head of a checkpoint: layers whose outputs are labels, attributes or a reward."""

    form: Form
    kind: HeadKind  # one output per sequence, one per token, or a value head on a language model
    prefix: str
    layers: Layers
    num_labels: int  # outputs: labels, or 1 behind a gate
    gate: Layers | None = None
    group: int = 1  # outputs of the layers for each attribute: quantiles, bins, or mean and standard deviation
    temperature: float | None = None  # of the gate's softmax; None: it has none
    others: tuple[str, ...] = ()  # tensors that are no layers: the gate's, and those of the constants
    pooling: Pooling = "auto"  # what config.json says; `auto`: nothing

    @property
    def is_plain(self) -> bool:
        """Whether it is applied to the body's hidden states at each token, and its outputs are the labels."""
        return self.gate is None and not self.form.pooled

    def owns(self, name: str) -> bool:
        """Return whether a tensor belongs to the head; those of pooling layers belong to transformers' class."""
        gated = () if self.gate is None else self.gate.names
        layer, _, part = name.rpartition(".")
        # Only numbered layers may be normalisations. Any other part, such as a scale, would be of another formula.
        parts = (*NORM, "num_batches_tracked") if layer.rpartition(".")[2].isdigit() else NORM[:2]
        return name in self.others or (part in parts and layer in (*self.layers.names, *gated))


def find_head(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Head | None:
    """Return the head that the tensors of a checkpoint form; None if they form none.

    Raises:
        ValueError: a head lacks a tensor, or its shapes or config.json contradict each other.
    """
    named = read_key(config, "value_head_prefix", str, "")  # written by OpenRLHF
    is_token = any("TokenClassification" in str(name) for name in read_key(config, "architectures", list, []))
    own = (Form(models="", prefixes=(named,), formula=""),) if named else ()
    found: list[Head] = []
    for form in (*own, *(form for form in FORMS if is_token or form.kind != "token")):
        if not (form.pooled and is_token):
            heads = _found(form, config, tensors)
            found += [head for head in heads if all(head.layers.names != known.layers.names for known in found)]
    if not found:
        return None
    head, *others = found
    if others and head.prefix != named:
        prefixes = ", ".join(each.prefix for each in found)
        raise ValueError(
            f"it has {len(found)} heads, {prefixes}; set value_head_prefix in config.json to the one that is trained"
        )
    unread = [name for name in tensors if any(other.owns(name) for other in others)]  # as value_head_prefix says
    head = replace(head, others=(*head.others, *sorted(unread)))
    return replace(head, kind="token") if is_token and head.kind == "sequence" else head


def _found(form: Form, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Iterator[Head]:
    """Yield the heads of this form. Raises ValueError as `find_head`."""
    rule = form.gate
    gate = None if rule is None else _layers(rule.prefix, rule.activation, tensors, latest=0)
    if rule is not None and (gate is None or not tensors.keys() >= {*rule.others}):
        return
    for prefix in form.prefixes:
        layers = _layers(prefix, form.activation, tensors)
        if layers is None:
            continue
        if len(layers.names) > 1:
            layers = replace(layers, activation=_activation(form, prefix, config))
        _check_count(prefix, len(layers.names), config)
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


def _temperature(rule: Gate, config: Mapping[str, Any]) -> float | None:
    if rule.softmax is None or (rule.softmax and not read_key(config, rule.softmax, bool, False)):
        return None
    key, default = rule.temperature
    found = read_key(config, key, float, default)
    if found <= 0:
        raise ValueError(f"config.json: {key} is {found:g}, must be above 0")
    return found


def _check_count(prefix: str, count: int, config: Mapping[str, Any]) -> None:
    """Compare the number of layers with GRM's keys of config.json."""
    is_linear = read_key(config, "vhead_layer_type", str, "") == "linear"
    hidden = 0 if is_linear else read_key(config, "vhead_num_layers", int, None)
    if prefix == "v_head.summary" and hidden is not None and hidden + 1 != count:
        raise ValueError(
            f"config.json (vhead_num_layers) has {hidden + 1} layers in the head {prefix}, the file {count}"
        )


def _layers(prefix: str, activation: str, tensors: Mapping[str, TensorInfo], *, latest: int = 1) -> Layers | None:
    """Return the layer `prefix`, or the layers `prefix.0`, `prefix.2`, ... of a `torch.nn.Sequential`; None if none.

    `latest`: the largest number that the first one may have.
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
    # In a `Sequential`, an activation is between two layers, and perhaps a dropout or a normalisation, and before the
    # first one a dropout at most. Gates that apply their activation themselves count their linear layers alone.
    allowed = {2, 3} if "gating" not in prefix else {1, 3}
    if linear[0] > latest or steps - allowed or (norms and norms != {n + 2 for n in linear[:-1]}):
        raise ValueError(
            f"the head {prefix} is no sequence of layers with activations between them: it has tensors of "
            f"{', '.join(f'{prefix}.{n}' for n in numbers)}; copy the checkpoint again"
        )
    width = None
    for n in numbers:
        if n not in norms:
            width = _check_layer(f"{prefix}.{n}", tensors, width)
        elif lacking := {f"{prefix}.{n}.{part}" for part in NORM} - tensors.keys():
            raise ValueError(f"the head lacks {min(lacking)}; copy the checkpoint again")
    return Layers(tuple(f"{prefix}.{n}" for n in numbers), activation)


def _check_layer(name: str, tensors: Mapping[str, TensorInfo], width: int | None) -> int:
    """Return the number of outputs of a linear layer with `width` inputs (None: any)."""
    weight, bias = tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")
    if weight is None:
        raise ValueError(f"the head lacks {name}.weight; copy the checkpoint again")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise ValueError(shape_error(f"{name}.weight", weight, "[num_labels, hidden], both above 0"))
    if width is not None and weight.shape[1] != width:
        raise ValueError(shape_error(f"{name}.weight", weight, f"[outputs, {width}], as the layer before it returns"))
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            shape_error(f"{name}.bias", bias, f"[{weight.shape[0]}], one number for each row of {name}.weight")
        )
    return weight.shape[0]


def shape_error(name: str, found: TensorInfo, expected: str) -> str:
    """Return the message for a head's tensor whose shape is not the expected one."""
    return (
        f"the head's tensor {name} has shape {list(found.shape)}, expected {expected}; save the checkpoint again with "
        "save_pretrained of the model that it was trained with"
    )


def _group(head: Head, gate: Layers, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> int:
    """Return the number of outputs for each attribute behind a gate. Raises ValueError if its parts do not fit."""
    count, size = tensors[f"{gate.names[-1]}.weight"].shape[0], head.form.size
    group = read_key(config, size, int, 1) if isinstance(size, str) else size
    transform = tensors[TRANSFORM].shape if TRANSFORM in tensors else (count, count)
    wide, read = (tensors[f"{layers.names[0]}.weight"].shape[1] for layers in (head.layers, gate))
    linear = sum(len(tensors[f"{name}.weight"].shape) == 2 for name in gate.names)
    hidden = read_key(config, "gating_n_hidden", int, linear - 1)
    if wide != read or hidden != linear - 1:
        raise ValueError(
            f"the gate {gate.names[0]} has {linear} layers and reads {read} numbers, but {head.prefix} reads {wide}, "
            f"and gating_n_hidden in config.json is {hidden}: they do not fit together"
        )
    if head.num_labels != count * group or transform != (count, count):
        raise ValueError(
            f"{head.prefix} has {head.num_labels} outputs, the gate {gate.names[-1]} {count}, with {group} of the "
            f"former for each of the latter, and {TRANSFORM} is {list(transform)}: they do not fit together"
        )
    return group


def _activation(form: Form, prefix: str, config: Mapping[str, Any]) -> str:
    """Return the activation between a head's layers: as config.json names it, or that of the published form."""
    named = {key: _plain(config[key]) for key in _activation_keys(prefix, config)}
    known = {_plain(name): name for name in ACTIVATIONS}
    if wrong := [key for key, value in named.items() if value not in known]:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"config.json: {wrong[0]} is {config[wrong[0]]!r}, but a head's activation is one of {names}")
    if len({*named.values()}) > 1:
        both = " and ".join(f"{key}: {config[key]!r}" for key in named)
        raise ValueError(f"config.json says {both}, of one head ({prefix}); remove the wrong one")
    return next((known[value] for value in named.values()), form.activation)


def _activation_keys(prefix: str, config: Mapping[str, Any]) -> list[str]:
    """Return the keys of config.json that name the activation between a head's layers."""
    stem = prefix.partition(".")[0]
    keys = re.compile(rf"({stem}|{stem.replace('_', '')}|head)_act\w*")
    return sorted(key for key, value in config.items() if keys.fullmatch(key) and value is not None)


def _plain(name: Any) -> str:
    """Return the last part of a name in config.json, without signs: of `torch.nn.LeakyReLU`, leakyrelu."""
    return re.sub(r"[^a-z0-9]", "", str(name).rpartition(".")[2].lower())


def said_of_head(head: Head | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says of the head's outputs in keys that its row of the table does not read.

    Some are keys of transformers' own classes, whose defaults say nothing; see `models.loading.placed_head`.
    """
    if head is None:
        return {}
    config = {**read_key(config, "sentence_transformers", dict, {}), **config}  # its cross-encoders' keys
    read = {"normalize_reward", "do_normalize", *OF_TRAINING}
    if len(head.layers.names) > 1:
        read |= {*_activation_keys(head.prefix, config)}
    said = {key: config[key] for key in sorted(config.keys() - read) if SAYS.fullmatch(key)}
    return {key: value for key, value in said.items() if not _says_nothing(key, value)}


def _says_nothing(key: str, value: Any) -> bool:
    if type(value) in (int, float):
        is_factor = re.search(r"(scale|std|var|temperature)$", key) is not None
        return "pool" in key or value == int(is_factor)
    return value is None or value is False or (isinstance(value, str) and _plain(value) in NOTHING)


def layers_path(names: Iterable[str]) -> str:
    """Return the path of a body's list of layers, such as `model.layers` of `model.layers.0.mlp...`; "" if none."""
    paths = Counter(match[1] for name in names if (match := re.match(r"(.+?)\.\d+\.", name)))
    return paths.most_common(1)[0][0] if paths else ""


def wrapper_of(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Return what a wrapper around the model, such as DistributedDataParallel, put before all names; "" if nothing.

    All names of a bare body may begin with its own name as well, which is then left there, unless a head does, too.
    """
    prefix = ""
    while (common := _common_root(tensors, prefix)) in WRAPPED:
        prefix += common
    wrapper = prefix
    while (common := _common_root(tensors, prefix)) and find_head(config, unwrapped(tensors, prefix)) is None:
        prefix += common
    return prefix if find_head(config, unwrapped(tensors, prefix)) is not None else wrapper


def unwrapped(tensors: Mapping[str, T], wrapper: str) -> dict[str, T]:
    """Return the tensors, by their names without `wrapper_of`."""
    return {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}


def _common_root(names: Iterable[str], prefix: str) -> str:
    """Return the part with which all names go on behind `prefix`, with its dot; "" if they differ."""
    roots = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    return f"{roots.pop()}." if len(roots) == 1 and all("." in name.removeprefix(prefix) for name in names) else ""


def loose_tensors(head: Head | None, tensors: Mapping[str, TensorInfo], vocab_size: int | None) -> list[str]:
    """Return the tensors beside the body that are not the head's: those that look like another's, or without it any.

    The loader of the weights knows exactly which tensors a model uses; this is known without it.
    """
    path = layers_path(tensors)
    root = path.partition(".")[0]
    if head is not None and (head.form.pooled or head.form.kind == "token"):  # their classes have layers of their own
        return []
    is_bare = "." not in path or root in ("encoder", "decoder")  # a body without a prefix
    return sorted(
        name
        for name, tensor in tensors.items()
        if (first := name.partition(".")[0]) != root
        and ((head is None and not is_bare) or LIKE_A_HEAD.search(first))
        and not is_harmless(name, tensor, vocab_size)
        and (head is None or not head.owns(name))
    )


def may_be_head(tensors: Mapping[str, TensorInfo], vocab_size: int | None) -> list[str]:
    """Return the prefixes of linear layers that no part of a body, but perhaps a head, would have."""
    return sorted(
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and len(tensor.shape) == 2
        and tensor.shape[0] < (vocab_size or math.inf)
        and not IN_BODY.search(name)
        and not is_harmless(name, tensor, vocab_size)
    )


def is_harmless(name: str, tensor: TensorInfo | None, vocab_size: int | None) -> bool:
    """Return whether a tensor that a model does not use has no effect on its outputs."""
    shape = () if tensor is None else tensor.shape
    if OUTPUT.fullmatch(name):
        return not shape or shape[0] >= (vocab_size or 0)
    return bool(HARMLESS.fullmatch(name) or (len(shape) == 4 and MASK.fullmatch(name)))
