"""The table of published heads: the tensors of each, how they are computed, and what its outputs mean; no torch."""

from dataclasses import dataclass
from typing import Literal

HeadKind = Literal["sequence", "token", "value"]
Pooling = Literal["auto", "last", "mean"]  # of a head on each token; the functions are in `models.readout.POOLS`
Reading = Literal["mean", "first", "bins"]
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
