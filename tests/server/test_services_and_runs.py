"""Runs and services that a Python program starts: a run that is stopped and resumed, and served models with clients."""

import asyncio
import threading
import time

import numpy as np
import psutil
import pytest
from expected_outputs import direct_rewards, direct_values
from model_inputs import random_rows
from run_checkpoints import TEXTS
from transformers import AutoModelForCausalLM

import rlhf_triton as rt

SMALL = {
    "actor.rollout_size": 8,
    "actor.prompts.max_tokens": 64,
    "actor.generation.max_new_tokens": 8,
    "actor.algorithm.mask_unfinished": False,
    "actor.client.deadline_s": 120.0,
}
MARK = "s"


def make_reward():
    """Return a function that no other process could import."""

    def marks(sample: rt.Sample) -> float:
        return (sample.response or "").count(MARK) - 0.1 * len(sample.response or "")

    return marks


@pytest.mark.slow
def test_a_run_started_in_a_thread_is_stopped_and_resumed_to_its_end(tmp_path, checkpoints):
    def begin():
        return rt.train(
            checkpoints.policy,
            prompts=[" ".join(text.split()[:3]) for text in TEXTS],
            reward=[make_reward(), (checkpoints.reward, 0.5)],
            algorithm="ppo",
            critic=checkpoints.critic,
            validation=checkpoints.prompts,
            steps=5000,
            dir=tmp_path / "run",
            wait=False,
            **SMALL,
        )

    async def first():
        run = await asyncio.to_thread(begin)
        while len(run.metrics.get("step", ())) < 2:
            assert run.is_running, run.log_path.read_text()
            await asyncio.sleep(0.1)
        assert np.isfinite(rt.RewardClient(run.url).score(TEXTS)).all()
        run.stop()  # in a running event loop, as in a notebook
        return run

    run = asyncio.run(first())
    assert not run.is_running
    with pytest.raises(rt.RlhfError, match="is not in progress, so it has no server; `resume` starts it"):
        run.url  # noqa: B018
    assert run.wait() is run, "a stopped run counts as failed"
    steps = int(run.metrics["step"][-1])
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(run.policy_path).parameters()) > 0
    assert len(run.samples("before")) == 8
    assert run.samples() == []
    found = rt.Run(tmp_path / "run").resume(**{"actor.steps": steps + 2})
    assert found.metrics["step"].tolist() == [*range(1, steps + 3)]
    assert np.isfinite(found.metrics["reward"]).all()
    assert {"rewards/marks/mean", "rewards/model/mean", "kl", "entropy"} <= found.metrics.keys()
    assert len(found.samples("after")) == 8
    assert f"finished after step {steps + 2}" in found.status()
    assert found.report().stat().st_size > 10_000


def test_refusals_of_the_command_are_raised_with_its_sentence(tmp_path, checkpoints, capfd):
    others = {*psutil.Process().children()}  # started by earlier tests
    with pytest.raises(rt.RlhfError) as caught:
        rt.train(
            checkpoints.policy, prompts=tmp_path / "none.jsonl", reward=make_reward(), dir=tmp_path / "run", **SMALL
        )
    assert str(caught.value).startswith(f"actor.prompts.path: {tmp_path}/none.jsonl does not exist")
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(rt.RlhfError, match=f"reward.model: {tmp_path}/none .*; give the folder of a"):
        rt.serve(tmp_path / "none", dir=tmp_path / "served")
    assert not {*psutil.Process().children()} - others


@pytest.mark.slow
def test_served_models_answer_their_clients_and_end_with_the_block(tmp_path, checkpoints, monkeypatch):
    """The critic is trained, and goes back to a step, with the key of its environment variable."""
    rows = random_rows((9, 4, 17), seed=1)
    others = {*psutil.Process().children(recursive=True)}
    rewards = direct_rewards(checkpoints.reward, rows)
    values = direct_values(checkpoints.critic, rows)
    monkeypatch.setenv("MY_TRAINING_KEY", "open sesame")
    key = {"server.training_key_env": "MY_TRAINING_KEY"}
    with rt.serve([(checkpoints.reward, 1.0)], checkpoints.critic, dir=tmp_path / "served", **key) as server:
        assert server.config_path == tmp_path / "served" / "serve.yaml"
        np.testing.assert_allclose(server.reward.score(rows), rewards, atol=1e-5)
        critic = server.critic
        assert critic.rewind(0) == 0
        scored = critic.score(rows)
        np.testing.assert_allclose(scored.rewards, rewards, atol=1e-5)
        for found in (scored, critic.values(rows)):
            np.testing.assert_allclose(np.concatenate(found.values), np.concatenate(values), atol=1e-5)
        old = [row[:-1] for row in scored.values]
        update = (rows, [row + 5 for row in old], old, [np.ones(row.size) for row in old])
        answer = critic.train(1, *update)
        assert (answer.loss_mean, answer.weights_version) == (pytest.approx(0.5 * 5**2), 1)
        assert critic.train(1, *update) == answer, "a repeated step got another answer"
        assert critic.rewind(0) > answer.weights_version
        assert critic.train(1, *update).loss_mean == pytest.approx(answer.loss_mean)
        children = {*psutil.Process().children(recursive=True)} - others
        assert len(children) > 2
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_services_started_in_a_thread_outlive_it(tmp_path, checkpoints):
    """The kernel ends a child with the thread that has started it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(rt.serve(checkpoints.reward, dir=tmp_path / "served")))
    thread.start()
    thread.join()
    time.sleep(1.0)
    (server,) = found
    assert np.isfinite(server.reward.score(["a text"])).all()
    server.stop()
    server.stop()
