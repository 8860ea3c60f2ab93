"""The prompts of `make demo-agent`: SmolLM2 plays a game of three tries, `sums_game`."""

from importlib.metadata import version
from pathlib import Path

from examples.demo.pretrained import build_once
from rlhf_triton.store.jsonl import read_jsonl, write_jsonl

OPENING = "Solve a sum in at most three tries.\n"


def prepare(out_dir: Path, tasks: Path) -> Path:
    """Return the folder with the prompt files; build it if needed.

    Args:
        tasks: the folder of `reasoning.prepare`, whose sums are the games.
    """

    def build(folder: Path) -> None:
        for name in ("prompts.jsonl", "validation.jsonl"):
            games = (
                {
                    "prompt_id": row["prompt_id"],
                    "text": OPENING,
                    "question": row["text"],
                    "answer": row["task"]["answer"],
                }
                for row in read_jsonl(tasks / name)
            )
            write_jsonl(folder / name, games)

    return build_once(out_dir, build, tasks=version("reasoning-gym"))
