"""A fake tritonserver with a reward model whose rewards can be checked by eye, and the gateway in front of it."""

import asyncio
import contextlib
import io
import json

import aiohttp
import numpy as np
import pytest
import uvicorn
from aiohttp import web
from fake_triton import FakeTriton
from tritonclient.utils import deserialize_bytes_tensor

from rlhf_triton.client import reward_source
from rlhf_triton.client.client import TritonClient
from rlhf_triton.client.retry import RETRIES
from rlhf_triton.config.client import ClientSettings
from rlhf_triton.config.sections import GatewaySection
from rlhf_triton.tools.gateway import app, rows
from rlhf_triton.tools.gateway.command import bounded
from rlhf_triton.wire.contract import REWARD_MODEL

DTYPES = {"INT64": np.int64, "INT32": np.int32}


class FakeReward(FakeTriton):
    """The reward of a text is its number of characters, that of token ids their sum; `received` has all inputs.

    As the real server, it refuses a request as a whole: if one of its texts contains "refuse", or token 99 occurs. A
    text that contains "nan" has no reward, as all terms of the sum but the first fail. With `labels`, it is a
    classifier whose probabilities are 0, ..., 0, 1.
    """

    def __init__(
        self,
        behaviour=lambda model, number: "ok",
        *,
        terms=(),
        labels=(),
        text="joined",
        groupwise=False,
    ):
        super().__init__(behaviour)
        self.version = None  # version of the weights, an output of a reward model that has versions
        self.received = []
        self.demanded = []  # `min_version` of each request
        self.terms = terms
        self.labels = labels
        self.parameters |= {"text": text, "labels": json.dumps(labels)}
        if terms:
            self.parameters["reward_components"] = json.dumps(terms)
        if groupwise:
            self.parameters["groupwise"] = "true"

    async def _infer(self, request):
        answer = await super()._infer(request)
        if answer.status != 200:
            return answer
        header_size = int(request.headers["Inference-Header-Content-Length"])
        inputs = tensors(body := await request.read(), header_size)
        header = json.loads(body[:header_size])
        wanted = {output["name"] for output in header["outputs"]}
        self.demanded.append(header.get("parameters", {}).get("min_version"))
        self.received.append(inputs)
        scores = []
        for i, row in enumerate(rows_of(inputs)):
            if isinstance(row, str) and "refuse" in row:
                return web.json_response({"error": f"sentences[{i}]: {row!r} has no tokens"}, status=400)
            if not isinstance(row, str) and 99 in row:
                return web.json_response({"error": f"tokens[{i}, 0]: 99 is outside the vocabulary"}, status=400)
            scores.append(np.nan if "nan" in row else float(len(row)) if isinstance(row, str) else float(sum(row)))
        return web.json_response({"model_name": "any", "outputs": self._outputs(scores, wanted)})

    async def _config(self, request):
        config = json.loads((await super()._config(request)).text or "")
        names = ["rewards", *(["reward_version"] if self.version is not None else [])]
        names += ["probabilities"] if self.labels else []
        return web.json_response({**config, "output": [{"name": name} for name in names]})

    def _outputs(self, scores, wanted):
        num_terms = len(self.terms)
        num_labels = len(self.labels)
        outputs = {
            "rewards": ("FP32", scores),
            "reward_version": ("INT64", [self.version] * len(scores)),
            "reward_components": (
                "FP32",
                [1.0 if np.isnan(score) and i == 0 else score for score in scores for i in range(num_terms)],
            ),
            "reward_errors": ("BYTES", ["the verifier crashed" if np.isnan(score) else "" for score in scores]),
            "probabilities": ("FP32", [float(i == num_labels - 1) for i in range(num_labels)] * len(scores)),
        }
        return [
            {"name": name, "datatype": kind, "shape": [len(scores), len(data) // len(scores)], "data": data}
            for name, (kind, data) in outputs.items()
            if name in wanted
        ]


def tensors(body, header_size):
    """Return the inputs of an inference request whose tensors follow its JSON header as binary data."""
    found = {}
    start = header_size
    for tensor in json.loads(body[:header_size])["inputs"]:
        data = body[start : start + tensor["parameters"]["binary_data_size"]]
        start += len(data)
        if tensor["datatype"] == "BYTES":
            array = deserialize_bytes_tensor(data)
        else:
            array = np.frombuffer(data, DTYPES[tensor["datatype"]])
        found[tensor["name"]] = array.reshape(tensor["shape"])
    return found


def rows_of(inputs):
    """Return the texts, those of a pair joined by |, or the token ids without padding."""
    if "text_pairs" in inputs:
        return [f"{a.decode()}|{b.decode()}" for a, b in np.hstack([inputs["sentences"], inputs["text_pairs"]])]
    if "sentences" in inputs:
        return [text.decode() for text in inputs["sentences"][:, 0]]
    lengths = inputs["sequence_lengths"][:, 0]
    return [row[:length].tolist() for row, length in zip(inputs["tokens"], lengths, strict=True)]


class Caller:
    """An HTTP client of the gateway at `url`."""

    def __init__(self, url, session):
        self.url = url
        self.session = session

    async def post(self, path, body, **options):
        """Return status and JSON of the reply; bytes are sent as they are."""
        content = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.session.post(self.url + path, **content, headers=headers, **options) as reply:
            return reply.status, await reply.json()

    async def get(self, path, **options):
        """Return status and JSON of the reply."""
        async with self.session.get(self.url + path, **options) as reply:
            return reply.status, await reply.json()

    async def error(self, path, body, status, **options):
        """Return the error message of a request that fails with `status`."""
        found, reply = await self.post(path, body, **options)
        assert found == status, reply
        assert reply["error"]["code"] == status
        return reply["error"]["message"]


@contextlib.asynccontextmanager
async def gateway(
    *urls,
    key=None,
    client=None,
    retries=RETRIES,
    expected=None,
    more=(),
    **limits,
):
    """Run the gateway in this event loop, in front of the servers at `urls`.

    `client`: changes of its client; `retries`: of one request. `expected`: parameters that the reward model must have.
    `more`: further routes. `limits`: constants of the gateway, by name.
    """
    calling = ClientSettings(**{"deadline_s": 120.0, "servers": urls, **(client or {})})
    section = GatewaySection(port=0)
    patch = pytest.MonkeyPatch()
    for name, limit in limits.items():
        for module in (app, rows, reward_source):
            patch.setattr(module, name, limit, raising=False)
    named = {REWARD_MODEL: expected} if expected else None
    triton = None  # the policy alone is served
    if urls:
        triton = TritonClient("unused:1", calling, retries=retries, expected=named)
    application = app.create_app(triton, key, more=more)
    server = uvicorn.Server(bounded(application, section))
    bound = server.config.bind_socket()
    task = asyncio.create_task(server.serve([bound]))
    try:
        while not server.started:
            assert not task.done(), task.result()
            await asyncio.sleep(0.001)
        async with aiohttp.ClientSession() as session:
            yield Caller(f"http://127.0.0.1:{bound.getsockname()[1]}", session)
    finally:
        patch.undo()
        server.should_exit = True
        await task
        bound.close()
