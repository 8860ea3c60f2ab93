"""Who is measured: ours in three variants, PyTriton in two, a forward per request, and the plan without a server.
Given: a name, a `Setup`, a `Split`. Returns: the contender's `Running`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from python_backend.config import RewardSection, RunConfig, RunSection, ServerSection
from python_backend.contract import REWARD_MODEL
from python_backend.control_key import control_key
from tools.bench.children import HOST, BenchChild, BenchError
from tools.bench.running import Running, Setup, Split
from tools.bench.snapshot import difference, snapshot
from tools.bench.trace import LONGEST
from tools.render_configs import parse_config, render_configs
from tools.triton_home import find_tritonserver, lay_out_backends
from tools.tritonserver import TritonServer

MAX_ROWS = 64
START_ATTEMPTS = 3


class Native(Running):
    """The project's own model in a tritonserver, as rendered, or with one thing changed."""

    def __init__(
        self, name: str, setup: Setup, split: Split, *, model_class: str = "CountedModel", ragged: bool = True
    ) -> None:
        super().__init__(name, setup, split)
        self._late = model_class == "LateModel"  # one forward at a time in a process, as a plain Triton model has it
        repository = self.folder / "model_repository"
        self._write_repository(repository, model_class, ragged)
        home = find_tritonserver()
        section = ServerSection(http_port=0, grpc_port=0, metrics_port=0, exit_timeout_s=1)
        log = self.folder / "tritonserver.log"
        self._server = TritonServer(
            home,
            repository,
            section,
            log,
            backends=lay_out_backends(home, self.folder / "backends"),
            control_key=control_key(self.folder),
            log=lambda line: None,
        )
        try:
            self._server.start()
            self._server.wait_ready()
        except BaseException:
            self._server.stop()
            raise

    @property
    def urls(self) -> list[str]:
        return [self._server.section.http_url]

    @property
    def pids(self) -> list[int]:
        return [self._server.pid]

    @property
    def metrics_url(self) -> str:
        return self._server.section.metrics_url

    def stop(self) -> None:
        self._server.stop()

    def _write_repository(self, repository: Path, model_class: str, ragged: bool) -> None:
        setup = self.setup
        reward = RewardSection(
            checkpoint=setup.checkpoint,
            instances=self.split.instances if self._late else 1,
            workers=1 if self._late else self.split.instances,
            threads=self.split.threads,
            token_budget=setup.token_budget,
            micro_batch_rows=MAX_ROWS,
            forward_overhead_tokens=setup.overhead_tokens,
            allocator="retain" if setup.tuned_allocator else "default",
            queue_delay_us=setup.queue_delay_us,
        )
        config = RunConfig(run=RunSection(dir=self.folder, run_id="bench"), reward=reward)
        message = parse_config(REWARD_MODEL, render_configs(config)[REWARD_MODEL])
        message.parameters["bench_counters"].string_value = str(self.counters.absolute())
        for tensor in message.input:
            tensor.allow_ragged_batch = tensor.allow_ragged_batch and ragged
        version = repository / REWARD_MODEL / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version.parent / "config.pbtxt").write_text(text_format.MessageToString(message))
        (version / "model.py").write_text(f"from tools.bench.models import {model_class} as TritonPythonModel\n")


class PyTriton(Running):
    """A PyTriton server; its clients pad to the trace's longest."""

    width = LONGEST

    def __init__(self, name: str, setup: Setup, split: Split, *, strip_multiple: int) -> None:
        super().__init__(name, setup, split)
        arguments = [*self._arguments(), "--instances", str(split.instances), "--strip-multiple", str(strip_multiple)]
        self._child = self._start(arguments)

    def _start(self, arguments: list[str]) -> BenchChild:
        # Its second instance waits one second for the first one's socket: on a busy machine, not always enough.
        for attempt in range(START_ATTEMPTS):
            log = self.folder / f"server-{attempt}.log"
            child = BenchChild(
                self.name, "tools.bench.pytriton", arguments, log, threads=self.split.threads, num_ports=3
            )
            try:
                child.wait_ready(f"/v2/models/{REWARD_MODEL}/ready")
            except BaseException as error:
                child.stop()
                if attempt + 1 == START_ATTEMPTS or not isinstance(error, BenchError):
                    raise
            else:
                return child
        raise AssertionError("unreachable")

    @property
    def urls(self) -> list[str]:
        return [self._child.url]

    @property
    def pids(self) -> list[int]:
        return [self._child.pid]

    @property
    def metrics_url(self) -> str:
        return f"{HOST}:{self._child.ports[2]}"

    def stop(self) -> None:
        self._child.stop()


class Instances(Running):
    """One process per instance, each with a port: `one_forward` and `ideal`."""

    def __init__(self, name: str, setup: Setup, split: Split, *, module: str) -> None:
        super().__init__(name, setup, split)
        self.plain = True
        self._children = [
            BenchChild(name, module, self._arguments(), self.folder / f"{i}.log", threads=split.threads)
            for i in range(split.instances)
        ]
        try:
            for child in self._children:
                child.wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def urls(self) -> list[str]:
        return [child.url for child in self._children]

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def stop(self) -> None:
        for child in self._children:
            child.stop()

    def run_plan(self, num_rows: int, num_checked: int) -> dict[str, Any]:
        """`ideal` only: seconds until the first `num_rows` rows of the trace are scored, and first rewards."""
        claims = self.folder / f"claims-{time.monotonic_ns()}"
        job = {
            "num_rows": num_rows, "num_checked": num_checked,
            "token_budget": self.setup.token_budget, "max_rows": MAX_ROWS,
            "overhead_tokens": self.setup.overhead_tokens,
            "claims": str(claims.absolute()), "start_at": time.monotonic() + 0.1 + num_rows * 5e-5,
        }  # fmt: skip
        before = snapshot(self.watched)
        with ThreadPoolExecutor(len(self._children)) as executor:
            parts = list(executor.map(lambda child: child.ask("/run", job), self._children))
        claims.unlink()
        seconds = max(part["end"] for part in parts) - min(part["start"] for part in parts)
        merged = zip(*(part["rewards"] for part in parts), strict=True)
        rewards = [next(score for score in scores if score is not None) for scores in merged]
        used = difference(snapshot(self.watched), before)
        return {"seconds": seconds, "p50_ms": None, "p99_ms": None, "client_cpu_s": 0.0, "rewards": rewards, **used}


Start = Callable[[str, Setup, Split], Running]
CONTENDERS: dict[str, Start] = {
    "ideal": lambda *of: Instances(*of, module="tools.bench.ideal"),
    "ours": lambda *of: Native(*of),
    "pytriton_padded": lambda *of: PyTriton(*of, strip_multiple=0),
    "pytriton_stripped": lambda *of: PyTriton(*of, strip_multiple=16),
    "one_forward": lambda *of: Instances(*of, module="tools.bench.one_forward"),
    "ragged_off": lambda *of: Native(*of, ragged=False),
    "late_answers": lambda *of: Native(*of, model_class="LateModel"),
}
