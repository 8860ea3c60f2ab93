"""A fake tritonserver that fails on demand, which the real one cannot: it speaks Triton's HTTP protocol, answers each
request as a test specifies, and records requests and connections.
"""

import asyncio

from aiohttp import web
from fake_server import FakeServer

from rlhf_triton.client.client import TritonClient
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.wire.contract import DEMANDED, IN_JOURNAL

DEAD = "Failed to process the request(s) for model 'critic_0_0', message: Stub process 'critic_0_0' is not healthy."
OUTPUTS = [
    {"name": "rewards", "datatype": "FP32", "shape": [1, 1], "data": [0.5]},
    {"name": "values", "datatype": "FP32", "shape": [1, 3], "data": [0.5, 1.5, 2.5]},
    {"name": "loss_mean", "datatype": "FP32", "shape": [1], "data": [0.25]},
    {"name": "status", "datatype": "INT64", "shape": [1], "data": [1]},
    {"name": "weights_version", "datatype": "INT64", "shape": [1], "data": [7]},
]


class FakeTriton(FakeServer):
    """A fake server, whose answers a behaviour chooses: a function of the model and the request's number, from 1.

    It returns `ok`, `busy` (503), `journalled` (503, no result yet), `behind` (503, a newer version is demanded),
    `dead` (the error of a dead model process), `wrong` (400), `failed` (500), `drop` (break the connection), `hang` (no
    answer), or `wait` (answer once `go` is set).
    """

    def __init__(self, behaviour=lambda model, number: "ok"):
        super().__init__(
            [
                web.post("/v2/models/{model}/infer", self._infer),
                web.get("/v2/models/{model}/ready", self._ready),
                web.get("/v2/models/{model}/config", self._config),
            ]
        )
        self.behaviour = behaviour
        self.ready = lambda model: True
        self.parameters = {"model": "here", "tokenizer_fingerprint": "ours"}
        self.parameters_of = {}  # by model, in place of `parameters`
        self.asked = []
        self.encodings = set()  # Accept-Encoding headers of the requests
        self.connections = set()
        self.in_flight = self.most_in_flight = self.probes = 0
        self.go = asyncio.Event()

    async def _infer(self, request):
        model = request.match_info["model"]
        self.asked.append(model)
        self.encodings.add(request.headers.get("Accept-Encoding"))
        self.connections.add(request.transport)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await request.read()
            return await self._answer(self.behaviour(model, len(self.asked)), request.transport)
        finally:
            self.in_flight -= 1

    async def _answer(self, what, transport):
        if what == "drop":
            transport.abort()
        while not self._is_stopped and (what == "hang" or (what == "wait" and not self.go.is_set())):
            await asyncio.sleep(0.001)
        errors = {
            "busy": (503, "no room"),
            "journalled": (503, f"no sidecar follows the journal; step 1 of run 'r' {IN_JOURNAL}: repeat the request"),
            "behind": (503, f"in ensemble 'critic_infer', critic serves version 3, {DEMANDED} 4 or newer"),
            "dead": (500, DEAD),
            "wrong": (400, "tokens: missing"),
            "failed": (500, "the gradients are not finite"),
        }
        if what in errors:
            return web.json_response({"error": errors[what][1]}, status=errors[what][0])
        return web.json_response({"model_name": "any", "outputs": OUTPUTS})

    async def _ready(self, request):
        self.probes += 1
        return web.Response(status=200 if self.ready(request.match_info["model"]) else 400)

    async def _config(self, request):
        declared = self.parameters_of.get(request.match_info["model"], self.parameters)
        parameters = {key: {"string_value": value} for key, value in declared.items()}
        return web.json_response({"input": [], "parameters": parameters})


def client_of(*servers, **changes):
    """A client of these servers with `changes` of its settings, or of its limits, which are arguments of its own."""
    names = ("retries", "max_in_flight")
    limits = {name: changes.pop(name) for name in names if name in changes}
    settings = ClientSettings(**{"deadline_s": 120.0, "servers": [server.url for server in servers], **changes})
    return TritonClient("unused:1", settings, **limits)
