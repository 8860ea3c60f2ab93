"""A model in training, policy or critic: gradients, optimizer steps, and checkpoints.

All ranks have the same objects and call the same methods in the same order. `save`, `verify` and `load` announce
themselves from rank 0 to the others; the code that calls `accumulate` and `step` must do so itself.
"""

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from rlhf_triton.checkpoints.inspection import CheckpointError
from rlhf_triton.config.optimizer import OptimizerSection
from rlhf_triton.config.trained_model import Resume, TrainedSection, decisive_settings, resume_marks
from rlhf_triton.errors import RankFailed
from rlhf_triton.models.batching import plan_micro_batches
from rlhf_triton.models.out_of_memory import MemoryBudget
from rlhf_triton.models.sharded_tensors import whole
from rlhf_triton.store.sealed_folder import DamagedCheckpoint, hashes, verify_folder
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks, dealt
from rlhf_triton.training_engine.recomputation import checkpoint_gradients, recomputing
from rlhf_triton.training_engine.sharding import sync_gradients
from rlhf_triton.training_engine.slices import read_tensors, stored_shapes, write_slices

BETAS = (0.9, 0.95)
MAX_ROWS = 1024  # never reached in practice: the token budget bounds a micro-batch first
BatchLoss = Callable[[list[int], bool], tuple[Tensor, dict[str, Tensor]]]
"""Returns, for the rows of a micro-batch, their share of the minibatch's loss, and statistics.

The flag is False if the row must not count: the forward pass then only takes part in the other ranks' collectives.
"""


class DifferentStatistics(ValueError):
    """Some micro-batches lack the statistics that the message names."""


