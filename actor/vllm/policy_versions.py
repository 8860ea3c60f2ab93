"""Versions of the policy's weights, in folders that all vLLM servers and ranks can read, and the servers' versions.

<root>/<number>/    a Hugging Face folder, or only the adapters under LoRA
<root>/CURRENT      {"number": ..., "name": ...}, replaced by rename
"""

import asyncio
import contextlib
import dataclasses
import math
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_triton.actor.data.recorded import PolicyTurn
from rlhf_triton.actor.vllm.connection import PROBE_S, VllmClient
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

# prefixes of versions' names
FULL_WEIGHTS = "weights-"
ADAPTERS = "adapters-"
VERSIONS_KEPT = 2  # the current version, and the one that a server may still be loading
LOCK_POLL_S = 0.05
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


class PolicyServer:
    """A vLLM server; requests wait until it has loaded the current version of the weights."""

    def __init__(self, server: VllmClient, versions: PolicyVersions, *, is_adapter: bool) -> None:
        """`is_adapter`: versions are LoRA adapters of the model that the server was started with."""
        self._server = server
        self._versions = versions
        self._version = versions.current()
        self._is_adapter = is_adapter
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
