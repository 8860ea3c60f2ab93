"""TRL with Triton: GRPO on its rewards through a server crash, PPO with its critic, and exported rows of agents.

Runs only in `make test-trl`.
"""

import asyncio
import json
import math
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from expected_outputs import direct_rewards
from live_system import ENVIRONMENT, make_run, start_system
from run_checkpoints import POSITIONS
from scripted_policy import TOKENIZER, ScriptedSampler, scripted_gateway
from tiny_checkpoints import save_tiny
from transformers import AutoTokenizer

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parents[2]
THEIRS = Path(os.environ.get("TRL_ENVIRONMENT", "")).absolute() / "bin" / "python"
STEPS = 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # from peft
    pytest.mark.skipif("TRL_ENVIRONMENT" not in os.environ, reason="opt-in: `make test-trl`"),
]


def theirs(script, *arguments, **environment):
    """Start a script of tests/support in TRL's environment."""
    known = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen([str(THEIRS), str(ROOT / "tests/support" / script), *map(str, arguments)], env=known)


def lines(path):
    return len(path.read_text().splitlines()) if path.is_file() else 0


def test_trl_grpo_trains_on_triton_rewards_through_a_server_crash(tmp_path, checkpoints):
    system = start_system(make_run(tmp_path, checkpoints))
    try:
        with theirs("trl_run.py", checkpoints.policy, tmp_path, STEPS, system.run.url) as trainer:
            while lines(tmp_path / "rewards.jsonl") < 16:
                assert trainer.poll() is None
                time.sleep(0.05)
            server = psutil.Process(system.server.process.pid)
            next(child for child in server.children(recursive=True) if child.name() == "tritonserver").kill()
            assert trainer.wait() == 0
    finally:
        system.stop()
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoints.reward))
    rows = [json.loads(line) for line in (tmp_path / "rewards.jsonl").read_text().splitlines()]
    ids = [np.asarray(tokenizer(prompt + text)["input_ids"][:POSITIONS], np.int64) for prompt, text, _ in rows]
    found = np.asarray([math.nan if reward is None else reward for _, _, reward in rows])
    known = ~np.isnan(found)
    assert len(rows) == 8 * STEPS
    assert known[:16].all()
    np.testing.assert_allclose(found[known], direct_rewards(checkpoints.reward, ids)[known], atol=1e-5)
    logged = [entry["reward"] for entry in json.loads((tmp_path / "log.json").read_text()) if "reward" in entry]
    assert logged[0] == pytest.approx(found[:8].mean(), abs=1e-4)


def test_trl_ppo_raises_the_reward_with_a_critic_from_triton(tmp_path, checkpoints):
    """The example, as it is."""
    system = start_system(make_run(tmp_path / "run", checkpoints))
    size = {"per_device_train_batch_size": 64, "num_generations": 4, "max_completion_length": 8, "num_iterations": 2}
    steps = {"learning_rate": 3e-2, "lr_scheduler_type": "constant", "max_steps": 60, "logging_steps": 2}
    plain = {"bf16": "false", "use_cpu": "true", "report_to": "none", "output_dir": tmp_path / "out"}
    options = [f"--{name}={value}" for name, value in {**size, **steps, **plain}.items()]
    try:
        with theirs("../../examples/trl_ppo.py", checkpoints.policy, system.run.url, "test", *options) as trainer:
            assert trainer.wait() == 0
        assert system.run.journal.last_step() == 30
    finally:
        system.stop()
    state = json.loads((tmp_path / "out" / "checkpoint-60" / "trainer_state.json").read_text())
    rewards = [entry["reward"] for entry in state["log_history"] if "reward" in entry]
    assert np.mean(rewards[-5:]) > 1.2 * np.mean(rewards[:5])
    assert all(math.isfinite(entry["critic/loss"]) for entry in state["log_history"] if "critic/loss" in entry)


def test_trl_grpo_trains_on_exported_agent_rows(tmp_path):
    """Ten groups of two sessions, with two turns each; all but the replies is masked."""
    export = tmp_path / "rows.jsonl"

    async def play():
        sampler = ScriptedSampler(reply=lambda prompt: f"I say {len(prompt)}.")
        async with scripted_gateway(sampler, export=export) as (caller, _):
            for i in range(20):
                name = f"s{i}"
                messages = [{"role": "user", "content": f"Play {i // 2}."}]
                for _ in range(2):
                    reply = (await caller.post(f"/sessions/{name}{CHAT}", {"messages": messages}))[1]
                    messages += [reply["choices"][0]["message"], {"role": "user", "content": "More" * (1 + i % 2)}]
                await caller.post(f"/sessions/{name}/reward", {"reward": i % 3})
                await caller.post(f"/sessions/{name}/end", {"group": f"g{i // 2}"})

    asyncio.run(play())
    save_tiny(tmp_path / "policy", "qwen2", "language", vocab_size=len(TOKENIZER), max_position_embeddings=256)
    TOKENIZER.save_pretrained(tmp_path / "policy")
    assert theirs("trl_capture.py", tmp_path / "policy", tmp_path, ROOT / "docs/gateway.md").wait() == 0
    rows = [json.loads(line) for line in export.read_text().splitlines()]
    steps = [entry for entry in json.loads((tmp_path / "log.json").read_text()) if "reward" in entry]
    assert len(steps) == 5
    for number, entry in enumerate(steps):
        own = rows[4 * number : 4 * number + 4]
        assert entry["reward"] == pytest.approx(np.mean([row["session_reward"] for row in own]))
        sampled = [sum(turn["end"] - turn["start"] for turn in row["turns"]) for row in own]
        assert entry["completions/mean_length"] == np.mean(sampled)
        assert math.isfinite(entry["loss"])
        assert entry["grad_norm"] > 0
