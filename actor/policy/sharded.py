"""A policy on several ranks: each generates a share of the responses, and trains with a shard of the weights.

Every rank keeps a whole copy of the weights, the sampler, and generates with it at its own pace. The rows reach rank 0
as they end, so that scoring overlaps with generation. Rank 0 calls the methods of `Policy`; the other ranks execute
what it announces. Generation and log-probs of the sampler have a list of operations of their own, without collectives,
so that they can run beside an update.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from actor.data.rollout import Rollout
from actor.generation.slots import Finished, Response
from actor.policy.policy import Policy
from actor.policy.state_files import write_sharded_state
from python_backend.errors import RlhfError
from python_backend.models.precision import use_bfloat16
from python_backend.models.sharded_tensors import whole
from python_backend.training.mailbox import Mailbox
from python_backend.training.ranks import Operations, Ranks
from python_backend.training.sharding import hollow, shard, sync_gradients

POLL_S = 0.002


class ShardedPolicy(Policy):
    """This rank's part of the policy."""

    def __init__(self, *args: Any, ranks: Ranks, **others: Any) -> None:
        """Load the policy, which must be the same on all ranks; arguments as of `Policy`."""
        self._ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.size
        connection = ranks.connection("sampling")
        self._lane, self._mail = Operations(ranks.rank, connection), Mailbox(ranks.rank, connection)
        self._closed = threading.Event()
        self._passes_left = 0  # backward passes of the current minibatch
        super().__init__(*args, **{**others, "keeps_sampler": True})

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._ranks.device

    def _placed(self, model: Any) -> Any:
        return model  # mapped from its file; sharding moves each rank's slices to its device

    def _frozen_copy(self) -> Any:
        """Return a copy that `_distribute` fills: no rank has the whole policy beside it in its host's memory."""
        copy = hollow(self.model, "meta").requires_grad_(False)
        self._widen(copy)
        self._prepare(copy)
        return hollow(copy, self.device)

    def _distribute(self) -> None:
        causal, precision = self._causal(self.model), self.settings.precision
        head = causal.get_output_embeddings()

        def prepare(part: Any) -> None:
            self._widen(part)
            if precision == "bfloat16":
                use_bfloat16(part, head)

        causal.response_logprobs = functools.partial(super()._response_logprobs, causal)
        shard(causal, self._ranks, methods=["response_logprobs"], prepare=prepare, precision=precision)
        self._fill([model for model in (self.reference, self.sampler) if model is not None])

    def _widen(self, part: Any) -> None:
        """Convert to float32 what `load_model` has left as it is stored; not the weights that stay in bfloat16."""
        for parameter in part.parameters():
            if parameter.dtype == torch.bfloat16 and not self.settings.lora_rank:
                parameter.data = parameter.data.float()

    @torch.no_grad()
    def _fill(self, copies: list[Any]) -> None:
        for current, *mine in zip(self.model.parameters(), *(c.parameters() for c in copies), strict=True):
            weights = whole(current)
            for parameter in mine:
                parameter.copy_(weights)

    def _shares_prompts_of(self, model: Any) -> bool:
        # Not with sharded weights: the number of forward passes would depend on the rows, and thus on the rank.
        return model is not self.model and super()._shares_prompts_of(model)

    def _response_logprobs(self, causal: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        if causal is self._causal(self.model):
            return causal.response_logprobs(*args)
        return super()._response_logprobs(causal, *args)

    # ---- announced by rank 0, executed by all ranks; collective ----

    @property
    def operations(self) -> dict[str, Callable[..., object]]:
        """The handlers of the operations that other ranks than 0 execute."""
        return {
            "renew_sampler": self.renew_sampler,
            "write_state": self.write_state,
            "read_state": self.read_state,
            "write_weights": self._write_weights,
        }

    def renew_sampler(self) -> None:
        """Copy the policy's weights into the samplers. Call only while all are idle."""
        self._ranks.announce("renew_sampler")
        super().renew_sampler()
        dist.barrier()  # no rank may generate before its sampler has the new weights

    def write_state(self, folder: Path | str) -> None:
        """Write the trained weights and the optimizer's state as slices. Raises OSError."""
        self._ranks.announce("write_state", folder=str(folder))
        write_sharded_state(self, Path(folder))

    def read_state(self, folder: Path | str) -> None:
        """Load what `write_state` wrote, with any number of ranks. Raises CheckpointError."""
        self._ranks.announce("read_state", folder=str(folder))
        super().read_state(Path(folder))

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder, from weights that are gathered one at a time. Rank 0 only."""
        self._save_in_parts(folder)
        self.tokenizer.save_pretrained(folder)

    def _write_weights(self, file: Path | str = os.devnull) -> None:
        self._ranks.announce("write_weights")
        super()._write_weights(Path(file))

    # ---- parts of an update, which `RankedUpdate` announces ----

    def share(self, lengths: Tensor) -> list[list[int]]:
        """Return this rank's micro-batches, as many as every other rank has."""
        plans = [[rows[chunk] for chunk in self.plan(lengths[rows])] for rows in self._dealt(lengths)]
        mine = [chunk.tolist() for chunk in plans[self.rank]]
        self._passes_left = max(len(plan) for plan in plans)
        return mine + [[]] * (self._passes_left - len(mine))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the loss; FSDP averages gradients over ranks."""
        self._passes_left -= 1
        sync_gradients(self._causal(self.model), is_last=self._passes_left <= 0)
        (loss * self.world_size).backward()

    def summed(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the sums over all ranks; collective."""
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64)
        dist.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def _dealt(self, lengths: Tensor) -> list[Tensor]:
        """Deal rows to the ranks, so that each gets rows of similar lengths; return their indices."""
        order = lengths.argsort(stable=True)
        return [order[rank :: self.world_size] for rank in range(self.world_size)]

    # ---- the sampler; without collectives ----

    def follow_sampling(self) -> None:
        """Execute what rank 0 announces to do with the samplers. All ranks but rank 0; ends only with an exception."""
        self._lane.follow({"respond": self._answer_prompts, "logprobs": self._answer_rows})

    def close(self) -> None:
        """Let calls in other threads that wait for other ranks raise CancelledError."""
        self._closed.set()
        super().close()

    def _respond(self, prompts: list[np.ndarray], finished: Finished, *, seed: int, greedy: bool) -> None:
        """Generate this rank's share of the responses, and take those of the other ranks as they end."""
        self._lane.announce("respond", seed=seed, greedy=greedy)
        lengths = torch.tensor([tokens.size for tokens in prompts])
        for rank in self._others:
            self._mail.send(rank, {"tokens": torch.from_numpy(np.concatenate(prompts)), "lengths": lengths})

        def take(_: int, message: Mapping[str, Tensor]) -> None:
            logprobs = message["logprobs"].tolist() if "logprobs" in message else None
            finished(int(message["index"]), Response(message["tokens"].tolist(), bool(message["ended"]), logprobs))

        missing = {rank: len(self._rows_of(rank, len(prompts))) for rank in self._others}
        rows, abandoned = self._rows_of(0, len(prompts)), threading.Event()
        with ThreadPoolExecutor(1, "rows") as thread:
            received = thread.submit(self._receive, missing, take, abandoned)
            try:
                self.generation.run_rows(rows, prompts, finished, seed=seed, greedy=greedy)
            except BaseException:
                abandoned.set()
                raise
            received.result()

    def _answer_prompts(self, *, seed: int, greedy: bool) -> None:
        message = self._message_of_rank_0()
        prompts = [tokens.numpy() for tokens in message["tokens"].split(message["lengths"].tolist())]

        def finished(index: int, response: Response) -> None:
            row = {"index": index, "tokens": response.tokens, "ended": response.ended, "logprobs": response.logprobs}
            self._mail.send(0, {name: torch.tensor(value) for name, value in row.items() if value is not None})

        rows = self._rows_of(self.rank, len(prompts))
        with self._reported(), self.computing(), self._stream.running():
            self.generation.run_rows(rows, prompts, finished, seed=seed, greedy=greedy)

    def logprobs(self, rollout: Rollout, *, reference: bool = False) -> Tensor:
        """Return log-probs as `Policy.logprobs` does; each rank computes those of some rows. Rank 0 only."""
        self._lane.announce("logprobs", reference=reference)
        rows = self._dealt(rollout.lengths)
        for rank in self._others:
            part = rollout.select(rows[rank])
            tensors = {"tokens": part.tokens, "lengths": part.lengths, "prompt_lengths": part.prompt_lengths}
            self._mail.send(rank, tensors)
        out = torch.zeros(rollout.tokens.shape[0], rollout.tokens.shape[1] - 1)
        out[rows[0]] = super().logprobs(rollout.select(rows[0]), reference=reference)

        def take(rank: int, message: Mapping[str, Tensor]) -> None:
            out[rows[rank]] = message["logprobs"]

        self._receive(dict.fromkeys(self._others, 1), take)
        return out

    def _answer_rows(self, *, reference: bool) -> None:
        message = self._message_of_rank_0()
        lengths = message["lengths"]
        part = Rollout([], message["tokens"], lengths, message["prompt_lengths"], torch.zeros_like(lengths).bool())
        with self._reported():
            self._mail.send(0, {"logprobs": super().logprobs(part, reference=reference)})

    @property
    def _others(self) -> range:
        return range(1, self.world_size)

    def _rows_of(self, rank: int, count: int) -> range:
        """Return the prompts of `count` that a rank answers: neighbours, so that most groups stay together."""
        return range(count * rank // self.world_size, count * (rank + 1) // self.world_size)

    def _receive(
        self,
        missing: dict[int, int],
        take: Callable[[int, dict[str, Tensor]], None],
        abandoned: threading.Event | None = None,
    ) -> None:
        """Call `take` with each message of the other ranks, until each has sent its number of `missing` ones.

        Raises:
            RankFailed: another rank met an error.
            CancelledError: the policy was closed, or `abandoned` is set.
        """
        while any(missing.values()):
            if self._closed.is_set() or (abandoned is not None and abandoned.is_set()):
                raise asyncio.CancelledError
            for rank, count in missing.items():
                if count and (message := self._mail.receive(rank)) is not None:
                    missing[rank] -= 1
                    take(rank, message)
            time.sleep(POLL_S)

    def _message_of_rank_0(self) -> dict[str, Tensor]:
        while (message := self._mail.receive(0)) is None:
            time.sleep(POLL_S)
        return message

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Send an error to rank 0 instead of raising it."""
        try:
            yield
        except RlhfError as error:
            self._mail.send_error(0, error)
