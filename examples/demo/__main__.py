"""`python -m examples.demo RECIPE`: prepares a demo's models and prompts, and does its run from the beginning.

`--cache-dir` has a folder for each seed, built once; the reasoning tasks and the pretrained models are shared by all.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.demo import agent, llm, prepare, reasoning
from rlhf_triton.config.command_line import reporting
from rlhf_triton.config.loading import load_config
from rlhf_triton.tools.server.child import LIBRARY_ENV

CONFIGS = {
    "sentences": "configs/demo.yaml",
    "chat": "configs/smollm2.yaml",
    "reasoning": "configs/rlvr.yaml",
    "sao": "configs/sao.yaml",
    "agent": "configs/agent.yaml",
}


def prepared(recipe: str, cache_dir: Path, seed: int, quick: bool) -> dict[str, Path]:
    """Prepare a recipe if needed; return {configuration key: path}. Raises RlhfError."""
    size = "-quick" if quick else ""
    seeded = f"seed-{seed}{size}"
    if recipe == "sentences":
        models = prompts = prepare.prepare(cache_dir / seeded, seed, quick)
    elif recipe == "chat":
        models = cache_dir / f"pretrained{size}"
        prompts = cache_dir / f"chat-{seeded}"
        llm.prepare(prompts, models, seed, quick)
    else:
        models = prompts = reasoning.prepare(cache_dir / f"reasoning{size}", quick)
    if recipe == "agent":
        prompts = agent.prepare(cache_dir / f"agent{size}", models)
    files = {
        "actor.policy.model": models / "policy",
        "actor.prompts.path": prompts / "prompts.jsonl",
        "actor.validation.prompts": prompts / "validation.jsonl",
    }
    if recipe in ("sentences", "chat"):
        files["reward.model"] = prompts / "reward"
    if recipe in ("sentences", "chat", "sao"):
        files["critic.model"] = models / "critic"
    return files


@reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a recipe and become `rlhf-triton run`; return 2 after an error (printed to stderr)."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Prepare a demo and run it.")
    parser.add_argument("recipe", choices=CONFIGS)
    parser.add_argument("--cache-dir", type=Path, default=Path("runs/prepared"), help="folder of prepared files")
    parser.add_argument("--quick", action="store_true", help="a tiny version that takes seconds and hardly learns")
    parser.add_argument("--prepare-only", action="store_true", help="do not run it")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override of a key in the YAML file")
    arguments = parser.parse_intermixed_args(argv)  # options may stand between overrides
    os.environ.update({key: value for key, value in LIBRARY_ENV.items() if key not in os.environ})
    path = CONFIGS[arguments.recipe]
    seed = load_config(Path(path), arguments.overrides).run.seed
    files = prepared(arguments.recipe, arguments.cache_dir, seed, arguments.quick)
    overrides = [*(f"{key}={file}" for key, file in files.items()), *arguments.overrides]
    if arguments.prepare_only:
        print("\n".join(overrides))
        return 0
    sys.stdout.flush()
    os.execv(
        sys.executable, [sys.executable, "-m", "rlhf_triton.tools", "run", "--fresh", "--config", path, *overrides]
    )


if __name__ == "__main__":
    sys.exit(main())
