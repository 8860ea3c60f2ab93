"""The critic update: clipped value loss over token-budget micro-batches, AdamW with warm-up and cosine schedule.

On a CPU, the same initial weights, payloads and number of threads give bit-identical results.

On several ranks, micro-batches are dealt to the ranks, and gradients are averaged over them. Rank 0 reads payloads and
decides; the other ranks follow it.
"""

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_triton.checkpoints.inspection import WEIGHTS_FILE
from rlhf_triton.config import TrainerSection
from rlhf_triton.digests import DEFAULT, Algorithm
from rlhf_triton.errors import NotFinite, RlhfError
from rlhf_triton.learning.model import recomputing
from rlhf_triton.learning.ranks import ALONE, AnyRanks, RankFailed, Ranks
from rlhf_triton.learning.sharding import all_finite, read_tensors, sync_gradients, write_slices
from rlhf_triton.learning.step import (
    load_state,
    make_adamw,
    named_state,
    read_optimizer,
    read_trained,
    state_tensors,
    take_step,
    trained_slices,
)
from rlhf_triton.python_backend.models.adapters import load_trained, trained_tensors
from rlhf_triton.python_backend.models.batching import padded_rows, plan_micro_batches
from rlhf_triton.python_backend.models.card import Halving, OutOfMemory, card_bytes, use_card
from rlhf_triton.python_backend.models.collation import collate
from rlhf_triton.python_backend.models.modeling import CriticModel, save_critic, write_config
from rlhf_triton.python_backend.models.precision import computing
from rlhf_triton.store.sealed_folder import DamagedCheckpoint, hashes, verify_folder
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.trainer.trained_critic import TrainedCritic, build_critic
from rlhf_triton.wire.training_payload import TrainPayload

# The critic's loss: squared error with PPO's value clip.
#
# Tensors are `[B, S-1]`. Each micro-batch's loss is its share of the whole batch's loss, so the split does not matter.


def clipped_value_loss(
    values: Tensor,
    prev_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip_value: float,
    num_tokens: float,
) -> Tensor:
    """Return the clipped value loss of a micro-batch, as its share of the loss of the whole batch.

        V_clip = V_old + clamp(V - V_old, -clip_value, clip_value)
        loss = 0.5 * sum_t mask_t * max((V_clip_t - R_t)^2, (V_t - R_t)^2) / num_tokens

    The losses of all micro-batches add up to the masked mean over the batch, however it is split. Masked positions
    contribute 0, even if they contain NaN.

    Args:
        values: `[B, S-1]`, V_t given the tokens up to t: the critic's `[B, S]` without the last position.
        prev_values: `[B, S-1]`, V_old: the values at rollout time.
        returns: `[B, S-1]`, targets R_t.
        mask: `[B, S-1]`, 1 where position t scores a response token.
        clip_value: clip range around V_old, in units of value; <= 0 means no clipping: 0.5 * (V - R)^2.
        num_tokens: number of ones in the mask of the whole batch, over all micro-batches and ranks. 0 is valid only
            with an all-zero mask, and gives loss 0 with zero gradient.

    Returns:
        Scalar tensor.

    Raises:
        ValueError: num_tokens < 0, or 0 with a nonzero mask; clip_value is NaN; or shapes differ.

    Source: OpenAI baselines, ppo2 (the value clip is not in the PPO paper, Schulman et al. 2017).
    """
    tensors = {"values": values, "prev_values": prev_values, "returns": returns, "mask": mask}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if values.ndim != 2 or len(set(shapes.values())) != 1:
        raise ValueError(f"expected one shape [B, S-1], got {shapes}")
    if not num_tokens >= 0 or (num_tokens == 0 and bool(mask.any())):
        raise ValueError(f"num_tokens must be the number of ones in the mask of the whole batch, got {num_tokens}")
    if clip_value != clip_value:
        raise ValueError(f"clip_value must be a number, got {clip_value}")
    # Fill masked positions instead of only multiplying by the mask: NaN * 0 is NaN, in the loss and in its gradient.
    values, prev_values, returns = (x.masked_fill(mask == 0, 0.0) for x in (values, prev_values, returns))
    error = (values - returns).square()
    if clip_value > 0:
        clipped = prev_values + (values - prev_values).clamp(-clip_value, clip_value)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * (error * mask).sum() / (num_tokens or 1)


