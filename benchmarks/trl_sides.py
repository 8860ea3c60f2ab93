"""The two sides of `bench trl`: trainers that stay loaded and run one step for each line that the driver sends.

`python -m benchmarks.trl_sides ours --config FILE` is `python -m rlhf_triton.actor`; `... theirs SETTINGS` is TRL's
trainer, run in TRL's own environment, so that all imports but the standard library's stand in functions. One optimizer
step per rollout on both sides: no activation checkpointing, float32, whole responses; a KL term only with PPO.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.reward_functions import variety
from rlhf_triton.rewards.function import Sample

GO, LAST = "go\n", "last\n"  # one step; the last step of a turn, which ends when all its work is done
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ContenderTurns:
    """One side of the comparison: waits on stdin for its turn, reports each step on stdout; prints go to stderr."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # even a long step ends if the driver is killed
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._start = 0.0
        self.phases: dict[str, float] = {}

    def begin(self) -> bool:
        """Wait for the next step; return whether it is the turn's last. Exit when the driver closes the input."""
        request = sys.stdin.readline()
        if not request:
            os._exit(0)  # skips cleanup, since no output of a measured run is kept
        self.phases = {}
        self._start = time.monotonic()
        return request == LAST

    def end(self, **measured: Any) -> None:
        """Report the step: its seconds, the seconds of each phase, and the measurements in `measured`."""
        answer = {"seconds": time.monotonic() - self._start, "phases": self.phases, **measured}
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to the phase `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start

    def timed(self, owner: Any, method: str, name: Callable[[], str]) -> None:
        """Wrap `owner.method` so that its time counts as the phase `name()`."""
        original = getattr(owner, method)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name()):
                return original(*args, **kwargs)

        setattr(owner, method, measured)


def ours() -> int:
    """Run the actor, whose loop waits for its turn before each step; return its exit code."""
    turns = ContenderTurns()

    from rlhf_triton.actor import __main__ as actor
    from rlhf_triton.actor import loop
    from rlhf_triton.store.jsonl import read_jsonl

    one_step = loop.PPORun.one_step

    async def in_turn(run: Any, step: int, *, is_last: bool) -> None:
        """Wait for the turn, do the step, and report its timers from metrics.jsonl."""
        ends_turn = await asyncio.to_thread(turns.begin)  # in a thread, so that the client's connections stay alive
        await one_step(run, step, is_last=is_last)
        if ends_turn:
            await run.critic.served(step)
        line = read_jsonl(Path(sys.argv[-1]).parent / "run" / "metrics.jsonl")[-1]  # see `trl.configuration`
        turns.phases = {key.removeprefix("timers/"): line[key] for key in line if key.startswith("timers/")}
        turns.end(tokens=round(line["train_rollouts/generation_length"] * run.settings.rollout_size))

    loop.PPORun.one_step = in_turn  # type: ignore[assignment, method-assign]
    return actor.main(sys.argv[1:])


def theirs() -> int:
    """Train with the settings in `sys.argv[1]`, the result of `trl.prepare_cell` as JSON."""
    settings = json.loads(sys.argv[1])
    turns = ContenderTurns()  # redirects standard output, so it must come before any library prints

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(settings["threads"])
    folder = settings["checkpoint"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # Phases that do the same work as ours have the same names.
    if settings["algorithm"] == "ppo":
        trainer = make_ppo_trainer(settings, model, tokenizer, turns)
    else:
        trainer = make_trainer(settings, model, tokenizer, turns)
        turns.timed(trainer, "_generate", lambda: "generate")
        turns.timed(trainer, "_calculate_rewards", lambda: "scoring")
        logprobs = "_get_per_token_logps_and_entropies"
        turns.timed(trainer, logprobs, lambda: "forward" if torch.is_grad_enabled() else "logprobs")
    turns.timed(trainer.accelerator, "backward", lambda: "backward")
    trainer.train()
    return 0


def make_ppo_trainer(settings: dict[str, Any], model: Any, tokenizer: Any, turns: ContenderTurns) -> Any:
    """Return TRL's PPO trainer, whose steps wait for their turn; its phases are functions of its module."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, TrainerCallback
    from trl.experimental import ppo
    from trl.experimental.ppo import ppo_trainer

    class InTurns(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end(tokens=settings["rows"] * settings["new_tokens"])  # its responses have no other length
            turns.begin()

    turns.timed(ppo_trainer, "batch_generation", lambda: "generate")
    turns.timed(ppo_trainer, "get_reward", lambda: "scoring")
    turns.timed(ppo_trainer, "forward", lambda: "forward" if torch.is_grad_enabled() else "init_logprobs")
    tokenizer.padding_side = "left"
    scoring = [
        AutoModelForSequenceClassification.from_pretrained(
            settings["scoring"], num_labels=1, dtype=torch.float32, local_files_only=True
        )
        for _ in range(2)
    ]
    prompts = [json.loads(line)["text"] for line in Path(settings["prompts"]).read_text().splitlines()]
    trainer = ppo.PPOTrainer(
        args=ppo.PPOConfig(**ppo_arguments(settings)),
        processing_class=tokenizer,
        model=model,
        ref_model=None,
        reward_model=scoring[0],
        value_model=scoring[1],
        train_dataset=Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in prompts]),
        callbacks=[InTurns()],
    )
    turns.timed(trainer.optimizer, "step", lambda: "optimizer")
    return trainer


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
    is_grpo = settings["algorithm"] == "grpo"
    config, own = (GRPOConfig, {"loss_type": "grpo"}) if is_grpo else (RLOOConfig, {})
    return (GRPOTrainer if is_grpo else RLOOTrainer)(
        model=model,
        reward_funcs=reward,
        args=config(**trl_arguments(settings), **own),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(prompts * 1000),
        callbacks=[InTurns()],
    )


def trl_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments common to TRL's GRPO and RLOO configurations; all others keep TRL's defaults."""
    return {
        **common_arguments(settings),
        "max_steps": 1_000_000,  # the driver ends the run before
        "num_iterations": 1,
        "num_generations": settings["group"],
        "max_completion_length": settings["new_tokens"],
        "beta": settings["kl_coef"],
        "top_k": 0,
        "top_p": 1.0,
        "generation_kwargs": {"min_new_tokens": settings["new_tokens"]},
        "shuffle_dataset": False,
    }


def ppo_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of TRL's PPO configuration; all others keep TRL's defaults."""
    return {
        **common_arguments(settings),
        "total_episodes": 1_000_000 * settings["rows"],  # the driver ends the run before
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "response_length": settings["new_tokens"],
        "kl_coef": settings["kl_coef"],
    }


def common_arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments common to TRL's three configurations: one optimizer step per rollout, in float32."""
    rows, micro_batch = settings["rows"], min(settings["rows"], settings["trl_micro_batch"])
    return {
        "output_dir": settings["folder"],
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": rows // micro_batch,
        "gradient_checkpointing": False,
        "temperature": 1.0,
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


if __name__ == "__main__":
    sys.exit({"ours": ours, "theirs": theirs}[sys.argv.pop(1)]())
