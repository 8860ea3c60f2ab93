"""Generates responses with vLLM servers; the actor itself computes the policy's log-probs."""

import asyncio
import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from rlhf_triton.actor.data.compute import cancel_all
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.generation.generation import Generation, JobSource
from rlhf_triton.actor.generation.row_sources import IsPaused, NewRow, RowId, SamplingJob
from rlhf_triton.actor.policy.policy import Policy
from rlhf_triton.actor.vllm.connection import BAN_BIAS, HINT, VllmClient, token_rules
from rlhf_triton.actor.vllm.policy_versions import PolicyServer, PolicyVersions
from rlhf_triton.client.errors import ReplyLost
from rlhf_triton.client.pool import ServerPool
from rlhf_triton.client.retry import RETRY_RESERVE, Attempts, RequestCounters, RetryBudget
from rlhf_triton.config.run_config import ConfigError, RunConfig
from rlhf_triton.errors import RlhfError

MODEL = "vLLM"  # in error messages
VERSIONS_FOLDER = "policy_versions"
POLL_S = 0.002
DEADLINE_S = 600.0  # for one response, or for loading a version of the weights
MAX_S_PER_TOKEN = 0.1  # a long response may take longer, unless it gets fewer tokens a second


class VllmGeneration(Generation):
    """Generates with the servers of `actor.generation.vllm`, which load each version of the policy's weights."""

    has_policy_logprobs = False

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        """Raise ConfigError if no server is configured."""
        actor = config.actor
        eos_ids = [token for token in policy.eos_ids if token < policy.vocab_size]  # vLLM refuses larger ids
        super().__init__(actor.generation, eos_ids=eos_ids, banned_ids=policy.banned_ids)
        self._vllm = actor.generation.vllm
        if not self._vllm.servers:
            raise ConfigError(
                "actor.generation.vllm.servers: empty; name the vLLM servers, or start the run with "
                "`rlhf-triton run`, which starts one"
            )
        self._client = actor.client
        self._policy = policy
        self._is_adapter = bool(actor.policy.lora_rank)
        self._versions = PolicyVersions(
            config.run.dir / VERSIONS_FOLDER, are_adapters=self._is_adapter, most_ahead=actor.max_off_policy_steps
        )
        self._published: int | None = None  # optimizer step of the published weights
        self._checked: set[str] = set()
        self._adding = threading.Lock()
        self._added: queue.SimpleQueue[SamplingJob] = queue.SimpleQueue()  # not started yet
        self._thread = ThreadPoolExecutor(1, "vllm")
        self._serving: list[Future[None]] = []  # each ends when there are no jobs
        self._is_serving = False
        self._wake_loop: Callable[[], None] = lambda: None
        self._sources: set[JobSource] = set()
        self._connected: list[PolicyServer] = []
        self._is_closed = False
        self._is_dropping = False
        self._budget = RetryBudget(RETRY_RESERVE)

    def renew(self, policy_step: int) -> None:
        """Publish the generator's weights, if they changed, as a version that servers load.

        They load it before their next response, or if they are responding, between two tokens.
        """
        self.policy_step = policy_step
        if self._policy.ranks.rank == 0:
            if self._published == self._policy.trained.optimizer_step:
                self._versions.keep(policy_step)
                return
            write = self._policy.generator.save_pretrained  # with LoRA, only the adapters
            self._versions.publish(write, policy_step)
            self._published = self._policy.trained.optimizer_step
        self._wake_loop()

    def close(self) -> None:
        self._is_closed = True
        for source in [*self._sources]:
            source.close()
        if self.runner is not None:
            self.runner.close()
        self._wake_loop()

    @property
    def has_jobs(self) -> bool:
        return bool(self._serving)

    def add(self, job: SamplingJob) -> None:
        """See `Generation`; call `renew` first."""
        with self._adding:
            self._added.put(job)
            if not self._is_serving:
                self._is_serving = True
                self._serving.append(self._thread.submit(lambda: asyncio.run(self._serve())))
        self._wake_loop()

    def wake(self) -> None:
        """Do nothing: `decode` calls its `is_paused` every `POLL_S`."""

    def abandon(self) -> None:
        self._is_dropping = True
        for source in [*self._sources]:
            source.close()
        self._wake_loop()
        wait(self._serving)
        self._serving = []
        self._added = queue.SimpleQueue()
        self._is_dropping = False

    def decode(self, is_paused: IsPaused = lambda: False) -> None:
        """Wait until the servers have responded to all jobs, or until `is_paused`.

        Raises:
            RequestFailed: the servers were unavailable for `actor.client.max_outage_s`, or refuse a request.
            RlhfError: a server was started without a required option.
        """
        while self._serving and not is_paused():
            wait(self._serving[:1], timeout=POLL_S)
            if self._serving[0].done():
                self._serving.pop(0).result()

    async def _serve(self) -> None:
        """Respond to all jobs, each of them as soon as it is added."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        self._wake_loop = wake
        self._connected = []

        def connect(url: str) -> PolicyServer:
            client = VllmClient(
                url,
                limit=self._settings.batch_size,
                deadline_s=max(DEADLINE_S, MAX_S_PER_TOKEN * self._settings.max_new_tokens),
                checked=self._checked,
                vocab_size=self._policy.vocab_size,
                loads_tied=not self._is_adapter and self._policy.model.config.get_text_config().tie_word_embeddings,
            )
            server = PolicyServer(client, self._versions, is_adapter=self._is_adapter)
            self._connected.append(server)
            return server

        pool = ServerPool(self._vllm.servers, connect, self._client, RequestCounters(), hint=HINT)
        limit = asyncio.Semaphore(self._settings.batch_size)
        tasks = set[asyncio.Task[None]]()
        waiting = asyncio.create_task(changed.wait())
        try:
            while True:
                if self._is_closed or self._is_dropping:
                    raise asyncio.CancelledError
                with self._adding:
                    while not self._added.empty():
                        tasks.add(asyncio.create_task(self._respond(self._added.get(), pool, limit)))
                    if not tasks:
                        self._is_serving = False
                        return
                await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
                if waiting.done():
                    changed.clear()
                    waiting = asyncio.create_task(changed.wait())
                    for server in self._connected:
                        server.renew()
        finally:
            self._is_serving = False
            await cancel_all([waiting, *tasks])
            await pool.close()

    async def _respond(self, job: SamplingJob, pool: ServerPool[PolicyServer], limit: asyncio.Semaphore) -> None:
        """Respond to the prompts of a job."""
        row_source = self._new_source()
        greedy = job.greedy
        row_source.add(job)
        self._sources.add(row_source)
        turns: dict[RowId, int] = collections.Counter()

        async def respond(row: NewRow) -> None:
            max_new_tokens = min(self._settings.max_new_tokens, row_source.longest - len(row.tokens))
            own_seed = [*row.seed, *([turns[row.id]] if turns[row.id] else ())]
            sampling = self._sampling_parameters(own_seed, max_new_tokens, greedy=greedy)
            turns[row.id] += 1
            # The turns of a conversation go to the same server, which has the tokens before them in its cache.
            session = None if self.runner is None else f"{job.seed}.{row.index}"
            async with limit:
                attempts = Attempts(MODEL, self._client, self._budget, repeats_late=False, session=session)
                try:
                    turn = await pool.request(attempts, lambda server: server.generate(row.tokens, sampling))
                except ReplyLost as error:  # only this response fails: counted and masked, and the run continues
                    turn = PolicyTurn([], ended=False, logprobs=[], versions=[], error=str(error))
            row_source.deliver(row.id, self._check_turn(turn))

        responses: set[asyncio.Task[None]] = set()
        try:
            arriving = asyncio.create_task(asyncio.to_thread(row_source.next_rows, wait=True))
            while True:
                await asyncio.wait([arriving, *responses], return_when=asyncio.FIRST_COMPLETED)
                for response in [response for response in responses if response.done()]:
                    response.result()
                    responses.remove(response)
                if arriving.done():
                    if not (new_rows := arriving.result()):
                        break
                    responses |= {asyncio.create_task(respond(row)) for row in new_rows}
                    arriving = asyncio.create_task(asyncio.to_thread(row_source.next_rows, wait=True))
            await asyncio.gather(*responses)
        finally:
            self._sources.discard(row_source)
            row_source.close()  # a thread may still wait in `next_rows`
            await cancel_all(responses)

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
