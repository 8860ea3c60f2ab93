"""TRL's side of `bench trl`, run in TRL's own environment: a trainer that waits for its turn before each step.

One optimizer step per rollout, as on our side: no KL term, no activation checkpointing, float32, whole responses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.support.reward_functions import variety
from benchmarks.trl.turns import ContenderTurns
from python_backend.rewards.function import Sample

ENDLESS = 1_000_000  # steps; the driver ends the run before


def main() -> None:
    """Train with the settings in `sys.argv[1]`, the result of `trainers.prepare_cell` as JSON."""
    settings = json.loads(sys.argv[1])
    turns = ContenderTurns()  # redirects standard output, so it must come before any library prints

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(settings["threads"])
    folder = settings["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    trainer = make_trainer(settings, model, tokenizer, turns)
    time_phases(trainer, turns, torch)
    trainer.train()


def make_trainer(settings: dict[str, Any], model: Any, tokenizer: Any, turns: ContenderTurns) -> Any:
    """Return TRL's trainer for `settings["algorithm"]`, whose steps wait for their turn."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    written = 0

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal written
        written = sum(map(len, completion_ids))
        return [variety(Sample(text, metadata={"response": text})) for text in completions]

    class InTurns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self._updating = turns.phase("optimizer")
            self._updating.__enter__()

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self._updating.__exit__(None, None, None)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end(tokens=written)

    lines = Path(settings["prompts"]).read_text().splitlines()
    prompts = [{"prompt": json.loads(line)["text"]} for line in lines]
    trainers: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "grpo": (GRPOTrainer, GRPOConfig, {"loss_type": "grpo"}),
        "rloo": (RLOOTrainer, RLOOConfig, {}),
    }
    kind, config, own = trainers[settings["algorithm"]]
    return kind(
        model=model,
        reward_funcs=reward,
        args=config(**trl_arguments(settings), **own),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(prompts * 1000),
        callbacks=[InTurns()],
    )


def trl_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments common to TRL's GRPO and RLOO configurations; all others keep TRL's defaults."""
    rows, micro_batch = settings["rows"], min(settings["rows"], settings["trl_micro_batch"])
    return {
        "output_dir": settings["folder"],
        "max_steps": ENDLESS,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "gradient_checkpointing": False,
        "num_iterations": 1,
        "num_generations": settings["group"],
        "max_completion_length": settings["new_tokens"],
        "beta": 0.0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "generation_kwargs": {"min_new_tokens": settings["new_tokens"]},
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "shuffle_dataset": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def time_phases(trainer: Any, turns: ContenderTurns, torch: Any) -> None:
    """Time the phases of a step; phases that do the same work as ours have the same names."""
    turns.timed(trainer, "_generate", lambda: "generate")
    turns.timed(trainer, "_calculate_rewards", lambda: "scoring")
    turns.timed(
        trainer, "_get_per_token_logps_and_entropies", lambda: "forward" if torch.is_grad_enabled() else "logprobs"
    )
    turns.timed(trainer.accelerator, "backward", lambda: "backward")


if __name__ == "__main__":
    main()
