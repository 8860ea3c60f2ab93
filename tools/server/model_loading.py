"""Makes sure that a newly started tritonserver works: every model is loaded and answers a request."""

from __future__ import annotations

import compileall
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from python_backend.config import ServerSection
from python_backend.wire.contract import (
    CRITIC,
    CRITIC_INFER,
    CRITIC_SAVE,
    CRITIC_TRAIN,
    LOGPROBS,
    REFERENCE,
    REWARD_CHECKPOINT,
    REWARD_COMPONENT,
    REWARD_ERROR,
    REWARD_FUNCTION_PREFIX,
    REWARD_MIXTURE,
    REWARD_MODEL,
    REWARDS,
    VALUES,
    WEIGHTS_VERSION,
)
from tools.server.triton_home import ServerStartError
from trainer.control_plane import ControlPlane

SCORING_OUTPUTS = {
    REWARD_CHECKPOINT: (REWARDS,),
    REWARD_MODEL: (REWARDS,),  # if it is an ensemble, this also probes the mixture
    REFERENCE: (LOGPROBS,),
    CRITIC: (VALUES, WEIGHTS_VERSION),
    CRITIC_INFER: (VALUES, WEIGHTS_VERSION),  # its rewards are those of reward_model, if any
}
POLL_INTERVAL_S = 0.1


def load_and_probe(
    control: ControlPlane,
    repository: Path,
    section: ServerSection,
    *,
    check: Callable[[], None],
    log: Callable[[str], None],
) -> None:
    """Load the models that are not ready, and return once every model of the repository has answered a request.

    The server has already tried to load every model. A model that failed to load is loaded again, because only the
    response to a load call contains the reason.

    Args:
        section: `start_timeout_s` limits the whole call, `load_timeout_s` each load.
        check: called repeatedly during a load or a request; raises an exception to abort.
        log: receives a line for each model.

    Raises:
        ServerStartError: the repository is empty, or the timeout has expired.
        ControlPlaneError: a model did not load, or did not answer.
    """
    models = {path.parent.name for path in repository.glob("*/config.pbtxt")}
    if not models:
        raise ServerStartError(f"{repository} contains no model; run `python -m tools render`")
    deadline = time.monotonic() + section.start_timeout_s

    def time_left() -> float:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ServerStartError(too_slow(section))
        return min(left_s, section.load_timeout_s)

    def load(model: str) -> str:
        start = time.monotonic()
        control.load(model, timeout_s=time_left())
        return f"{model} loaded in {time.monotonic() - start:.1f} s"

    def answer(model: str) -> str:
        probe(control, model, time_left())
        return f"{model} answers"

    missing = {model for model in models if not control.is_ready(model)}
    for group in load_order(missing):
        _together(load, group, check, log)
    for model in sorted(models):
        _together(answer, {model}, check, log)


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


def _together(
    work: Callable[[str], str], models: set[str], check: Callable[[], None], log: Callable[[str], None]
) -> None:
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


def probe(control: ControlPlane, model: str, timeout_s: float) -> None:
    """Send the model a request without side effects and wait for its answer. Raises ControlPlaneError."""
    if model in SCORING_OUTPUTS:
        control.probe_scoring(model, SCORING_OUTPUTS[model], timeout_s)
    elif model.startswith(REWARD_FUNCTION_PREFIX):  # the sample is made up: NaN is a valid answer
        control.probe_scoring(model, (REWARD_COMPONENT, REWARD_ERROR), timeout_s)
    elif model in (CRITIC_TRAIN, CRITIC_SAVE):
        control.probe_rejection(model, timeout_s)
