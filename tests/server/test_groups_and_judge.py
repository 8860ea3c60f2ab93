"""Groupwise functions and the LLM judge on the real server. The judge's endpoint is scripted (`chat_server`)."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reward_functions
from bare_client import ask
from chat_server import ChatServer
from live_system import Checkpoints, make_run, run_actor
from test_reward_mixture import errors_of, functions_alone
from tiny_models import tiny_server

from python_backend.wire.contract import REWARD_COMPONENTS, REWARD_ERRORS, REWARD_MODEL, REWARDS, texts_array
from tools.server.tritonserver import TritonServer

FUNCTIONS = Path(reward_functions.__file__)
OUTPUTS = (REWARDS, REWARD_COMPONENTS, REWARD_ERRORS)
KEY = "sk-live-secret"


def terms_of(endpoint: ChatServer) -> dict[str, Any]:
    options = {
        "model": "m",
        "base_url": endpoint.url,
        "max_retries": 1,
        "rubric": "{{ response }}\n{{ metadata.say | default('Score: 7') }}",
        "prompt_price": 1.0,
        "api_key_env": "JUDGE_KEY",
        "request_timeout_s": 0.3,
    }
    judge = {"function": "python_backend.rewards.judge:Judge", "options": options, "timeout_s": 10.0, "workers": 4}
    return {
        "peers": {"function": f"{FUNCTIONS}:by_group", "groupwise": True, "timeout_s": 2.0},
        "judge": {**judge, "weight": 0.5},
    }


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ChatServer]:
    server = ChatServer()
    yield server
    if server.stop_after is None:
        server.stop()


@pytest.fixture(scope="module")
def server(endpoint: ChatServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("groups")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", KEY)
        patch.setenv("NO_PROXY", "127.0.0.1")
        functions_alone(folder, terms_of(endpoint))
        with tiny_server(folder, exit_timeout_s=1) as server:
            server.wait_ready()
            assert not endpoint.requests  # the probe at the start costs nothing
            yield server
    assert KEY not in (folder / "logs" / "tritonserver.log").read_text()


def rows(*metadata: Any) -> dict[str, np.ndarray]:
    return {
        "sentences": texts_array(["a" for _ in metadata]),
        "metadata": texts_array([json.dumps({"response": "a", **each}) for each in metadata]),
    }


def answer_of(server: TritonServer, *metadata: Any) -> tuple[list[list[float]], list[str]]:
    """Components and errors of rows with this metadata."""
    answer = ask(server.section.http_url, REWARD_MODEL, rows(*metadata), OUTPUTS)
    components = answer[REWARD_COMPONENTS].astype(float)
    expected = components @ np.asarray([1.0, 0.5])
    np.testing.assert_allclose(answer[REWARDS][:, 0], expected)  # NaN wherever a term is
    return components.tolist(), errors_of(answer)


def test_rows_of_a_request_with_one_id_or_prompt_are_a_group(server: TritonServer) -> None:
    """Mixed, in any order, duplicates and groups of one included; a group that fails costs no other."""
    given = [
        {"group": 1},
        {"prompt": "p"},
        {"group": 1},
        {"group": "1"},
        {"prompt": "p"},
        {"group": 1},
        {"group": 2, "do": "die"},
        {"group": 2},
        {},
        {"group": 1.5},
        {"group": 3, "do": "gaps"},
        {"group": 3},
    ]
    components, errors = answer_of(server, *given)
    died = "peers: the worker process ended with exit code 3"
    np.testing.assert_equal(
        [row[0] for row in components], [3, 2, 3, 1, 2, 3, math.nan, math.nan, math.nan, math.nan, 1, math.nan]
    )
    assert [row[1] for row in components] == [7] * len(given)
    assert errors[:8] == [""] * 6 + [died] * 2
    assert errors[8].startswith("peers: metadata has neither group nor prompt")
    assert errors[9] == "peers: metadata.group: 1.5, must be a string or an integer"
    assert errors[10:] == ["", "peers: the function returned None, but it must return a number"]


def test_the_judge_and_its_counters(server: TritonServer) -> None:
    before = counters(server)
    says = ["Score: 3", "no idea", "busy once", "wrong", "hang", "echo the key", "Score: 99"]
    components, errors = answer_of(server, *[{"group": i, "say": text} for i, text in enumerate(says)])
    np.testing.assert_equal([row[1] for row in components], [3, math.nan, 7, *[math.nan] * 4])
    assert [row[0] for row in components] == [1] * len(says)
    patterns = [
        "",
        "judge: the judge's answer has no number: 'no idea'",
        "",
        "judge: http://.*: HTTP 400: max_tokens is too large",
        "judge: .*timed out; gave up after 2 attempts",
        "judge: .*HTTP 401: Incorrect API key: Bearer \\*\\*\\*",
        "judge: the judge's score 99 is outside 1 to 10: 'Score: 99'",
    ]
    for pattern, error in zip(patterns, errors, strict=True):
        assert re.fullmatch(pattern, error), error
    added = {name: value - before.get(name, 0.0) for name, value in counters(server).items()}
    assert added.pop("request_seconds") > 0.5
    assert added == {
        "requests": 9,
        "retries": 2,
        "failures": 5,
        "prompt_tokens": 400,
        "completion_tokens": 40,
        "cost": pytest.approx(4e-4),
    }


def counters(server: TritonServer) -> dict[str, float]:
    """The judge's counters in the server's metrics."""
    with urllib.request.urlopen(f"http://{server.section.metrics_url}/metrics", timeout=60) as page:
        text = page.read().decode()
    family = r'^rlhf_reward_function_total\{(?=.*model="reward_function_judge").*counter="(\w+)".*\} (\S+)$'
    return {name: float(value) for name, value in re.findall(family, text, re.MULTILINE)}


@pytest.mark.slow
def test_grpo_until_the_endpoint_dies(
    server: TritonServer, endpoint: ChatServer, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Groups arrive whole; a row that the judge fails on is masked; when all fail, the run stops. No reward is 0."""
    prompts = tmp_path / "prompts.jsonl"
    says = ["Score: 4", "Score: 4", "no idea", "Score: 4"]
    lines = [{"text": text, "say": say} for text, say in zip(("Return the", "A", "The", "Open the"), says, strict=True)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    actor = {
        "prompts_path": str(prompts),
        "validation_size": 0,
        "rollout_size": 16,
        "max_failed_fraction": 0.25,
        "steps": 3,
        "client": {"servers": [server.section.http_url], "rows_per_request": 3},
        "algorithm": {"name": "grpo", "responses_per_prompt": 4},
    }
    run = make_run(tmp_path / "run", checkpoints, rewards=terms_of(endpoint), actor=actor)
    endpoint.stop_after = len(endpoint.requests) + 16 + 6
    code, log = run_actor(run, "actor")
    assert code != 0
    (line,) = [json.loads(line) for line in (run.config.run.dir / "metrics.jsonl").read_text().splitlines()]
    assert line["train_rollouts/reward_peers"] == 4.0
    assert line["train_rollouts/reward_judge"] == 4.0
    assert line["train_rollouts/masked_samples"] == 4
    assert line["train_rollouts/rewards"] == 4 + 0.5 * 4
    assert "step 1: 4 of 16 rewards are unavailable: judge: the judge's answer has no number: 'no idea'" in log
    assert "ConnectionRefusedError" in log
    assert "actor.rewards.max_failed_fraction" in log
