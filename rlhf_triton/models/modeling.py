"""Reward model and critic: scores and values of token rows, loaded from Hugging Face checkpoints.

Shared by the server, the sidecar and the tests.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from rlhf_triton.checkpoints.heads import Head, Pooling
from rlhf_triton.checkpoints.inspection import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    CheckpointInfo,
    Constants,
    inspect_checkpoint,
    reward_head,
)
from rlhf_triton.models.adapters import MergedWeights
from rlhf_triton.models.batching import padded_rows
from rlhf_triton.models.collation import collate, limits_of
from rlhf_triton.models.gpu import to_host
from rlhf_triton.models.heads import GatedHead, ModelHead, merged
from rlhf_triton.models.loading import load_classifier, load_token_model
from rlhf_triton.models.mapped_tensors import check_finite, stored_tensors
from rlhf_triton.models.new_weights import check_same_architecture, twin_with_head, with_tensors
from rlhf_triton.models.readout import (
    POOLS,
    label_probabilities,
    log_odds,
    merge_attributes,
    pool_last,
    standardise,
)
from rlhf_triton.models.stored_heads import attribute_weights_of, placed_head, read_head
from rlhf_triton.models.token_head import TokenHead

if TYPE_CHECKING:  # slow to import, and needed only for models larger than one device
    from rlhf_triton.models.tensor_parallel import RankGroup

logger = logging.getLogger(__name__)
StandardizationChoice = Literal["model", "off"] | tuple[float, float]
TokenTypes = Sequence[np.ndarray | None]
"""The type of each token of a row (int64 `[length_i]`), such as 1 in the second text of BERT; None: all 0."""


class RewardModel:
    """A reward model: pools the head's outputs, combines them into one score and standardises it, in fp32."""

    def __init__(
        self,
        outputs: TokenHead,
        *,
        constants: Constants,
        pooling: str | None = "last",
        weights: Tensor | None = None,
        num_for: int | None = None,
        probability: bool = False,
        num_outputs: int = 1,
        skipped_pad_id: int | None = None,
        origin: CheckpointInfo | None = None,
        reload: Callable[..., RewardModel] | None = None,
    ) -> None:
        """
        Args:
            pooling: a key of `POOLS`; None: the model pools its outputs itself.
            weights: `[A]`; the score is the weighted sum of the outputs. None: no sum.
            num_for: the score is the log-odds of the first `num_for` outputs against the others. None: no log-odds.
            probability: return the sigmoid of the score.
            origin: the checkpoint that the model was loaded from.
            reload: `load_reward` with the same settings, for `with_weights`.
        """
        self.origin = origin
        self._reload = reload
        self.model = outputs.model
        self.num_outputs = num_outputs
        self.mean = constants.mean
        self.std = constants.std
        self.limits = limits_of(self.model)
        self.skipped_pad_id = skipped_pad_id  # stripped from the end of sentences, because transformers pools before it
        self._outputs = outputs
        self._pool = None if pooling is None else POOLS[pooling]
        self._weights = weights
        self._num_for = num_for
        self._probability = probability
        self.has_token_types = (getattr(self.model.config, "type_vocab_size", None) or 0) > 1

    @property
    def header(self) -> tuple[int, ...]:
        """Token ids that every row must contain to get a reward; () if there are none."""
        head = self._outputs.head
        pattern = head.pattern if isinstance(head, GatedHead) else None
        return () if pattern is None else tuple(pattern.tolist())

    @torch.no_grad()
    def score(self, rows: Sequence[np.ndarray], width: int | None = None, types: TokenTypes = ()) -> np.ndarray:
        """Return rewards float32 `[n, num_outputs]` of n token rows (int64 `[length_i]`).

        Runs one forward pass, padded to `width`.
        """
        return self.launch(rows, width, types)()[:, : self.num_outputs]

    @torch.no_grad()
    def launch(
        self, rows: Sequence[np.ndarray], width: int | None = None, types: TokenTypes = ()
    ) -> Callable[[], np.ndarray]:
        """Launch a forward pass; return a function that waits for its results.

        The results are float32 `[n, num_outputs + A]`: the rewards that `score` returns, then the head's A outputs.
        """
        token_types = []
        if self.has_token_types and any(row_types is not None and row_types.any() for row_types in types):
            type_rows = [np.zeros(0, np.int64) if row_types is None else row_types for row_types in types]
            token_types = [padded_rows(type_rows, width or max(row.size for row in rows), np.int64)]
        ids, attention, lengths, *placed_types = collate(rows, self.model.device, width, *token_types)
        named = {"token_type_ids": placed_types[0]} if placed_types else {}
        if self._pool is pool_last:
            scores = self._outputs.at_last(ids, attention, lengths, **named)
        else:
            scores = self._outputs(ids, attention, **named)
            scores = scores if self._pool is None else self._pool(scores, lengths)
        return to_host(torch.cat([self._scores(scores), scores], dim=1))

    @torch.no_grad()
    def launch_token_scores(
        self, rows: Sequence[np.ndarray], width: int | None = None
    ) -> Callable[[], list[np.ndarray]]:
        """Launch a forward pass, padded to `width`; return a function that waits for its results.

        The results are one array of scores float32 `[length_i]` per token row (int64 `[length_i]`), one score per
        token. Needs a linear head.
        """
        ids, attention, _ = collate(rows, self.model.device, width)
        return _by_rows(self._scores(self._outputs(ids, attention)).squeeze(-1), rows)

    def _scores(self, outputs: Tensor) -> Tensor:
        """Return the scores `[..., num_outputs]` of the head's outputs `[..., A]`."""
        if self._num_for is not None:
            outputs = log_odds(outputs, self._num_for)
        if self._weights is not None:
            outputs = merge_attributes(outputs, self._weights)
        return standardise(outputs.sigmoid() if self._probability else outputs, self.mean, self.std)

    def outputs_of(self, row: np.ndarray) -> np.ndarray:
        """Return the rewards float32 `[num_outputs]` of a token row (int64 `[length]`)."""
        return self.score([row])[0]

    def probabilities(self, scores: np.ndarray) -> np.ndarray:
        """Return the label probabilities float32 `[n, A]` for the head's outputs `[n, A]`."""
        return label_probabilities(torch.from_numpy(scores), self.model.config.problem_type).numpy()

    def check_finite(self) -> None:
        """Raise CheckpointError naming the first parameter that holds NaN or infinity."""
        check_finite(self.model)

    def with_weights(self, folder: Path) -> RewardModel:
        """Return a second model with the same settings and the weights and constants of another checkpoint.

        Raises:
            CheckpointError: architecture, head, names or shapes differ from this model's, or the file is damaged.
        """
        assert self._reload is not None
        return self._reload(folder, like=self)


