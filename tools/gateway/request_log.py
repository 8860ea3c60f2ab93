"""One log line and Prometheus metrics for each request of the gateway."""

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_triton.monitoring.metrics import GATEWAY
from rlhf_triton.wire.texts import printable

logger = logging.getLogger(__name__)
CLIENT_LEFT = 499  # nginx's status of a request whose client did not wait for the reply
MAX_CAUSE_CHARACTERS = 300  # in characters
_KINDS: dict[str, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


def gateway_metrics(registry: CollectorRegistry) -> dict[str, Any]:
    """Register the metrics of the table `GATEWAY`, which are returned by name, and the process's own."""
    ProcessCollector(registry=registry)
    return {
        spec.name: _KINDS[spec.kind](
            f"rlhf_gateway_{spec.name}", spec.help, spec.label.split(",") if spec.label else (), registry=registry
        )
        for spec in GATEWAY
    }


@dataclass(eq=False)
class RequestLog:
    """ASGI middleware: counts and logs each request, at WARNING with the cause if it or one of its rows failed.

    Routes leave `num_rows`, and the `errors` of rows without a reward, in the request's state; `refused` the `cause`.
    """

    app: ASGIApp
    metrics: Mapping[str, Any]
    routes: Collection[str]
    """Paths that are counted under their name."""
    quiet: Collection[str]
    """Paths that are not logged."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            status = int(message.get("status", status))  # an HTTPStatus has another text in Python 3.10
            await send(message)

        state = scope.setdefault("state", {})
        started = time.monotonic()
        try:
            with self.metrics["requests_in_flight"].track_inprogress():
                await self.app(scope, receive, send_noting_status)
        except Exception:
            status = 500  # Starlette answers it, outside this middleware
            raise
        finally:
            causes = [state["cause"]] if "cause" in state else state.get("errors", [])
            self._note(scope, status, time.monotonic() - started, state.get("num_rows", 0), causes)

    def _note(self, scope: Scope, status: int, seconds: float, num_rows: int, causes: list[str]) -> None:
        path = scope["path"]
        route = path if path in self.routes else "/sessions" if path.startswith("/sessions/") else "other"
        num_failed = num_rows if status >= 400 else len(causes)
        self.metrics["requests"].labels(route, str(status)).inc()
        self.metrics["request_seconds"].labels(route).observe(seconds)
        self.metrics["rows"].inc(num_rows)
        self.metrics["failed_rows"].inc(num_failed)
        if path not in self.quiet:
            failed = f" ({num_failed} without a reward)" if num_failed else ""
            rows = f" {num_rows} rows{failed}" if num_rows else ""
            line = f"{scope['method']} {path} {status}{rows} {1000 * seconds:.0f} ms"
            cause = f": {causes[0]}" if causes else ""
            level = logging.WARNING if cause or status >= 400 else logging.INFO
            logger.log(level, "%s", printable(line + cause, MAX_CAUSE_CHARACTERS))
