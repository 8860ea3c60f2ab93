"""The critic in training, constructed from the `trainer` settings, without its optimizer.

It may differ from the served critic: LoRA adapters instead of new weights, frozen matrices in bfloat16. With several
ranks, each has a slice of every tensor. All ranks have the same objects and call the same methods in the same order:
rank 0 announces each call, and the others execute it in `follow_rank_0`. All ranks share the same files.
"""

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf_triton.checkpoints.inspection import (
    ADAPTERS_KEY,
    CONFIG_FILE,
    WEIGHTS_FILE,
    CheckpointError,
    Constants,
    inspect_checkpoint,
)
from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.errors import RankFailed
from rlhf_triton.models.adapters import MergedWeights, describe_adapters, trained_tensors
from rlhf_triton.models.heads import ModelHead
from rlhf_triton.models.loading import empty_token_model
from rlhf_triton.models.modeling import CriticModel, load_critic, write_config
from rlhf_triton.models.precision import in_float32, use_bfloat16
from rlhf_triton.store.durable import disk_errors
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.training_engine import preparation
from rlhf_triton.training_engine.merged_slices import MergedSlices
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks, Ranks
from rlhf_triton.training_engine.sharding import all_finite, gathered_as_stored, shard
from rlhf_triton.training_engine.slices import different_tensors, write_checkpoint

BASE_VERSION = 0  # training starts from it; it is never pruned


class TrainedCritic(CriticModel):
    """A critic in training, complete or sharded over ranks."""

    def __init__(
        self,
        model: Any,
        plain: CriticModel,
        *,
        as_adapters: bool = False,
        stored_as: torch.dtype | None = None,
        ranks: AnyRanks = ALONE,
        precision: str = "float32",
    ) -> None:
        """Create the critic; with several ranks, shard the weights, which every rank has loaded.

        Args:
            model: the model in training.
            plain: the served critic from which training started: the template for loading versions.
            as_adapters: versions contain only adapters; otherwise all weights.
            stored_as: dtype of the weights in versions, except the head; default: the model's.
            precision: with several ranks, `bfloat16` rounds frozen matrices layer by layer while sharding, so that no
                rank has a copy of all of them.
        """
        super().__init__(model, constants=Constants(plain.mean, plain.std), note=plain.note, like=plain)
        self._plain = plain
        self.ranks = ranks
        self.stored_as = stored_as
        if ranks.shards:
            self._shard(ranks, precision)
        self.adapters = describe_adapters(self.model, base=BASE_VERSION) if as_adapters else None

    def _shard(self, ranks: Ranks, precision: str) -> None:
        if self._token_head.one_by_one:  # each pass gathers weights, but ranks would run different numbers of passes
            raise CheckpointError(
                f"each row needs its own forward pass in {type(self.model).__name__}, which several ranks do not "
                "support; set trainer.ranks: 1"
            )
        outputs = self._token_head
        self.model.token_outputs = types.MethodType(
            lambda _, ids, attention: outputs(ids, attention).clone(),  # FSDP needs an output that is not a view
            self.model,
        )
        head = ModelHead(self.model).module
        in_bfloat16 = precision == "bfloat16"
        shard(
            self.model,
            ranks,
            methods=["token_outputs"],
            prepare=lambda module: use_bfloat16(module, head) if in_bfloat16 else None,
            precision=precision,
        )

    def own_weights(self) -> None:
        """Copy the trainable weights out of the mapped file; slices already are copies."""
        if not self.ranks.shards:
            super().own_weights()

    def outputs(self, ids: Tensor, attention: Tensor) -> Tensor:
        return self.model.token_outputs(ids, attention) if self.ranks.shards else super().outputs(ids, attention)

    def values(self, rows: Sequence[np.ndarray], width: int | None = None) -> list[np.ndarray]:
        """Like `CriticModel.values`, but computed in float32; all ranks compute the same rows."""
        self.ranks.announce("values", rows=[row.tolist() for row in rows], width=width)
        with gathered_as_stored(self.model), in_float32(self.model):
            return super().values(rows, width)

    def weights(self) -> MergedWeights:
        kind = MergedSlices if self.ranks.shards else MergedWeights
        return kind(self.model, self.stored_as, ModelHead(self.model).module)

    def write(self, folder: Path) -> Mapping[str, str] | None:
        """Write a version: a Hugging Face checkpoint with one file per rank, or only the adapters, which rank 0 writes.

        Returns the digest of each weights file and of the index, if there is one; None for adapters.
        """
        self.ranks.announce("write_version", folder=str(folder))
        if self.adapters is not None:
            trained = trained_tensors(self.model)
            adapters = self.adapters

            def write_adapters() -> None:
                if self.ranks.rank == 0:
                    with disk_errors(folder / WEIGHTS_FILE):
                        save_file(trained, folder / WEIGHTS_FILE, metadata={"format": "pt"})
                    config = json.loads(write_config(self, folder).read_text())
                    (folder / CONFIG_FILE).write_text(json.dumps({**config, ADAPTERS_KEY: asdict(adapters)}, indent=2))

            self.ranks.run_on_all_ranks(write_adapters)
            return None
        if not self.ranks.shards:
            return super().write(folder)
        weights = self.weights()
        digests = write_checkpoint(weights.shapes(), weights.__getitem__, folder, self.ranks)
        if self.ranks.rank == 0:
            write_config(self, folder)
        return digests

    def with_weights(self, folder: Path) -> CriticModel:
        return self._plain.with_weights(folder)

    def verify_slices(self, store: WeightsStore, version: int) -> None:
        """Verify that a version's weights are bit-identical to this critic's, and finite.

        Each rank compares its own slices. Together these are all bytes that `write` has hashed for the manifest, so
        they need not be hashed again. The base version of adapters is hashed once.

        Raises:
            WeightsError, CheckpointError, RankFailed: a check failed on this or another rank.
        """
        self.ranks.announce("verify", root=str(store.root), version=version)
        weights = self.weights()

        def verify() -> None:
            if self.adapters is not None:
                store.verify_hashes(store.manifest(version), part=self.ranks.rank, parts=self.ranks.size)
            if not all_finite(self.model.parameters()):
                raise CheckpointError("the critic's weights are not finite; lower trainer.optimizer.lr")
            if wrong := self._differences(weights, store.folder(version)):
                raise CheckpointError(f"{wrong[0]} of version {version} differs from the trained weights")

        self.ranks.run_on_all_ranks(verify)

    def holds_slices(self, store: WeightsStore, version: int) -> bool:
        """Return whether a version's weights are bit-identical to this critic's."""
        self.ranks.announce("holds", root=str(store.root), version=version)
        weights = self.weights()
        try:
            same = self.ranks.run_on_all_ranks(lambda: not self._differences(weights, store.folder(version)))
            return all(self.ranks.gather(same))
        except (CheckpointError, RankFailed):  # a file is damaged
            return False

    def _differences(self, weights: MergedWeights, folder: Path) -> list[str]:
        """Return the names of tensors that differ between this critic and a version, or ADAPTERS_KEY."""
        info = inspect_checkpoint(folder)
        if info.adapters is None:
            return different_tensors(weights, info)
        trained = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return [ADAPTERS_KEY] if info.adapters != self.adapters else different_tensors(trained, info)


