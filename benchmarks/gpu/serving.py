"""A served model in this process, with the tests' stand-in for Triton's module: its requests need no server."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from python_backend.config import RunConfig
from python_backend.models.batching import padded_rows
from python_backend.wire.contract import SEQUENCE_LENGTHS, TOKENS
from tools.render_configs import MODULES, parse_config, render_configs

STAND_IN = Path(__file__).resolve().parents[2] / "tests" / "support" / "stub"
REPLY_S = 60.0


class Served:
    """A model as tritonserver would load it, from its rendered configuration. Call `ask` from any thread."""

    def __init__(self, config: RunConfig, name: str) -> None:
        os.environ.setdefault(
            "TRITON_SERVER_VERSION", "none"
        )  # the wheel's tritonserver refuses NumPy 2, this does not
        sys.path.append(str(STAND_IN))
        rendered = parse_config(name, render_configs(config)[name])
        parameters = {key: {"string_value": item.string_value} for key, item in rendered.parameters.items()}
        self._outputs = [output.name for output in rendered.output]
        self._request = importlib.import_module("triton_python_backend_utils").Request
        self.model = importlib.import_module(MODULES[name]).TritonPythonModel()
        self.model.initialize(
            {
                "model_config": json.dumps({"name": name, "parameters": parameters}),
                "model_name": name,
                "model_instance_name": f"{name}_0",
                "model_instance_device_id": "0",
            }
        )

    def ask(self, **inputs: np.ndarray) -> Any:
        """Send one request; return the reply, which has `outputs` or an `error`. Raises queue.Empty without a reply."""
        request = self._request(inputs, self._outputs)
        self.model.execute([request])
        return request.responses.get(timeout=REPLY_S)

    def score(self, rows: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of a request with these token rows. Raises ValueError if it is refused."""
        reply = self.ask(**token_inputs(rows))
        if reply.error is not None:
            raise ValueError(reply.error)
        return dict(reply.outputs)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.model.finalize()


def token_inputs(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the inputs of a request with these token rows."""
    lengths = np.asarray([[row.size] for row in rows])
    return {TOKENS: padded_rows(rows, int(lengths.max()), np.int64), SEQUENCE_LENGTHS: lengths}
