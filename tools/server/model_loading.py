"""Loads the models of a newly started tritonserver, and makes sure that each answers a request."""

from __future__ import annotations

import compileall
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from rlhf_triton.client.control_plane import ControlPlane
from rlhf_triton.config.sections import ServerSection
from rlhf_triton.tools.server.child import WaitCheck
from rlhf_triton.tools.server.server_log import Log
from rlhf_triton.tools.server.triton_home import (
    ServerStartError,
)
from rlhf_triton.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    REFERENCE,
    REWARD_CHECKPOINT,
    REWARD_FUNCTION_PREFIX,
    REWARD_MIXTURE,
    REWARD_MODEL,
)

POLL_INTERVAL_S = 0.1


def load_and_probe(
    control: ControlPlane,
    repository: Path,
    section: ServerSection,
    *,
    check: WaitCheck,
    log: Log,
) -> None:
    """Load the models that are not ready, and return once every model of the repository has answered a request.

    The server has already tried to load every model. A model that failed to load is loaded again, because only the
    response to a load call contains the reason.

    Args:
        section: `start_timeout_s` limits the whole call.
        check: called repeatedly during a load or a request; raises an exception to abort.
        log: receives a line for each model.

    Raises:
        ServerStartError: the repository is empty, or the timeout has expired.
        ControlPlaneError: a model did not load, or did not answer.
    """
    models = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    if not models:
        raise ServerStartError(f"{repository} contains no model; render it with tools/render_configs.py")
    deadline = time.monotonic() + section.start_timeout_s

    def time_left() -> float:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ServerStartError(too_slow(section))
        return left_s

    def load(model: str) -> str:
        start = time.monotonic()
        control.load(model, timeout_s=time_left())
        return f"{model} loaded in {time.monotonic() - start:.1f} s"

    def answer(model: str) -> str:
        control.probe(model, time_left())
        return f"{model} answers"

    missing = {model for model in models if not control.is_ready(model)}
    for group in load_order(missing):
        _load_in_parallel(load, group, check, log)
    for model in sorted(models):
        _load_in_parallel(answer, {model}, check, log)


def too_slow(section: ServerSection) -> str:
    """Return the error message for models that are not ready in time."""
    return (
        f"the models were not ready within {section.start_timeout_s:g} s: the server's log shows "
        "what they are waiting for; if they only need more time, raise server.start_timeout_s"
    )


def load_order(models: set[str]) -> list[set[str]]:
    """Return groups of models, in load order; a group can load in parallel, and ensembles come after their models."""
    components = (REWARD_CHECKPOINT, REWARD_MIXTURE)
    parts = {model for model in models if model.startswith(REWARD_FUNCTION_PREFIX) or model in components}
    first = {CRITIC, REFERENCE, *(parts or {REWARD_MODEL})}
    order = [first, {REWARD_MODEL} - first, {CRITIC_INFER}, {CRITIC_TRAIN}, {CRITIC_SAVE}]
    others = models.difference(*order)
    return [models & group for group in [*order, others] if models & group]


def compile_ahead(repository: Path) -> None:
    """Write each model's bytecode before Triton first looks at its folder.

    Stubs run in isolated mode and ignore PYTHONDONTWRITEBYTECODE. To Triton, a `__pycache__` that appears during the
    first load is a change of the model: loading an ensemble would then load its models once more.
    """
    for model in repository.glob("*/[1-9]*/model.py"):
        compileall.compile_file(model, quiet=2)  # if this process cannot write there, a stub cannot either


def _load_in_parallel(work: Callable[[str], str], models: set[str], check: WaitCheck, log: Log) -> None:
    executor = ThreadPoolExecutor(max_workers=max(1, len(models)), thread_name_prefix="load")
    try:
        waiting = {executor.submit(work, model) for model in models}
        while waiting:
            done, waiting = wait(waiting, POLL_INTERVAL_S, FIRST_COMPLETED)
            for future in done:
                log(future.result())
            check()
    finally:
        executor.shutdown(wait=False)  # after a failure or a signal, stopping the server ends the other calls
