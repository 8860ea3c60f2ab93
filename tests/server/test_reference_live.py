"""The reference model inside the real server: the policy's own log-probs, and a run that does without a copy of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare_client import ask
from live_system import (
    Checkpoints,
    FinishedRun,
    LiveRun,
    System,
    make_checkpoint,
    make_run,
    make_tokenizer,
    random_rows,
    reload_model,
    run_actor,
    scoring_inputs,
    start_system,
)
from settled import settled_statistics

from actor.data.rollout import Prompt, ReferenceLogprobs, Rollout
from actor.policy.policy import Policy
from actor.scoring.reference import ServedReference
from python_backend.client.client import TritonClient
from python_backend.config import load_config
from python_backend.errors import RlhfError
from python_backend.store.jsonl import read_jsonl
from python_backend.wire.contract import REFERENCE
from tests.support.settings import changed
from trainer.control_plane import ControlPlane

TOLERANCE = 1e-5
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 127, 128)


pytestmark = pytest.mark.slow  # a whole run of its own, of an optional model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, checkpoints: Checkpoints) -> Iterator[FinishedRun]:
    """The run of `finished` but for one setting: three PPO steps, and the reference is the server's."""
    folder = tmp_path_factory.mktemp("reference")
    system = start_system(make_run(folder, checkpoints, actor={"kl_reference": "triton"}))
    try:
        yield FinishedRun(system.run, system.server, system.sidecar, *run_actor(system.run, "actor"))
    finally:
        system.stop()


def policy_of(run: LiveRun, **settings: Any) -> Policy:
    """The policy at its start; with a copy of it unless `settings` say otherwise."""
    return Policy.of(changed(run.config.actor, kl_reference="actor", **settings))


def rollout_of(rows: list[np.ndarray], prompt_length: int = 1) -> Rollout:
    """Rows as the policy would have written them after prompts of `prompt_length` tokens."""
    inputs = scoring_inputs(rows)
    lengths = torch.from_numpy(inputs["sequence_lengths"][:, 0])
    prompts = [Prompt(str(i), "", row[:prompt_length]) for i, row in enumerate(rows)]
    starts = torch.full_like(lengths, prompt_length)
    return Rollout(prompts, torch.from_numpy(inputs["tokens"]), lengths, starts, torch.ones_like(lengths).bool())


def expected(policy: Policy, rows: list[np.ndarray]) -> list[np.ndarray]:
    """`[length_i - 1]` each: what the actor's own frozen copy says."""
    logprobs = policy.logprobs(rollout_of(rows), reference=True).numpy()
    return [logprobs[i, : row.size - 1] for i, row in enumerate(rows)]


def assert_logprobs(policy: Policy, rows: list[np.ndarray], found: list[np.ndarray]) -> None:
    """`found[i]` `[S]` is of row i, padded to any S."""
    for row, ours, theirs in zip(rows, expected(policy, rows), found, strict=True):
        assert theirs.dtype == np.float32
        np.testing.assert_allclose(theirs[: row.size - 1], ours, atol=TOLERANCE, rtol=0)  # -inf equals -inf
        assert not theirs[row.size - 1 :].any()


def with_reference(run: LiveRun, ask: Callable[[ServedReference], Any], *overrides: str, **settings: Any) -> Any:
    """What `ask` makes of an actor's reference under these overrides of the YAML."""
    config = load_config(run.path, overrides)
    policy = Policy.of(changed(config.actor, **settings))

    async def use() -> Any:
        async with TritonClient(run.url, config.actor.client) as client:
            return await ask(ServedReference(client, policy, config.reference.checkpoint, rows_per_request=1))

    return asyncio.run(use())


async def all_of(reference: ServedReference, whole: Rollout) -> ReferenceLogprobs:
    """As collecting asks: row by row, as they happen to end."""
    await reference.compare()
    stream = reference.stream(asyncio.to_thread)
    for i in np.random.default_rng(0).permutation(len(whole.prompts)).tolist():
        length = int(whole.lengths[i])
        rest = (whole.lengths[i : i + 1], whole.prompt_lengths[i : i + 1], whole.is_end[i : i + 1])
        stream.take(i, Rollout([whole.prompts[i]], whole.tokens[i : i + 1, :length], *rest))
    await asyncio.sleep(0)  # what was taken is on its way now
    return await stream.logprobs(whole)


# ---- a whole run ----


def test_a_run_with_a_served_reference_ends_well_and_has_no_copy(served: FinishedRun) -> None:
    assert served.exit_code == 0, served.actor_log
    folder = served.run.config.run.dir
    summary = json.loads((folder / "actor_summary.json").read_text())
    assert summary["steps"] == summary["critic_updates"] == 3
    assert summary["failed_requests"] == summary["masked_samples"] == 0
    assert Policy.of(served.run.config.actor).reference is None
    with ControlPlane(served.run.config.server.grpc_url) as control:  # validations before and after, and the steps
        assert settled_statistics(control, REFERENCE).inference_count >= 3 * 8 + 2 * 8


