"""Reward functions for TRL and verl that request rewards from the gateway.

Needs the standard library and this checkout alone. The environment variable REWARD_GATEWAY_URL has the gateway's
address, REWARD_GATEWAY_KEY its key if it requires one.

A response without a reward is None for TRL, which leaves it out of its update, and an error for verl, which has no such
value. While no gateway or server answers, the functions wait for it, and then fail.
"""

import functools
import http.client
import itertools
import json
import logging
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_triton.backoff import backoff_s
from rlhf_triton.errors import RlhfError
from rlhf_triton.rewards.opener import opener_for

logger = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
WAIT_S = 300.0  # for a gateway or server that does not answer
TIMEOUT_S = 180.0  # of one request; above the gateway's own limit for a row
ROWS_PER_REQUEST = 256
FIRST_PAUSE_S = 0.5
NOT_THE_GATEWAY = (
    "is this the address of `rlhf-triton gateway` (port 8100 by default), without a path, and not Triton's?"
)
NOT_METADATA = ("completion_ids", "environments")  # arguments of TRL with one entry per row that are no columns


def trl_reward(
    prompts: Sequence[str | Messages], completions: Sequence[str | Messages], **columns: Any
) -> list[float | None]:
    """Return one reward per completion, None where there is none: `GRPOTrainer(reward_funcs=trl_reward)`.

    Columns of the data set reach reward functions as `sample.metadata`.

    Raises RlhfError if no server answers for `WAIT_S` seconds, or if the gateway refuses the request.
    """
    shared = {name: values for name, values in columns.items() if _is_column(name, values, len(prompts))}
    rows = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        metadata = {name: values[i] for name, values in shared.items()}
        if isinstance(prompt, str) and isinstance(completion, str):
            rows.append({"prompt": prompt, "response": completion, "metadata": metadata})
        else:
            rows.append({"messages": [*prompt, *completion], "metadata": metadata})
    rewards, errors = rewards_of(rows, prompts=prompts)
    missing = [error for error in errors if error]
    if missing:
        logger.warning("%d of %d completions have no reward: %s", len(missing), len(rows), missing[0])
    return rewards


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    prompt_key: str = "question",
    url: str | None = None,
    **_: Any,
) -> float:
    """Return the reward of one response: verl's custom reward function.

    Args:
        data_source, ground_truth, extra_info: reach reward functions as `sample.metadata`.
        solution_str: the response.
        prompt_key: key of `extra_info` with the prompt, a text or messages, which verl does not pass otherwise.
        url: the gateway's address; default: REWARD_GATEWAY_URL.

    Raises RlhfError if there is no reward, KeyError if `extra_info` has no prompt.
    """
    info = dict(extra_info or {})
    if prompt_key not in info:
        raise KeyError(f"extra_info has no {prompt_key!r}, the prompt; name its key as reward_kwargs.prompt_key")
    prompt = info[prompt_key]
    columns = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": info}
    row = {"prompt": prompt if isinstance(prompt, str) else list(prompt), "response": solution_str, "metadata": columns}
    (reward,), (error,) = rewards_of([row], url)
    if reward is None:
        raise RlhfError(error)
    return reward


def rewards_of(
    rows: Sequence[Mapping[str, Any]], url: str | None = None, prompts: Sequence[Any] = ()
) -> tuple[list[float | None], list[str | None]]:
    """Return rewards and errors of rows in the form of the gateway's `/v1/rewards`. Raises RlhfError.

    `prompts`: the prompt of each row; consecutive rows with equal ones share a request, for groupwise functions.
    """
    rewards: list[float | None] = []
    errors: list[str | None] = []
    for chunk in _chunks(rows, prompts or range(len(rows))):
        reply = _post({"inputs": chunk}, url or os.environ.get("REWARD_GATEWAY_URL", ""))
        if len(reply["rewards"]) != len(chunk) or any(isinstance(reward, list) for reward in reply["rewards"]):
            raise RlhfError("the reward model has several rewards per row: set reward.attribute_weights")
        rewards += reply["rewards"]
        errors += reply["errors"]
    return rewards, errors


def _chunks(rows: Sequence[Mapping[str, Any]], prompts: Sequence[Any]) -> list[Sequence[Mapping[str, Any]]]:
    starts = [0] if rows else []
    for i in range(1, len(rows)):
        if i - starts[-1] >= ROWS_PER_REQUEST and prompts[i] != prompts[i - 1]:
            starts.append(i)
    return [rows[start:end] for start, end in itertools.pairwise([*starts, len(rows)])]


def _post(body: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the gateway's reply; wait while no server answers. Raises RlhfError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:  # shows no password
        raise RlhfError(
            "REWARD_GATEWAY_URL must be the gateway's address, for example http://host:8100; its key belongs into "
            "REWARD_GATEWAY_KEY"
        )
    key = os.environ.get("REWARD_GATEWAY_KEY")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/rewards", json.dumps(body, default=_plain).encode(), headers
    )
    give_up = time.monotonic() + WAIT_S
    for attempt in itertools.count():
        try:
            with opener_for(url).open(request, timeout=TIMEOUT_S) as reply:
                found = json.load(reply)
            return {name: [*found[name]] for name in ("rewards", "errors")}
        except urllib.error.HTTPError as error:
            cause = f"{url}: {error.code}: {_message(error)}"
            if error.code not in (503, 504):
                raise RlhfError(cause) from error
        except (OSError, http.client.IncompleteRead) as error:
            cause = f"{url}: {error}"
        except (
            http.client.HTTPException,
            ValueError,
            KeyError,
            TypeError,
        ) as error:  # it answers, but not as a gateway
            raise RlhfError(f"{url}: the reply has no rewards; {NOT_THE_GATEWAY}") from error
        pause_s = backoff_s(FIRST_PAUSE_S, attempt)
        if time.monotonic() + pause_s > give_up:
            break
        logger.warning("no rewards yet, trying again: %s", cause)
        time.sleep(pause_s)
    raise RlhfError(f"{cause}; no answer for {WAIT_S:g} s")


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):  # a proxy's page, or another server
        return f"{error.reason}; {NOT_THE_GATEWAY}" if error.code == 404 else str(error.reason)


def _is_column(name: str, values: Any, num_rows: int) -> bool:
    """Return whether a keyword argument of TRL is a column of the data set that JSON can express."""
    if name in NOT_METADATA or not isinstance(values, list) or len(values) != num_rows:
        return False
    try:
        json.dumps(values, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:  # images, for example
        _say_once(f"reward functions do not receive the column {name}: {error}")
        return False
    return True


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


def _plain(value: Any) -> Any:
    """Return an array or a number of NumPy or torch as Python's own. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")
