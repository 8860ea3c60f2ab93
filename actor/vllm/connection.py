"""Versions of the policy's weights for vLLM servers, and connections that load a version and generate with it."""

import asyncio
import contextlib
import dataclasses
import json
import math
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.vllm.replies import turn_in
from rlhf_triton.client.connection import attempt_failure
from rlhf_triton.client.deadline import timeout
from rlhf_triton.client.errors import AttemptFailed, ErrorKind
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import (
    exclusive_lock,
    numbers_in,
    read_json,
    remove_folder,
    sweep,
    write_folder,
    write_json,
)

# Versions of the policy's weights: folders that all vLLM servers and ranks can read.
#
# <root>/<number>/    a Hugging Face folder, or only the adapters under LoRA
# <root>/CURRENT      {"number": ..., "name": ...}, replaced by rename


# prefixes of versions' names
FULL_WEIGHTS = "weights-"
ADAPTERS = "adapters-"
VERSIONS_KEPT = 2  # the current version, and the one that a server may still be loading
KEPT_NAMES = 1000  # versions whose names are kept; recent ones sampled the responses


@dataclass(frozen=True)
class PolicyVersion:
    """One version of the policy's weights."""

    name: str
    """Unique over all runs: a server that outlives an actor must not mistake the next actor's version for its own."""
    folder: Path
    step: int
    """The last step whose update the weights contain."""


class PolicyVersions:
    """The published weights versions of one run."""

    def __init__(self, root: Path, *, are_adapters: bool, most_ahead: int = 0) -> None:
        """`most_ahead`: `actor.max_off_policy_steps`; responses in flight may use the adapters of as many versions."""
        self._root = root
        self._most_ahead = most_ahead
        self._prefix = f"{ADAPTERS if are_adapters else FULL_WEIGHTS}{uuid.uuid4().hex[:8]}"
        self.steps: dict[str, int] = {}
        """The step of each version that this process has published or seen, by name."""

    def publish(self, write: Callable[[Path], None], step: int) -> None:
        """Write a new version with `write(folder)`, make it the current version, and remove old ones."""
        self._root.mkdir(parents=True, exist_ok=True)
        sweep(self._root)
        number = max(numbers_in(self._root), default=0) + 1
        write_folder(self._root / str(number), write, durable=False)  # the next actor publishes its own
        self._set_current(number, f"{self._prefix}-{number}", step)
        for old in numbers_in(self._root)[:-VERSIONS_KEPT]:
            remove_folder(self._root / str(old))

    def keep(self, step: int) -> None:
        """Keep the current version, whose weights have not changed up to `step`."""
        current = self.current()
        self._set_current(int(current.folder.name), current.name, step)

    def current(self) -> PolicyVersion:
        """Return the current version; at least one must have been published."""
        current = read_json(self._root / "CURRENT")
        assert current is not None, "no version was published"
        version = PolicyVersion(current["name"], (self._root / str(current["number"])).absolute(), current["step"])
        self.steps[version.name] = version.step
        return version

    def may_unload(self, name: str) -> bool:
        """Return whether no response in flight uses these adapters."""
        return self.steps.get(name, -math.inf) < max(self.steps.values()) - self._most_ahead

    def _set_current(self, number: int, name: str, step: int) -> None:
        write_json(self._root / "CURRENT", {"number": number, "name": name, "step": step})
        self.steps[name] = step
        while len(self.steps) > KEPT_NAMES:
            del self.steps[next(iter(self.steps))]


OLDEST = (0, 32)  # the first version with /inference/v1/generate and spans of weights versions
PROBE_S = 10.0
IDLE_S = 2.0  # after which an idle connection is closed; vLLM closes it after 5 s, possibly during a new request
LOCK_POLL_S = 0.05
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
        self, url: str, *, limit: int, deadline_s: float, checked: set[str], vocab_size: int | None = None
    ) -> None:
        """
        Args:
            limit: maximum connections; 0: no limit.
            deadline_s: timeout of one request.
            checked: URLs of servers whose release and settings were checked, shared by all connections.
            vocab_size: number of the policy's embeddings; None if unknown.
        """
        self.url = url
        self._vocab_size = vocab_size
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
        settings = await self._request("GET", "/server_info?config_format=json", None, self._deadline_s)
        mode = settings.get("vllm_config", {}).get("model_config", {}).get("logprobs_mode", LOGPROBS_MODE)
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


