"""Drains a tritonserver before it is stopped; `python3 -m rlhf_triton.tools.server.drain` does so in the image.

Unloading is Triton's way to drain a model: it is no longer ready, further requests get 404 ("has no available
versions") without being executed, and its process ends once all requests in flight and in its queues are answered. On
SIGTERM alone, tritonserver resets new connections but reports ready and takes requests on open ones until its exit
timeout, which breaks off whatever is then in flight.

Needs only the standard library, as the image's other commands do, and so uses HTTP: unlike a load, an unload does not
stall it.
"""

import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rlhf_triton.store.control_key import KEY_HEADER, control_key
from rlhf_triton.tools.server.container import REPOSITORY, weights_dir
from rlhf_triton.tools.server.healthcheck import LOCAL, local_address
from rlhf_triton.tools.server.triton_home import STUB
from rlhf_triton.wire.contract import CRITIC_INFER, REWARD_MODEL

DRAIN_S = 20.0  # how long requests in flight may take
CALL_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.05
# Without any process of a model, before unanswered requests count as lost with one that has died; on a busy machine,
# Triton takes seconds to report a model as unloaded whose process has ended.
ORPHANED_S = 5.0
ENSEMBLES = (CRITIC_INFER, REWARD_MODEL)  # the second is one only if the YAML has `rewards`


def main(repository: Path = REPOSITORY, url: str | None = None, *, give_up: Callable[[], bool] = lambda: False) -> int:
    """Drain the image's server, see `drain`; return 0 if all requests were answered, else 1."""
    try:
        is_idle = drain(url or local_address(), control_key(weights_dir(repository)), DRAIN_S, _has_stub, give_up)
    except (OSError, ValueError, HTTPException) as error:
        print(f"the server does not answer: {error}", file=sys.stderr)
        return 1
    return 0 if is_idle else 1


def drain(url: str, key: str, timeout_s: float, has_stub: Callable[[], bool], give_up: Callable[[], bool]) -> bool:
    """Unload all models of the server at `url` (`host:port`) and wait until their requests in flight are answered.

    Args:
        key: the key for model control.
        has_stub: returns whether the server has a process of any model; none for `ORPHANED_S` ends the wait, because
            Triton never answers the requests of a process that died.
        give_up: checked while waiting; True ends the wait.

    Returns:
        Whether all requests were answered; False: they were not within `timeout_s` or never will be, a model is being
        loaded, or `give_up` returned True.

    Raises:
        OSError: the server cannot be reached, or refuses the key.
        ValueError: the response is not Triton's.
    """
    last_alive = time.monotonic()
    deadline = last_alive + timeout_s
    loading: set[str] = set()
    while loaded := {model: state for model, state in _loaded(url, key).items() if model not in loading}:
        for model in sorted(loaded, key=lambda model: model not in ENSEMBLES):  # before their models
            if loaded[model] == "READY":  # at first; later only if a publish has loaded it again
                try:
                    _post(url, key, f"models/{model}/unload")
                except TimeoutError:  # it is being loaded, which Triton finishes first: drain the others
                    loading.add(model)
        now = time.monotonic()
        if has_stub():
            last_alive = now
        if now > deadline or now - last_alive > ORPHANED_S or give_up():
            return False
        time.sleep(POLL_INTERVAL_S)
    return not loading


def _loaded(url: str, key: str) -> dict[str, str]:
    """Return the state of each model that is loaded or still answers requests."""
    states = {model["name"]: model.get("state", "UNAVAILABLE") for model in json.loads(_post(url, key, "index"))}
    return {model: state for model, state in states.items() if state != "UNAVAILABLE"}


def _has_stub() -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            command, _, _ = path.read_bytes().partition(b"\0")  # empty once it is a zombie
            if command.endswith(f"/{STUB}".encode()):
                return True
    return False


def _post(url: str, key: str, path: str) -> Any:
    request = urllib.request.Request(f"http://{url}/v2/repository/{path}", b"{}", {KEY_HEADER: key})
    with LOCAL.open(request, timeout=CALL_TIMEOUT_S) as answer:
        return answer.read()


if __name__ == "__main__":
    sys.exit(main())
