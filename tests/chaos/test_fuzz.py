"""`python -m tools fuzz`: the same seed sends the same requests, errors are reported, and a short run is clean."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from chaos import fuzz
from chaos.fuzz import (
    ATTACKS,
    CHANGES,
    GATEWAY_MB,
    KILLING,
    LONGEST_WAIT_S,
    Answer,
    Request,
    StageOutcome,
    attacks,
    requests,
)

MODELS = ["critic", "critic_infer", "critic_save", "critic_train", "reference", "reward_model"]


def sent(strategies: list[st.SearchStrategy[Any]], seed: int, count: int, seen: Callable[[Any], Any]) -> list[Any]:
    """What `seen` returns of each example that a sender sends."""
    examples: list[Any] = []

    @contextlib.contextmanager
    def sender() -> Iterator[fuzz.Send]:
        yield lambda example: (str(examples.append(seen(example))), Answer("400", "", 0.0))

    fuzz.send_examples(StageOutcome("plain"), strategies, sender, count, seed)
    return examples


def outline(request: Request) -> tuple[str, list[str], list[Any]]:
    return request.model, request.wrong, [(tensor.name, tensor.shape, len(tensor.data)) for tensor in request.tensors]


def test_the_same_seed_makes_the_same_requests_and_every_defect_comes_up() -> None:
    strategies = requests(MODELS, "key", kills=True)
    found = sent(strategies, 3, 3 * len(strategies), outline)
    assert found == sent(strategies, 3, 3 * len(strategies), outline)
    assert found != sent(strategies, 4, 3 * len(strategies), outline)
    firsts = Counter(wrong[0] if wrong else None for _, wrong, _ in found)
    assert firsts == dict.fromkeys([None, *CHANGES, *KILLING], 3)
    assert {model for model, _, _ in found} == set(MODELS)


def test_what_kills_the_server_itself_is_left_out_unless_asked_for() -> None:
    found = sent(requests(MODELS, None, kills=False), 3, 50, outline)
    assert not {name for _, wrong, _ in found for name in wrong} & set(KILLING)


def test_every_attack_at_the_gateway_is_a_request() -> None:
    found = sent([attacks()], 3, 50, lambda attack: (attack.name, attack.content[:6], attack.left_open))
    assert {name for name, _, _ in found} == {*ATTACKS, "left open"}
    assert all(left_open or start == b"POST /" for _, start, left_open in found)


@pytest.mark.parametrize("stage", LONGEST_WAIT_S)
def test_a_client_that_waits_and_a_gateway_that_grows_are_failures(stage: str) -> None:
    def kept(wait_s: float, gateway_mb: float) -> bool:
        outcome = StageOutcome(stage, longest_good_wait_s=wait_s, gateway_mb=gateway_mb)
        outcome.sent["200"] += 1
        return all(item.kept for item in outcome.verdicts())

    limit = LONGEST_WAIT_S[stage]
    assert kept(limit, GATEWAY_MB)
    assert not kept(limit + 0.1, 0.0)
    assert not kept(0.0, GATEWAY_MB + 1)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer("400", "tokens: missing", 0.1), []),
        (Answer("UNAVAILABLE", "no sidecar", 0.1), []),
        (Answer("500", "TypeError: incompatible", 0.1), ["wrong"]),
        (Answer("INTERNAL", "AttributeError: 'int'", 0.1), ["wrong"]),
        (Answer("500", "failed to parse the request JSON buffer: Invalid value", 0.1), []),
        (Answer("200", "", 0.1, {"rewards": [0, 1]}), ["wrong"]),
        (Answer("DEADLINE_EXCEEDED", "", 30.0), ["hangs"]),
        (Answer(None, "TimeoutError: timed out", 30.1), ["hangs"]),
    ],
)
def test_answers_are_judged(answer: Answer, found: list[str]) -> None:
    outcome = StageOutcome("plain")
    outcome.judge("1: critic over HTTP", answer)
    assert [name for name in ("wrong", "hangs") if getattr(outcome, name)] == found
    assert all(item.kept for item in outcome.verdicts()) == (not found)
    assert outcome.sent == {str(answer.status): 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz.main(["--count", "150", "--seed", "5", "--out", str(tmp_path)])  # its exit code also judges times
    print(capsys.readouterr().out)
    outcomes = json.loads((tmp_path / "result.json").read_text())["samples"]
    assert [sum(outcome["sent"].values()) for outcome in outcomes] == [50, 50, 50]
    assert all(not outcome[found] for outcome in outcomes for found in ("wrong", "hangs", "outages", "restarts"))
    assert outcomes[2]["gateway_mb"] > 0  # its exit code judges this, too
    assert all(outcome["good_answers"] > 5 for outcome in outcomes)
