"""Process rewards in the actor: advantages by hand and against loops, shaping, metrics, and places on tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import make_text_tokenizer
from torch import Tensor

from actor.algorithms.advantages import response_mask
from actor.algorithms.baselines import process_supervision
from actor.algorithms.batch import make_batch, score_returns
from actor.algorithms.inputs import AdvantageInputs
from actor.algorithms.method import Method
from actor.algorithms.rollout_metrics import process_metrics
from actor.algorithms.stages import RewardShaper
from actor.data.prompts import PromptError
from actor.data.rollout import ProcessRewards, Prompt, Rollout, ScoredRollout, Scores
from actor.run.validation import explained
from actor.scoring.metadata import check_prompts
from actor.scoring.process import BLOCK, tokens_with
from actor.scoring.scorer import Scorer, join_scores
from python_backend.client.served import ServedModel
from python_backend.config import RunConfig
from python_backend.errors import RlhfError
from tests.support.settings import actor_section

NAN = float("nan")
# Two responses to one prompt of two tokens: tokens 2..5 and 2..4. Steps end at tokens 3 and 5, and at token 4.
LENGTHS, PROMPT_LENGTHS = torch.tensor([6, 5]), torch.tensor([2, 2])
STEPS = torch.tensor([[0, 0, 0, 1.0, 0, 0.5], [0, 0, 0, 0, 3.0, 0]])
ENDS = STEPS != 0


def scored(outcome: tuple[float, ...] = (0.0, 0.0), ok: tuple[bool, ...] = (True, True)) -> ScoredRollout:
    """The two responses, with values that grow by 0.1 from token to token, and no KL."""
    prompts = [Prompt(str(i), "", np.asarray([7, 8])) for i in range(2)]
    rollout = Rollout(prompts, torch.ones(2, 6).long(), LENGTHS, PROMPT_LENGTHS, torch.tensor([True, True]))
    process = ProcessRewards(STEPS, ENDS, torch.tensor(outcome))
    values = torch.arange(6).expand(2, 6) * 0.1
    scores = Scores(torch.tensor([0.5, 3.0]), values, torch.ones(2).long(), torch.tensor(ok), [], process=process)
    return ScoredRollout(rollout, scores, None, None)


def batch(sample: ScoredRollout, name: str, **changes: Any) -> Any:
    actor = actor_section(
        name=name,
        whiten_advantages=False,
        responses_per_prompt=2 if name == "grpo" else 1,
        mask_unfinished=False,
        gamma=1.0,
        lam=1.0,
        kl_coef=0.0,
        **changes,
    )
    shaper, method = RewardShaper(actor.rewards, max_new_tokens=8), Method.of(actor.algorithm, actor.kl)
    return make_batch(sample, method, shaper, kl_coef=0.0, responses_per_prompt=actor.algorithm.responses_per_prompt)


def test_ppo_and_reinforce_sum_the_steps_that_follow():
    """Position t scores token t + 1: a reward at token 3 is at position 2. Returns at gamma 1 are sums to the end."""
    returns = [[0, 1.5, 1.5, 0.5, 0.5], [0, 3, 3, 3, 0]]
    assert batch(scored(), "reinforce++").advantages.tolist() == returns
    ppo = batch(scored(), "ppo")
    torch.testing.assert_close(ppo.returns, torch.tensor(returns))
    values = torch.tensor([[0, 0.1, 0.2, 0.3, 0.4], [0, 0.1, 0.2, 0.3, 0]])
    torch.testing.assert_close(ppo.advantages, torch.tensor(returns) - values)
    torch.testing.assert_close(score_returns(scored().scores, scored().rollout)[0], torch.tensor(returns))


def test_what_is_beyond_the_steps_is_given_at_the_end():
    returns = batch(scored((10.0, 20.0)), "reinforce++").returns
    assert returns.tolist() == [[0, 11.5, 11.5, 10.5, 10.5], [0, 23, 23, 23, 0]]


def test_grpo_with_process_supervision_by_hand():
    """Steps 1, 0.5 and 3 have the mean 1.5 and the deviation sqrt(1.75): standardised -0.378, -0.756 and 1.134."""
    found = batch(scored(), "grpo").advantages
    one, half, three = (value / 1.75**0.5 for value in (-0.5, -1.0, 1.5))
    expected = torch.tensor([[0, one + half, one + half, half, half], [0, three, three, three, 0]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    # A further outcome is a reward of the last step: 1, 0.5 + 1.5 and 3 have the mean 2 and the deviation 1.
    found = batch(scored((1.5, 0.0)), "grpo")
    torch.testing.assert_close(found.advantages[0], torch.tensor([0, -1.0, -1.0, 0, 0]), atol=1e-5, rtol=0)
    assert found.returns[0].tolist() == [0, 3, 3, 2, 2]


def test_a_row_without_rewards_is_masked_and_teaches_nobody():
    one = scored(ok=(True, False))
    for name in ("ppo", "reinforce++", "grpo"):
        found = batch(one, name)
        assert found.mask[1].sum() == found.advantages[1].abs().sum() == found.policy_weights[1].sum() == 0
    deviation = (2 * 0.25**2) ** 0.5
    torch.testing.assert_close(
        batch(one, "grpo").advantages[0], torch.tensor([0, 0, 0, -0.25, -0.25]) / deviation, atol=1e-4, rtol=0
    )
    assert process_metrics(one.scores) == {"process_rewards": 0.75, "steps_per_response": 2.0}


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 8), num_groups=st.integers(1, 3))
def test_process_supervision_equals_a_loop(seed: int, count: int, num_groups: int):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(count, 7, generator=generator, dtype=torch.float64)
    ends = torch.rand(count, 7, generator=generator) > 0.6
    groups = torch.randint(num_groups, (count,), generator=generator)
    counted = torch.rand(count, generator=generator) > 0.3
    found = process_supervision(torch.where(ends, rewards, NAN), ends, groups, counted)
    for i in range(count):
        of_group = [
            float(rewards[j, t])
            for j in range(count)
            if counted[j] and groups[j] == groups[i]
            for t in range(7)
            if ends[j, t]
        ]
        for t in range(7):
            expected = 0.0
            for later in range(t, 7):
                if counted[i] and ends[i, later] and len(of_group) > 1:
                    expected += (float(rewards[i, later]) - np.mean(of_group)) / (np.std(of_group, ddof=1) + 1e-6)
            assert float(found[i, t]) == pytest.approx(expected, abs=1e-9)


def shaped(sample: ScoredRollout, **changes: Any) -> AdvantageInputs:
    """What an advantage function receives."""
    actor = actor_section(max_new_tokens=10, **changes)
    received: list[AdvantageInputs] = []
    method = dataclasses.replace(
        Method.of(actor.algorithm, actor.kl),
        advantage=lambda inputs: (received.append(inputs), (inputs.mask, inputs.mask))[1],
    )
    make_batch(sample, method, RewardShaper(actor.rewards, max_new_tokens=10), kl_coef=0.0)
    return received[0]


def steps_of(found: AdvantageInputs) -> Tensor:
    assert found.steps is not None
    assert found.steps[~ENDS[:, 1:]].abs().sum() == 0
    return found.steps[ENDS[:, 1:]]


def test_each_step_is_normalised_and_clipped_and_penalties_come_at_the_end():
    found = shaped(scored((4.0, 0.0)), rewards_normalization="batch", rewards_clip=1.0)
    torch.testing.assert_close(steps_of(found), torch.tensor([-0.4629, -0.9258, 1.0]), atol=1e-4, rtol=0)
    assert found.rewards.tolist() == [4.0, 0.0]
    sample = scored()
    sample.rollout.is_end[1] = False
    found = shaped(sample, rewards_missing_eos_penalty=0.5, algorithm_mask_unfinished=False)
    assert steps_of(found).tolist() == [1.0, 0.5, 3.0]
    assert found.rewards.tolist() == [0.0, -0.5]
    found = shaped(scored(ok=(True, False)), rewards_normalization="static", rewards_mean=1.0)
    torch.testing.assert_close(steps_of(found), torch.tensor([0.0, -0.5, 0.0]))


def test_a_row_without_rewards_does_not_count_in_the_explained_variance():
    """As in summary.json's ev_last: its rewards may be anything, and its values are there."""
    sample = scored(ok=(True, False))
    process = dataclasses.replace(sample.scores.process, rewards=STEPS.clone())
    process.rewards[1] = NAN
    rewarded, valued = dataclasses.replace(sample.scores, process=process), scored().scores
    returns = torch.tensor([1.5, 1.5, 0.5, 0.5])  # of the first row alone
    values = torch.tensor([0.1, 0.2, 0.3, 0.4])
    expected = 1 - float((returns - values).var(correction=0) / returns.var(correction=0))
    assert explained(sample.rollout, rewarded, valued) == pytest.approx(expected, abs=1e-6)


