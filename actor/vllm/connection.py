"""HTTP connections to vLLM servers."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.vllm.replies import turn_in
from rlhf_triton.client.connection import attempt_failure
from rlhf_triton.client.deadline import timeout
from rlhf_triton.client.errors import AttemptFailed, ErrorKind
from rlhf_triton.errors import RlhfError

OLDEST = (0, 32)  # the first version with /inference/v1/generate and spans of weights versions
PROBE_S = 10.0
IDLE_S = 2.0  # after which an idle connection is closed; vLLM closes it after 5 s, possibly during a new request
GENERATE = "/inference/v1/generate"
HINT = "; is vLLM running there?"
LOGPROBS_MODE = "processed_logprobs"  # log-probs at the sampling temperature
BAN_BIAS = -100.0  # added to the logits of banned tokens; the lowest bias that vLLM accepts


def token_rules(eos_ids: Sequence[int], banned_ids: Sequence[int]) -> dict[str, Any]:
    """Return the sampling parameters with which only `eos_ids` end a response, and `banned_ids` are never sampled."""
    rules = {"stop_token_ids": [*eos_ids], "ignore_eos": True, "skip_special_tokens": False}
    return rules | ({"logit_bias": {str(token): BAN_BIAS for token in banned_ids}} if banned_ids else {})


class VllmClient:
    """HTTP connections to one vLLM server."""

    def __init__(
        self,
        url: str,
        *,
        limit: int,
        deadline_s: float,
        checked: set[str],
        vocab_size: int | None = None,
        loads_tied: bool = False,
    ) -> None:
        """
        Args:
            limit: maximum connections; 0: no limit.
            deadline_s: timeout of one request.
            checked: URLs of servers whose release and settings were checked, shared by all connections.
            vocab_size: number of the policy's embeddings; None if unknown.
            loads_tied: whether the server loads weights whose output layer is the embeddings.
        """
        self.url = url
        self._vocab_size = vocab_size
        self._loads_tied = loads_tied
        self._deadline_s = deadline_s
        self._checked = checked
        connector = aiohttp.TCPConnector(limit=limit, keepalive_timeout=IDLE_S)
        no_limit = aiohttp.ClientTimeout(total=None)  # `_request` sets the only deadline
        self._session = aiohttp.ClientSession(f"http://{url}", connector=connector, timeout=no_limit)

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        await self._session.close()

    async def generate(self, token_ids: Sequence[int], sampling: Mapping[str, Any], **more: str) -> PolicyTurn:
        """Return the server's complete response to one prompt. `more`: further fields of the request.

        Raises:
            AttemptFailed: the attempt failed.
            RlhfError: the server was started without a required option.
        """
        await self.check()
        body = {"token_ids": [*token_ids], "sampling_params": dict(sampling), **more}
        return turn_in(await self.post(GENERATE, body), self._vocab_size)

    async def check(self) -> None:
        """Check the server's release and settings, once per server and process. Raises RlhfError."""
        if self.url in self._checked:
            return
        release = str((await self.get("/version")).get("version"))
        if not _is_new_enough(release):
            raise RlhfError(f"the server at {self.url} is vLLM {release}; 0.32 or newer is needed")
        info = await self._request("GET", "/server_info?config_format=json", None, self._deadline_s)
        settings = info.get("vllm_config", {})
        if self._loads_tied and settings.get("device_config", {}).get("device") == "cpu":
            raise RlhfError(
                f"the server at {self.url} runs on a CPU, where vLLM packs the output layer once: responses would come "
                "from that of the first policy, because this model's embeddings are its output layer, too; set "
                "actor.generation.engine: slots, or actor.policy.lora_rank"
            )
        mode = settings.get("model_config", {}).get("logprobs_mode", LOGPROBS_MODE)
        if mode != LOGPROBS_MODE:
            raise RlhfError(
                f"the server at {self.url} returns {mode}, not the log-probs that it samples from: start it with "
                f"--logprobs-mode {LOGPROBS_MODE}"
            )
        self._checked.add(self.url)

    async def get_ready(self, model: str) -> str | None:
        """Check the server again, which may have been restarted; return None. Raises AttemptFailed, RlhfError."""
        self._checked.discard(self.url)
        await self.check()
        return None

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`. Raises AttemptFailed, RlhfError."""
        return await self._request("GET", path, None, PROBE_S)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Post a JSON object to `path` and return the server's reply. Raises AttemptFailed, RlhfError."""
        return await self._request("POST", path, body, self._deadline_s)

    async def _request(self, method: str, path: str, body: Any, deadline_s: float) -> dict[str, Any]:
        """Return the JSON object in the server's reply, {} if there is none. Raises AttemptFailed, RlhfError."""
        try:
            async with timeout(deadline_s), self._session.request(method, path, json=body) as response:
                text = await response.text()
                status = response.status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise attempt_failure(error, deadline_s, hint=HINT) from error
        if status != 200:
            raise self._refusal(path, status, text)
        try:
            reply = json.loads(text) if text.startswith("{") else {}
        except ValueError as error:
            raise AttemptFailed(ErrorKind.LOST, f"answered {path} with a damaged response", text[:200]) from error
        return reply if isinstance(reply, dict) else {}

    def _refusal(self, path: str, status: int, text: str) -> Exception:
        missing = None
        if path == GENERATE and (status == 403 or _has_no_route(status, text)):
            missing = "does not accept token ids: start it with --enable-scale-out"
        elif _has_no_route(status, text):
            missing = (
                "does not load adapters: start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                if "lora" in path
                else f"has no {path.partition('?')[0]}: start it with VLLM_SERVER_DEV_MODE=1"
            )
        if missing:
            return RlhfError(f"the server at {self.url} {missing}")
        if path == GENERATE and status == 404:  # the adapter is unknown after a restart
            return AttemptFailed(ErrorKind.LOST, "has lost the adapters", _message(text))
        kind = ErrorKind.WRONG if status < 500 else ErrorKind.BUSY
        return AttemptFailed(kind, f"refused {path}", _message(text) or f"status {status}")


def _is_new_enough(release: str) -> bool:
    """Return whether a release is OLDEST or newer; true for a development build without a number ("dev")."""
    number = re.match(r"(\d+)\.(\d+)", release)
    return number is None or (int(number[1]), int(number[2])) >= OLDEST


def _has_no_route(status: int, text: str) -> bool:
    """Return whether FastAPI itself answered that the route does not exist; vLLM's own errors have a field `error`."""
    return status in (404, 405) and '"error"' not in text


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text[:500]
