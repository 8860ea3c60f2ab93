"""`tools init`: what it writes works as it is."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from python_backend.config import load_config
from python_backend.environments.pool import Environments
from tools.init import main


def test_an_environment_passes_its_test_and_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["environment", "my_game", "--policy", "a/policy"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "my_game.py",
        "test_my_game.py",
        "my_game.jsonl",
        "my_game.yaml",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_game.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout
    config = load_config(Path("my_game.yaml"))
    assert (str(config.actor.policy.model), config.needs_server) == ("a/policy", False)
    rows = [json.loads(line) for line in Path("my_game.jsonl").read_text().splitlines()]
    assert len(rows) == 16

    async def play() -> list[tuple[float | None, bool]]:
        assert config.environment is not None
        environments = Environments(config.environment)
        await environments.start()
        try:
            game = await environments.open({**rows[0], "seed": 0})
            steps = [await game.step(action) for action in ("nothing", "1")]
            return [(step.reward, step.done) for step in steps]
        finally:
            await environments.close()

    assert asyncio.run(play()) == [(-0.1, False), (1.0, True)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", "taken.jsonl exists; choose another name than taken"),
        ("my-game", "the name is 'my-game'"),
        ("class", "no keyword or module of Python"),
        ("json", "no keyword or module of Python"),
    ],
)
def test_nothing_is_overwritten_or_unusable(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.jsonl").write_text("mine")
    assert main(["environment", name]) == 2
    assert message in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("taken.jsonl", "mine")]