def test_its_rewards_and_kl_are_those_of_a_run_with_a_copy(served: FinishedRun, finished: FinishedRun) -> None:
    """Of step 1, where the policy is the reference, and of step 2, where it has moved."""
    assert finished.run.config.actor.kl.reference == "actor"
    ours, theirs = (read_jsonl(run.run.config.run.dir / "metrics.jsonl") for run in (served, finished))
    for name in ("rewards", "init_policy_kl", "init_policy_kl_per_sequence", "generation_length", "advantages_std"):
        pairs = [[lines[step][f"train_rollouts/{name}"] for lines in (ours, theirs)] for step in (0, 1)]
        for found, wanted in pairs if name != "advantages_std" else pairs[:1]:
            assert found == pytest.approx(wanted, abs=1e-4), name
    assert theirs[1]["train_rollouts/init_policy_kl"] > 1e-3
    assert all(line["timers/init_logprobs"] > 0 for line in ours)


# ---- what is served ----


def test_served_logprobs_are_the_policys_own(served: FinishedRun) -> None:
    policy = policy_of(served.run)
    rows = random_rows(LENGTHS, seed=1)
    rows[5][4] = rows[7][0] = rows[7][30] = policy.banned_ids[0]  # a prompt may hold them
    together = ask(served.run.url, REFERENCE, scoring_inputs(rows, width=140))["logprobs"]
    assert together.shape == (12, 140)
    assert np.isneginf(together[5, 3])
    assert np.isneginf(together).sum() == 2  # nothing predicts a row's first token
    assert_logprobs(policy, rows, list(together))
    alone = [ask(served.run.url, REFERENCE, scoring_inputs([row]))["logprobs"] for row in rows]
    assert [answer.shape for answer in alone] == [(1, row.size) for row in rows]
    assert_logprobs(policy, rows, [answer[0] for answer in alone])


def test_an_actor_gets_what_its_copy_would_say(served: FinishedRun) -> None:
    """Rows in another order than the prompts', several in a request, and a policy with adapters that has moved."""
    whole = rollout_of(random_rows([3, 9, 40, 120, 2, 1, 1, 17], seed=4))
    policy = policy_of(served.run, lora_rank=4, lr=1e-2)
    for name, parameter in policy.model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    overrides = ("actor.client.rows_per_request=3", "actor.policy.lora_rank=4")
    found = with_reference(served.run, lambda reference: all_of(reference, whole), *overrides)
    assert found.known.all()
    assert not found.failures
    assert_logprobs(policy, whole.rows(), [np.append(row, np.float32(0)) for row in found.logprobs.numpy()])
    moved = policy.logprobs(whole)
    assert not torch.allclose(found.logprobs[3, :119], moved[3, :119], atol=1e-3)


# ---- what does not fit ----


def compare(run: LiveRun, *overrides: str) -> None:
    """As an actor with these overrides does at its start."""
    with_reference(run, lambda reference: reference.compare(), *overrides)


def test_an_actor_that_does_not_fit_is_refused(served: FinishedRun, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Other banned tokens are those of the same vocabulary and weights, with another role of a token."""
    folders = {
        name: make_checkpoint(tmp_path / name, "policy", make_tokenizer(), seed=seed)
        for name, seed in (("roles", 3), ("weights", 33))
    }
    settings = json.loads((folders["roles"] / "tokenizer_config.json").read_text())
    (folders["roles"] / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "</s>"}))
    compare(served.run)
    compare(served.run, f"reference.checkpoint={tmp_path / 'on the server only'}")  # cannot be seen from here
    for override, message in {
        "generation.temperature=0.7": r"rendered with temperature 1\.0, the actor has 0\.7",
        "policy.precision=bfloat16": r"computes in float32, the actor in bfloat16.*set reference\.dtype and",
        f"policy.checkpoint={checkpoints.other_policy}": r"the reference's tokenizer differs from the policy's \(",
        f"policy.checkpoint={folders['roles']}": r"rendered with banned_token_ids \[0, 2\], the actor has \[2\]",
        f"policy.checkpoint={folders['weights']}": r"whose weights are not those of reference\.checkpoint \(",
    }.items():
        with pytest.raises(RlhfError, match=message):
            compare(served.run, f"actor.{override}")


def test_a_server_without_the_model_is_named(served: FinishedRun, live: System) -> None:
    elsewhere = dataclasses.replace(served.run, config=live.run.config)
    with pytest.raises(RlhfError, match=r"the server has no model reference \(.*actor\.kl\.reference to"):
        compare(elsewhere)


# ---- the last test changes the model ----


def test_temperature_and_int32_tokens(served: FinishedRun) -> None:
    def change(config: dict[str, Any]) -> None:
        config["parameters"]["temperature"]["string_value"] = "0.7"
        next(tensor for tensor in config["input"] if tensor["name"] == "tokens")["data_type"] = "TYPE_INT32"

    reload_model(served.run, REFERENCE, change)
    rows = random_rows(LENGTHS, seed=6)
    inputs = scoring_inputs(rows)
    found = ask(served.run.url, REFERENCE, {**inputs, "tokens": inputs["tokens"].astype(np.int32)})["logprobs"]
    assert_logprobs(policy_of(served.run, temperature=0.7), rows, list(found))
    with pytest.raises(RlhfError, match=r"rendered with temperature 0\.7, the actor has 1\.0"):
        compare(served.run)
