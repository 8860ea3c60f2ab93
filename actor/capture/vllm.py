"""Samples for agents with vLLM servers, whatever weights they have."""

import asyncio
import zlib
from collections.abc import Sequence

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.actor.capture.sessions import Sampling
from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.vllm.connection import VllmClient, token_rules
from rlhf_triton.client.errors import Kind, Trouble
from rlhf_triton.client.servers import ServerNames


class VllmSampler:
    """A sampler over vLLM servers: each session has its own order of them, for their prefix caches."""

    def __init__(
        self, addresses: Sequence[str], *, eos_ids: Sequence[int], banned_ids: Sequence[int] = (), deadline_s: float
    ) -> None:
        """`addresses`: as `actor.client.servers`. `deadline_s`: timeout of one reply of one server."""
        self._names, self._deadline_s = ServerNames(addresses), deadline_s
        self._tokens = token_rules(eos_ids, banned_ids)
        self._servers: dict[str, VllmClient] = {}
        self._checked: set[str] = set()

    async def sample(self, session: str, tokens: list[int], sampling: Sampling) -> PolicyTurn:
        """Return the reply of the session's first server that answers. Raises HttpError, RlhfError."""
        wanted = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 0,
            **self._tokens,
            **({"stop": [*sampling.stop], "include_stop_str_in_output": True} if sampling.stop else {}),
        }
        troubles, urls = [], await self._names.urls()
        for url in sorted(urls, key=lambda url: zlib.crc32(f"{session} {url}".encode())):
            try:
                return await self._reply(url, tokens, wanted)
            except Trouble as trouble:
                sentence = trouble.sentence("vLLM", url, 1)
                if trouble.kind is Kind.WRONG:
                    raise HttpError(400, sentence) from trouble
                troubles.append(sentence)
        raise HttpError(503, "; ".join(troubles))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def _reply(self, url: str, tokens: list[int], wanted: dict[str, object]) -> PolicyTurn:
        if url not in self._servers:
            self._servers[url] = VllmClient(url, limit=0, deadline_s=self._deadline_s, checked=self._checked)
        server = self._servers[url]
        await server.check()
        return await server.generate(tokens, wanted)
