"""A fake vLLM server that fails on demand: it speaks the part of vLLM's HTTP protocol that the actor uses."""

import asyncio
from pathlib import Path

from aiohttp import web
from fake_server import FakeServer


class FakeVllm(FakeServer):
    """A fake server. It responds with the tokens 5, 6, 7 and the end-of-sequence token 1, unless `answer` differs."""

    def __init__(self):
        super().__init__([web.route("*", "/{path:.*}", self._handle)])
        self.release = "0.32.0"
        self.weights = "initial"
        self.adapters = []
        self.loaded = []
        self.requests = []
        self.calls = []
        self.missing = set()
        """Paths without a route."""
        self.logprobs_mode = "processed_logprobs"
        self.device = "cuda"
        self.answer = lambda request: {}
        self.drops = 0
        """Number of generation requests whose connection is broken."""
        self.is_hanging = False
        """Generation requests get no response."""
        self.stuck = None
        """Generation requests whose tokens begin with these get no response."""
        self.pause_mode = ""
        """Of the last request to pause."""
        self.silent = set()
        """Paths that never respond."""

    async def start(self):
        """Listen; after a stop on the same port, with the initial weights."""
        self.weights = "initial"
        self.adapters = []
        await super().start()

    async def _handle(self, request):
        if request.path in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.calls.append(request.path)
        while request.path in self.silent and not self._is_stopped:
            await asyncio.sleep(0.001)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/inference/v1/generate":
            return await self._generate(request, body)
        if "lora" in request.path:
            return self._adapter(request.path, body)
        if request.path == "/pause":
            self.pause_mode = request.query["mode"]
        if request.path == "/collective_rpc":
            self.loaded.append(Path(body["kwargs"]["weights_path"]))
        elif request.path == "/update_weight_version":
            self.weights = body["new_version"]
        elif request.path == "/server_info":
            model = {"logprobs_mode": self.logprobs_mode}
            return web.json_response({"vllm_config": {"model_config": model, "device_config": {"device": self.device}}})
        models = [{"id": "base", "parent": None}, *({"id": name, "parent": "base"} for name in self.adapters)]
        return web.json_response({"version": self.release, "weight_version": self.weights, "data": models})

    def _adapter(self, path, body):
        name = body["lora_name"]
        if path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return _error(400, f"The lora adapter '{name}' has already been loaded.")
            self.adapters.append(name)
            self.loaded.append(Path(body["lora_path"]))
        else:
            if name not in self.adapters:
                return _error(404, f"The lora adapter '{name}' cannot be found.")
            self.adapters.remove(name)
        return web.Response(text="Success")

    async def _generate(self, request, body):
        self.requests.append(body)
        stuck = self.stuck
        is_stuck = stuck is not None and body["token_ids"][: len(stuck)] == stuck
        while (self.is_hanging or is_stuck) and not self._is_stopped:
            await asyncio.sleep(0.001)
        if self.drops:
            self.drops -= 1
            request.transport.abort()
        if body.get("model", "base") not in ("base", *self.adapters):
            return _error(404, f"The model `{body['model']}` does not exist.")
        answer = self.answer(body)
        tokens = answer.get("token_ids", [5, 6, 7, 1])
        choice = {
            "token_ids": tokens,
            "weight_versions": [{"version": self.weights, "start": 0, "end": len(tokens or ())}],
            "logprobs": {"content": [{"logprob": -0.5} for _ in tokens or ()]},
            "finish_reason": "stop",
        }
        return web.json_response({"choices": [{**choice, **answer}]})


def _error(status, message):
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
