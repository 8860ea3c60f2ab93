"""`make demo-agent`: SmolLM2 plays a game of three tries, which an OpenEnv server serves from its own environment."""

import contextlib
import subprocess
import time
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from examples.demo import sums_game
from examples.demo.pretrained import build_once
from examples.demo.reasoning import HELD_OUT_SEED, TRAIN_SEED
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl
from rlhf_triton.tools.server.child import Child
from rlhf_triton.tools.server.health import get_page
from rlhf_triton.tools.server.ports import free_port

OPENENV = "openenv==0.10.0"
GAMES = "games.json"
OPENING = "Solve a sum in at most three tries.\n"


def prepare(out_dir: Path, tasks: Path, quick: bool) -> Path:
    """Return the folder with games, prompt files and, unless `quick`, the server's environment; build it if needed.

    Args:
        tasks: the folder of `reasoning.prepare`, whose sums are the games.

    Raises RlhfError if a package cannot be installed.
    """

    def build(folder: Path) -> None:
        games: dict[str, tuple[str, str]] = {}
        for name, first in (("validation", HELD_OUT_SEED), ("prompts", TRAIN_SEED)):
            prompts = []
            for row in read_jsonl(tasks / f"{name}.jsonl"):
                seed = first + row["task"]["metadata"]["source_index"]
                games[str(seed)] = row["text"], row["task"]["answer"]
                prompts.append({"prompt_id": f"{name}-{seed}", "text": OPENING, "seed": seed})
            write_jsonl(folder / f"{name}.jsonl", prompts)
        write_json(folder / GAMES, games, durable=False)
        if not quick:
            print(f"server: installing {OPENENV} into an environment of its own")
            _install(folder / "server")

    return build_once(out_dir, build, tasks=version("reasoning-gym"), quick=quick)


def play(prepared: Path, arguments: Sequence[str]) -> int:
    """Run `rlhf-triton run` with these arguments against a server of the game; return its exit code."""
    from rlhf_triton.tools import run

    with _server(prepared) as url:
        return run.main([*arguments, f"environment.options.url={url}"])


@contextlib.contextmanager
def _server(prepared: Path) -> Iterator[str]:
    port = free_port()
    command = [str(prepared.absolute() / "server" / "bin" / "python"), sums_game.__file__]
    arguments = [str(prepared.absolute() / GAMES), str(port)]
    game = Child("game server", arguments, prepared / "game_server.log", {}, command=command)
    try:
        while get_page(f"127.0.0.1:{port}", "/health") == "":
            if game.poll() is not None:
                raise RlhfError(game.obituary())
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        game.process.kill()
        game.process.wait()


def _install(folder: Path) -> None:
    venv.create(folder, with_pip=True, symlinks=True)
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", OPENENV],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RlhfError(f"{OPENENV} cannot be installed: {done.stderr.strip()[-500:]}")
