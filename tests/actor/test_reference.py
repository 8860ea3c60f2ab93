"""The actor's side of a served reference: asked while generation goes on, and rows that it has no answer for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_system import Checkpoints, make_run

from actor.algorithms.batch import check_failures, sequence_kl
from actor.algorithms.rollout_metrics import rollout_metrics
from actor.data.rollout import Prompt, ReferenceLogprobs, Rollout, ScoredRollout, Scores
from actor.loop import PPORun
from actor.scoring.reference import ServedReference, only_known
from python_backend.client.errors import RequestFailed
from python_backend.client.retry import RequestCounters
from python_backend.errors import RlhfError
from python_backend.wire.contract import REWARDS

PATIENCE_S = 60.0  # far beyond what any of this takes; a broken loop fails after it instead of hanging


class Server:
    """Stands for a server whose reference answers or fails as a test wants: the real one cannot on demand."""

    def __init__(self, answer: Callable[[list[np.ndarray]], np.ndarray]) -> None:
        self.counters = RequestCounters()
        self.answer = answer
        self.rows: list[np.ndarray] = []
        self.sizes: list[int] = []
        self.rewarded = 0

    async def rewards(self, rows: list[np.ndarray], *_: object) -> dict[str, np.ndarray]:
        self.rewarded += len(rows)
        return {REWARDS: np.ones((len(rows), 1), np.float32)}

    async def logprobs(self, rows: list[np.ndarray]) -> np.ndarray:
        self.rows += rows
        self.sizes.append(len(rows))
        return self.answer(rows)


def by_first_token(rows: list[np.ndarray]) -> np.ndarray:
    """`[n, S]`: what tells each position of each row apart."""
    found = np.zeros((len(rows), max(row.size for row in rows)), np.float32)
    for i, row in enumerate(rows):
        found[i, : row.size - 1] = -0.01 * row[1:]
    return found


def make_ppo(folder: Path, checkpoints: Checkpoints, server: Server, **settings: Any) -> PPORun:
    """A run without critic: eight responses, four at a time."""
    actor = {"kl_reference": "triton", "algorithm_name": "reinforce++", **settings}
    return PPORun(make_run(folder, checkpoints, actor=actor).config, server)  # type: ignore[arg-type]


def collect(run: PPORun) -> ScoredRollout:
    """The rollout of step 1."""

    async def rollout() -> ScoredRollout:
        return (await run.rollouts.collect(1, updated=0)).scored

    return asyncio.run(asyncio.wait_for(rollout(), PATIENCE_S))


@pytest.mark.parametrize("rows_per_request", [1, 3])
def test_rows_are_asked_for_while_others_are_written(
    tmp_path: Path, checkpoints: Checkpoints, rows_per_request: int
) -> None:
    asked = threading.Event()

    def answer(rows: list[np.ndarray]) -> np.ndarray:
        asked.set()
        return by_first_token(rows)

    server = Server(answer)
    run = make_ppo(tmp_path, checkpoints, server, client={"rows_per_request": rows_per_request})
    generate, ended = run.policy.generate, []

    def watched(*args: Any, finished: Callable[[int, Rollout], None], **kwargs: Any) -> Rollout:
        def hold(index: int, row: Rollout) -> None:
            finished(index, row)
            ended.append(index)
            if len(ended) == rows_per_request:  # no further row is written before these have been requested
                assert asked.wait(PATIENCE_S / 3), "the reference waits for the end of generation"

        return generate(*args, finished=hold, **kwargs)

    run.policy.generate = watched  # type: ignore[method-assign]
    scored = collect(run)
    assert len(ended) == 8
    assert run.policy.reference is None
    assert sum(server.sizes) == 8
    assert max(server.sizes) <= rows_per_request
    rollout = scored.rollout
    assert scored.scores.scored.all()
    for i, (row, length) in enumerate(zip(rollout.tokens, rollout.lengths.tolist(), strict=True)):
        torch.testing.assert_close(scored.ref_logprobs[i, : length - 1], -0.01 * row[1:length].float())
        assert not scored.ref_logprobs[i, length - 1 :].any()


def test_rows_without_an_answer_are_rows_without_a_score(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """One is refused, one has an answer that is no number; the others are untouched."""
    without: set[bytes] = set()

    def answer(rows: list[np.ndarray]) -> np.ndarray:
        (row,) = rows
        number = len(server.rows)
        if number in (3, 6):
            without.add(row.tobytes())
        if number == 3:
            raise RequestFailed("reference at host refused: too late")
        found = by_first_token(rows)
        found[0, 0] = -np.inf  # of a prompt's token that sampling never draws
        if number == 6:
            found[0, row.size - 2] = np.nan
        return found

    server = Server(answer)
    run = make_ppo(tmp_path, checkpoints, server)
    scored = collect(run)
    assert scored.scores.scored.tolist() == [row.tobytes() not in without for row in scored.rollout.rows()]
    assert scored.scores.scored.sum() == 6
    assert scored.scores.failures == [
        "reference at host refused: too late",
        "reference returned log-probs that are not finite for a response",
    ]
    assert scored.scores.rewards.tolist() == scored.scores.scored.float().tolist()
    batch = run.make_batch(scored)
    masked = ~scored.scores.scored
    assert not batch.mask[masked].any()
    assert not batch.policy_weights[masked].any()
    assert batch.mask[~masked].any(-1).all()
    for tensor in (batch.kl, batch.advantages, batch.returns):
        assert torch.isfinite(tensor).all()
    assert np.isfinite(sequence_kl(scored, batch.mask))
    check_failures(scored.scores, 0.25)
    with pytest.raises(RlhfError, match=r"2 of 8 .*: reference at host refused: too late; reference returned"):
        check_failures(scored.scores, 0.2)


def test_a_row_needs_both_score_and_reference() -> None:
    flags = {"scored": [True, True, False, False], "known": [True, False, True, False]}
    scored, known = (torch.tensor(values) for values in flags.values())
    scores = Scores(torch.ones(4), torch.ones(4, 3), torch.full((4,), 7), scored, ["no score"])
    assert only_known(scores, ReferenceLogprobs(torch.zeros(4, 2), torch.ones(4).bool(), [])) is scores
    both = only_known(scores, ReferenceLogprobs(torch.zeros(4, 2), known, ["no reference"]))
    assert both.scored.tolist() == [True, False, False, False]
    assert both.rewards.tolist() == [1, 0, 0, 0]
    assert both.values.sum(-1).tolist() == [3, 0, 0, 0]
    assert both.failures == ["no reference", "no score"]


def test_a_prompt_alone_is_known(tmp_path: Path, checkpoints: Checkpoints) -> None:
    """A response may be empty, and a prompt one token long."""
    server = Server(by_first_token)
    run = make_ppo(tmp_path, checkpoints, server)
    prompts = [Prompt(str(i), "", np.asarray([5])) for i in range(2)]
    tokens = torch.tensor([[5, 0, 0], [5, 6, 7]])
    rollout = Rollout(prompts, tokens, torch.tensor([1, 3]), torch.tensor([1, 1]), torch.tensor([True, True]))

    assert isinstance(run.reference, ServedReference)
    found = asyncio.run(run.reference.ask(rollout))
    assert found.known.all()
    torch.testing.assert_close(found.logprobs, torch.tensor([[0.0, 0.0], [-0.06, -0.07]]))


@pytest.mark.parametrize("reference", ["actor", "triton"])
def test_without_a_kl_penalty_the_reference_is_not_asked(
    tmp_path: Path, checkpoints: Checkpoints, reference: str
) -> None:
    server = Server(by_first_token)
    run = make_ppo(tmp_path, checkpoints, server, kl_reference=reference, kl_coef=0.0)
    assert run.policy.reference is None
    scored = collect(run)
    assert not server.rows
    assert scored.ref_logprobs is None
    assert not [name for name in rollout_metrics(scored, run.make_batch(scored), kl_coef=0.0) if "kl_per_seq" in name]


def test_without_a_kl_penalty_its_kl_is_measured_every_nth_step(tmp_path: Path, checkpoints: Checkpoints) -> None:
    server = Server(by_first_token)
    run = make_ppo(tmp_path, checkpoints, server, kl_coef=0.0, kl_every=2)

    async def rollouts() -> list[ScoredRollout]:
        return [(await run.rollouts.collect(step, updated=0)).scored for step in (1, 2)]

    first, second = asyncio.run(asyncio.wait_for(rollouts(), PATIENCE_S))
    assert first.ref_logprobs is None
    assert second.ref_logprobs is not None
    assert len(server.rows) == 8
