"""The critic update: clipped value loss over token-budget micro-batches, AdamW with warm-up and cosine schedule.

On a CPU, equal initial weights, payloads and numbers of threads give bit-identical results. With several ranks, each
processes a part of the micro-batches, and gradients are averaged. Rank 0 reads payloads and decides; the other ranks
follow it.
"""

import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.config.sections import TrainerSection
from rlhf_triton.errors import NotFinite
from rlhf_triton.models.batching import padded_rows
from rlhf_triton.models.collation import collate
from rlhf_triton.models.gpu import use_gpu
from rlhf_triton.models.out_of_memory import OutOfMemory, gpu_bytes
from rlhf_triton.models.precision import computing
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.trained_critic import TrainedCritic, build_critic
from rlhf_triton.trainer.value_loss import clipped_value_loss
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks, Ranks
from rlhf_triton.training_engine.sharding import all_finite
from rlhf_triton.training_engine.trained import TrainedModel, operations
from rlhf_triton.wire.training_payload import TrainPayload

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingRow:
    """A sequence of a payload: `tokens` `[L]`; `returns`, `prev_values` and `mask` `[L-1]`."""

    tokens: np.ndarray
    returns: np.ndarray
    prev_values: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """Metrics of training on one payload."""

    loss_mean: float  # mean over the trained tokens of all optimizer steps
    grad_norm: float  # before clipping; mean over the optimizer steps
    lr: float  # at the last optimizer step
    optimizer_steps: int
    skipped_steps: int  # optimizer steps skipped because the gradient was not finite, or a sequence did not fit
    seconds: float
    out_of_memory: int = 0  # how often micro-batches were halved because the GPU ran out of memory
    memory: dict[str, int] = field(default_factory=dict)  # see gpu_bytes
    # Numbers, over all passes, of global batches that did not fit.
    skipped_batches: list[int] = field(default_factory=list)
    is_finite: bool = True  # whether the weights are finite; if not, the caller must restore the previous state


class CriticUpdate:
    """Trains a critic on training payloads."""

    def __init__(self, critic: TrainedCritic, settings: TrainerSection) -> None:
        self.ranks = critic.ranks
        critic.own_weights()
        use_gpu(torch.device(critic.model.device))  # for kernels outside torch
        self.critic = critic
        self.settings = settings
        self.trained = TrainedModel(
            critic.model,
            settings,
            settings.optimizer,
            self.ranks,
            section="trainer",
            remedy="train on shorter rows (of an actor: lower actor.generation.max_new_tokens)",
            total_steps=settings.optimizer.max_steps,
        )

    def train(
        self, payload: TrainPayload | None, progress: Callable[[int], None], skip: Collection[int] | None = None
    ) -> UpdateReport:
        """Train on one payload: `epochs` passes over its global batches, in the order received.

        Skips global batches whose mask is all 0; if all are, the weights do not change.

        Args:
            payload: a validated payload; ranks other than 0 pass None.
            progress: called after each micro-batch with the number of micro-batches so far.
            skip: in a replay, the `skipped_batches` of the original update; no other batch may be skipped.

        Raises:
            NotFinite: no optimizer step had a finite gradient; the weights are unchanged.
            OutOfMemory: no optimizer step was taken, because single sequences do not fit into the GPU's memory; or a
                batch of a replay does not fit.
        """
        self.ranks.announce("train", skip=skip)
        payload = self.ranks.broadcast(payload)
        start = time.monotonic()
        rows = list(split_rows(payload))
        size = self.settings.global_batch_size
        batches = [rows[i : i + size] for i in range(0, len(rows), size)] * self.settings.epochs
        loss_sum = token_sum = 0.0
        norms: list[float] = []
        done = itertools.count(1)
        skipped = 0
        skipped_batches: list[int] = []
        failure: NotFinite | OutOfMemory = NotFinite(
            "the critic's gradients are not finite: no optimizer step was taken and the weights are unchanged"
        )
        for number, batch in enumerate(batches):
            num_tokens = float(sum(row.mask.sum() for row in batch))
            # Without targets there is no gradient, but a step would still apply momentum and weight decay.
            if num_tokens == 0 or number in (skip or ()):
                continue
            try:
                loss = self._gradients(batch, num_tokens, lambda: progress(next(done)))
                norm = self.trained.step()
            except OutOfMemory as error:
                self.trained.drop_gradients()
                if skip is not None:
                    raise
                logger.warning("optimizer step %d is skipped: %s", self.trained.optimizer_step, error)
                failure = error
                norm = None
                skipped_batches.append(number)
            if norm is None:
                skipped += 1
                continue
            norms.append(norm)
            loss_sum = loss_sum + loss * num_tokens
            token_sum = token_sum + num_tokens
        if not norms and skipped:
            raise failure
        is_finite = not norms or all(self.ranks.gather(all_finite(self.trained.parameters.values())))
        return UpdateReport(
            loss_mean=loss_sum / (token_sum or 1),
            grad_norm=float(np.mean(norms or 0.0)),
            lr=self.trained.last_lr,
            optimizer_steps=len(norms),
            skipped_steps=skipped,
            seconds=time.monotonic() - start,
            out_of_memory=self.trained.memory.new_halvings(),
            memory=gpu_bytes(self.critic.model.device),
            skipped_batches=skipped_batches,
            is_finite=is_finite,
        )

    def _gradients(self, batch: list[TrainingRow], num_tokens: float, progress: Callable[[], None]) -> float:
        """Compute the gradients of a batch, replacing earlier ones; return its loss."""
        lengths = torch.tensor([row.tokens.size for row in batch])

        def loss(chunk: list[int], counts: bool) -> tuple[Tensor, dict[str, Tensor]]:
            return self._loss([batch[i] for i in chunk], num_tokens, counts=counts), {}

        return self.trained.accumulate(lengths, loss, progress)["loss"]

    def _loss(self, rows: list[TrainingRow], num_tokens: float, *, counts: bool) -> Tensor:
        model = self.critic.model
        settings = self.settings
        tokens = [row.tokens for row in rows]
        width = max(row.size for row in tokens)
        names = ("prev_values", "returns", "mask")
        others = (padded_rows([getattr(row, name) for row in rows], width - 1) for name in names)
        ids, attention, _, prev_values, returns, mask = collate(tokens, model.device, width, *others)
        with computing(model.device, settings.precision):
            values = self.critic.forward(ids, attention)[:, :-1]
        mask = mask if counts else torch.zeros_like(mask)
        return clipped_value_loss(
            values, prev_values, returns, mask, clip_value=settings.clip_value, num_tokens=num_tokens
        )


