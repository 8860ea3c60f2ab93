"""`python -m tools fuzz`: the same seed sends the same requests, errors are reported, and a short run is clean."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from chaos.fuzz import command as fuzz
from chaos.fuzz.client import Answer
from chaos.fuzz.gateway import ATTACKS
from chaos.fuzz.outcome import GATEWAY_MB, LONGEST_WAIT_S, StageOutcome
from chaos.fuzz.requests import CHANGES, KILLING, make_request

MODELS = ["critic", "critic_infer", "critic_save", "critic_train", "reference", "reward_model"]


def test_the_same_seed_makes_the_same_requests_and_every_change_comes_up() -> None:
    def requests(seed: int) -> list:
        generator = random.Random(seed)
        return [make_request(generator, MODELS, "key", kills=False) for _ in range(300)]

    assert requests(3) == requests(3) != requests(4)
    done = {name for request in requests(3) for name in request.wrong}
    assert done == {*CHANGES}
    assert {request.model for request in requests(3)} == set(MODELS)


@pytest.mark.parametrize("name", ATTACKS)
def test_the_same_seed_makes_the_same_attack(name: str) -> None:
    first, second = (ATTACKS[name](random.Random(3)) for _ in range(2))
    assert first == second
    assert first.startswith((b"POST /", b"GET /"))


@pytest.mark.parametrize("stage", LONGEST_WAIT_S)
def test_a_client_that_waits_and_a_gateway_that_grows_are_failures(stage: str) -> None:
    limit = LONGEST_WAIT_S[stage]
    assert StageOutcome(stage, longest_good_wait_s=limit, gateway_mb=GATEWAY_MB).passed
    assert not StageOutcome(stage, longest_good_wait_s=limit + 0.1).passed
    assert not StageOutcome(stage, gateway_mb=GATEWAY_MB + 1).passed


def test_what_kills_the_server_itself_is_a_switch() -> None:
    generator = random.Random(0)
    done = {name for _ in range(300) for name in make_request(generator, MODELS, None, kills=True).wrong}
    assert {*KILLING} <= done


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
    assert outcome.passed == (not found)
    assert outcome.sent == {str(answer.status): 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_run_is_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fuzz.main(["--count", "300", "--seed", "5", "--out", str(tmp_path)])  # its exit code also judges times
    print(capsys.readouterr().out)
    outcomes = json.loads((tmp_path / "result.json").read_text())
    assert [sum(outcome["sent"].values()) for outcome in outcomes] == [100, 100, 100]
    assert all(not outcome[found] for outcome in outcomes for found in ("wrong", "hangs", "outages", "restarts"))
    assert outcomes[2]["gateway_mb"] > 0  # its exit code judges this, too
    assert all(outcome["good_answers"] > 10 for outcome in outcomes)