def build_critic(
    folder: Path, settings: TrainerSection, *, seed: int, dtype: str = "float32", ranks: AnyRanks = ALONE
) -> TrainedCritic:
    """Load the critic to train from version 0 in `folder`; with several ranks, shard it. Collective.

    Args:
        seed: seed of torch's random state, and thus of the adapters' initial weights.
        dtype: dtype of the served critic, and thus of its versions.

    Raises:
        CheckpointError: the model does not support one of the settings.
    """
    torch.manual_seed(seed)
    own = settings
    if ranks.shards:
        # Map the weights from the file and shard them layer by layer, so that no rank has a copy of all of them.
        own = settings.model_copy(update={"device": "cpu", "precision": "float32"})
    model, plain = ranks.run_on_all_ranks(lambda: _load(folder, own))
    return TrainedCritic(
        model,
        plain,
        as_adapters=settings.publish.format == "adapter",
        stored_as=torch.bfloat16 if dtype == "bfloat16" and settings.publish.format == "merged" else None,
        ranks=ranks,
        precision=settings.precision,
    )


def _load(folder: Path, settings: TrainerSection) -> tuple[Any, CriticModel]:
    """Return the model to train and the served critic; they share the model unless the settings change it."""
    check_lora_targets(folder, settings)
    if not settings.changes_the_model:
        plain = load_critic(folder, device=settings.device)
        return prepare_for_training(plain.model, settings), plain
    plain = load_critic(folder)  # stays mapped from the file, on the CPU
    return prepare_for_training(plain.with_weights(folder).model, settings).to(settings.device), plain


def check_lora_targets(folder: Path, settings: TrainerSection) -> None:
    """Raise CheckpointError if a name in `lora_targets` matches no layer. Reads only config.json."""
    preparation.check_lora_targets(
        settings, "trainer", lambda: empty_token_model(folder), lambda model: ModelHead(model).module
    )


def prepare_for_training(model: Any, settings: TrainerSection) -> Any:
    """Prepare the critic's model for training according to `settings`, in place. Raises CheckpointError."""
    preparation.prepare(model, settings, "trainer", ModelHead(model).module)
    return model