def load_update(
    folder: Path,
    settings: TrainerSection,
    *,
    seed: int,
    dtype: str = "float32",
    ranks: AnyRanks = ALONE,
    pretraining: bool = False,
) -> CriticUpdate:
    """Load the critic in `folder` and create its optimizer; collective.

    Args:
        seed, dtype: see `build_critic`.
        pretraining: train without value clip, in one pass over each payload, and write merged weights in float32.
    """
    ranks.announce("load", folder=str(folder), pretraining=pretraining)
    if pretraining:
        dtype = "float32"
        publish = settings.publish.model_copy(update={"format": "merged"})
        settings = settings.model_copy(update={"clip_value": 0.0, "epochs": 1, "publish": publish})
    return CriticUpdate(build_critic(folder, settings, seed=seed, dtype=dtype, ranks=ranks), settings)


def follow_rank_0(settings: TrainerSection, seed: int, ranks: Ranks, dtype: str = "float32") -> None:
    """Execute the operations that rank 0 announces until it ends the job. Raises RankLost if rank 0 dies."""
    update: CriticUpdate
    # Cached, because a store remembers the base version that it has verified.
    store = functools.cache(lambda root: WeightsStore(Path(root)))

    def load(folder: str, pretraining: bool) -> None:
        nonlocal update
        update = load_update(Path(folder), settings, seed=seed, dtype=dtype, ranks=ranks, pretraining=pretraining)

    ranks.operations.follow(
        {
            "load": load,
            "train": lambda skip: update.train(None, lambda _: None, skip),
            **operations(lambda: update.trained),
            "values": lambda rows, width: update.critic.values([np.asarray(row, np.int64) for row in rows], width),
            "write_version": lambda folder: update.critic.write(Path(folder)),
            "verify": lambda root, version: update.critic.verify_slices(store(root), version),
            "holds": lambda root, version: update.critic.holds_slices(store(root), version),
        }
    )


def split_rows(payload: TrainPayload) -> Iterator[TrainingRow]:
    """Yield the payload's sequences, in order."""
    token = target = 0
    for length in payload.lengths.tolist():
        tokens = slice(token, token + length)
        targets = slice(target, target + length - 1)
        yield TrainingRow(
            payload.tokens[tokens], payload.returns[targets], payload.prev_values[targets], payload.mask[targets]
        )
        token = token + length
        target = target + length - 1
