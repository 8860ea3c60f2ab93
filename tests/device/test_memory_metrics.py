"""How much of its card a process uses: in its metrics, in the lines that it writes, and in `tools status`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton_python_backend_utils as stub
from live_system import make_tokenizer
from recorded_run import RecordedRun
from served_model import served_model
from simulated_cuda.device import TOTAL_MEMORY
from tiny_checkpoints import save_tiny

from python_backend.config import RunConfig
from python_backend.models.card.memory import Halving, card_bytes
from python_backend.store.durable import write_json
from python_backend.store.heartbeat import Heartbeat
from python_backend.store.journal import Journal
from tools import status
from trainer.critic_update import UpdateReport
from trainer.progress import SidecarProgress

GIB = 1 << 30
PAGE = f"""# HELP rlhf_card_bytes Memory
rlhf_card_bytes{{instance="reward_0_1",model="reward",version="1"}} {3 * GIB}
rlhf_card_peak_bytes{{instance="reward_0_1",model="reward",version="1"}} {5.5 * GIB:.6e}
rlhf_card_reserved_bytes{{instance="reward_0_1",model="reward",version="1"}} {6 * GIB}
rlhf_card_size_bytes{{instance="reward_0_1",model="reward",version="1"}} {80 * GIB}
nv_gpu_utilization{{gpu_uuid="GPU-1"}} 0.35
nv_gpu_utilization{{gpu_uuid="GPU-2"}} 0
"""


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A Triton server whose metrics are `PAGE`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PAGE.encode() if self.path == "/metrics" else b'{"name":"triton"}')

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_card_has_what_is_allocated_what_was_and_its_size():
    before = torch.cuda.memory_allocated(2)
    torch.cuda.reset_peak_memory_stats(2)
    kept = torch.zeros(100, device="cuda:2")
    kept = torch.zeros(50, device="cuda:2")
    found = card_bytes(torch.device("cuda:2"))
    assert (found["card_bytes"], found["card_peak_bytes"]) == (before + kept.nbytes, before + 600)
    assert (found["card_reserved_bytes"], found["card_size_bytes"]) == (before + kept.nbytes, TOTAL_MEMORY)
    assert card_bytes(torch.device("cpu")) == {}


def test_a_served_model_shows_the_memory_of_its_own_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown: dict[str, list[float]] = {}

    class Family(stub.MetricFamily):
        def __init__(self, *, name: str, **_: object) -> None:
            self._name = name

        def Metric(self, *, labels: dict[str, str]) -> Family:
            return Family(name="/".join([self._name, *labels.values()]))

        def set(self, value: float) -> None:
            shown.setdefault(self._name, []).append(value)

    monkeypatch.setattr(stub, "MetricFamily", Family)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    save_tiny(tmp_path, "llama", "reward", vocab_size=len(tokenizer))
    config = RunConfig.model_validate({"reward": {"checkpoint": str(tmp_path), "device": "cuda"}})
    with served_model(config, "reward_model", model_instance_device_id="3") as model:
        model.served.compute.publish()
        assert shown["rlhf_card_bytes/reward_model/reward_model_0_0"][-1] == torch.cuda.memory_allocated(3) > 0
    assert {name.split("/")[0] for name in shown} >= {f"rlhf_{name}" for name in card_bytes(torch.device("cuda:3"))}


def test_status_shows_the_memory_of_every_process(tmp_path: Path, metrics_url: str):
    run = RecordedRun(tmp_path, device="cuda:1").start().steps(1)
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert {name: written[name] for name in card_bytes(torch.device("cuda:1"))} == card_bytes(torch.device("cuda:1"))
    memory = {
        "card_bytes": GIB,
        "card_peak_bytes": 40 * GIB,
        "card_reserved_bytes": 41 * GIB,
        "card_size_bytes": 80 * GIB,
    }
    run.config.run.journal_dir.mkdir()
    journal = Journal(run.config.run.journal_dir, run.config.run.identity)
    progress = SidecarProgress(run.config, journal, epoch=1, stop=threading.Event())
    progress.log_update(1, 1, UpdateReport(0.5, 1.0, 1e-5, 1, 0, 2.0, memory=memory), None)
    (metric,) = [each for each in progress._exported.exporter.collect() if each.name == "rlhf_trainer_card_peak_bytes"]
    assert metric.samples[0].value == 40 * GIB
    device = torch.device("cpu")  # the line of this failure has no memory of a card
    update: Any = SimpleNamespace(
        memory=Halving("x", remedy="y"), critic=SimpleNamespace(model=SimpleNamespace(device=device))
    )
    update.memory.count = 3
    publisher: Any = SimpleNamespace(rejected=0)
    progress.log_failure(2, 1, "no memory", publisher, update)
    (metric,) = [each for each in progress._exported.exporter.collect() if each.name == "rlhf_trainer_out_of_memory"]
    assert metric.samples[0].value == 3
    journal.beat(Heartbeat(1, 1, 0, "idle", 0.0))
    write_json(run.config.server_dir / "server.json", {"http": metrics_url, "metrics": metrics_url})
    lines = list(status.status(run.config))
    assert "          reward_0_1; 3.0 GiB on its GPU of 80.0 GiB, at most 5.5" in lines
    assert "          GPUs busy: 35%, 0%" in lines
    (actor,) = [line for line in lines if line.startswith("actor")]
    assert actor.endswith("; 0.0 GiB on its GPU of 80.0 GiB, at most 0.0")
    assert "; 1.0 GiB on its GPU of 80.0 GiB, at most 40.0;" in status._sidecar(run.config)
    write_json(run.config.server_dir / "server.json", {"http": "127.0.0.1:1", "metrics": metrics_url})
    assert not any("GPUs busy" in line for line in status.status(run.config))  # the port is another program's now
