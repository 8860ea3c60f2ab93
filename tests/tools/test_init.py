"""`rlhf-triton init`: the files that it writes work unchanged."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_triton.actor.environments.pool import Environments
from rlhf_triton.config.environment import EnvironmentSection
from rlhf_triton.config.loading import load_config
from rlhf_triton.tools.init import main


def used(section, use):
    """Return what `use` returns for the environments of a section."""

    async def within():
        environments = Environments(section)
        await environments.start()
        try:
            return await use(environments)
        finally:
            await environments.close()

    return asyncio.run(within())


def test_init_environment_writes_a_tested_playable_game(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["environment", "my_game", "--policy", "a/policy"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "my_game.py",
        "test_my_game.py",
        "my_game.jsonl",
        "my_game.yaml",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_game.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout
    config = load_config(Path("my_game.yaml"))
    assert (str(config.actor.policy.model), config.needs_server) == ("a/policy", False)
    rows = [json.loads(line) for line in Path("my_game.jsonl").read_text().splitlines()]
    assert len(rows) == 16

    async def play(environments):
        game = await environments.open({**rows[0], "seed": 0})
        steps = [await game.step(action) for action in ("nothing", "1")]
        return [(step.reward, step.done) for step in steps]

    assert used(config.environment, play) == [(-0.1, False), (1.0, True)]


def test_documented_environment_with_a_tool_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    (shop,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    Path("shop.py").write_text(shop)

    async def buy(environments):
        visit = await environments.open({"budget": 5, "seed": 0})
        said = [await visit.call("buy", {"item": "tea", "price": price}) for price in (2, 4)]
        return environments.tools, visit.observation, said, await visit.reward()

    tools, observation, said, reward = used(EnvironmentSection.model_validate({"class": "shop.py:Shop"}), buy)
    assert [tool["function"]["name"] for tool in tools] == ["buy"]
    assert (observation, said[0], reward) == ("You have 5 coins.", "tea: yours. 3 coins left.", 0.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("taken", "taken.jsonl exists; choose another name than taken"),
        ("my-game", "the name is 'my-game'"),
        ("class", "no keyword of Python"),
        ("none", "no keyword of Python"),  # its class would be None
        ("json", "json is an installed module, which json.py would hide"),
        ("torch", "torch is an installed module"),
    ],
)
def test_init_refuses_existing_files_and_unusable_names(name, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.jsonl").write_text("mine")
    assert main(["environment", name]) == 2
    assert message in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("taken.jsonl", "mine")]
