"""The image's health check: exit code 0 if all models answer requests, with weights that are up to date.

Triton's own readiness stays true after a model's process has died, and does not know which version of the weights is to
be served. Like `entry_point`, needs only the standard library and numpy.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.client.errors import code_of
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.server.container import REPOSITORY, weights_dirs
from rlhf_triton.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    NEEDS_MORE,
    PROBE_HEADER,
    REFERENCE,
    REWARD_MODEL,
    REWARD_VERSION,
    SEQUENCE_LENGTHS,
    TOKENS,
    WEIGHTS_VERSION,
)

TIMEOUT_S = 110.0  # Docker and Kubernetes allow 120 s for all requests, the start of Python included
VERSION_OF = {CRITIC: WEIGHTS_VERSION, REWARD_MODEL: REWARD_VERSION}
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def local_address() -> str:
    """Return the address and port at which the image's server answers on this machine."""
    return os.environ.get("TRITON_ADDRESS", "127.0.0.1").replace("0.0.0.0", "127.0.0.1") + ":8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Check the server on this machine; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python3 -m rlhf_triton.tools.server.healthcheck", description="Check the local server."
    )
    parser.add_argument("--repository", type=Path, default=REPOSITORY, help="the rendered model repository")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of each request; a busy server has a queue")
    arguments = parser.parse_args(argv)
    return check(arguments.repository, f"http://{local_address()}", timeout_s=arguments.timeout_s)


def check(repository: Path, url: str, *, timeout_s: float = TIMEOUT_S) -> int:
    """Probe each model that clients use; return 0, or print the reason and return 1 if one is not ready."""
    whole = CRITIC_INFER if (repository / CRITIC_INFER).is_dir() else REWARD_MODEL  # critic_infer runs all of them
    models = [model for model in (whole, REFERENCE) if (repository / model).is_dir()]
    if not models:
        print(f"not ready: {repository} has no model yet", file=sys.stderr)
        return 1
    try:
        for model in models:
            # Read first: a version that is published during the request does not make the server late.
            stores = {} if model == REFERENCE else weights_dirs(repository)
            currents = {part: WeightsStore(folder).current() or 0 for part, folder in stores.items()}
            answer = infer(f"{url}/v2/models/{model}", timeout_s)
            if not answer and CRITIC in currents:  # the reward model refused the row, and so critic_infer did
                answer = infer(f"{url}/v2/models/{CRITIC}", timeout_s)
            for part, current in currents.items():
                served = answer[VERSION_OF[part]][0]
                if served < current:
                    raise RlhfError(f"{part} serves version {served}, but CURRENT is {current}")
    except (OSError, ValueError, KeyError, RlhfError) as error:
        print(f"not ready: {model}: {error}", file=sys.stderr)
        return 1
    return 0


def infer(model_url: str, timeout_s: float) -> dict[str, Any]:
    """Score two tokens with id 0, but run no reward function, and return the outputs by name.

    Raises OSError (also HTTP), ValueError, KeyError.

    A reward model that such a row cannot be sent to refuses it, which proves that it is alive; returns {} then.
    """
    inputs = [
        {"name": TOKENS, "datatype": "INT64", "shape": [1, 2], "data": [0, 0]},
        {"name": SEQUENCE_LENGTHS, "datatype": "INT64", "shape": [1, 1], "data": [2]},
    ]
    request = urllib.request.Request(
        f"{model_url}/infer", json.dumps({"inputs": inputs}).encode(), headers={PROBE_HEADER: "1"}
    )
    try:
        with LOCAL.open(request, timeout=timeout_s) as answer:
            return {tensor["name"]: tensor["data"] for tensor in json.load(answer)["outputs"]}
    except urllib.error.HTTPError as error:
        if code_of(error.read().decode("utf-8", "replace")) == NEEDS_MORE:
            return {}
        raise


if __name__ == "__main__":
    sys.exit(main())
