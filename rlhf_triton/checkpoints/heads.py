"""The table of published head forms: their tensors, their formulas, and the meaning of their outputs; no torch."""

from dataclasses import dataclass
from typing import Literal

HeadKind = Literal["sequence", "token", "value"]
Pooling = Literal["auto", "last", "mean"]  # for heads on each token; the functions are in `models.readout.POOLS`
Reduction = Literal["mean", "first", "bins"]
BINS = 10  # bins of LDL's distribution over an attribute's values
TRANSFORM = "reward_transform_matrix"
SCALE = "gating.logit_scale"
MODEL_TYPES = {"gpt_neox_reward_model": "gpt_neox"}  # model type of a checkpoint's own class -> model type of its body
NORMALISER = ("normalizer.mean", "normalizer.var", "normalizer.count")  # beaver's; see `inspection.Constants`
NORM = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True, kw_only=True)
class AttributeGate:
    """A gating network: layers that compute each attribute's weight in the reward from a hidden state."""

    prefix: str  # names of the gate's layers begin with it
    activation: str
    at_turn: bool = False  # True: the gate reads the start of the last answer's header; False: the scored token
    others: tuple[str, ...] = ()  # further tensors of the gate
    softmax: str | None = None  # key of config.json that turns the softmax on; "": always on; None: never
    temperature: tuple[str, float] = ("", 1.0)  # config.json's key of the softmax's temperature, and its default


@dataclass(frozen=True, kw_only=True)
class Form:
    """A published form of head; a row of the table in docs/your-models.md."""

    models: str  # checkpoints or trainers with this form, for the documentation
    prefixes: tuple[str, ...]  # prefixes of the output layers' names; the first one that exists counts
    formula: str  # for the documentation
    kind: HeadKind = "value"
    activation: str = "relu"  # between layers, unless config.json names another one
    reduction: Reduction = "mean"  # how several outputs of an attribute become one number
    size: str | int = 1  # outputs per attribute, or the key of config.json with this number
    gate: AttributeGate | None = None
    pooled: bool = False  # transformers' class pools, and has further layers before the head


LAST = "the layers at the last token"
FORMS = (
    Form(
        models="ArmoRM; QRM for Llama 3 and 3.1",
        prefixes=("regression_layer",),
        size="num_quantiles",
        gate=AttributeGate(
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
        reduction="first",
        size=2,
        gate=AttributeGate(prefix="weights.fc", activation="selu"),
        formula="sum of every other output (means and standard deviations alternate), weighted by `weights.fc` (SELU)",
    ),
    Form(
        models="LDL-Reward-Gemma-2-27B, converted to `regression_layer.safetensors` and `gating_layer.safetensors`",
        prefixes=("regression_layer.network",),
        activation="leaky_relu",
        reduction="bins",
        size=BINS,
        gate=AttributeGate(
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
GATE_HEADERS: dict[str, tuple[str, tuple[int, ...]]] = {
    "llama": ("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", (128009, 128006, 78191, 128007, 271)),
    "gemma2": ("<end_of_turn>\n<start_of_turn>model\n", (107, 108, 106, 2516, 108)),
}


@dataclass(frozen=True)
class Layers:
    """A head's linear layers and normalisations, in order, with an activation in between."""

    names: tuple[str, ...]  # prefixes of the layers' tensors
    activation: str


@dataclass(frozen=True, kw_only=True)
class Head:
    """The trained head of a checkpoint: layers whose outputs are labels, attributes or a reward."""

    form: Form
    kind: HeadKind  # scores sequences, scores tokens, or a value head on a language model
    prefix: str
    layers: Layers
    num_labels: int  # number of outputs; 1 with a gate
    gate: Layers | None = None
    group: int = 1  # the layers' outputs per attribute: quantiles, bins, or mean and standard deviation
    temperature: float | None = None  # for the gate's softmax; None: no softmax
    others: tuple[str, ...] = ()  # tensors outside the layers: of the gate, and of the standardisation constants
    pooling: Pooling = "auto"  # as in config.json; `auto`: not stated

    @property
    def is_plain(self) -> bool:
        """Whether the head maps each token's hidden state directly to the labels, without gate or own pooling."""
        return self.gate is None and not self.form.pooled

    def owns(self, name: str) -> bool:
        """Return whether a tensor belongs to the head. Tensors of pooling layers do not."""
        gated = () if self.gate is None else self.gate.names
        layer, _, part = name.rpartition(".")
        # Only numbered layers may be normalisations. Any other part, such as a scale, implies another formula.
        parts = (*NORM, "num_batches_tracked") if layer.rpartition(".")[2].isdigit() else NORM[:2]
        return name in self.others or (part in parts and layer in (*self.layers.names, *gated))
