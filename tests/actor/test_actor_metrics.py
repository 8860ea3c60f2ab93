"""What an actor shows to Prometheus: the numbers of its last step, sums over its steps, and its client's counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actor.run.metrics import ActorMetrics, MetricsLog
from python_backend.client.retry import RequestCounters
from python_backend.config import RunConfig


def shown(metrics: ActorMetrics) -> dict[str, float]:
    samples = [sample for family in metrics.exporter.collect() for sample in family.samples]
    return {s.name.removeprefix("rlhf_actor_") + "".join(s.labels.values()): s.value for s in samples}


def test_a_step_is_shown_and_summed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": {"dir": tmp_path}, "actor": {"steps": 9, "max_staleness": 0}}
    config = RunConfig.model_validate({**settings, "trainer": {"publish": {"every": 3}}})
    counters = RequestCounters(requests=5)
    metrics = ActorMetrics(config, counters, lambda: 2)
    before = shown(metrics)
    assert (before["steps_planned"], before["allowed_staleness"], before["requests_total"]) == (9, 2, 5)
    assert before["step_timestamp_seconds"] > 0  # of the start: an alert on old steps needs one
    assert "step" not in before

    log = MetricsLog(tmp_path, first_step=1, exported=metrics)
    line: dict[str, Any] = {
        "train_rollouts/rollout_size": 8.0,
        "train_rollouts/masked_samples": 1.0,
        "train_rollouts/rewards": 0.5,
        "train_rollouts/staleness": 2.0,
        "train_rollouts/staleness_rows": {"0": 3, "2": 4},
        "timers/step_time": 4.0,
        "timers/generate": 3.0,
        "train_optim/grad_norm": 0.25,
        "tokens_per_s": 60.0,
    }
    log.write(1, line)
    log.write(2, {**line, "train_rollouts/rewards": 0.75, "timers/score_wait": 1.0})
    log.chart({"val_rollouts/rewards": 0.875}, 2)
    counters.retries += 1
    found = shown(metrics)
    expected = {
        "step": 2,
        "rows_total": 16,
        "masked_rows_total": 2,
        "reward": 0.75,
        "staleness": 2,
        "step_seconds": 4,
        "phase_secondsgenerate": 3,
        "phase_secondsscore_wait": 1,
        "grad_norm": 0.25,
        "tokens_per_second": 60,
        "validation_reward": 0.875,
        "retries_total": 1,
        "requests_total": 5,
        "failed_critic_updates_total": 2,
    }
    assert {name: found[name] for name in expected} == expected
    assert "phase_secondsstep_time" not in found
    assert "kl_nats" not in found  # this run has no reference
    log.close()


def test_a_run_without_a_critic_has_no_staleness(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "responses_per_prompt": 4}
    config = RunConfig.model_validate({"run": {"dir": tmp_path}, "actor": {"algorithm": algorithm}})
    assert "allowed_staleness" not in shown(ActorMetrics(config, RequestCounters(), lambda: 0))
