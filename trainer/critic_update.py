"""The critic update: clipped value loss over token-budget micro-batches, AdamW with warm-up and cosine schedule.

On a CPU, the same initial weights, payloads and number of threads give bit-identical results.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.config import TrainerSection
from python_backend.errors import NotFinite
from python_backend.models.adapters import check_trained, load_trained, trained_tensors
from python_backend.models.batching import padded_rows, plan_micro_batches
from python_backend.models.card.memory import Halving, OutOfMemory, card_bytes
from python_backend.models.card.streams import use_card
from python_backend.models.collation import collate
from python_backend.models.modeling import CriticModel, save_critic
from python_backend.models.precision import computing
from python_backend.store.sealed_folder import hashes, verify_folder
from python_backend.training.adamw import empty_state, load_state, make_adamw, state_tensors
from python_backend.training.gradient_checkpointing import recomputing
from python_backend.training.sharding import read_tensors, stored_shapes
from python_backend.wire.training_payload import TrainPayload
from trainer.value_loss import clipped_value_loss

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
    out_of_memory: int = 0  # how often micro-batches were halved because the card's memory did not suffice
    memory: dict[str, int] = field(default_factory=dict)  # see card_bytes
    skipped_batches: list[int] = field(default_factory=list)  # of all passes: global batches that did not fit


class CriticUpdate:
    """A critic with its optimizer and its position in the learning-rate schedule."""

    def __init__(self, critic: CriticModel, settings: TrainerSection) -> None:
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
            alone=settings.ranks == 1,
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
        self, payload: TrainPayload, progress: Callable[[int], None], skip: Collection[int] | None = None
    ) -> UpdateReport:
        """Train on one payload: `epochs` passes over its global batches, in the order received.

        Args:
            payload: a validated payload.
            progress: called after each micro-batch with the number done so far.
            skip: in a replay, the `skipped_batches` of the first time; no others may be skipped for lack of memory.

        Raises:
            NotFinite: no optimizer step had a finite gradient; the weights are unchanged.
            OutOfMemory: no optimizer step was taken, because sequences do not fit into the card's memory one at a time;
                or one of a replay does not fit.
        """
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
        if not norms:
            raise failure
        return UpdateReport(
            loss_sum / token_sum,
            float(np.mean(norms)),
            self.settings.optimizer.learning_rate(self.optimizer_step - 1),
            len(norms),
            skipped,
            time.monotonic() - start,
            self.memory.new(),
            card_bytes(self.critic.model.device),
            lacking,
        )

    def write(self, folder: Path) -> dict[str, str]:
        """Write weights, optimizer and torch's random state to `folder`; return the sha256 of each file."""
        if self.settings.lora_rank:
            save_file(trained_tensors(self.critic.model), folder / ADAPTERS_FILE)
        else:
            save_critic(self.critic, folder)
        save_file({**self._random_state(), **state_tensors(self.optimizer, self.parameters)}, folder / OPTIMIZER_FILE)
        return hashes(folder)

    def read(self, folder: Path, optimizer_step: int) -> None:
        """Load what `write` wrote, in this process or on any number of ranks, and continue at this optimizer step.

        Raises:
            DamagedCheckpoint: a file is missing or does not match its sha256; nothing has changed.
            CheckpointError: the adapters do not fit; nothing has changed.
        """
        verify_folder(folder)
        if not (folder / OPTIMIZER_FILE).is_file():
            self._read_slices(folder, no_dist=True)
            self.optimizer_step = optimizer_step
            return
        if self.settings.lora_rank:
            load_trained(self.critic.model, load_file(folder / ADAPTERS_FILE), folder / ADAPTERS_FILE, "trainer")
        else:
            self.critic.model.load_state_dict(load_file(folder / WEIGHTS_FILE))
        tensors = load_file(folder / OPTIMIZER_FILE)
        torch.set_rng_state(tensors.pop(RANDOM_STATE))
        load_state(self.optimizer, self.parameters, tensors)
        self.optimizer_step = optimizer_step

    def _read_slices(self, folder: Path, *, no_dist: bool = False) -> None:
        """Load weights, optimizer and random state from files of any number of ranks."""
        stored, weights, random_state = stored_shapes(folder), self._stored_weights(), self._random_state()
        if self.settings.lora_rank:
            shapes = {name: shape for name, shape in stored.items() if "/" not in name}
            check_trained({name: tensor.shape for name, tensor in weights.items()}, shapes, folder, "trainer")
        state = empty_state(self.parameters, stored)  # none before the first step
        read_tensors({**weights, **state, **random_state}, folder, no_dist=no_dist)
        torch.set_rng_state(random_state[RANDOM_STATE])
        load_state(self.optimizer, self.parameters, state)

    def _stored_weights(self) -> dict[str, Tensor]:
        """Return the weights of a checkpoint of several ranks: under LoRA only the trained ones."""
        if self.settings.lora_rank:
            return {name: parameter.detach() for name, parameter in self.parameters.items()}
        return dict(self.critic.model.state_dict())

    @staticmethod
    def _random_state() -> dict[str, Tensor]:
        return {RANDOM_STATE: torch.get_rng_state()}

    def _micro_batches(self, batch: list[TrainingRow]) -> Iterator[list[TrainingRow]]:
        lengths = [row.tokens.size for row in batch]
        for indices in plan_micro_batches(lengths, token_budget=self.memory.size, max_rows=MAX_ROWS):
            yield [batch[i] for i in indices]

    def _gradients(self, batch: list[TrainingRow], num_tokens: float, progress: Callable[[], None]) -> float:
        """Accumulate the gradients of a batch, anew in smaller micro-batches if they do not fit; return its loss."""

        def accumulate(_: int) -> float:
            self.optimizer.zero_grad(set_to_none=True)  # of an attempt that ran out of memory
            loss = 0.0
            for micro_batch in self._micro_batches(batch):
                loss += self._accumulate(micro_batch, num_tokens)
                progress()
            return self._total(loss)

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
            self._backward(loss)
        return float(loss.detach())

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _total(self, loss: float) -> float:
        """Return the loss of a batch, given that of the micro-batches of this process."""
        return loss

    def _clip(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.optimizer.grad_clip)

    def _step(self) -> float | None:
        norm = float(self._clip())
        finite = math.isfinite(norm)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.optimizer.learning_rate(self.optimizer_step)
            self.optimizer.step()
            self.optimizer_step += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm if finite else None


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