class CriticModel:
    """A critic: one value per token, in fp32. The value at index t belongs to the state after token t."""

    stored_as: torch.dtype | None = None
    """Data type of the body in versions; None: float32. The head is always in float32."""
    header: tuple[int, ...] = ()
    """See `RewardModel.header`; every row has values."""

    def __init__(
        self,
        model: Any,
        *,
        constants: Constants | None = None,
        note: str = "",
        like: CriticModel | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self._group = group
        self.model = model.eval()
        self.mean = (constants or Constants()).mean
        self.std = (constants or Constants()).std
        loaded_head = None if like is None else like._token_head
        self._token_head: TokenHead = TokenHead(model, like=loaded_head)
        self.limits = limits_of(model)
        self.note = note  # the origin of the value head, for logs and reports

    @torch.no_grad()
    def values(self, rows: Sequence[np.ndarray], width: int | None = None) -> list[np.ndarray]:
        """Return values float32 `[length_i]` of each token row (int64 `[length_i]`).

        Runs one forward pass, padded to `width`.
        """
        return self.launch(rows, width)()

    def outputs_of(self, row: np.ndarray) -> np.ndarray:
        """Return the values float32 `[length]` of a token row (int64 `[length]`)."""
        return self.values([row])[0]

    @torch.no_grad()
    def launch(self, rows: Sequence[np.ndarray], width: int | None = None) -> Callable[[], list[np.ndarray]]:
        """Launch the forward pass of `values`; return a function that waits for its results."""
        ids, attention, _ = collate(rows, self.model.device, width)
        return _by_rows(self.forward(ids, attention), rows)

    def forward(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Return standardised values `[B, S]` of `ids` `[B, S]` with attention mask `[B, S]`; differentiable."""
        values = self.outputs(ids, attention).squeeze(-1)
        at_least_fp32 = torch.promote_types(values.dtype, torch.float32)
        return standardise(values.to(at_least_fp32), self.mean, self.std)

    def outputs(self, ids: Tensor, attention: Tensor) -> Tensor:
        """Return the head's outputs `[B, S, 1]`, before standardisation."""
        return self._token_head(ids, attention)

    def check_finite(self) -> None:
        """Raise CheckpointError naming the first parameter that holds NaN or infinity."""
        check_finite(self.model)

    def own_weights(self) -> None:
        """Copy the trainable weights out of the mapped file, so that training can change them."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.clone()

    def weights(self) -> MergedWeights:
        """Return the weights by name, in the dtypes that a version stores."""
        return MergedWeights(self.model, self.stored_as, ModelHead(self.model).module)

    def write(self, folder: Path) -> Mapping[str, str] | None:
        """Write weights, configuration and constants (model.safetensors, config.json), a version of the critic.

        Returns the digest of each weights file, None if none was computed.
        """
        digest = self.weights().write(folder / WEIGHTS_FILE)
        write_config(self, folder)
        return {WEIGHTS_FILE: digest}

    def with_weights(self, folder: Path) -> CriticModel:
        """Return a second critic of the same architecture and dtypes with the weights and constants in `folder`.

        On a CPU, weights that the file stores in the same dtype stay memory-mapped.

        Raises:
            CheckpointError: names or shapes differ from this critic's, or the file is damaged.
        """
        info = inspect_checkpoint(folder)
        check_same_architecture(self.model.config.to_dict(), info)
        if self._group is None:
            model = with_tensors(self.model, stored_tensors(info), folder)
        else:  # only transformers can split the layers
            head = None if info.head is None else read_head(info, placed_head(info, info.head, "last"))
            dtype = str(self.model.dtype).removeprefix("torch.")
            model = load_token_model(info, head, dtype, self._group).to(self._group.device)
        return CriticModel(model, constants=info.constants, note=self.note, like=self, group=self._group)


def _by_rows(outputs: Tensor, rows: Sequence[np.ndarray]) -> Callable[[], list[np.ndarray]]:
    """Return a function that waits for `outputs` `[B, S]` and returns each row's part `[length_i]`, without padding."""
    copied = to_host(outputs)
    return lambda: [row_outputs[: row.size] for row_outputs, row in zip(copied(), rows, strict=True)]


def load_reward(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    pooling: Pooling = "auto",
    attribute_weights: Sequence[float] | Literal["separate"] | None = None,
    probability: bool = False,
    standardization: StandardizationChoice = "model",
    group: RankGroup | None = None,
    like: RewardModel | None = None,
) -> RewardModel:
    """Load a reward model from a checkpoint with a trained head of one or more labels (attributes).

    Args:
        pooling: for a head on each token: `last` (index length-1), `mean`, or `auto`: the checkpoint's own pooling,
            usually `last`; `auto` also sets `skipped_pad_id`. Heads with their own pooling or gate accept `auto` only.
        attribute_weights: the reward is the sum of the A attributes with these weights; `separate`: return all A
            scores. Required if A > 1.
        probability: return the sigmoid of the score, or of the sum.
        standardization: `model` (config.json's `reward_standardization`), `off`, or (mean, std).
        group: load this rank's part of the model; `device` is then the rank's device.
        like: a model loaded with the same settings; the new one must have its architecture and head.

    Raises:
        CheckpointError: the folder is not a checkpoint, has no trained head, or a setting does not fit its head; or its
            architecture or head differs from the one of `like`.
    """
    info = inspect_checkpoint(folder)
    head = placed_head(info, reward_head(info), pooling)
    copied = None if like is None or like.origin is None else twin_with_head(like.model, like.origin, info, group)
    weights = None
    if not isinstance(attribute_weights, str) and attribute_weights is not None:
        weights = attribute_weights_of(info, head, attribute_weights)
    if attribute_weights is None and head.num_labels > 1:
        raise CheckpointError(
            f"{info.folder}: which of its {head.num_labels} outputs ({', '.join(info.label_names)}) is the reward? "
            "Give reward.attribute_weights, one weight per output"
        )
    # A group's model is not probed: the probes' collectives would mix with those of other ranks' requests.
    loaded_head: Any = like._outputs if like is not None and (copied is not None or group is not None) else None
    if head.form.pooled and group is not None:
        raise CheckpointError(
            f"{info.folder}: the head {head.prefix} has its own pooling, which cannot be split; set tensor_parallel: 1"
        )
    if copied is not None:
        model = copied
    elif head.form.pooled:
        model = load_classifier(info, head, dtype, pooling)
    else:
        model = load_token_model(info, read_head(info, head), dtype, group)
    outputs = TokenHead(model.to(device), is_pooled=head.form.pooled, like=loaded_head)
    # transformers' own class pools the last token that is not padding
    skips_padding = pooling == "auto" and head.kind == "sequence" and outputs.is_causal
    reload = functools.partial(
        load_reward,
        device=device,
        dtype=dtype,
        pooling=pooling,
        attribute_weights=attribute_weights,
        probability=probability,
        standardization=standardization,
        group=group,
    )
    return RewardModel(
        outputs,
        pooling=None if head.form.pooled else _pooling(info, head, outputs, pooling),
        weights=None if weights is None else weights.to(device),
        probability=probability,
        num_outputs=head.num_labels if attribute_weights == "separate" else 1,
        constants=constants_for(info, standardization),
        skipped_pad_id=model.config.get_text_config().pad_token_id if skips_padding else None,
        origin=info,
        reload=reload,
    )


def load_critic(
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    standardization: StandardizationChoice = "model",
    group: RankGroup | None = None,
) -> CriticModel:
    """Load a critic from a critic, reward model or base checkpoint; its `note` names the origin of the value head.

    A head on each token (token classification, value head, a decoder's `score`), linear or with several layers, becomes
    the value head; several attributes are merged into their mean. A checkpoint without a head, or whose head has its
    own pooling or gate, gets a value head that returns 0. With `group`, loads this rank's part of the model; `device`
    is then the rank's device.

    Raises:
        CheckpointError: the folder is not a checkpoint, or its body does not fit the architecture it names.
    """
    info = inspect_checkpoint(folder)
    constants = constants_for(info, standardization)
    placed = None if info.head is None else placed_head(info, info.head, "last")
    head = None if placed is None or not placed.is_plain else read_head(info, placed)
    if placed is None:
        note = "the checkpoint has no head: the value head starts at 0"
    elif head is None:
        note = f"{placed.prefix} has its own {'pooling' if placed.gate is None else 'gate'}: the value head starts at 0"
    else:
        note = f"the value head is {placed.prefix}"
        if placed.num_labels > 1:
            head = merged(head, torch.full((placed.num_labels,), 1 / placed.num_labels))
            note += f", its {placed.num_labels} outputs merged into one"
    logger.info("%s: %s", folder, note)
    model = load_token_model(info, head, dtype, group).to(device)
    return CriticModel(model, constants=constants, note=note, group=group)


def write_config(critic: CriticModel, folder: Path) -> Path:
    """Write config.json with the critic's standardisation constants; return its path."""
    critic.model.config.reward_standardization = {"mean": critic.mean, "std": critic.std}
    critic.model.config.save_pretrained(folder)
    return folder / CONFIG_FILE


def quiet_transformers() -> None:
    """Silence transformers' progress bars and load reports: the module `loading` itself checks for missing weights."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _pooling(info: CheckpointInfo, head: Head, outputs: TokenHead, pooling: Pooling) -> str:
    """Return the pooling of a head on each token, `last` or `mean`, from the setting or from the checkpoint."""
    if pooling == "auto" and head.pooling == "auto" and not outputs.is_causal:
        raise CheckpointError(
            f"{info.folder}: unknown which token of a row the head {head.prefix} reads, because the body is not "
            f"causal; set pooling: last{' or mean' if outputs.is_linear else ''}"
        )
    if "mean" not in (pooling, head.pooling if pooling == "auto" else None):
        return "last"
    if not outputs.is_linear:
        raise CheckpointError(
            f"{info.folder}: pooling: mean needs a linear head, but {head.prefix} has several layers or a gate, so "
            "the order of mean and head is ambiguous; use pooling: last, or another reward model"
        )
    return "mean"


def constants_for(info: CheckpointInfo, setting: StandardizationChoice) -> Constants:
    """Return the standardisation constants that `setting` selects; see `load_reward`."""
    if setting == "off":
        return Constants()
    if setting == "model":
        return info.constants or Constants()
    return Constants(*setting)
