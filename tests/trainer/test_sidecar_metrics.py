"""What a sidecar shows to Prometheus: trained, failed and rejected updates, versions, and the journal."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families
from sidecar_rig import Rig, overflowing

from python_backend.config import MonitoringSection
from tools.server.ports import free_port


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {s.name.removeprefix("rlhf_trainer_") + "".join(s.labels.values()): s.value for s in samples}


def test_updates_failures_and_rejections_are_counted(make: Callable[..., Rig]) -> None:
    rig, port = make(), free_port()
    monitoring = MonitoringSection(trainer_port=port)
    rig.config = rig.config.model_copy(update={"monitoring": monitoring})
    instance = rig.serve()
    instance.refuses = {2}
    rig.start()
    assert rig.answer(rig.send(1)).error is None
    assert rig.answer(rig.send(2)).error is not None  # its version is refused
    failed = rig.journal.accept_training(overflowing(), run_id="run", step=3)
    assert rig.answer(failed).error is not None
    assert rig.answer(rig.send(4)).error is None
    rig.stop()  # the last numbers are shown after the answer
    found = scrape(port)
    counts = {name: value for name, value in found.items() if name.endswith("_total") and "log" not in name}
    assert {name: value for name, value in counts.items() if not name.startswith("process")} == {
        "updates_total": 3,
        "failed_updates_total": 2,
        "rejected_versions_total": 1,
        "skipped_optimizer_steps_total": 0,
        "out_of_memory_total": 0,
    }
    assert (found["step"], found["weights_version"], found["journal_last_step"]) == (4, rig.store.current(), 4)
    assert (found["journal_pending_entries"], found["blocked"]) == (0, 0)
    assert found["loss"] > 0
    assert all(found[f"publish_seconds{phase}"] > 0 for phase in ("write", "verify", "reload"))