class VllmConnection:
    """Connections to one vLLM server; requests wait until the server has loaded the current version of the weights."""

    def __init__(
        self,
        url: str,
        *,
        versions: PolicyVersions,
        is_adapter: bool,
        limit: int,
        deadline_s: float,
        checked: set[str],
        vocab_size: int,
    ) -> None:
        """
        Args:
            is_adapter: versions are LoRA adapters of the model that the server was started with.
            limit: maximum connections.
            deadline_s: timeout of one response, and of loading a version.
            checked: URLs of servers whose release and settings were checked, shared by all connections.
            vocab_size: number of the policy's embeddings.
        """
        self._versions = versions
        self._version = versions.current()
        self._is_adapter = is_adapter
        self._server = VllmClient(url, limit=limit, deadline_s=deadline_s, checked=checked, vocab_size=vocab_size)
        self._is_loaded = False
        self._loading: asyncio.Task[None] | None = None

    async def generate(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> PolicyTurn:
        """Return the server's complete response to one prompt, whose versions are steps of the policy's updates.

        All of it is sampled with the current version or, if weights are loaded meanwhile, with newer ones.

        Raises:
            AttemptFailed: the attempt failed, or the server was restarted and generated with other weights.
            RlhfError: the server was started without a required option.
        """
        await self._load()
        version = self._version
        model = {"model": version.name} if self._is_adapter else {}
        try:
            turn = await self._server.generate(token_ids, sampling, **model)
        except AttemptFailed:
            self._is_loaded = False  # a restart loses adapters
            raise
        names = [*map(str, turn.versions or ())]
        if any(self._versions.steps.get(name, -1) < version.step for name in names):
            self._is_loaded = False
            used = ", ".join(sorted({*names}))
            raise AttemptFailed(ErrorKind.LOST, "has other weights", f"it generated with {used}, not {version.name}")
        # A response uses the adapters that it names, whatever the server loads meanwhile.
        steps = [version.step if self._is_adapter else self._versions.steps[name] for name in names]
        return dataclasses.replace(turn, versions=[*steps])

    def renew(self) -> None:
        """Load the version that is current now; requests in flight continue with its weights."""
        if self._versions.current() != self._version:
            self._is_loaded = False
            self._start_loading()

    async def get_ready(self, model: str) -> str | None:
        """Load the version if it is missing; return None. Raises AttemptFailed if loading fails."""
        self._is_loaded = False  # the server may have been restarted
        await self._load()
        return None

    async def close(self) -> None:
        """Cancel a load in progress, which resumes the server, and close all connections; requests in flight fail."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.wait([self._loading], timeout=PROBE_S)
        await self._server.close()

    async def _load(self) -> None:
        """Make the server use the version's weights, if it does not yet; concurrent callers share one attempt."""
        while not self._is_loaded or self._version != self._versions.current():
            await asyncio.shield(self._start_loading())

    def _start_loading(self) -> asyncio.Task[None]:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._attempt_load())
            # Retrieve the error, which the waiting requests raise, so that asyncio does not log it as well.
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._loading

    async def _attempt_load(self) -> None:
        await self._server.check()
        self._version = self._versions.current()
        async with self._lock_server():
            loaded = str((await self._server.get("/weight_info")).get("weight_version"))
            if loaded != self._version.name:
                if self._is_adapter and loaded.startswith(FULL_WEIGHTS):
                    raise RlhfError(
                        f"the server at {self._server.url} has the weights of another run ({loaded}), which do not fit "
                        "the adapters: restart it"
                    )
                await (self._load_adapter() if self._is_adapter else self._load_weights())
        self._is_loaded = True

    @contextlib.asynccontextmanager
    async def _lock_server(self) -> AsyncIterator[None]:
        """Hold the server's lock, because every rank of the actor generates with all servers."""
        path = self._version.folder.with_name(f"{self._server.url}.lock")
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(exclusive_lock(path, patience_s=0.0))
                    break
                except TimeoutError:
                    await asyncio.sleep(LOCK_POLL_S)
            yield

    async def _load_weights(self) -> None:
        try:  # even a cancelled request may have paused the server
            # Requests in flight stay, and compute their keys and values again with the new weights.
            await self._server.post("/pause?mode=keep&clear_cache=true")
            path = {"weights_path": str(self._version.folder)}
            await self._server.post("/collective_rpc", {"method": "reload_weights", "kwargs": path})
            await self._server.post("/reset_prefix_cache")
            await self._server.post("/update_weight_version", {"new_version": self._version.name})
        finally:
            await self._server.post("/resume")

    async def _load_adapter(self) -> None:
        """Load the adapter under the version's name, and unload adapters that no response in flight can use."""
        models = (await self._server.get("/v1/models")).get("data", [])
        adapters = [model["id"] for model in models if model.get("parent")]
        for name in adapters:
            if name != self._version.name and self._versions.may_unload(name):
                await self._server.post("/v1/unload_lora_adapter", {"lora_name": name})
        if self._version.name not in adapters:  # otherwise an earlier attempt was cut off after this request
            adapter = {"lora_name": self._version.name, "lora_path": str(self._version.folder)}
            await self._server.post("/v1/load_lora_adapter", adapter)
        await self._server.post("/update_weight_version", {"new_version": self._version.name})


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
