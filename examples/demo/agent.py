"""`make demo-agent`: SmolLM2 plays a game of three tries, which an OpenEnv server serves from its own environment."""

import contextlib
import subprocess
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import wait_until
from examples.demo import sums_game
from examples.demo.pretrained import Built, Log, build_once, code_fingerprint
from examples.demo.reasoning import HELD_OUT_SEED, NUM_HELD_OUT, NUM_TRAIN, TRAIN_SEED, drawn_sums
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.jsonl import write_jsonl
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.ports import free_port

OPENENV = "openenv==0.10.0"
GAMES = "games.json"
OPENING = "Solve a sum in at most three tries.\n"


def prepare(out_dir: Path, log: Log = print) -> Built:
    """Return the folder with games, prompt files and the server's environment; build it if needed.

    Raises RlhfError if a package cannot be installed.
    """

    def build(folder: Path) -> dict[str, Any]:
        write_games(folder)
        log(f"server: installing {OPENENV} into an environment of its own")
        _install(folder / "server", OPENENV)
        return {}

    return build_once(out_dir, code_fingerprint("reasoning-gym"), build, log)


def write_games(folder: Path) -> None:
    """Write the games, and the two prompt files, which have their seeds. Held-out questions differ from all others."""
    games: dict[str, tuple[str, str]] = {}
    for name, first, number in (("validation", HELD_OUT_SEED, NUM_HELD_OUT), ("prompts", TRAIN_SEED, NUM_TRAIN)):
        known, found = {question for question, _ in games.values()}, dict[str, tuple[str, str]]()
        for seed, entry in enumerate(drawn_sums(first, 4 * number), first):
            question = entry["question"].strip()
            if len(found) < number and question not in known:
                found[str(seed)] = question, entry["answer"]
                known |= {question} if name == "validation" else set()
        rows = ({"prompt_id": f"{name}-{seed}", "text": OPENING, "seed": int(seed)} for seed in found)
        write_jsonl(folder / f"{name}.jsonl", rows)
        games |= found
    write_json(folder / GAMES, games, durable=False)


def play(prepared: Path, arguments: Sequence[str]) -> int:
    """Run `rlhf-triton run` with these arguments against a server of the game; return its exit code."""
    from rlhf_triton.tools import run

    with _server(prepared) as url:
        return run.main([*arguments, f"environment.url={url}"])


@contextlib.contextmanager
def _server(prepared: Path) -> Iterator[str]:
    port, command = free_port(), [str(prepared.absolute() / "server" / "bin" / "python"), sums_game.__file__]
    arguments = [str(prepared.absolute() / GAMES), str(port)]
    game = Child("game server", arguments, prepared / "game_server.log", {}, command=command)
    try:
        wait_until(lambda: get_page(f"127.0.0.1:{port}", "/health") != "", game)
        yield f"http://127.0.0.1:{port}"
    finally:
        game.process.kill()
        game.process.wait()


def _install(folder: Path, package: str) -> None:
    venv.create(folder, with_pip=True, symlinks=True)
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", package],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RlhfError(f"{package} cannot be installed: {done.stderr.strip()[-500:]}")
