"""Samples for agents with vLLM servers, whatever weights they have."""

import functools
from collections.abc import Sequence

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.actor.capture.sessions import Sampling
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.vllm.connection import VllmClient, token_rules
from rlhf_triton.client.errors import RequestFailed, RequestRefused
from rlhf_triton.client.pool import ServerPool
from rlhf_triton.client.retry import RETRY_RESERVE, Attempts, RequestCounters, RetryBudget
from rlhf_triton.config.client import ClientSettings


class VllmSampler:
    """A sampler over vLLM servers: the calls of a session go to the same one, for its prefix cache."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        eos_ids: Sequence[int],
        banned_ids: Sequence[int] = (),
        deadline_s: float,
        vocab_size: int | None = None,
    ) -> None:
        """
        Args:
            addresses: as `actor.client.servers`.
            deadline_s: timeout of one reply of one server.
            vocab_size: number of the policy's embeddings; None if unknown.
        """
        self._tokens = token_rules(eos_ids, banned_ids)
        self._settings = ClientSettings(max_outage_s=0)  # the agent decides whether to wait
        self._budget = RetryBudget(RETRY_RESERVE)
        connect = functools.partial(VllmClient, limit=0, deadline_s=deadline_s, checked=set(), vocab_size=vocab_size)
        self._servers = ServerPool(addresses, connect, self._settings, RequestCounters())

    async def sample(self, session: str, tokens: list[int], sampling: Sampling) -> PolicyTurn:
        """Return a server's reply. Raises HttpError, RlhfError."""
        wanted = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 0,
            **self._tokens,
            **({"stop": [*sampling.stop], "include_stop_str_in_output": True} if sampling.stop else {}),
        }
        attempts = Attempts("vLLM", self._settings, self._budget, retries=1, session=session)
        try:
            return await self._servers.request(attempts, lambda server: server.generate(tokens, wanted))
        except RequestFailed as error:
            raise HttpError(400 if isinstance(error, RequestRefused) else 503, str(error)) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._servers.close()
