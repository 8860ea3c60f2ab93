"""An OpenAI-compatible HTTP server in the test's own process, for faults that a real one cannot be made to show.

No model runs in it: the last line of the message it receives says what to reply.
"""

import collections
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ONCE = {"busy once": (429, "rate limit")}
ALWAYS = {"broken": (503, "overloaded"), "wrong": (400, "max_tokens is too large")}


class ChatServer:
    """Listens on a free port of loopback until `stop`; `requests` has the bodies, `headers` those of the last one."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: Mapping[str, str] = {}
        self.retry_after = "0"
        self.released = threading.Event()  # ends hanging replies
        self._seen: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                server.handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:  # a client that has timed out
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    @property
    def url(self) -> str:
        """Address with the version."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def stop(self) -> None:
        """Refuse connections from now on."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        """Reply to one request."""
        body = json.loads(http.rfile.read(int(http.headers["Content-Length"])))
        with self._lock:
            self.requests.append(body)
            self.headers = http.headers  # names in any case
            what = body["messages"][0]["content"].splitlines()[-1]
            self._seen[what] += 1
            is_first = self._seen[what] == 1
        assert http.path == "/v1/chat/completions"
        if what == "hang":
            self.released.wait(60)
        else:
            self._send(http, *self._reply(what, is_first, http.headers["Authorization"]))

    def _reply(self, what: str, is_first: bool, key: str | None) -> tuple[Any, int, float]:
        """Return the body, the status, and which part of the body to send."""
        refusal = (ONCE.get(what) if is_first else None) or ALWAYS.get(what)
        if refusal is not None:
            return {"error": {"message": refusal[1]}}, refusal[0], 1.0
        replies: dict[str, tuple[Any, int, float]] = {
            "echo the key": ({"error": {"message": f"Incorrect API key: {key}"}}, 401, 1.0),
            "echo the key late": ({"error": {"message": f"{'x' * 338} {key}"}}, 401, 1.0),
            "redirect": ({}, 302, 1.0),
            "no choices": ({"choices": []}, 200, 1.0),
            "half once": (completion("Score: 7"), 200, 0.5 if is_first else 1.0),
            "no text": (completion(None), 200, 1.0),
            "cut": (completion("Score: 1", reason="length"), 200, 1.0),
        }
        return replies.get(what, (completion("Score: 7" if what.endswith("once") else what), 200, 1.0))

    def _send(self, http: BaseHTTPRequestHandler, reply: Any, status: int, part: float) -> None:
        content = json.dumps(reply).encode() if isinstance(reply, dict) else reply.encode()
        http.send_response(status)
        http.send_header("Content-Length", str(len(content)))
        if status in (429, 503):
            http.send_header("Retry-After", self.retry_after)
        if status == 302:
            http.send_header("Location", self.url + "/elsewhere")
        http.end_headers()
        http.wfile.write(content[: int(len(content) * part)])


def completion(text: str | None, reason: str = "stop") -> dict[str, Any]:
    """Return the body of a reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return {"choices": [choice]}