def test_rloo_is_refused():
    data = {
        "reward": {"process": {"separator": "."}},
        "actor": {"algorithm": {"name": "rloo", "responses_per_prompt": 2}},
    }
    with pytest.raises(ValueError, match="rloo, which has no published form for process rewards"):
        RunConfig.model_validate(data)


# ---- replies of the server ----


class Client:
    """Answers with these outputs, and records what it was asked."""

    def __init__(self, answer: dict[str, Any], **parameters: str) -> None:
        dtypes = {"step_ends": np.int64, "reward_errors": np.object_}
        self.answer = {name: np.asarray(value, dtypes.get(name, np.float32)) for name, value in answer.items()}
        self.parameters = parameters
        self.asked: dict[str, Any] = {}
        self.rows: list[list[int]] = []

    async def describe(self, model: str) -> ServedModel:
        return ServedModel.of({"checkpoint": "there", "tokenizer_fingerprint": "other", **self.parameters})

    async def rewards(self, rows: Any, outputs: Any, metadata: Any, **more: Any) -> dict[str, np.ndarray]:
        self.asked = {"rows": rows, "outputs": outputs, **more}
        indices = [self.rows.index(row.tolist()) for row in rows]  # requests come in any order
        return {name: array[indices] for name, array in self.answer.items()}

    async def score_sentences(self, texts: Any, outputs: Any, metadata: Any, *, pairs: Any) -> dict[str, np.ndarray]:
        self.asked = {"texts": texts, "outputs": outputs, "metadata": metadata}
        return self.answer


