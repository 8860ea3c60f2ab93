"""`python3 -m tools.server.healthcheck`: exit code 0 if all models answer requests, and the critic is up to date.

Triton's own readiness stays true after a model's process has died, and does not know which version of the critic is to
be served. Like `tools.server.entry_point`, needs only the standard library and numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from python_backend.errors import RlhfError
from python_backend.store.weights import WeightsStore
from python_backend.wire.contract import (
    CRITIC_INFER,
    REFERENCE,
    REWARD_MODEL,
    SEQUENCE_LENGTHS,
    TOKENS,
    WEIGHTS_VERSION,
)
from tools.server.container import REPOSITORY, weights_dir

TIMEOUT_S = 8.0
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class BehindCurrent(RlhfError):
    """The critic serves an older version than the one that CURRENT names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the server on this machine; return the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m tools.server.healthcheck", description="Check the local server.")
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="the rendered model repository")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of each request; a busy server has a queue")
    arguments = parser.parse_args(argv)
    address = os.environ.get("TRITON_ADDRESS", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
    return check(arguments.repository, f"http://{address}:8000", timeout_s=arguments.timeout_s)


def check(repository: Path, url: str, *, timeout_s: float = TIMEOUT_S) -> int:
    """Probe each model that clients use; return 0, or print the reason and return 1 if one is not ready."""
    whole = CRITIC_INFER if (repository / CRITIC_INFER).is_dir() else REWARD_MODEL  # critic_infer runs both models
    models = [model for model in (whole, REFERENCE) if (repository / model).is_dir()]
    try:
        for model in models:
            # Read first: a version that is published during the request does not make the server late.
            current = WeightsStore(weights_dir(repository)).current() if model == CRITIC_INFER else None
            answer = infer(f"{url}/v2/models/{model}", timeout_s)
            if current is not None and answer[WEIGHTS_VERSION][0] < current:
                raise BehindCurrent(f"it serves version {answer[WEIGHTS_VERSION][0]}, but CURRENT is {current}")
    except (OSError, ValueError, KeyError, RlhfError) as error:
        print(f"not ready: {model}: {error}", file=sys.stderr)
        return 1
    return 0


def infer(model_url: str, timeout_s: float) -> dict[str, Any]:
    """Score two tokens with id 0 and return the outputs by name. Raises OSError (also HTTP), ValueError, KeyError."""
    with LOCAL.open(model_url, timeout=timeout_s) as answer:
        types = {tensor["name"]: tensor["datatype"] for tensor in json.load(answer)["inputs"]}
    inputs = [
        {"name": TOKENS, "datatype": types[TOKENS], "shape": [1, 2], "data": [0, 0]},
        {"name": SEQUENCE_LENGTHS, "datatype": types[SEQUENCE_LENGTHS], "shape": [1, 1], "data": [2]},
    ]
    body = json.dumps({"inputs": inputs}).encode()
    with LOCAL.open(urllib.request.Request(f"{model_url}/infer", body), timeout=timeout_s) as answer:
        return {tensor["name"]: tensor["data"] for tensor in json.load(answer)["outputs"]}


if __name__ == "__main__":
    sys.exit(main())
