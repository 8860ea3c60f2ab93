"""`Policy.generate`: what ends a response, what it may hold, and what every generated row is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from live_system import make_checkpoint, make_tokenizer
from packaging.version import Version
from transformers import GenerationConfig

from actor.data.rollout import Prompt, Rollout
from actor.data.step_inputs import step_seed
from actor.generation.engine import Generation
from actor.policy.policy import Policy
from python_backend.config import GenerationSection
from tests.support.settings import actor_section

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("policy") / "policy", "policy", make_tokenizer(), seed=3)


def make_policy(checkpoint: Path, **settings: Any) -> Policy:
    return Policy.of(actor_section(checkpoint=checkpoint, max_new_tokens=12, **settings))


def generate(policy: Policy, *, seed: int = 0, greedy: bool = False) -> Rollout:
    prompts = [Prompt(str(i), "", np.asarray(tokens)) for i, tokens in enumerate(PROMPTS)]
    return policy.generate(prompts, seed=seed, greedy=greedy)


def responses(rollout: Rollout) -> list[list[int]]:
    starts = rollout.prompt_lengths.tolist()
    return [row[start:].tolist() for row, start in zip(rollout.rows(), starts, strict=True)]


def check(policy: Policy, rollout: Rollout) -> None:
    """What holds for every rollout."""
    assert [row[:n].tolist() for row, n in zip(rollout.rows(), rollout.prompt_lengths.tolist(), strict=True)] == PROMPTS
    for row, length in zip(rollout.tokens, rollout.lengths.tolist(), strict=True):
        assert (row[length:] == policy.pad_id).all()
    for response in responses(rollout):
        assert 1 <= len(response) <= 12
        assert not set(response) & set(policy.banned_ids)


def test_an_end_of_sequence_ends_a_response_and_belongs_to_it(checkpoint: Path):
    policy = make_policy(checkpoint)
    with torch.no_grad():
        policy.model.lm_head.weight[policy.eos_ids[0]] += 0.5  # now and then
    rollouts = [generate(policy, seed=seed) for seed in range(4)]
    ended = [(r, e) for rollout in rollouts for r, e in zip(responses(rollout), rollout.is_end.tolist(), strict=True)]
    assert {end for _, end in ended} == {True, False}
    for response, end in ended:
        assert (response[-1] in policy.eos_ids) == end
        assert not set(response[:-1]) & set(policy.eos_ids)


def test_a_stop_string_ends_a_response(checkpoint: Path):
    free = make_policy(checkpoint)
    plain = generate(free, seed=3)
    words = [free.tokenizer.decode(response) for response in responses(plain)]
    stop = free.tokenizer.decode(responses(plain)[0][2:4])  # what the first row writes third and fourth
    policy = make_policy(checkpoint, stop_strings=(stop, "never written"))
    rollout = generate(policy, seed=3)
    check(policy, rollout)
    for response, text, end in zip(responses(rollout), words, rollout.is_end.tolist(), strict=True):
        written = policy.tokenizer.decode(response)
        assert end == (stop in written or response[-1] in policy.eos_ids)
        if stop in written:
            assert stop not in policy.tokenizer.decode(response[:-1])
        else:
            assert written == text  # the others write on as they would have
    assert len(responses(rollout)[0]) <= 4
    assert bool(rollout.is_end[0])


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_new_tokens": 3}], ids=["plain", "restricted"]
)
def test_both_ways_to_generate_sample_alike_and_leave_the_global_generator_alone(
    checkpoint: Path, settings: dict[str, Any]
):
    """Under `one_step_off_policy` the dropout of an update seeds it, and draws from it, in another thread."""
    found = []
    for decoding in ("slots", "transformers"):
        policy = make_policy(checkpoint, engine=decoding, generation_batch_size=2, **settings)
        prompts = [Prompt(str(i), "", np.asarray(tokens)) for i, tokens in enumerate(PROMPTS)]
        before = torch.get_rng_state()
        found.append(responses(generate(policy, seed=5)))
        assert torch.equal(torch.get_rng_state(), before)
        found.append(responses(policy.generate(prompts, seed=5, finished=lambda *_: torch.manual_seed(9))))
    assert all(each == found[0] for each in found)


class Letters:
    """A tokenizer whose ids are the bytes of UTF-8."""

    def decode(self, ids: list[int], **_: object) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("written", "ends"),
    [
        ("ab", False),
        ("xab", False),
        ("xabx", False),
        ("xabxxxxab", True),
        ("xxab", True),
        ("xxxab", True),
        ("abab", True),
        ("xabyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy", False),
        ("xéab", True),
        ("xxé", True),
        ("xé", False),
    ],
)
def test_a_stop_string_that_ends_within_the_least_length_is_text(written: str, ends: bool):
    """As vLLM: of three tokens at least, `ab` may begin within them and must end after them."""
    settings = GenerationSection(min_new_tokens=3, stop_strings=("ab", "é"))
    generation = Generation(None, Letters(), settings, eos_ids=[], pad_id=0, banned_ids=[])
    ids = list(written.encode())
    assert generation._has_stop(ids) == ends
    assert not any(generation._has_stop(ids[:n]) for n in range(len(ids)))


@pytest.mark.parametrize("decoding", ["slots", "transformers"])
def test_a_stop_string_that_began_in_the_prompt_ends_nothing(checkpoint: Path, decoding: str):
    free = make_policy(checkpoint, engine=decoding)
    written = generate(free, greedy=True)
    stop = free.tokenizer.decode([PROMPTS[0][-1], responses(written)[0][0]])
    policy = make_policy(checkpoint, engine=decoding, stop_strings=(stop,))
    rollout = generate(policy, greedy=True)
    check(policy, rollout)
    assert responses(rollout)[0] == responses(written)[0]


@pytest.mark.parametrize(
    "settings", [{}, {"stop_strings": ("t", "never written")}, {"repetition_penalty": 1.5}], ids=str
)
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_who_writes_never_matters(checkpoint: Path, settings: dict[str, Any], pad_is_eos: bool):
    """Greedy texts, under whatever the checkpoint's own generation config asks for."""
    if pad_is_eos and "repetition_penalty" in settings and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("generate() of transformers 5.20, the last for Python 3.10, penalises the padding as well")
    found = []
    for decoding in ("slots", "transformers"):
        policy = make_policy(checkpoint, engine=decoding, **settings)
        asked = GenerationConfig(no_repeat_ngram_size=1, forced_eos_token_id=policy.eos_ids[0], eos_token_id=77)
        policy.model.generation_config = asked
        if pad_is_eos:
            policy.generation._pad_id = policy.eos_ids[0]
        with torch.no_grad():
            policy.model.lm_head.weight[policy.eos_ids[0]] *= 2  # the likeliest now and then
        prompts = [Prompt(str(i), "", np.asarray([5 + i] * (1 + i % 7))) for i in range(30)]
        rollout = policy.generate(prompts, seed=0, greedy=True)
        found.append((responses(rollout), rollout.is_end.tolist()))
        assert policy.model.generation_config is asked  # checkpoints keep it
    assert set(found[0][1]) == {True, False}
    assert found[0] == found[1]


