"""A server that speaks OpenEnv's protocol."""

from aiohttp import WSMsgType, web


class OpenEnvServer:
    """Speaks OpenEnv's protocol over `/ws`: echoes actions of the field `message`, for at most two sessions."""

    def __init__(self):
        self.sessions = self.refused = self.pongs = 0
        self.failing = []  # handlers of the next requests, instead of a session
        self.resets = []
        self.transports = []

    async def session(self, request):
        """Serve one session."""
        if self.failing:
            self.refused += 1
            return self.failing.pop(0)(request)
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        if self.sessions == 2:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            return socket
        self.sessions += 1
        self.transports.append(request.transport)
        try:
            async for message in socket:
                self.pongs += message.type is WSMsgType.PONG
                if message.type is WSMsgType.TEXT:
                    await self._answer(socket, **message.json())
                    await socket.ping()
        finally:
            self.sessions -= 1
        return socket

    async def _answer(self, socket, type, data):
        text = data.get("message")
        if type == "reset":
            self.resets.append(data)
        if text == "go":
            await socket.close()
        elif text == "raise":
            await socket.send_json({"type": "error", "data": {"message": "no", "code": "EXECUTION_ERROR"}})
        else:
            fields = {"echo": text or "start", "board": [1, "é"], "metadata": {}}
            reply = {"observation": fields, "reward": None if type == "reset" else 0.5, "done": text == "end"}
            await socket.send_json({"type": "observation", "data": reply})
