"""An OpenAI-compatible HTTP server in the test's own process, for faults that a real one cannot be made to show.

No model runs in it: the last line of the message it receives says what to reply.
"""

import collections
import json
import threading

from http_server import HttpServer


class ChatServer(HttpServer):
    """`requests` has the bodies, `headers` those of the last one."""

    def __init__(self):
        self.requests = []
        self.headers = {}
        self.retry_after = "0"
        self._seen = collections.Counter()
        self._lock = threading.Lock()
        super().__init__()

    @property
    def url(self):
        """Address with the version."""
        return f"{super().url}/v1"

    def reply(self, path, headers, body):
        assert path == "/v1/chat/completions"
        with self._lock:
            self.requests.append(json.loads(body))
            self.headers = headers
            what = self.requests[-1]["messages"][0]["content"].splitlines()[-1]
            self._seen[what] += 1
            is_first = self._seen[what] == 1
        if what == "hang":
            threading.Event().wait(60)
        seven = completion("Score: 7")
        if what == "half once" and is_first:
            return 200, {"Content-Length": str(len(seven))}, seven[: len(seven) // 2]
        if what == "busy once" and is_first:
            return 429, {"Retry-After": self.retry_after}, refusal("rate limit")
        key = headers["Authorization"]
        replies = {
            "broken": (503, {"Retry-After": self.retry_after}, refusal("overloaded")),
            "wrong": (400, {}, refusal("max_tokens is too large")),
            "echo the key": (401, {}, refusal(f"Incorrect API key: {key}")),
            "echo the key late": (401, {}, refusal(f"{'x' * 338} {key}")),
            "redirect": (302, {"Location": self.url + "/elsewhere"}, b"{}"),
            "no choices": (200, {}, b'{"choices": []}'),
            "no text": (200, {}, completion(None)),
            "cut": (200, {}, completion("Score: 1", reason="length")),
        }
        return replies.get(what, (200, {}, seven if what.endswith("once") else completion(what)))


def refusal(message):
    """Return the body of an error."""
    return json.dumps({"error": {"message": message}}).encode()


def completion(text, reason="stop"):
    """Return the body of a reply."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return json.dumps({"choices": [choice]}).encode()
