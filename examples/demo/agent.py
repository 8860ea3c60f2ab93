"""The prompts and games of `make demo-agent`: SmolLM2 plays a game of three tries, `sums_game`."""

from importlib.metadata import version
from pathlib import Path

from examples.demo.pretrained import build_once
from examples.demo.reasoning import HELD_OUT_SEED, TRAIN_SEED
from rlhf_triton.store.durable import write_json
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl

GAMES = "games.json"
OPENING = "Solve a sum in at most three tries.\n"


def prepare(out_dir: Path, tasks: Path) -> Path:
    """Return the folder with games and prompt files; build it if needed.

    Args:
        tasks: the folder of `reasoning.prepare`, whose sums are the games.
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

    return build_once(out_dir, build, tasks=version("reasoning-gym"))
