"""A client that scores the same valid rows repeatedly, as an actor would, while others send bad requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from chaos.background import Background
from chaos.fuzz.client import post
from chaos.fuzz.outcome import StageOutcome

PAUSE_S = 0.05
TOLERANCE = 1e-4


def scored_tokens(rows: np.ndarray) -> dict[str, Any]:
    """Return the body of an inference request of token rows `[B, S]`."""
    tensor = {"name": "tokens", "datatype": "INT64", "shape": list(rows.shape), "data": rows.ravel().tolist()}
    return {"inputs": [tensor]}


def numbers_of(answer: Any) -> dict[str, Any]:
    """Return the outputs of an inference request that are numbers, by name."""
    return {item["name"]: item["data"] for item in answer["outputs"] if item["datatype"] == "FP32"}


class GoodClient:
    """Scores the same rows repeatedly in its `thread`; the first answer is the reference for all others."""

    def __init__(
        self,
        outcome: StageOutcome,
        url: str,
        path: str,
        body: Any,
        read: Callable[[Any], dict[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        """Get the first answer.

        Args:
            outcome: of the stage; receives what is wrong, and how long the client waited.
            read: returns the numbers of a reply, by name.
        """
        self._outcome, self._read, self._expected = outcome, read, dict[str, Any]()
        self._request = url, path, json.dumps(body).encode(), headers
        self._ask()
        self.thread = Background("good-client", self._run)

    def _run(self) -> None:
        while not self.thread.given_up.wait(PAUSE_S):
            self._ask()

    def _ask(self) -> None:
        answer = post(*self._request)
        self._outcome.longest_good_wait_s = max(self._outcome.longest_good_wait_s, answer.seconds)
        if answer.status != "200":
            self._outcome.outages.append(f"{answer.status} {answer.text[:200]}")
            return
        found = {name: np.asarray(values, np.float64) for name, values in self._read(json.loads(answer.text)).items()}
        self._expected = self._expected or found
        self._outcome.good_answers += 1
        for name, array in self._expected.items():
            if name not in found or not np.allclose(found[name], array, atol=TOLERANCE, rtol=0, equal_nan=True):
                self._outcome.wrong.append(f"{name}: {found.get(name)} instead of {array}")
