"""Section `monitoring` of the YAML configuration."""

from __future__ import annotations

from python_backend.config.fields import Port, Section


class MonitoringSection(Section):
    """Prometheus metrics of actor and sidecar. Those of the server are on `server.metrics_port`."""

    host: str = "127.0.0.1"
    """Address to bind. There is no authentication: beyond loopback, let only Prometheus connect."""
    actor_port: Port | None = None
    """Port of the actor's metrics; 0 selects a free one, which the log names; default: no metrics."""
    trainer_port: Port | None = None
    """Port of the sidecar's metrics, as `actor_port`."""
