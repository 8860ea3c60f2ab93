"""A client without checks or retries, for requests that the project's own client would not send."""

import asyncio

from tritonclient.http import InferInput, InferRequestedOutput
from tritonclient.http.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code, message):
        super().__init__(f"HTTP {code}: {message}")
        self.code = code
        self.message = message


class BareClient:
    """Sends any tensors under any names, as another project's client may; an async context manager."""

    def __init__(self, url, *, headers=None):
        self._url = url
        self._headers = dict(headers or {})

    async def __aenter__(self):
        self._http = InferenceServerClient(self._url, conn_limit=256)
        return self

    async def __aexit__(self, *_):
        await self._http.close()

    async def infer(
        self,
        model,
        arrays,
        outputs=(),
        timeout_us=None,
        parameters=None,
    ):
        """Return the outputs, all if none are named. `timeout_us` is Triton's queue timeout. Raises Refused."""
        inputs = []
        for name, array in arrays.items():
            tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        wanted = [InferRequestedOutput(name) for name in outputs] or None
        try:
            answer = await self._http.infer(
                model,
                inputs,
                outputs=wanted,
                headers=dict(self._headers),
                timeout=timeout_us,
                parameters=parameters,
            )
        except InferenceServerException as error:
            raise Refused(str(error.status()), str(error.message())) from error
        return {item["name"]: answer.as_numpy(item["name"]) for item in answer.get_response()["outputs"]}


def ask_all(url, requests, *, headers=None):
    """Send requests, each the arguments of `infer`, concurrently; return the answers in their order."""

    async def together():
        async with BareClient(url, headers=headers) as client:
            return await asyncio.gather(*(caught(client, *request) for request in requests))

    async def caught(client, *request):
        try:
            return await client.infer(*request)
        except Refused as error:
            return error

    return asyncio.run(together())


def ask(
    url,
    model,
    arrays,
    outputs=(),
    *,
    headers=None,
):
    """Send one request and return its outputs. Raises Refused."""
    (answer,) = ask_all(url, [(model, arrays, outputs)], headers=headers)
    if isinstance(answer, Refused):
        raise answer
    return answer
