"""The samplers of a policy on several ranks: each generates a share of the responses, with whole weights of its own.

Each works at its own pace. The rows reach rank 0 as they end, so that scoring overlaps with generation. No operation is
collective, so that all of them can run beside an update.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhf_triton.actor.data.recorded import SampledTurn
from rlhf_triton.actor.data.rollout import Prompt, Rollout, Trajectory
from rlhf_triton.actor.generation.engine import Generation
from rlhf_triton.actor.generation.slots import Finished, Response
from rlhf_triton.errors import RlhfError
from rlhf_triton.learning.ranks import Mailbox, Operations, Ranks, as_tensor, dealt, value_of

POLL_S = 0.002


class OwnLogprobs(Protocol):
    """Computes log-probs on this rank, as `Policy.logprobs` returns them."""

    def __call__(self, rollout: Rollout, *, reference: bool) -> Tensor: ...


class OtherSamplers:
    """Rank 0's access to the samplers of the other ranks; on those ranks, what answers it."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        self._others = range(1, ranks.size)
        connection = ranks.connection("sampling")
        self._lane, self._mail = Operations(ranks.rank, connection), Mailbox(ranks.rank, connection)
        self._closed = threading.Event()

    def respond(
        self, generation: Generation, prompts: list[Prompt], finished: Finished, *, seed: int, greedy: bool
    ) -> None:
        """Generate rank 0's share of the responses with `generation`, and take those of the other ranks as they end.

        Raises as `_receive`.
        """
        self._lane.announce("respond", seed=seed, greedy=greedy)
        sent = prompts if generation.agent else [replace(prompt, text="", metadata={}) for prompt in prompts]
        for rank in self._others:
            own = self._rows_of(rank, len(prompts))
            self._mail.send(rank, {"prompts": as_tensor([own.start, sent[own.start : own.stop]])})

        def take(_: int, message: Mapping[str, Tensor]) -> None:
            index, response = value_of(message["row"])
            finished(index, _response(response))

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

    def logprobs(self, own: OwnLogprobs, rollout: Rollout, *, reference: bool) -> Tensor:
        """Return the log-probs of a rollout; each rank computes some rows. Rank 0 only; raises as `_receive`."""
        self._lane.announce("logprobs", reference=reference)
        rows = dealt(rollout.lengths, self._size)
        for rank in self._others:
            part = rollout.select(rows[rank])
            tensors = {"tokens": part.tokens, "lengths": part.lengths, "prompt_lengths": part.prompt_lengths}
            if part.observed is not None:
                tensors["observed"] = part.observed
            self._mail.send(rank, tensors)
        out = torch.zeros(rollout.tokens.shape[0], rollout.tokens.shape[1] - 1)
        out[rows[0]] = own(rollout.select(rows[0]), reference=reference)

        def take(rank: int, message: Mapping[str, Tensor]) -> None:
            out[rows[rank]] = message["logprobs"]

        self._receive(dict.fromkeys(self._others, 1), take)
        return out

    def follow(self, respond: Callable[..., None], own: OwnLogprobs) -> None:
        """Execute what rank 0 announces, by `respond(prompts, finished, seed=, greedy=)` and `own`.

        All ranks but rank 0; ends only with an exception.
        """

        def answer_prompts(*, seed: int, greedy: bool) -> None:
            first, found = value_of(self._message_of_rank_0()["prompts"])
            prompts = dict(enumerate(map(_prompt, found), first))

            def send(index: int, response: Response) -> None:
                self._mail.send(0, {"row": as_tensor([index, response])})

            with self._reported():
                respond(prompts, send, seed=seed, greedy=greedy)

        def answer_rows(*, reference: bool) -> None:
            message = self._message_of_rank_0()
            lengths = message["lengths"]
            is_end = torch.zeros_like(lengths).bool()
            part = Rollout([], message["tokens"], lengths, message["prompt_lengths"], is_end)
            part = replace(part, observed=message.get("observed"))
            with self._reported():
                self._mail.send(0, {"logprobs": own(part, reference=reference)})

        self._lane.follow({"respond": answer_prompts, "logprobs": answer_rows})

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


def _prompt(found: dict[str, Any]) -> Prompt:
    return Prompt(**{**found, "tokens": np.array(found["tokens"], np.int64)})


def _response(found: dict[str, Any]) -> Response:
    prompt, trajectory = found["prompt"], found["trajectory"]
    if trajectory is not None:
        turns = (SampledTurn(**{**turn, "tokens": tuple(turn["tokens"])}) for turn in trajectory["turns"])
        trajectory = Trajectory(**{**trajectory, "turns": tuple(turns), "messages": tuple(trajectory["messages"])})
    others = tuple(_response(each) for each in found["others"])
    return Response(**{**found, "prompt": prompt and _prompt(prompt), "trajectory": trajectory, "others": others})
