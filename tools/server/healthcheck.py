"""`python3 -m tools.server.healthcheck`: exit code 0 if the models of the image answer an inference request.

Triton's own readiness stays true after a model's process has died. Like `tools.server.container`, needs only the
standard library.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from python_backend.wire.contract import CRITIC_INFER, REFERENCE, REWARD_MODEL, SEQUENCE_LENGTHS, TOKENS
from tools.server.container import REPOSITORY

TIMEOUT_S = 8.0
LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(repository: Path = REPOSITORY, url: str | None = None) -> int:
    """Probe each model that clients use; return 0, or print the reason and return 1 if one does not answer."""
    address = os.environ.get("TRITON_ADDRESS", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
    whole = CRITIC_INFER if (repository / CRITIC_INFER).is_dir() else REWARD_MODEL  # critic_infer runs both models
    models = [model for model in (whole, REFERENCE) if (repository / model).is_dir()]
    try:
        for model in models:
            infer(f"{url or f'http://{address}:8000'}/v2/models/{model}")
    except (OSError, ValueError, KeyError) as error:
        print(f"{model}: {error}", file=sys.stderr)
        return 1
    return 0


def infer(model_url: str) -> dict[str, Any]:
    """Score two tokens with id 0 and return the response. Raises OSError (HTTP errors too), ValueError, KeyError."""
    with LOCAL.open(model_url, timeout=TIMEOUT_S) as answer:
        types = {tensor["name"]: tensor["datatype"] for tensor in json.load(answer)["inputs"]}
    inputs = [
        {"name": TOKENS, "datatype": types[TOKENS], "shape": [1, 2], "data": [0, 0]},
        {"name": SEQUENCE_LENGTHS, "datatype": types[SEQUENCE_LENGTHS], "shape": [1, 1], "data": [2]},
    ]
    body = json.dumps({"inputs": inputs}).encode()
    with LOCAL.open(urllib.request.Request(f"{model_url}/infer", body), timeout=TIMEOUT_S) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
