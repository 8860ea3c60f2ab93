"""The samplers of a policy on several ranks: each generates a share of the responses, with whole weights of its own.

Each works at its own pace. The rows reach rank 0 as they end, so that scoring overlaps with generation. No operation is
collective, so that all of them can run beside an update.
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
from rlhf_triton.actor.data.sample import Conversation, SampledRow
from rlhf_triton.actor.generation.engine import Generation
from rlhf_triton.actor.generation.slots import Finished
from rlhf_triton.errors import RlhfError
from rlhf_triton.learning.mailbox import Mailbox, as_tensor, value_of
from rlhf_triton.learning.ranks import Operations, Ranks, dealt

POLL_S = 0.002


OwnLogprobs = Callable[..., list[np.ndarray]]
"""Computes log-probs on this rank, as `Policy.logprobs` takes and returns them."""


class OtherSamplers:
    """Rank 0's access to the samplers of the other ranks; on those ranks, the answering side."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        self._others = range(1, ranks.size)
        connection = ranks.connection("sampling")
        self._lane, self._mail = Operations(ranks.rank, connection), Mailbox(ranks.rank, connection)
        self._closed = threading.Event()
        self._number = 0  # of the operation: rank 0 may have given up an earlier one, which the others still answer

    def respond(
        self, generation: Generation, prompts: list[Prompt], finished: Finished, *, seed: int, greedy: bool
    ) -> None:
        """Generate rank 0's share of the responses with `generation`, and take those of the other ranks as they end.

        Raises as `_receive`.
        """
        self._announce("respond", seed=seed, greedy=greedy)
        sent = prompts if generation.agent else [replace(prompt, text="", metadata={}) for prompt in prompts]
        for rank in self._others:
            own = self._rows_of(rank, len(prompts))
            self._mail.send(rank, {"prompts": as_tensor([own.start, sent[own.start : own.stop]])})

        def take(_: int, message: Mapping[str, Tensor]) -> None:
            index, rows = value_of(message["conversation"])
            conversation = tuple(SampledRow.of(row) for row in rows)
            if not generation.agent:  # its prompt has come back without text
                conversation = tuple(replace(row, prompt=prompts[index]) for row in conversation)
            finished(index, conversation)

        missing = {rank: len(self._rows_of(rank, len(prompts))) for rank in self._others}
        rows, abandoned = self._rows_of(0, len(prompts)), threading.Event()
        with ThreadPoolExecutor(1, "rows") as thread:
            received = thread.submit(self._receive, missing, take, abandoned)
            try:
                generation.run_rows({row: prompts[row] for row in rows}, finished, seed=seed, greedy=greedy)
            except BaseException:
                abandoned.set()
                raise
            received.result()

    def logprobs(self, own: OwnLogprobs, rows: Sequence[SampledRow], *, reference: bool) -> list[np.ndarray]:
        """Return the log-probs of samples; each rank computes those of some. Rank 0 only; raises as `_receive`."""
        self._announce("logprobs", reference=reference)
        shares = [share.tolist() for share in dealt(torch.tensor([len(row.tokens) for row in rows]), self._size)]
        for rank in self._others:
            lengths = torch.tensor([len(rows[i].tokens) for i in shares[rank]], dtype=torch.int64)
            sent = {
                name: _concatenated([getattr(rows[i], name) for i in shares[rank]]) for name in ("tokens", "sampled")
            }
            self._mail.send(rank, {**sent, "lengths": lengths})
        found = dict(zip(shares[0], own([rows[i] for i in shares[0]], reference=reference), strict=True))

        def take(rank: int, message: Mapping[str, Tensor]) -> None:
            parts = message["logprobs"].split([len(rows[i].tokens) for i in shares[rank]])
            found.update(zip(shares[rank], (part.numpy() for part in parts), strict=True))

        self._receive(dict.fromkeys(self._others, 1), take)
        return [found[i] for i in range(len(rows))]

    def follow(self, respond: Callable[..., None], own: OwnLogprobs) -> None:
        """Execute what rank 0 announces, by `respond(prompts, finished, seed=, greedy=)` and `own`.

        All ranks but rank 0; ends only with an exception.
        """

        def answer_prompts(*, number: int, seed: int, greedy: bool) -> None:
            first, found = value_of(self._message_of_rank_0()["prompts"])
            prompts = dict(enumerate(map(Prompt.of, found), first))

            def send(index: int, conversation: Conversation) -> None:
                self._reply(number, {"conversation": as_tensor([index, conversation])})

            with self._reported():
                respond(prompts, send, seed=seed, greedy=greedy)

        def answer_rows(*, number: int, reference: bool) -> None:
            message = self._message_of_rank_0()
            sizes, nothing = message["lengths"].tolist(), Prompt("", "", np.zeros(0, np.int64))
            parts = zip(message["tokens"].split(sizes), message["sampled"].split(sizes), strict=True)
            rows = [SampledRow(nothing, tokens.numpy(), sampled.numpy(), ended=True) for tokens, sampled in parts]
            with self._reported():
                self._reply(number, {"logprobs": _concatenated(own(rows, reference=reference), np.float32)})

        self._lane.follow({"respond": answer_prompts, "logprobs": answer_rows})

    def _announce(self, name: str, **arguments: Any) -> None:
        self._number += 1
        self._lane.announce(name, number=self._number, **arguments)

    def _reply(self, number: int, message: Mapping[str, Tensor]) -> None:
        self._mail.send(0, {**message, "number": torch.tensor(number)})

    def close(self) -> None:
        """Let calls in other threads that wait for other ranks raise CancelledError."""
        self._closed.set()

    def _rows_of(self, rank: int, count: int) -> range:
        """Return the prompts of `count` that a rank answers: neighbours, so that most groups stay together."""
        return range(count * rank // self._size, count * (rank + 1) // self._size)

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
                message = self._mail.receive(rank) if count else None
                if message is not None and int(message["number"]) == self._number:
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


def _concatenated(arrays: Sequence[np.ndarray], dtype: Any = None) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays or [np.zeros(0, dtype or np.int64)]))