class TrainedModel:
    """A model with its optimizer and its position in the learning-rate schedule."""

    def __init__(
        self,
        model: Any,
        settings: TrainedSection,
        optimizer: OptimizerSection,
        ranks: AnyRanks = ALONE,
        *,
        section: str,
        remedy: str,
        total_steps: int,
    ) -> None:
        """
        Args:
            model: prepared with `training_engine.preparation.prepare`, on its device, and sharded if there are several
                ranks.
            section: key of `settings`.
            remedy: how to get shorter rows, for the error if the GPU's memory is too small for a single row.
            total_steps: length of the learning-rate schedule.

        Raises:
            CheckpointError: the model does not support gradient checkpointing.
        """
        if settings.gradient_checkpointing:
            checkpoint_gradients(model, f"{section}.gradient_checkpointing")
        self.model = model
        self.ranks = ranks
        self._marks = resume_marks(section, type(settings))
        self._schedule = optimizer
        self._total_steps = total_steps
        owner = section.partition(".")[0]
        self.settings = decisive_settings(section, settings) | decisive_settings(f"{owner}.optimizer", optimizer)
        """Settings that affect training, by full key; checkpoints store them."""
        self.memory = MemoryBudget(
            f"{section}.token_budget",
            settings.token_budget,
            remedy=remedy + ("" if settings.gradient_checkpointing else f" or set {section}.gradient_checkpointing"),
            alone=ranks.size == 1,
        )
        """Token budget of a micro-batch; halved when the GPU runs out of memory."""
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = make_adamw(self.parameters, optimizer)
        self.optimizer_step = 0

    def plan(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return micro-batches within the token budget, each as a list of indices into `lengths`."""
        return plan_micro_batches(lengths, token_budget=self.memory.size, max_rows=MAX_ROWS)

    def micro_batches(self, lengths: Tensor) -> list[list[int]]:
        """Return this rank's micro-batches of row indices, padded with empty ones to the same number on all ranks."""
        plans = [
            [rows[chunk].tolist() for chunk in self.plan(lengths[rows].tolist())]
            for rows in dealt(lengths, self.ranks.size)
        ]
        mine = plans[self.ranks.rank]
        return mine + [[]] * (max(map(len, plans)) - len(mine))

    def accumulate(
        self,
        lengths: Tensor,
        loss: BatchLoss,
        progress: Callable[[], object] = lambda: None,
        *,
        names: Collection[str] = (),
    ) -> dict[str, float]:
        """Compute the gradients of a minibatch; return its `loss` and statistics, summed over all rows.

        If the GPU runs out of memory, repeats the whole minibatch in smaller micro-batches.

        Args:
            lengths: number of tokens of each row of the minibatch, int64 `[B]`.
            progress: called after each micro-batch.
            names: the statistics of earlier minibatches, including `loss`; empty for the first one.

        Raises:
            DifferentStatistics: a micro-batch lacks the statistics of another one; raised on all ranks.
        """
        longest = int(lengths.max())
        return self.memory.run(
            lambda _: self._accumulate(lengths, loss, progress, names), least=longest, most=longest * len(lengths)
        )

    def _accumulate(
        self, lengths: Tensor, loss: BatchLoss, progress: Callable[[], object], names: Collection[str]
    ) -> dict[str, float]:
        self.drop_gradients()  # from an attempt that ran out of memory
        parts: list[dict[str, Tensor]] = []
        chunks = self.micro_batches(lengths)
        for number, chunk in enumerate(chunks, 1):
            sync_gradients(self.model, is_last=number == len(chunks))
            with recomputing(self.model):
                share, statistics = loss(chunk or [int(lengths.argmin())], bool(chunk))
                self.ranks.backward(share)
            parts.append({**statistics, "loss": share.detach()})
            progress()
        # A single copy from the device per minibatch, because each copy waits until the device is idle.
        values = iter(torch.stack([value for part in parts for value in part.values()]).tolist())
        by_rank = self.ranks.gather([{name: next(values) for name in part} for part in parts])
        all_names = [{*part} for rank_parts in by_rank for part in rank_parts]
        all_names.append({*names} or all_names[0])
        if differing := set.union(*all_names) - set.intersection(*all_names):
            raise DifferentStatistics(", ".join(sorted(differing)))
        return {name: _sum(_sum(part[name] for part in rank_parts) for rank_parts in by_rank) for name in parts[0]}

    def drop_gradients(self) -> None:
        """Discard the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> float | None:
        """Clip the gradients, take an optimizer step and drop the gradients; collective.

        Returns:
            The norm before clipping; None if it is not finite, in which case the weights are unchanged.
        """
        trained = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
        total = whole(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
        nn.utils.clip_grads_with_norm_(trained, self._schedule.grad_clip, total)
        norm = float(total)
        is_finite = math.isfinite(norm)
        if is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self._schedule.learning_rate(self.optimizer_step, total_steps=self._total_steps)
            self.optimizer.step()
            self.optimizer_step += 1
        self.drop_gradients()
        return norm if is_finite else None

    @property
    def last_lr(self) -> float:
        """The learning rate of the last optimizer step."""
        return self._schedule.learning_rate(max(0, self.optimizer_step - 1), total_steps=self._total_steps)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state as tensors named `<key>/<parameter name>`, sharded like the parameters."""
        return {
            f"{key}/{name}": torch.as_tensor(value).detach()  # bitsandbytes counts steps in an int
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the trained parameters, by name."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def save(self, folder: Path | str) -> dict[str, str]:
        """Write trained weights and optimizer state, each rank its slices; return each file's digest by relative path.

        Any number of ranks can load them, bit-identically. Raises OSError on all ranks if one cannot write.
        """
        ranks = self.ranks
        folder = Path(folder)
        ranks.announce("trained.save", folder=str(folder))
        write_slices({**self.weights(), **self.state()}, folder, ranks)
        own = ranks.run_on_all_ranks(lambda: hashes(folder, part=ranks.rank, parts=ranks.size))
        return {name: digest for part in ranks.gather(own) for name, digest in part.items()}

    def verify(self, folder: Path | str) -> None:
        """Verify the digest of every file of a checkpoint. Raises DamagedCheckpoint."""
        ranks = self.ranks
        folder = Path(folder)
        ranks.announce("trained.verify", folder=str(folder))
        try:
            ranks.run_on_all_ranks(lambda: verify_folder(folder, part=ranks.rank, parts=ranks.size))
        except RankFailed as error:
            raise DamagedCheckpoint(str(error)) from error

    def load(self, folder: Path | str, optimizer_step: int) -> None:
        """Load a checkpoint that `save` wrote on any number of ranks; continue at `optimizer_step`."""
        folder = Path(folder)
        self.ranks.announce("trained.load", folder=str(folder), optimizer_step=optimizer_step)
        self.load_weights(folder)
        names = [name for name in stored_shapes(folder) if "/" in name]  # none before the first optimizer step
        parameters = {name: self.parameters[name.partition("/")[2]].detach() for name in names}
        state = {
            name: torch.zeros(()) if name.startswith("step/") else torch.zeros_like(parameter)
            for name, parameter in parameters.items()
        }
        read_tensors(state, folder, self.ranks)
        self.optimizer.state.clear()
        for full_name, tensor in state.items():
            key, _, name = full_name.partition("/")
            parameter = self.parameters[name]
            is_count = key == "step" and not isinstance(self.optimizer, AdamW)
            self.optimizer.state[parameter][key] = int(tensor) if is_count else tensor.to(parameter.device)
        self.optimizer_step = optimizer_step

    def load_weights(self, folder: Path) -> None:
        """Load the trained weights that `save` wrote, without the optimizer; collective."""
        read_tensors(self.weights(), folder, self.ranks)

    def check_fixed(self, saved: Mapping[str, Any], folder: Path) -> None:
        """Raise CheckpointError if a `Resume.FIXED` setting differs: the checkpoint in `folder` cannot be loaded.

        `saved`: the checkpoint's `settings`.
        """
        for key in self._differing(saved):
            if self._marks.get(key) is Resume.FIXED:
                raise CheckpointError(
                    f"{folder} was saved with {key}: {saved[key]}, not {self.settings[key]}; restore it, or start a "
                    "run in another folder (run.dir)"
                )

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a text such as `trainer.optimizer.lr: was 0.1, now 0.2` for each setting that differs from `saved`."""
        return [
            f"{key}: was {saved[key]}, now {self.settings[key]}"
            + (" (rounding only)" if self._marks.get(key) is Resume.ROUNDING else "")
            for key in self._differing(saved)
        ]

    def _differing(self, saved: Mapping[str, Any]) -> list[str]:
        return [key for key, now in self.settings.items() if saved[key] != now]


def operations(current: Callable[[], TrainedModel]) -> dict[str, Callable[..., object]]:
    """Return the handlers of a `TrainedModel`'s operations, by name; `current` returns this rank's `TrainedModel`."""
    return {
        "trained.save": lambda **arguments: current().save(**arguments),
        "trained.verify": lambda **arguments: current().verify(**arguments),
        "trained.load": lambda **arguments: current().load(**arguments),
    }


def _sum(values: Iterable[float]) -> float:
    """Return the sum of the values, rounded after each one; the built-in `sum` does not from Python 3.12 on."""
    return functools.reduce(operator.add, values)


def make_adamw(parameters: Mapping[str, nn.Parameter], settings: OptimizerSection) -> Optimizer:
    """Create AdamW over the parameters.

    Weight decay applies only to parameters with two or more dimensions, not to biases and norms.
    """
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if settings.kind == "adamw_8bit":  # not torchao's, whose state has its own tensor classes instead of plain tensors
        from bitsandbytes.optim import AdamW8bit  # not a dependency

        return AdamW8bit(groups, lr=settings.lr, betas=BETAS)
    # Fused: one pass over the weights instead of one per operation.
    return AdamW(groups, lr=settings.lr, betas=BETAS, fused=True)