def score(client: Client, tokenizer: Any, rollout: Rollout, *, texts: bool, rows_per_request: int = 8) -> Scores:
    client.rows = [row.tolist() for row in rollout.rows()]
    scorer = Scorer(client, tokenizer, rows_per_request=rows_per_request, with_critic=False)  # type: ignore[arg-type]
    scorer.reward, scorer.sends_sentences = ServedModel.of(client.parameters), texts
    return asyncio.run(scorer.score(rollout))


def written(tokenizer: Any, pairs: list[tuple[str, str]]) -> Rollout:
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in pairs]
    rows = [
        p + tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for p, (_, text) in zip(prompts, pairs, strict=True)
    ]
    tokens = torch.zeros(len(rows), max(map(len, rows))).long()
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    made = [
        Prompt(str(i), text, np.asarray(ids)) for i, (ids, (text, _)) in enumerate(zip(prompts, pairs, strict=True))
    ]
    return Rollout(
        made,
        tokens,
        torch.tensor([len(row) for row in rows]),
        torch.tensor([len(ids) for ids in prompts]),
        torch.ones(len(rows)).bool(),
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_text_tokenizer("qwen2")


def test_rewards_of_tokens_are_placed_where_the_server_says(tokenizer: Any):
    rollout = written(tokenizer, [("Open it.", " A file. A day."), ("Open it.", " the")])
    first = int(rollout.prompt_lengths[0])
    answer = {
        "rewards": [[0.25], [NAN]],
        "step_rewards": [[0.5, 0.25], [0.125, 0]],
        "step_ends": [[first + 1, int(rollout.lengths[0]) - 1], [first, -1]],
        "reward_components": [[0.25, 2.0], [NAN, 1.0]],
        "reward_errors": [[b""], [b"why"]],
    }
    names = {"reward_components": '["model", "length"]', "reward_weights": "[2.0, 3.0]", "process": "step"}
    client = Client(answer, **names)
    scores = score(client, tokenizer, rollout, texts=False)
    assert client.asked["prompt_lengths"] == rollout.prompt_lengths.tolist()
    assert client.asked["outputs"][-2:] == ("step_rewards", "step_ends")
    assert scores.scored.tolist() == [True, False]
    process = scores.process
    assert process is not None
    assert process.rewards[0].nonzero().flatten().tolist() == [first + 1, int(rollout.lengths[0]) - 1]
    assert process.rewards[0, process.ends[0]].tolist() == [1.0, 0.5]  # times the model's weight
    assert process.outcome.tolist() == [6.0, 3.0]
    one_by_one = score(client, tokenizer, rollout, texts=False, rows_per_request=1).process
    assert one_by_one is not None
    assert torch.equal(one_by_one.rewards, process.rewards)
    assert torch.equal(one_by_one.ends, process.ends)
    client.answer["rewards"][1], client.answer["step_rewards"][0, 1] = 0.5, NAN  # a sum that is finite, and a step
    assert score(client, tokenizer, rollout, texts=False).scored.tolist() == [False, True]
    joined = join_scores([scores, scores], rollout.tokens.shape[1] + 2).select(torch.tensor([2]))
    assert joined.process is not None
    assert joined.process.rewards.tolist() == [[*process.rewards[0].tolist(), 0, 0]]


@pytest.mark.parametrize("is_chat", [False, True])
def test_rewards_of_texts_are_placed_on_the_token_that_has_the_end(tokenizer: Any, is_chat: bool):
    response = " Return a line. a good day"
    rollout = written(tokenizer, [("Open it.", response)])
    if is_chat:
        rollout.prompts[0].metadata["messages"] = [{"role": "user", "content": "Open it."}]
    text = response if is_chat else "Open it." + response
    ends = [text.index("line.") + 5, len(text)]
    client = Client({"rewards": [[0.5]], "step_rewards": [[0.5, 0.75]], "step_ends": [ends]}, process="step")
    scores = score(client, tokenizer, rollout, texts=True)
    assert client.asked["texts"] == [text]
    assert client.asked["metadata"][0]["response"] == response
    assert scores.process is not None
    places = scores.process.ends[0].nonzero().flatten().tolist()
    assert places[1] == int(rollout.lengths[0]) - 1
    assert tokenizer.decode(rollout.tokens[0, : places[0] + 1]) == "Open it. Return a line."
    assert scores.process.rewards[0, places].tolist() == [0.5, 0.75]
    mask = response_mask(rollout.prompt_lengths, rollout.lengths, rollout.tokens.shape[1])
    assert bool(mask[0, [place - 1 for place in places]].all())


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), count=st.integers(0, 2 * BLOCK + 3), family=st.sampled_from(["qwen2", "llama"]))
def test_ends_found_in_blocks_are_those_of_whole_prefixes(seed: int, count: int, family: str):
    tokenizer, generator = make_text_tokenizer(family), np.random.default_rng(seed)
    ids = generator.integers(len(tokenizer), size=count).tolist()  # characters of several tokens, and parts of them

    def characters(n: int) -> int:
        return len(tokenizer.decode(ids[:n], skip_special_tokens=True))

    whole = characters(count)
    ends = generator.integers(whole + 2, size=5).tolist()
    expected = [None if end >= whole else next(n for n in range(count + 1) if characters(n) >= end) for end in ends]
    assert tokens_with(ends, tokenizer, ids) == expected


def test_token_rewards_of_another_vocabulary_are_refused(tokenizer: Any):
    client = Client({}, process="token")
    scorer = Scorer(client, tokenizer, rows_per_request=1, with_critic=False)  # type: ignore[arg-type]
    with pytest.raises(RlhfError, match=r"reward\.process\.granularity is token, but the tokens of there"):
        asyncio.run(scorer.compare_tokenizers())
    client.parameters = {"texts_only": "true"}
    asyncio.run(scorer.compare_tokenizers())
    assert scorer.sends_sentences
    with pytest.raises(PromptError, match="has a column 'step_ends'"):
        check_prompts(ServedModel.of({"process": "step"}), [Prompt("0", "", np.ones(1), {"step_ends": [3]})])
