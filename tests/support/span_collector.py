"""An OpenTelemetry collector on loopback: records the spans that it receives as OTLP over HTTP with JSON."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """One span as it was received; ids in hex."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """The received spans, and the paths and headers of the requests; `answering` is cleared to let requests hang."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.requests: list[tuple[str, str]] = []  # path, content type
        self.url = ""
        self.status = 200
        self.answering = threading.Event()
        self.answering.set()

    def named(self, name: str, service: str | None = None) -> list[Span]:
        """The spans of this name, of all services or of one."""
        return [span for span in self.spans if span.name == name and service in (None, span.service)]

    def receive(self, path: str, content_type: str, body: bytes) -> None:
        """Record one request."""
        self.requests.append((path, content_type))
        for resource in json.loads(body)["resourceSpans"]:
            service = attributes_of(resource["resource"])["service.name"]
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    failed = span.get("status", {}).get("code") == 2
                    ids = (span["traceId"], span["spanId"], span.get("parentSpanId", ""))
                    self.spans.append(Span(service, span["name"], *ids, attributes_of(span), failed))


def attributes_of(holder: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span or resource; an integer is a string in OTLP's JSON."""
    found = {}
    for item in holder.get("attributes", []):
        ((kind, value),) = item["value"].items()
        found[item["key"]] = int(value) if kind == "intValue" else value
    return found


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Serve a collector on a free port; at the end, requests that still hang are answered."""
    received = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.receive(self.path, self.headers["Content-Type"], body)
            received.answering.wait()
            with contextlib.suppress(ConnectionError):  # the sender may have given up
                self.send_response(received.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield received
        finally:
            received.answering.set()
            server.shutdown()
            serving.join()
