"""`make demo-agent`: SmolLM2 plays a game of three tries with an OpenEnv server, which has an environment of its own."""

import contextlib
import subprocess
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

from examples.demo import sums_game
from examples.demo.pretrained import Built, Log, build_once, code_fingerprint
from python_backend.errors import RlhfError
from python_backend.store.jsonl import write_jsonl
from tools.server.child import Child
from tools.server.ports import free_port

OPENENV = "openenv==0.10.0"
NUM_TRAIN, NUM_HELD_OUT = 1024, 256
TRAIN_SEED, HELD_OUT_SEED = 0, 1_000_000
START_S = 120.0


def prepare(out_dir: Path, quick: bool = False, log: Log = print) -> Built:
    """Return the folder with the prompt files and, unless `quick`, the server's environment; build it if needed.

    Raises RlhfError if a package cannot be installed.
    """

    def build(folder: Path) -> dict[str, Any]:
        write_games(folder)
        if not quick:
            log(f"server: installing {OPENENV} into an environment of its own")
            _install(folder / "server", [OPENENV, f"reasoning-gym=={version('reasoning-gym')}"])
        return {}

    return build_once(out_dir, code_fingerprint("reasoning-gym"), build, log)


def write_games(folder: Path) -> None:
    """Write the two prompt files: seeds of games. Held-out questions differ from all others."""
    held_out: dict[str, int] = {}
    for seed in count(HELD_OUT_SEED):
        if len(held_out) == NUM_HELD_OUT:
            break
        held_out.setdefault(sums_game.sum_of(seed)[0], seed)
    unseen = (seed for seed in count(TRAIN_SEED) if sums_game.sum_of(seed)[0] not in held_out)
    for name, seeds in (("prompts", (next(unseen) for _ in range(NUM_TRAIN))), ("validation", held_out.values())):
        rows = ({"prompt_id": f"{name}-{seed}", "seed": seed} for seed in seeds)
        write_jsonl(folder / f"{name}.jsonl", rows)


def play(prepared: Path, arguments: Sequence[str], log_dir: Path) -> int:
    """Run `tools run` with these arguments against a server of the game; return its exit code."""
    from tools import run

    with _server(prepared / "server" / "bin" / "python", log_dir) as url:
        return run.main([*arguments, f"environment.url={url}"])


@contextlib.contextmanager
def _server(python: Path, log_dir: Path) -> Iterator[str]:
    port = free_port()
    game = Child("game server", [str(port)], log_dir / "game_server.log", {}, command=[str(python), sums_game.__file__])
    try:
        deadline = time.monotonic() + START_S
        while not _answers(f"http://127.0.0.1:{port}/health"):
            game.raise_if_failed()
            if time.monotonic() > deadline:
                raise RlhfError(f"the game server did not answer within {START_S:g} s; see {game.log_path}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        game.process.kill()
        game.process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _install(folder: Path, packages: Sequence[str]) -> None:
    venv.create(folder, with_pip=True, symlinks=True)
    done = subprocess.run(
        [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RlhfError(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-500:]}")