logger = logging.getLogger(__name__)
ADAPTERS_FILE = "adapters.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
RANDOM_STATE = "random_state/cpu"
MAX_ROWS = 1024  # not a real limit: the token budget is reached long before


@dataclass(frozen=True)
class TrainingRow:
    """A sequence of a payload: tokens `[L]`; returns, prev_values, mask `[L-1]`."""

    tokens: np.ndarray
    returns: np.ndarray
    prev_values: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True)
class UpdateReport:
    """Metrics of training on one payload."""

    loss_mean: float  # token-weighted
    grad_norm: float  # before clipping; mean over the optimizer steps
    lr: float  # of the last optimizer step
    optimizer_steps: int
    skipped_steps: int  # optimizer steps skipped because the gradient was not finite, or a sequence did not fit
    seconds: float
    out_of_memory: int = 0  # how often micro-batches were halved because the GPU was out of memory
    memory: dict[str, int] = field(default_factory=dict)  # see card_bytes
    skipped_batches: list[int] = field(default_factory=list)  # of all passes: global batches that did not fit


class WeightsBroken(RlhfError):
    """An update left weights that no critic can be served with; the state before it must be restored."""


class CriticUpdate:
    """A critic with its optimizer and its position in the learning-rate schedule."""

    def __init__(self, critic: CriticModel, settings: TrainerSection) -> None:
        self.ranks: AnyRanks = critic.ranks if isinstance(critic, TrainedCritic) else ALONE
        critic.own_weights()
        use_card(torch.device(critic.model.device))  # for kernels that are not torch's
        self.critic = critic
        self.optimizer_step = 0
        self.settings = settings
        self.memory = Halving(
            "trainer.token_budget",
            settings.token_budget,
            remedy="lower actor.generation.max_new_tokens"
            + " or set trainer.gradient_checkpointing" * (not settings.gradient_checkpointing),
            alone=self.ranks.size == 1,
        )
        self.parameters = {n: p for n, p in critic.model.named_parameters() if p.requires_grad}
        self.optimizer = make_adamw(
            self.parameters,
            lr=settings.optimizer.lr,
            betas=settings.optimizer.betas,
            weight_decay=settings.optimizer.weight_decay,
            kind=settings.optimizer.kind,
            fused=True if critic.model.device.type == "cuda" else None,
        )

    def train(
        self, payload: TrainPayload | None, progress: Callable[[int], None], skip: Collection[int] | None = None
    ) -> UpdateReport:
        """Train on one payload: `epochs` passes over its global batches, in the order received.

        A global batch whose mask is all 0 is left out; without any other, nothing changes.

        Args:
            payload: a validated payload; other ranks than 0 pass None.
            progress: called after each micro-batch with the number done so far.
            skip: in a replay, the `skipped_batches` of the first time; no others may be skipped for lack of memory.

        Raises:
            NotFinite: no optimizer step had a finite gradient; the weights are unchanged.
            OutOfMemory: no optimizer step was taken, because sequences do not fit into the GPU's memory one at a time;
                or one of a replay does not fit.
            WeightsBroken: weights are not finite after it.
        """
        self.ranks.announce("train", skip=skip)
        payload = self.ranks.broadcast(payload, TrainPayload)
        start = time.monotonic()
        rows = list(split_rows(payload))
        size = self.settings.global_batch_size
        batches = [rows[i : i + size] for i in range(0, len(rows), size)] * self.settings.epochs
        loss_sum = token_sum = 0.0
        norms: list[float] = []
        done, skipped, lacking = itertools.count(1), 0, list[int]()
        failure: NotFinite | OutOfMemory = NotFinite(
            "the critic's gradients are not finite: no optimizer step was taken and the weights are unchanged"
        )
        for number, batch in enumerate(batches):
            num_tokens = float(sum(row.mask.sum() for row in batch))
            # Without targets there is no gradient, but a step would still apply momentum and weight decay.
            if num_tokens == 0 or number in (skip or ()):
                continue
            try:
                loss, norm = self._gradients(batch, num_tokens, lambda: progress(next(done))), self._step()
            except OutOfMemory as error:
                self.optimizer.zero_grad(set_to_none=True)
                if skip is not None:
                    raise
                logger.warning("optimizer step %d is skipped: %s", self.optimizer_step, error)
                failure, norm = error, None
                lacking.append(number)
            if norm is None:
                skipped += 1
                continue
            norms.append(norm)
            loss_sum, token_sum = loss_sum + loss * num_tokens, token_sum + num_tokens
        if not norms and skipped:
            raise failure
        if norms and not all(self.ranks.gather(all_finite(self.parameters.values()))):
            raise WeightsBroken("the update left weights of the critic that are not finite")
        return UpdateReport(
            loss_sum / (token_sum or 1),
            float(np.mean(norms or 0.0)),
            self.settings.optimizer.learning_rate(max(0, self.optimizer_step - 1)),
            len(norms),
            skipped,
            time.monotonic() - start,
            self.memory.new(),
            card_bytes(self.critic.model.device),
            lacking,
        )

    def write(self, folder: Path, integrity: Algorithm = DEFAULT) -> dict[str, str]:
        """Write weights, optimizer and random state, each rank its slices; return the digest of each file."""
        ranks = self.ranks
        ranks.announce("write", folder=str(folder), integrity=integrity)
        if isinstance(ranks, Ranks):
            model, state = self.critic.model, named_state(self.optimizer, self.parameters)
            weights = trained_slices(model) if self.settings.lora_rank else model.state_dict()
            write_slices({**weights, **state, **self._random_state()}, folder)
            if ranks.rank == 0 and not self.settings.lora_rank:
                write_config(self.critic, folder)
        else:
            self._write_whole(folder)
        parts = ranks.gather(ranks.together(lambda: hashes(folder, integrity, part=ranks.rank, parts=ranks.size)))
        return {name: digest for part in parts for name, digest in part.items()}

    def _write_whole(self, folder: Path) -> None:
        if self.settings.lora_rank:
            save_file(trained_tensors(self.critic.model), folder / ADAPTERS_FILE)
        else:
            save_critic(self.critic, folder)
        save_file({**self._random_state(), **state_tensors(self.optimizer, self.parameters)}, folder / OPTIMIZER_FILE)

    def read(self, folder: Path, optimizer_step: int) -> None:
        """Load what `write` wrote on any number of ranks, and continue at this optimizer step.

        Raises:
            DamagedCheckpoint: a file is missing or does not match its digest; nothing has changed.
            CheckpointError: the adapters do not fit; nothing has changed.
        """
        ranks = self.ranks
        ranks.announce("read", folder=str(folder), optimizer_step=optimizer_step)
        try:
            ranks.together(lambda: verify_folder(folder, part=ranks.rank, parts=ranks.size))
        except RankFailed as error:
            raise DamagedCheckpoint(str(error)) from error
        if isinstance(ranks, Ranks) or not (folder / OPTIMIZER_FILE).is_file():
            self._read_slices(folder)
        else:
            self._read_whole(folder)
        self.optimizer_step = optimizer_step

    def _read_whole(self, folder: Path) -> None:
        if self.settings.lora_rank:
            load_trained(self.critic.model, load_file(folder / ADAPTERS_FILE), folder / ADAPTERS_FILE, "trainer")
        else:
            self.critic.model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        tensors = load_file(folder / OPTIMIZER_FILE)
        torch.set_rng_state(tensors.pop(RANDOM_STATE))
        load_state(self.optimizer, self.parameters, tensors)

    def _read_slices(self, folder: Path) -> None:
        """Load weights, optimizer and random state from files of any number of ranks."""
        no_dist, random_state = self.ranks.size == 1, self._random_state()
        if self.settings.lora_rank:
            read_trained(self.critic.model, folder, "trainer", self.ranks)
        else:
            read_tensors(self.critic.model.state_dict(), folder, no_dist=no_dist)
        read_tensors(random_state, folder, no_dist=no_dist)
        torch.set_rng_state(random_state[RANDOM_STATE])
        read_optimizer(self.optimizer, self.parameters, folder, self.ranks)

    @staticmethod
    def _random_state() -> dict[str, Tensor]:
        return {RANDOM_STATE: torch.get_rng_state()}

    def _micro_batches(self, batch: list[TrainingRow]) -> Iterator[list[TrainingRow]]:
        """Yield this rank's micro-batches, the same number on every rank; one without targets if there are too few."""
        rank, size = self.ranks.rank, self.ranks.size
        lengths = [row.tokens.size for row in batch]
        max_rows = min(MAX_ROWS, -(-len(batch) // size))  # at least one micro-batch for each rank, if possible
        plan = plan_micro_batches(lengths, token_budget=self.memory.size, max_rows=max_rows)
        for i in range(0, len(plan), size):
            sync_gradients(self.critic.model, is_last=i + size >= len(plan))
            if i + rank < len(plan):
                yield [batch[row] for row in plan[i + rank]]
            else:
                shortest = batch[plan[0][0]]
                yield [replace(shortest, mask=np.zeros_like(shortest.mask))]

    def _gradients(self, batch: list[TrainingRow], num_tokens: float, progress: Callable[[], None]) -> float:
        """Accumulate the gradients of a batch, repeated in smaller micro-batches on out-of-memory; return its loss."""

        def accumulate(_: int) -> float:
            self.optimizer.zero_grad(set_to_none=True)  # of an attempt that ran out of memory
            loss = 0.0
            for micro_batch in self._micro_batches(batch):
                loss += self._accumulate(micro_batch, num_tokens)
                progress()
            return self.ranks.totals([loss])[0]

        longest = max(row.tokens.size for row in batch)
        return self.memory.repeat(accumulate, least=longest, most=longest * len(batch))

    def _accumulate(self, rows: list[TrainingRow], num_tokens: float) -> float:
        model, settings = self.critic.model, self.settings
        tokens = [row.tokens for row in rows]
        width = max(row.size for row in tokens)
        names = ("prev_values", "returns", "mask")
        others = (padded_rows([getattr(row, name) for row in rows], width - 1) for name in names)
        ids, attention, _, prev_values, returns, mask = collate(tokens, model.device, width, *others)
        with recomputing(model) if settings.gradient_checkpointing else contextlib.nullcontext():
            with computing(model.device, settings.precision):
                values = self.critic.forward(ids, attention)[:, :-1]
            loss = clipped_value_loss(
                values, prev_values, returns, mask, clip_value=settings.clip_value, num_tokens=num_tokens
            )
            self.ranks.backward(loss)
        return float(loss.detach())

    def _step(self) -> float | None:
        settings = self.settings.optimizer
        lr = settings.learning_rate(self.optimizer_step)
        norm = take_step(self.optimizer, self.parameters.values(), lr=lr, grad_clip=settings.grad_clip)
        self.optimizer_step += norm is not None
        return norm


def load_update(
    folder: Path, settings: TrainerSection, *, seed: int, ranks: AnyRanks = ALONE, pretraining: bool = False
) -> CriticUpdate:
    """Load the critic in `folder` and create its optimizer; collective.

    Args:
        seed: of torch's random state.
        pretraining: train without value clip, one pass over each payload, and write weights as version 0 has them.
    """
    ranks.announce("load", folder=str(folder), pretraining=pretraining)
    if pretraining:
        publish = settings.publish.model_copy(update={"format": "merged", "dtype": "float32"})
        settings = settings.model_copy(update={"clip_value": 0.0, "epochs": 1, "publish": publish})
    return CriticUpdate(build_critic(folder, settings, seed=seed, ranks=ranks), settings)


def follow_rank_0(settings: TrainerSection, seed: int, ranks: Ranks) -> None:
    """Execute what rank 0 announces until it ends the job. Raises RankLost if it dies."""
    update: CriticUpdate
    store = functools.cache(lambda root: WeightsStore(Path(root)))  # remembers the base that it has verified

    def load(folder: str, pretraining: bool) -> None:
        nonlocal update
        update = load_update(Path(folder), settings, seed=seed, ranks=ranks, pretraining=pretraining)

    def critic() -> TrainedCritic:
        assert isinstance(update.critic, TrainedCritic)
        return update.critic

    ranks.operations.follow(
        {
            "load": load,
            "train": lambda skip: update.train(None, lambda _: None, skip),
            "write": lambda folder, integrity: update.write(Path(folder), integrity),
            "read": lambda folder, optimizer_step: update.read(Path(folder), optimizer_step),
            "values": lambda rows, width: critic().values([np.asarray(row, np.int64) for row in rows], width),
            "write_version": lambda folder, integrity: critic().write(Path(folder), integrity),
            "verify": lambda root, version: critic().verify_slices(store(root), version),
            "holds": lambda root, version: critic().holds_slices(store(root), version),
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
        token, target = token + length, target + length - 1
