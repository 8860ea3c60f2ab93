"""The reference model inside the real server: the policy's own log-probs, and a run that does without a copy of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from bare_client import Refused, ask, ask_all
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
from tritonclient.grpc import InferenceServerClient as GrpcClient

from actor.data.rollout import Prompt, ReferenceLogprobs, Rollout
from actor.policy.policy import Policy
from actor.scoring.reference import ServedReference
from actor.scoring.scorer import ModelMismatch
from python_backend.client.client import TritonClient
from python_backend.config import load_config
from python_backend.store.control_key import GRPC_HEADER, control_key
from python_backend.store.durable import read_json
from python_backend.store.jsonl import read_jsonl
from python_backend.wire.contract import REFERENCE, REWARD_MODEL
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


def test_concurrent_requests_of_mixed_lengths_batch(served: FinishedRun) -> None:
    rows = random_rows(np.random.default_rng(2).integers(1, 129, 64).tolist(), seed=2)
    with served.without_probes(REFERENCE), ControlPlane(served.run.config.server.grpc_url) as control:
        before = settled_statistics(control, REFERENCE)
        answers = ask_all(served.run.url, [(REFERENCE, scoring_inputs([row])) for row in rows])
        after = settled_statistics(control, REFERENCE)
    assert after.inference_count - before.inference_count == 64
    assert after.execution_count - before.execution_count < 64 / 4
    assert_logprobs(policy_of(served.run), rows, [answer["logprobs"][0] for answer in answers])


def test_wrong_requests_fail_alone(served: FinishedRun) -> None:
    rows = random_rows(range(2, 22), seed=3)
    wrong = rows[11].copy()
    wrong[-1] = 4711
    requests = [(REFERENCE, scoring_inputs([wrong if i == 11 else row])) for i, row in enumerate(rows)]
    requests.append((REFERENCE, {"sequence_lengths": np.ones((1, 1), np.int64)}))
    requests.append((REFERENCE, scoring_inputs([np.zeros(129, np.int64)])))
    *answers, missing, too_long = ask_all(served.run.url, requests)
    refused = answers.pop(11)
    for answer, message in (
        (refused, f"tokens[0, {wrong.size - 1}]: 4711 is outside the vocabulary [0, 200)"),
        (missing, "tokens: missing"),
        (too_long, "tokens[0]: 129 tokens, the model has 128 positions"),
    ):
        assert isinstance(answer, Refused)
        assert answer.code == "400"
        assert message in answer.message
    assert_logprobs(policy_of(served.run), rows[:11] + rows[12:], [answer["logprobs"][0] for answer in answers])


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


def test_another_temperature_is_refused(served: FinishedRun) -> None:
    compare(served.run)
    with pytest.raises(ModelMismatch, match=r"rendered with temperature 1\.0, the actor has 0\.7"):
        compare(served.run, "actor.generation.temperature=0.7")


def test_another_precision_is_refused(served: FinishedRun) -> None:
    with pytest.raises(ModelMismatch, match=r"computes in float32, the actor in bfloat16.*set reference\.dtype and"):
        compare(served.run, "actor.policy.precision=bfloat16")


def test_another_tokenizer_is_refused(served: FinishedRun, checkpoints: Checkpoints) -> None:
    with pytest.raises(ModelMismatch, match=r"the reference's tokenizer differs from the policy's \("):
        compare(served.run, f"actor.policy.checkpoint={checkpoints.other_policy}")


def test_other_banned_tokens_are_refused(served: FinishedRun, tmp_path: Path) -> None:
    """The same vocabulary and weights, and another role of a token."""
    folder = make_checkpoint(tmp_path / "policy", "policy", make_tokenizer(), seed=3)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "</s>"}))
    with pytest.raises(ModelMismatch, match=r"rendered with banned_token_ids \[0, 2\], the actor has \[2\]"):
        compare(served.run, f"actor.policy.checkpoint={folder}")


def test_another_checkpoint_is_refused(served: FinishedRun, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "policy", "policy", make_tokenizer(), seed=33)
    with pytest.raises(ModelMismatch, match=r"whose weights are not those of reference\.checkpoint \("):
        compare(served.run, f"actor.policy.checkpoint={folder}")
    compare(served.run, f"reference.checkpoint={tmp_path / 'on the server only'}")  # cannot be seen from here


def test_a_server_without_the_model_is_named(served: FinishedRun, live: System) -> None:
    elsewhere = dataclasses.replace(served.run, config=live.run.config)
    with pytest.raises(ModelMismatch, match=r"the server has no model reference \(.*actor\.kl\.reference to"):
        compare(elsewhere)


def test_it_is_loaded_only_where_it_is_asked_for(served: FinishedRun, live: System) -> None:
    loaded = []
    for run in (served.run, live.run):
        with GrpcClient(run.config.server.grpc_url) as client:
            headers = {GRPC_HEADER: control_key(run.config.run.weights_dir)}
            loaded.append({model.name for model in client.get_model_repository_index(headers=headers).models})
    assert loaded[0] - loaded[1] == {REFERENCE}
    assert REWARD_MODEL in loaded[1]


# ---- the last tests change the model ----


def test_a_killed_process_is_replaced_while_the_actor_waits(served: FinishedRun) -> None:
    rollout = rollout_of(random_rows([5, 50], seed=7))
    stub = process_of(served.run, REFERENCE)
    stub.kill()
    found = with_reference(served.run, lambda reference: all_of(reference, rollout), "actor.client.retries=60")
    assert found.known.all()
    assert process_of(served.run, REFERENCE).pid != stub.pid
    rows = [np.append(row, np.float32(0)) for row in found.logprobs.numpy()]
    assert_logprobs(policy_of(served.run), rollout.rows(), rows)


def test_rows_without_reference_logprobs_are_masked_counted_and_logged(served: FinishedRun) -> None:
    """The reference takes shorter rows only, so the longer ones of a further step have no log-probs."""
    run = served.run
    prompts = [json.loads(line)["text"] for line in run.config.actor.prompts.path.read_text().splitlines()]
    policy = policy_of(run)
    longest = int(np.median([len(policy.tokenizer(text)["input_ids"]) for text in prompts])) + 8
    set_parameters(run, max_length=str(longest))
    code, log = run_actor(
        run, "actor-again", "actor.steps=4", "actor.rewards.max_failed_fraction=0.9", "actor.client.rows_per_request=1"
    )
    assert code == 0
    line = read_jsonl(run.config.run.dir / "metrics.jsonl")[-1]
    assert line["step"] == 4
    masked = int(line["train_rollouts/masked_samples"])
    assert 0 < masked < 8
    assert f"step 4: {masked} of 8 rewards are unavailable: reference at " in log
    assert f"tokens, the model has {longest} positions" in log
    assert all(np.isfinite(value) for value in line.values() if isinstance(value, float))
    summary = json.loads((run.config.run.dir / "actor_summary.json").read_text())
    assert summary["masked_samples"] > masked  # those of the validation, too


def test_temperature_and_int32_tokens(served: FinishedRun) -> None:
    def change(config: dict[str, Any]) -> None:
        config["parameters"]["temperature"]["string_value"] = "0.7"
        next(tensor for tensor in config["input"] if tensor["name"] == "tokens")["data_type"] = "TYPE_INT32"

    reload_model(served.run, REFERENCE, change)
    rows = random_rows(LENGTHS, seed=6)
    inputs = scoring_inputs(rows)
    found = ask(served.run.url, REFERENCE, {**inputs, "tokens": inputs["tokens"].astype(np.int32)})["logprobs"]
    assert_logprobs(policy_of(served.run, temperature=0.7), rows, list(found))
    with pytest.raises(ModelMismatch, match=r"rendered with temperature 0\.7, the actor has 1\.0"):
        compare(served.run)


def process_of(run: LiveRun, model: str) -> psutil.Process:
    """The process that runs the model."""
    server = psutil.Process(read_json(run.config.run.dir / "server.json")["pid"])
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie has no command, and may go at any time
            if f"{os.sep}{model}{os.sep}" in " ".join(child.cmdline()):
                found.append(child)
    (process,) = found
    return process


def set_parameters(run: LiveRun, **values: str) -> None:
    """Load the reference with these parameters."""

    def change(config: dict[str, Any]) -> None:
        for name, value in values.items():
            config["parameters"][name]["string_value"] = value

    reload_model(run, REFERENCE, change)