def test_log_probs_are_those_of_the_sampling_distribution(checkpoint: Path):
    """Under the temperature and without forbidden tokens, whatever top-k, top-p or a penalty did to the draw."""
    policy = make_policy(checkpoint, precision="float32", temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.3)
    rollout = generate(policy, seed=1)
    found = policy.logprobs(rollout)
    row, start = rollout.rows()[2], len(PROMPTS[2])
    with torch.no_grad():
        logits = policy.model(torch.from_numpy(row)[None].to(policy.model.device)).logits[0].cpu() / 0.7
    logits[:, policy.banned_ids] = -torch.inf
    expected = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(row[1:])[:, None])[:, 0]
    torch.testing.assert_close(found[2, start - 1 : len(row) - 1], expected[start - 1 :], atol=1e-5, rtol=1e-5)


def test_what_writes_stands_still_while_the_policy_is_updated(checkpoint: Path):
    """One step off-policy: until it is renewed, texts and log-probs are those of the policy that began the rollout."""
    policy = make_policy(checkpoint, one_step_off_policy=True)
    before = generate(policy)
    logprobs, ref_logprobs = policy.logprobs(before), policy.logprobs(before, reference=True)
    with torch.no_grad():
        policy.model.lm_head.weight[20] += 5.0
    assert torch.equal(generate(policy).tokens, before.tokens)
    assert torch.equal(policy.logprobs(before), logprobs)
    policy.renew_sampler()
    assert not torch.equal(generate(policy).tokens, before.tokens)
    assert not torch.equal(policy.logprobs(before), logprobs)
    assert torch.equal(policy.logprobs(before, reference=True), ref_logprobs)


def test_each_step_of_each_run_draws_its_own_numbers():
    """On a CPU torch's generator looks at 32 bits of a seed."""
    seeds = [step_seed(run, step) for run in (0, 1, 2, 2**31) for step in range(1, 400)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(step_seed(run, 1))) for run in (0, 1)]
    assert not torch.equal(*draws)


def test_log_probs_of_generation_are_taken_once_proven(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    policy = make_policy(checkpoint, precision="float32", temperature=0.7)
    rollout = generate(policy)
    passes: list[int] = []
    forward = policy.logprobs
    monkeypatch.setattr(policy, "logprobs", lambda rows: (passes.append(len(rows.prompts)), forward(rows))[1])
    torch.testing.assert_close(policy.sampled_logprobs(rollout), forward(rollout), atol=1e-4, rtol=0)
    assert passes == [len(PROMPTS)]
    other = generate(policy, seed=1)
    assert policy.sampled_logprobs(other) is other.logprobs
    assert len(passes) == 1


def test_log_probs_of_generation_that_are_wrong_are_not_taken(checkpoint: Path):
    policy = make_policy(checkpoint)
    rollout = generate(policy)
    assert rollout.logprobs is not None
    rollout.logprobs[1] *= 1.01
    torch.testing.assert_close(policy.sampled_logprobs(rollout), policy.logprobs(rollout))
    again = generate(policy, seed=1)
    assert torch.equal(policy.sampled_logprobs(again), policy.logprobs(again))
    theirs = make_policy(checkpoint, engine="transformers")
    rollout = generate(theirs)
    assert rollout.logprobs is None
    assert torch.equal(theirs.sampled_logprobs(rollout), theirs.logprobs(rollout))


def test_log_probs_of_generation_are_never_taken_in_bfloat16(checkpoint: Path):
    """Small logits may agree by chance in the first rollout, and a resumed run has another first rollout."""
    policy = make_policy(checkpoint, precision="bfloat16")
    rollout = generate(policy)
    policy.sampled_logprobs(dataclasses.replace(rollout, logprobs=policy.logprobs(rollout)))
    other = generate(policy, seed=1)
    wrong = dataclasses.replace(other, logprobs=torch.ones_like(policy.logprobs(other)))
    assert torch.equal(policy.sampled_logprobs(wrong), policy.logprobs(other))
