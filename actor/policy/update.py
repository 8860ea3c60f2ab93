"""Policy update: shuffled minibatches, micro-batches within the token budget, gradient clipping, AdamW.

The split into micro-batches does not change the result. On several ranks, rank 0 announces the update and sends the
batch; each rank trains on its share of the rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_triton.actor.algorithms.importance import importance_factors
from rlhf_triton.actor.algorithms.inputs import LossAndMetrics, LossInputs
from rlhf_triton.actor.algorithms.kl import kl_loss
from rlhf_triton.actor.algorithms.method import Method
from rlhf_triton.actor.data.batch import PPOBatch
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.config.actor import ActorSection
from rlhf_triton.errors import FunctionError, NotFinite
from rlhf_triton.training_engine.trained import DifferentStatistics


@dataclass(frozen=True)
class PolicyUpdateResult:
    """The result of an update; the defaults are those of a step that does not train the policy."""

    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # `train_optim/…`, mostly means over tokens
    old_logprobs: Tensor | None = None  # float32 [B, S-1], under the policy before; None if they were not recomputed


class PolicyUpdate:
    """Trains a policy with one `Method`."""

    def __init__(self, actor: ActorSection, policy: Policy, method: Method) -> None:
        self._policy = policy
        self._trained = policy.trained
        self._ranks = policy.ranks
        self._method = method
        self._settings = actor.update
        self._is_one_update = actor.is_one_update
        # Responses come from older policies: old log-probs, if they are not the samplers', are of the policy before the
        # update.
        self._recomputes = actor.max_off_policy_steps > 0 and method.settings.old_logprobs == "recomputed"
        self._max_new_tokens = actor.generation.max_new_tokens  # the constant of `loss_mean: constant`

    def run(self, batch: PPOBatch | None, *, seed: int, kl_coef: float) -> PolicyUpdateResult:
        """Train on the batch for `epochs` passes.

        If `actor.update.max_kl` is set, the update ends before the first minibatch whose KL from the old log-probs
        exceeds it; `train_optim/minibatches` counts the optimizer steps. Collective: ranks other than 0 pass no batch.

        Raises:
            NotFinite: the gradient of a minibatch is not finite; this minibatch did not change the weights.
        """
        self._ranks.announce("update", seed=seed, kl_coef=kl_coef)
        batch = self._ranks.broadcast(batch)
        old_logprobs = self._current_logprobs(batch) if self._recomputes else None
        batch = self._corrected(batch if old_logprobs is None else dataclasses.replace(batch, logprobs=old_logprobs))
        s = self._settings
        contributes = batch.policy_weights.any(-1)
        rows_per_conversation = _rows_per_conversation(batch, contributes)
        generator = torch.Generator().manual_seed(seed)
        totals: dict[str, float] = {}
        weight_sum = num_steps = norms = 0.0
        for rows in self._minibatches(batch, generator):
            rows = rows[contributes[rows]]  # rows without any weight have no gradient
            if not len(rows):
                continue
            total = float(batch.policy_weights[rows].sum())
            scale = 1.0  # scales the loss only; metrics stay means over tokens
            if self._method.loss_mean == "constant":
                scale = total * rows_per_conversation / (len(rows) * self._max_new_tokens)
            sums = self._gradients(batch, rows, total, kl_coef, scale=scale, names=totals)
            if self._method.own_loss and not math.isfinite(sums["loss"]):
                self._trained.drop_gradients()
                raise NotFinite(
                    f"actor.algorithm.loss: {self._method.own_loss} returned {sums['loss']} at optimizer step "
                    f"{self._trained.optimizer_step}; the step did not change the weights"
                )
            if s.max_kl is not None and sums["approx_kl"] / total > s.max_kl:
                self._trained.drop_gradients()
                break
            norms += self._step()
            weight_sum += total
            num_steps += 1
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        means = {name: value / max(1.0, weight_sum) for name, value in totals.items()}
        means["loss"] = totals.get("loss", 0.0) / max(1.0, num_steps)
        means.update(
            grad_norm=norms / max(1.0, num_steps),
            minibatches=num_steps,
            optim_step=float(self._trained.optimizer_step),
            lr=self._trained.last_lr,
        )
        return PolicyUpdateResult({f"train_optim/{name}": value for name, value in means.items()}, old_logprobs)

    def _minibatches(self, batch: PPOBatch, generator: torch.Generator) -> list[Tensor]:
        """Return the shuffled rows of each minibatch of all epochs.

        Conversations with several rows enlarge the minibatches; they do not add any.
        """
        all_rows = torch.ones_like(batch.lengths, dtype=torch.bool)
        size = math.ceil(self._settings.minibatch_size * _rows_per_conversation(batch, all_rows))
        orders = [torch.randperm(len(all_rows), generator=generator) for _ in range(self._settings.epochs)]
        return [rows for order in orders for rows in order.split(size)]

    def _corrected(self, batch: PPOBatch) -> PPOBatch:
        """Return the batch with the correction's importance factors, if any."""
        correction = self._method.settings.factors
        if correction is None or batch.logprobs is None or batch.sampled_logprobs is None:
            return batch
        factors = importance_factors(
            batch.logprobs,
            batch.sampled_logprobs,
            batch.mask,
            level=correction.level,
            mode=correction.mode,
            low=correction.low,
            high=correction.upper,
        )
        return dataclasses.replace(batch, importance=factors)

    @torch.no_grad()
    def _current_logprobs(self, batch: PPOBatch) -> Tensor:
        """Return log-probs `[B, S-1]` under the policy before the update, on every rank."""
        policy = self._policy
        mask = batch.mask
        lengths = batch.lengths

        def compute(_: int) -> Tensor:
            logprobs = torch.zeros_like(mask)
            for chunk in self._trained.micro_batches(lengths):
                rows = chunk or [0]
                tokens = batch.tokens[rows, : int(lengths[rows].max())]
                part = policy.token_logprobs.compute(
                    policy.model, tokens, lengths[rows], mask[rows, : tokens.shape[1] - 1]
                )
                if chunk:
                    logprobs[chunk, : part.shape[1]] = part.to(logprobs)
            return logprobs

        longest = int(lengths.max())
        # Exactly one rank computes each row; the others add 0.
        return self._ranks.summed(self._trained.memory.run(compute, least=longest, most=longest * len(lengths)))

    def _gradients(
        self,
        batch: PPOBatch,
        rows: Tensor,
        total: float,
        kl_coef: float,
        *,
        scale: float = 1.0,
        names: Collection[str] = (),
    ) -> dict[str, float]:
        """Compute the gradients of a minibatch; return its loss, and its statistics as sums over tokens.

        Args:
            rows: rows of the minibatch.
            total: sum of their weights.
            scale: factor of the loss, but not of the statistics.
            names: the statistics of earlier minibatches.
        """
        positive = float(batch.policy_weights[rows][batch.positive[rows]].sum())
        unweighted = dataclasses.replace(batch, policy_weights=torch.zeros_like(batch.policy_weights))

        def loss(chunk: list[int], counts: bool) -> LossAndMetrics:
            part = batch if counts else unweighted
            share, statistics = self._loss(part, rows[chunk], total, positive, kl_coef)
            return share * scale, statistics

        try:
            return self._trained.accumulate(batch.lengths[rows], loss, names=names)
        except DifferentStatistics as error:
            raise FunctionError(
                f"actor.algorithm.loss: {self._method.own_loss} returns different metrics for different rows "
                f"({error}); always return the same names, with 0 where nothing counts"
            ) from error

    def _loss(self, batch: PPOBatch, rows: Tensor, total: float, positive: float, kl_coef: float) -> LossAndMetrics:
        """Return a micro-batch's share of the minibatch loss, and its statistics.

        Args:
            rows: rows of the micro-batch.
            total: sum of the minibatch's weights.
            positive: sum of the weights of the minibatch's responses with a positive score.
        """
        policy = self._policy
        method = self._method
        lengths = batch.lengths[rows]
        tokens = batch.tokens[rows, : int(lengths.max())]

        names = (
            *("advantages", "policy_weights", "mask", "logprobs", "ref_logprobs", "importance"),
            *("groups", "versions", "positive"),
        )
        tensors = {name: tensor[rows] for name in names if (tensor := getattr(batch, name)) is not None}
        parts = {name: part[:, : tokens.shape[1] - 1] if part.ndim == 2 else part for name, part in tensors.items()}
        token_logprobs = policy.token_logprobs
        placed, others = token_logprobs.place(policy.model, tokens, lengths, parts["policy_weights"], *parts.values())
        part = dict(zip(parts, others, strict=True))
        advantages = part["advantages"]
        weights = part["policy_weights"]
        bonus = method.settings.entropy_bonus
        nll = method.settings.defaults.positive_nll
        logprobs, entropies = token_logprobs.of_placed(policy.model, placed, entropy="gradient" if bonus else "value")
        assert entropies is not None
        # If the rollout is a single minibatch, the policy is still the one that sampled it, so the ratio is exactly 1.
        # Log-probs that were computed for the KL are not used here, so that measuring it does not change the update.
        old = logprobs.detach() if self._is_one_update else part.get("logprobs", logprobs.detach())
        if "importance" in part:
            # As weights they would cancel in the mean, and would also weight the KL, the entropy and `max_kl`.
            advantages = advantages * part["importance"]
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=advantages,
            weights=weights,
            total=total,
            clip=method.clip,
            mask=part["mask"],
            groups=part["groups"],
            versions=part["versions"],
            ref_logprobs=part.get("ref_logprobs"),
        )
        loss, metrics = method.loss(inputs)
        stats = {**inputs.statistics(), **metrics}
        if "importance" in part:
            stats["importance"] = inputs.sum(part["importance"])
            stats["importance_masked"] = inputs.sum(part["importance"] == 0)
        if method.kl_in_loss and kl_coef:
            assert "ref_logprobs" in part, "a KL penalty needs the reference"
            ref = part["ref_logprobs"]
            kl = kl_loss(logprobs, ref, inputs.log_ratio, weights, kind=method.kl_estimator, total=total)
            penalty = kl_coef * kl
            loss = loss + penalty
            stats["scaled_kl"] = penalty.detach() * total
        stats["entropy"] = inputs.sum(entropies)
        if bonus:
            loss = loss - bonus * inputs.mean(entropies)
            stats["scaled_entropy"] = bonus * stats["entropy"]
        if nll:
            weighted = (-inputs.logprobs * weights * part["positive"][:, None]).sum()
            loss = loss + nll * weighted / (positive or 1)
            stats["scaled_nll"] = nll * weighted.detach() / (positive or 1) * total
        return loss, stats

    def _step(self) -> float:
        trained = self._trained
        norm = trained.step()
        if norm is None:
            raise NotFinite(
                f"the policy's gradient is not finite at optimizer step {trained.optimizer_step}; lower "
                f"actor.optimizer.lr ({trained.settings['actor.optimizer.lr']:g}) or check the rewards of this step in "
                "metrics.jsonl"
            )
        return norm


def _rows_per_conversation(batch: PPOBatch, rows: Tensor) -> float:
    """Return the mean number of rows per conversation among the selected `rows`, bool `[B]`; 1 if none is selected."""
    return int(rows.sum()) / max(1, batch.conversations[rows].unique().numel()) or 1.0
