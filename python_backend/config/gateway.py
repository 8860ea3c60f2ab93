"""Section `gateway` of the YAML configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from python_backend.config.fields import Count, Port, Seconds, Section


class GatewaySection(Section):
    """The HTTP gateway for other trainers (`tools gateway`). It sends requests as `actor.client` says."""

    host: str = "127.0.0.1"
    """Address to bind. Beyond loopback, set `key_env`, and a certificate unless a proxy adds TLS."""
    port: Port = 8100
    """Port; 0 selects a free one, which the gateway prints."""
    model: str = "reward_model"
    """Name of the reward model in vLLM's protocol."""
    key_env: str | None = None
    """Name of the environment variable with the key that every request must carry; default: no key."""
    tls_certificate: Path | None = None
    """PEM file with the certificate chain; default: HTTP without TLS."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key; default: it is in `tls_certificate`."""
    deadline_s: Seconds = 60.0
    """Longest wait for the rewards of a row; it includes retries and waiting for a server."""
    max_body_bytes: Count = 16_000_000
    """Maximum size of a request's body, of the texts of all its rows, and of all large bodies in memory at a time."""
    max_rows: Count = 4096
    """Maximum rows in one request."""
    rows_per_request: Count = 32
    """Maximum rows in one request to Triton. Without reward functions, rows that arrive within 2 ms, of all clients,
    share a request; one that the server refuses does not affect the others."""

    @model_validator(mode="after")
    def _certificate_for_key(self) -> GatewaySection:
        if self.tls_key and not self.tls_certificate:
            raise ValueError("gateway.tls_key requires gateway.tls_certificate")
        return self
