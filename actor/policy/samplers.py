"""The samplers of a policy on several ranks: each holds whole weights and generates a share of the responses.

Each works at its own pace. Rows reach rank 0 as they end, so that scoring overlaps with generation. No operation is
collective, so that all of them can run during an update.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import Conversation, Group, RolloutRow
from rlhf_triton.actor.data.sample_records import group_of, record_of
from rlhf_triton.actor.generation.generation import Generation
from rlhf_triton.actor.generation.row_sources import SamplingJob
from rlhf_triton.errors import RankFailed, RlhfError
from rlhf_triton.store.record_log import StoredRecord
from rlhf_triton.training_engine.mailbox import Mailbox, as_tensor, value_of
from rlhf_triton.training_engine.ranks import Operations, Ranks, dealt

POLL_S = 0.002
ERROR = "error"  # in place of a result, in the reply of a rank that failed


OwnLogprobs = Callable[..., list[np.ndarray]]
"""Computes log-probs on this rank; arguments and results as in `Policy.logprobs`."""


class OtherSamplers:
    """Rank 0's access to the samplers of the other ranks; on the other ranks, it answers rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._size = ranks.size
        self._others = range(1, ranks.size)
        connection = ranks.connection("sampling")
        self._lane = Operations(ranks.rank, connection)
        self._mail = Mailbox(ranks.rank, connection)
        self._closed = threading.Event()
        self._number = 0  # the current operation; other ranks may still answer an earlier one, which rank 0 gave up

    def respond(self, generation: Generation, job: SamplingJob) -> None:
        """Generate rank 0's share of the responses with `generation`; receive other ranks' responses as they end.

        Rank 0 only; raises as `_receive`.
        """
        prompts, indices = [*job.prompts.values()], [*job.prompts]
        self._announce("respond", seed=job.seed, greedy=job.greedy)
        sent = prompts if generation.runner else [replace(prompt, text="", metadata={}) for prompt in prompts]
        for rank in self._others:
            share = self._rows_of(rank, len(prompts))
            own = [indices[share.start : share.stop], sent[share.start : share.stop]]
            self._mail.send(rank, {"prompts": as_tensor(own)})

        def receive(_: int, message: dict[str, Tensor]) -> None:
            header = value_of(message.pop("header"))
            record = StoredRecord(header, {name: tensor.numpy() for name, tensor in message.items()})
            (conversation,) = group_of(record).conversations
            index = header["index"]
            if not generation.runner:  # the prompt was sent without text and metadata
                conversation = tuple(replace(row, prompt=job.prompts[index]) for row in conversation)
            job.finish(index, conversation)

        missing = {rank: len(self._rows_of(rank, len(prompts))) for rank in self._others}
        rows = self._rows_of(0, len(prompts))
        abandoned = threading.Event()
        with ThreadPoolExecutor(1, "rows") as thread:
            received = thread.submit(self._receive, missing, receive, abandoned)
            try:
                own_prompts = {indices[row]: prompts[row] for row in rows}
                generation.run_rows(own_prompts, job.finish, seed=job.seed, greedy=job.greedy)
            except BaseException:
                abandoned.set()
                raise
            received.result()

    def logprobs(self, compute: OwnLogprobs, rows: Sequence[RolloutRow], *, reference: bool) -> list[np.ndarray]:
        """Return the log-probs of rows; each rank computes a share. Called on rank 0 only; raises as `_receive`."""
        self._announce("logprobs", reference=reference)
        shares = [share.tolist() for share in dealt(torch.tensor([len(row.tokens) for row in rows]), self._size)]
        for rank in self._others:
            lengths = torch.tensor([len(rows[i].tokens) for i in shares[rank]], dtype=torch.int64)
            sent = {
                name: _concatenated([getattr(rows[i], name) for i in shares[rank]]) for name in ("tokens", "sampled")
            }
            self._mail.send(rank, {**sent, "lengths": lengths})
        results = dict(zip(shares[0], compute([rows[i] for i in shares[0]], reference=reference), strict=True))

        def receive(rank: int, message: Mapping[str, Tensor]) -> None:
            parts = message["logprobs"].split([len(rows[i].tokens) for i in shares[rank]])
            results.update(zip(shares[rank], (part.numpy() for part in parts), strict=True))

        self._receive(dict.fromkeys(self._others, 1), receive)
        return [results[i] for i in range(len(rows))]

    def follow(self, respond: Callable[..., None], compute: OwnLogprobs) -> None:
        """Execute what rank 0 announces with `respond(prompts, finished, is_over, seed=, greedy=)` and `compute`.

        Rank 0 waits for responses before its next announcement, so `is_over` returns True once it has given them up.
        Call on every rank except 0; ends only by an exception.
        """

        def answer_prompts(*, number: int, seed: int, greedy: bool) -> None:
            indices, prompt_fields = value_of(self._message_of_rank_0()["prompts"])
            prompts = dict(zip(indices, map(Prompt.from_json, prompt_fields), strict=True))

            def send(index: int, conversation: Conversation) -> None:
                record = record_of(Group((conversation,)), index=index)
                arrays = {name: torch.from_numpy(array) for name, array in record.arrays.items()}
                self._reply(number, {"header": as_tensor(record.header), **arrays})

            with self._reported(number):
                respond(prompts, send, self._lane.has_next, seed=seed, greedy=greedy)

        def answer_rows(*, number: int, reference: bool) -> None:
            message = self._message_of_rank_0()
            sizes = message["lengths"].tolist()
            no_prompt = Prompt("", "", np.zeros(0, np.int64))
            parts = zip(message["tokens"].split(sizes), message["sampled"].split(sizes), strict=True)
            rows = [
                RolloutRow(prompt=no_prompt, tokens=tokens.numpy(), sampled=sampled.numpy(), ended=True)
                for tokens, sampled in parts
            ]
            with self._reported(number):
                self._reply(number, {"logprobs": _concatenated(compute(rows, reference=reference), np.float32)})

        self._lane.follow({"respond": answer_prompts, "logprobs": answer_rows, "abandon": lambda **_: None})

    def _announce(self, name: str, **arguments: Any) -> None:
        self._number += 1
        self._lane.announce(name, number=self._number, **arguments)

    def _reply(self, number: int, message: Mapping[str, Tensor]) -> None:
        self._mail.send(0, {**message, "number": torch.tensor(number)})

    def abandon(self) -> None:
        """End the responses of the other ranks that rank 0 has given up. Rank 0 only."""
        self._announce("abandon")

    def close(self) -> None:
        """Make calls in other threads that wait for other ranks raise CancelledError."""
        self._closed.set()

    def _rows_of(self, rank: int, count: int) -> range:
        """Return the indices, out of `count`, of the prompts of a rank: a range, so that most groups stay together."""
        return range(count * rank // self._size, count * (rank + 1) // self._size)

    def _receive(
        self,
        missing: dict[int, int],
        receive: Callable[[int, dict[str, Tensor]], None],
        abandoned: threading.Event | None = None,
    ) -> None:
        """Call `receive(rank, message)` with each message until every rank has sent the number in `missing`.

        Raises:
            RankFailed: another rank met an error in the current operation.
            CancelledError: the policy was closed, or `abandoned` is set.
        """
        while any(missing.values()):
            if self._closed.is_set() or (abandoned is not None and abandoned.is_set()):
                raise asyncio.CancelledError
            for rank, count in missing.items():
                message = self._mail.receive(rank) if count else None
                if message is not None and int(message["number"]) == self._number:
                    if ERROR in message:
                        raise RankFailed(value_of(message[ERROR]))
                    missing[rank] -= 1
                    receive(rank, message)
            time.sleep(POLL_S)

    def _message_of_rank_0(self) -> dict[str, Tensor]:
        while (message := self._mail.receive(0)) is None:
            time.sleep(POLL_S)
        return message

    @contextlib.contextmanager
    def _reported(self, number: int) -> Iterator[None]:
        """Reply to operation `number` with an error instead of raising it; ignored if rank 0 has given it up."""
        try:
            yield
        except (RlhfError, OSError) as error:  # what `Operations.follow` only logs
            self._reply(number, {ERROR: as_tensor(f"rank {self._rank}: {error}")})


def _concatenated(arrays: Sequence[np.ndarray], dtype: Any = None) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays or [np.zeros(0, dtype or np.int64)]))
