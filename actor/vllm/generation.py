"""Generates responses with vLLM servers; the actor itself computes the policy's log-probs."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_triton.actor.data.compute import cancel_all
from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.generation.conversations import ROW_STEP
from rlhf_triton.actor.generation.engine import Generation
from rlhf_triton.actor.generation.slots import Finished, RowSource
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.vllm.connection import BAN_BIAS, HINT, PolicyVersions, VllmConnection, token_rules
from rlhf_triton.client.pool import ServerPool
from rlhf_triton.client.retry import RETRY_RESERVE, Attempts, RequestCounters, RetryBudget
from rlhf_triton.config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError

MODEL = "vLLM"  # in error messages
VERSIONS_FOLDER = "policy_versions"


class VllmGeneration(Generation):
    """Generates with the servers of `actor.generation.vllm`, which load each version of the policy's weights."""

    has_policy_logprobs = False

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Raise ConfigError if no server is configured."""
        actor = config.actor
        super().__init__(
            policy.sampler,
            policy.tokenizer,
            actor.generation,
            pad_id=policy.pad_id,
            banned_ids=policy.banned_ids,
            eos_ids=[token for token in policy.eos_ids if token < policy.vocab_size],  # vLLM refuses larger ids
        )
        self._vllm = actor.generation.vllm
        if not self._vllm.servers:
            raise ConfigError(
                "actor.generation.vllm.servers: empty; name the vLLM servers, or start the run with "
                "`rlhf-triton run`, which starts one"
            )
        self._client, self._policy, self._is_adapter = actor.client, policy, bool(actor.policy.lora_rank)
        self._versions = PolicyVersions(config.run.dir / VERSIONS_FOLDER, are_adapters=self._is_adapter)
        self._published: int | None = None  # optimizer step of the published weights
        self._checked: set[str] = set()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._is_closed = False
        self._budget = RetryBudget(RETRY_RESERVE)

    def renew(self) -> None:
        """Publish the sampler's weights, if they changed, as a version that servers load before their next response."""
        if self._policy.ranks.rank == 0 and self._published != self._policy.trained.optimizer_step:
            self._versions.publish(self._policy.sampler.save_pretrained)  # with LoRA, only the adapters
            self._published = self._policy.trained.optimizer_step

    def close(self) -> None:
        """End the environments; a `run` in another thread raises CancelledError."""
        super().close()
        self._is_closed = True
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # `run` is just ending: the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    def run_rows(self, prompts: Mapping[int, Prompt], finished: Finished, *, seed: int, greedy: bool) -> None:
        """Generate the responses of `run` to some of the prompts, given by index; call `renew` first.

        Raises:
            RequestFailed: the servers were unavailable for `actor.client.max_outage_s`, or refuse a request.
            RlhfError: a server was started without a required option.
        """
        with self._open_row_source(prompts, finished, seed) as row_source:
            asyncio.run(self._run(row_source, seed=seed, greedy=greedy))

    async def _run(self, row_source: RowSource, *, seed: int, greedy: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        limit = asyncio.Semaphore(self._settings.batch_size)
        connect = functools.partial(
            VllmConnection,
            version=self._versions.current(),
            is_adapter=self._is_adapter,
            limit=self._settings.batch_size,
            checked=self._checked,
        )
        pool = ServerPool(self._vllm.servers, connect, self._client, RequestCounters(), hint=HINT)

        turns: dict[int, int] = collections.Counter()

        async def respond(row: int, tokens: Sequence[int]) -> None:
            left = min(self._settings.max_new_tokens, row_source.longest - len(tokens))
            sampling = self._sampling_parameters(
                [seed, row, *([turns[row]] if turns[row] else ())], left, greedy=greedy
            )
            turns[row] += 1
            # The turns of a conversation go to the same server, which has the tokens before them in its cache.
            session = None if self.runner is None else row % ROW_STEP
            async with limit:
                attempts = Attempts(MODEL, self._client, self._budget, session=session)
                turn = await pool.answer(attempts, lambda connection: connection.generate(tokens, sampling))
            row_source.deliver(row, self._check_turn(turn))

        responses: set[asyncio.Task[None]] = set()
        self._running = asyncio.get_running_loop(), task
        try:
            if self._is_closed:
                raise asyncio.CancelledError
            arriving = asyncio.create_task(asyncio.to_thread(row_source.next_rows, wait=True))
            while True:
                await asyncio.wait([arriving, *responses], return_when=asyncio.FIRST_COMPLETED)
                for response in [response for response in responses if response.done()]:
                    response.result()
                    responses.remove(response)
                if arriving.done():
                    if not (new_rows := arriving.result()):
                        break
                    responses |= {asyncio.create_task(respond(*row)) for row in new_rows}
                    arriving = asyncio.create_task(asyncio.to_thread(row_source.next_rows, wait=True))
            await asyncio.gather(*responses)
        finally:
            self._running = None
            row_source.close()  # a thread may still wait in `next_rows`
            await cancel_all(responses)
            await pool.close()

    def _sampling_parameters(self, seed: Sequence[int], max_tokens: int, *, greedy: bool) -> dict[str, Any]:
        """Return vLLM's sampling parameters for a turn; a repeated request gets the same ones."""
        s = self._settings
        own_seed = int(np.random.SeedSequence([*seed]).generate_state(1)[0]) >> 1
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "min_tokens": min(s.min_new_tokens, max_tokens),
            "seed": own_seed,
            "logprobs": 0,
            "temperature": 0.0 if greedy else s.temperature,
            **token_rules(self._eos_ids, self._banned_ids),
        }
        if not greedy:
            sampling |= {"top_k": s.top_k, "top_p": s.top_p}
        if s.stop_strings:
            sampling |= {"stop": list(s.stop_strings), "include_stop_str_in_output": True}
        return sampling

    def _check_turn(self, turn: PolicyTurn) -> PolicyTurn:
        """Return the turn, without vLLM's log-probs if the actor defines them differently.

        Raises RlhfError if the turn has a banned token.
        """
        if banned := sorted({*turn.tokens} & {*self._banned_ids}):
            raise RlhfError(
                f"vLLM generated the tokens {banned}, although each request lowers their logits by {-BAN_BIAS:g}: "
                "check that the server applies `logit_bias`"
            )
        # vLLM computes log-probs after applying these settings, the actor before.
        s = self._settings
        is_plain = (s.top_k, s.top_p, s.min_new_tokens) == (0, 1.0, 0)
        return turn if is_plain else dataclasses.replace(turn, logprobs=None)
