"""Run folders of made-up metrics, for the report."""

import json

from rlhf_triton.config.run_config import RunConfig
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.jsonl import write_jsonl
from rlhf_triton.tools.report.data import finish_run

EVIL = " <script>alert('x')</script> & great"


def write_run(run_dir, *, report=None, validated=True, critic=True, num_steps=12):
    """Write a finished run's folder, whose `report` may name a function that adds sections; return it."""
    run_dir.mkdir()
    if report:
        write_json(run_dir / "settings.json", RunConfig(report=report).model_dump(mode="json"))
    steps = range(1, num_steps + 1)
    metrics = [
        {
            "step": k,
            "time": 100.0 + 2 * k,
            "train_rollouts/rewards": 0.1 * k,
            "train_rollouts/rewards_with_kl": 0.08 * k,
            "train_rollouts/init_policy_kl_per_sequence": 0.2 * k,
            "train_rollouts/reward_words": 0.2 * k,
            "train_rollouts/reward_style": -0.1 * k,
            "train_rollouts/generation_length": 20.0,
            "train_rollouts/fraction_of_samples_properly_ended": 0.9,
            "timers/generate": 1.0,
            "timers/train_time": 0.5,
            "timers/step_time": 2.0,
            **(
                {
                    "train_rollouts/explained_variance": float("nan") if k == 1 else 0.04 * k,
                    "train_rollouts/weights_version": k - 1,
                    "timers/critic_wait": 0.1,
                }
                if critic
                else {}
            ),
        }
        for k in steps
    ]
    swaps = [
        {"step": k, "time": 101.0 + 2 * k, "weights_version": k, "reload": "swap", "reload_ms": 5.0} for k in steps
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 13, "ti')
    if critic:
        write_jsonl(run_dir / "critic_metrics.jsonl", swaps)
    if validated:
        rows = [
            {"prompt_id": f"p{i}", "when": when, "prompt": "It <b>is</b>", "response": text, "reward": reward}
            for i in range(30)
            for when, text, reward in (
                ("before", f" thing {i}.", 0.0),
                ("after", EVIL if i == 2 else f" good thing {i}.", 1.0 + i % 3),
            )
        ]
        write_jsonl(run_dir / "samples.jsonl", rows)
    validations = dict.fromkeys(("reward_before", "reward_after", "kl_final"), 0.5) if validated else {}
    critics = dict.fromkeys(("weights_version", "critic_updates", "failed_critic_updates"), num_steps) if critic else {}
    explained = dict.fromkeys(("ev_v0", "ev_last"), 0.5) if critic and validated else {}
    always = {"steps": num_steps, "failed_requests": 0, "masked_samples": 0, "seconds_per_step": 2.0}
    (run_dir / "actor_summary.json").write_text(json.dumps({**validations, **critics, **explained, **always}))
    finish_run(run_dir, server_failures=0, peak_rss_mb=100.0, seconds_total=50.0)
    return run_dir
