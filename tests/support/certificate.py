"""A self-signed certificate of 127.0.0.1, for tests of TLS."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> dict[str, Path]:
    """Return the gateway's settings of a new certificate; skips the test without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = folder / "certificate.pem", folder / "private.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return {"tls_certificate": certificate, "tls_key": key}
