"""An OpenTelemetry collector on loopback: records the spans that it receives as OTLP over HTTP with JSON."""

import json
import threading
from dataclasses import dataclass
from typing import Any

from http_server import HttpServer


@dataclass(frozen=True)
class Span:
    """A span as received; ids are hexadecimal."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: bool


class Collector(HttpServer):
    """The received spans, and the paths and content types of requests; `answering` is cleared to let requests hang."""

    def __init__(self):
        self.spans = []
        self.requests = []
        self.status = 200
        self.answering = threading.Event()
        self.answering.set()
        super().__init__()

    def named(self, name, service=None):
        """The spans of this name, of all services or of one."""
        return [span for span in self.spans if span.name == name and service in (None, span.service)]

    def reply(self, path, headers, body):
        self.requests.append((path, headers["Content-Type"]))
        for resource in json.loads(body)["resourceSpans"]:
            service = attributes_of(resource["resource"])["service.name"]
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    failed = span.get("status", {}).get("code") == 2
                    ids = (span["traceId"], span["spanId"], span.get("parentSpanId", ""))
                    self.spans.append(Span(service, span["name"], *ids, attributes_of(span), failed))
        self.answering.wait()
        return self.status, {}, b""


def attributes_of(holder):
    """The attributes of a span or resource; an integer is a string in OTLP's JSON."""
    found = {}
    for item in holder.get("attributes", []):
        ((kind, value),) = item["value"].items()
        found[item["key"]] = int(value) if kind == "intValue" else value
    return found
