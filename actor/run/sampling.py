"""Samples the responses of several steps at once: an asyncio interface to the policy's decoding in a compute thread."""

import asyncio
from collections.abc import Mapping

from rlhf_triton.actor.data.compute import ComputeThread, cancel_all, set_error
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import Conversation
from rlhf_triton.actor.generation.row_sources import SamplingJob
from rlhf_triton.actor.policy.policy import Policy


class PolicySampling:
    """Conversations that the policy is sampling.

    Decoding gives way to other calls in the compute thread, between two forward passes.
    """

    def __init__(self, policy: Policy, in_thread: ComputeThread) -> None:
        self._policy = policy
        self._in_thread = in_thread
        in_thread.interrupt = policy.generation.wake
        self._unfinished = set[asyncio.Future[Conversation]]()
        self._decoding: asyncio.Task[None] | None = None
        self._is_over = False

    def start(
        self, prompts: Mapping[int, Prompt], *, seed: int, greedy: bool = False
    ) -> list[asyncio.Future[Conversation]]:
        """Start to respond to the prompts; return a future for each one's conversation, in order.

        Arguments as in `SamplingJob`. The futures have the error with which decoding fails, such as NotFinite.
        """
        loop = asyncio.get_running_loop()
        ended = {index: loop.create_future() for index in prompts}
        self._unfinished.update(ended.values())

        def resolve(index: int, conversation: Conversation) -> None:
            self._unfinished.discard(ended[index])
            if not ended[index].done():
                ended[index].set_result(conversation)

        def on_finished(index: int, conversation: Conversation) -> None:
            if self._is_over:
                raise asyncio.CancelledError  # so that decoding stops
            loop.call_soon_threadsafe(resolve, index, conversation)

        self._policy.add(SamplingJob(dict(prompts), on_finished, seed, greedy))
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        return [*ended.values()]

    async def renew(self, policy_step: int) -> None:
        """Sample with the policy's current weights from now on; see `Policy.renew_generator`."""
        await self._in_thread(self._policy.renew_generator, policy_step)

    async def settle(self) -> None:
        """Wait until all conversations have ended."""
        if self._decoding is not None:
            await asyncio.wait([self._decoding])

    async def cancel(self) -> None:
        """End all conversations."""
        self._is_over = True
        self._policy.generation.wake()
        await cancel_all([self._decoding] if self._decoding else [])
        await self._in_thread(self._policy.abandon)
        self._is_over = False

    async def _decode(self) -> None:
        try:
            while self._policy.has_jobs:
                await self._in_thread(self._policy.decode, lambda: self._is_over or self._in_thread.is_awaited())
        except BaseException as error:  # task edge: what waits for the conversations raises it
            for conversation in self._unfinished:
                if isinstance(error, asyncio.CancelledError):
                    conversation.cancel()
                elif not conversation.done():
                    set_error(conversation, error)
            self._unfinished.clear()
            if not isinstance(error, Exception):
                raise
