"""Benchmark of training steps against TRL's, in matched rounds.

TRL runs in an environment of its own, which the first measurement sets up. Both sides train the same model on the same
prompts with the same reward, full parameters in float32, one optimizer step per rollout; every response has the same
number of new tokens. Our side is `python -m rlhf_triton.actor` with its reward behind a real tritonserver; with PPO,
that serves a reward model and a critic of the policy's size, and the sidecar trains the critic.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measurement import (
    Option,
    Record,
    Result,
    Target,
    cpu_seconds,
    grouped,
    in_turn,
    medians,
    peak_rss_mb,
    ratio,
)
from benchmarks.processes import free_ports, running_sidecar, running_triton
from benchmarks.trl_sides import GO, LAST
from benchmarks.workload import SEED, SHORTEST, SIZES, make_checkpoint, make_trace
from rlhf_triton.config import load_config
from rlhf_triton.errors import RlhfError
from rlhf_triton.store.jsonl import write_jsonl
from rlhf_triton.store.weights import WeightsStore
from rlhf_triton.tools.run import LIBRARY_ENV
from rlhf_triton.tools.server.child import tail
from rlhf_triton.trainer.publish import initialise_store

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = Path(__file__).with_name("trl_requirements.txt")
WITH_PPO = "trl==1.12.0"  # the last release that has `trl.experimental.ppo`; used for PPO alone
ALGORITHMS = ("grpo", "rloo", "ppo")
GROUP = 8  # responses per prompt, without a critic
PROMPTS = (
    "Explain to a child why the sky is blue during the day and turns red in the evening.",
    "Write the first sentence of a short story about a lighthouse keeper who is afraid of the sea.",
    "What should I pack for a week of hiking in the mountains in early spring?",
    "My neighbour practises the trumpet every night until eleven. How can I ask for quiet and stay friends?",
    "List three ways to cook potatoes.",
    "Describe how a bicycle stays upright while it moves, without using any formula at all.",
    "A shop sells two apples for one euro and three pears for two euros. Which fruit is cheaper, by how much?",
    "Give me some advice for learning to play chess as an adult with little time.",
)
OURS, TRL = "ours", "trl"
MOST_RATIO = 0.7
SMOLLM2 = "135m"
CELL = ("model", "algorithm", "rows", "new_tokens")
MOST_STEPS = 20  # per turn
Steps = Callable[[int], dict[str, Any]]
OPTIONS = {
    "models": Option(["7m", SMOLLM2], f"any of {SMOLLM2} (SmolLM2), {', '.join(SIZES)}", ["tiny"], (SMOLLM2, *SIZES)),
    "smollm2": Option(Path(), f"Hugging Face folder of SmolLM2-135M, for --models {SMOLLM2}"),
    "algorithms": Option([*ALGORITHMS], f"any of {', '.join(ALGORITHMS)}", quick=["grpo", "ppo"], known=ALGORITHMS),
    "cells": Option(["16x32", "64x64"], f"rows x new tokens; rows are a multiple of {GROUP}", quick=["16x8"]),
    "contenders": Option([TRL, OURS], "trainers to measure; one alone for its profile", known=(TRL, OURS)),
    "rounds": Option(5, "turns of each contender in each cell", quick=1),
    "seconds": Option(10.0, f"duration of the faster trainer's turn, at most {MOST_STEPS} steps", quick=0.1),
    "warmup": Option(2, "unmeasured steps before the first round"),
    "threads": Option(2, "cores of each side, and torch threads of each trainer"),
    "trl_micro_batch": Option(64, "rows per forward pass of TRL; gradients of more rows are accumulated"),
    "environment": Option(Path("runs/trl-environment"), "folder of TRL's environment; created if missing"),
}


def prepare_environment(folder: Path, log: Callable[[str], None]) -> Path:
    """Install TRL's environment in `folder` unless it has the requirements already; return its Python interpreter."""
    done, python = folder / "complete", folder.absolute() / "bin" / "python"
    wanted = f"{REQUIREMENTS.read_text()}\n{WITH_PPO}\n"
    if not done.is_file() or done.read_text() != wanted:
        log(f"installing TRL into {folder}: a few minutes, once")
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
        older = ["--no-deps", "--target", str(folder / WITH_PPO), WITH_PPO]
        subprocess.run([*pip, "install", "--quiet", *older], check=True)
        done.write_text(wanted)
    return python


def prompts_for(name: str, count: int) -> list[str]:
    """Return `count` English prompts, or as many random words of the vocabulary of a model with random weights."""
    if name in SIZES:
        return [" ".join(f"w{token}" for token in row[:SHORTEST]) for row in make_trace(count)]
    return [f"{i + 1}. {PROMPTS[i % len(PROMPTS)]}" for i in range(count)]


def make_scoring_model(policy: Path, folder: Path) -> None:
    """Write a scoring model to `folder`: the policy's body under a head of one output with random weights."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(SEED)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)


def prepare_cell(
    arguments: argparse.Namespace, out: Path, cell: dict[str, Any], checkpoint: Path, scoring: Path
) -> dict[str, Any]:
    """Empty the cell's folder, write the prompts of every step to it, and return the settings of both trainers."""
    name = "-".join(str(value) for value in cell.values())
    folder = out.absolute() / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    is_ppo = cell["algorithm"] == "ppo"
    group = 1 if is_ppo else GROUP
    prompts = prompts_for(cell["model"], cell["rows"] // group)
    write_jsonl(folder / "prompts.jsonl", ({"text": text} for text in prompts))
    return {
        **cell,
        "folder": str(folder),
        "prompts": str(folder / "prompts.jsonl"),
        "checkpoint": str(checkpoint.absolute()),
        "scoring": str(scoring.absolute()),
        "group": group,
        "kl_coef": 0.05 if is_ppo else 0.0,  # TRL's defaults
        "lr": 1e-6,
        "threads": arguments.threads,
        "trl_micro_batch": arguments.trl_micro_batch,
    }


@contextlib.contextmanager
def running(name: str, settings: dict[str, Any], theirs: Path | None) -> Iterator[Steps]:
    """Run one side of the comparison, `trl` with the interpreter `theirs`, or ours; yield `SteppedTrainer.steps`."""
    folder = Path(settings["folder"])
    env = {
        **LIBRARY_ENV,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", LIBRARY_ENV["OMP_WAIT_POLICY"]),
        "OMP_NUM_THREADS": str(settings["threads"]),
    }
    with contextlib.ExitStack() as stack:
        servers: list[int] = []
        if theirs is not None and name == "trl":
            command = [str(theirs), "-u", "-m", "benchmarks.trl_sides", "theirs", json.dumps(settings)]
            older = [str(theirs.parents[1] / WITH_PPO)] if settings["algorithm"] == "ppo" else []
            env["PYTHONPATH"] = os.pathsep.join([*older, str(ROOT)])
        else:
            path = folder / "run.yaml"
            path.write_text(json.dumps(configuration(settings), indent=1))  # JSON is YAML
            config = load_config(path)
            if config.serves_critic:
                initialise_store(WeightsStore(config.run.weights_dir), config.critic, run_id=config.run.identity)
            servers.append(stack.enter_context(running_triton(config)).pid)
            if config.serves_critic:
                servers.append(stack.enter_context(running_sidecar(config)).process.pid)
            command = [sys.executable, "-u", "-m", "benchmarks.trl_sides", "ours", "--config", str(path)]
        contender = SteppedTrainer(name, command, folder / f"{name}.log", env, servers)
        stack.callback(contender.stop)
        yield contender.steps


def configuration(settings: dict[str, Any]) -> dict[str, Any]:
    """Return our run's YAML, all settings equal to TRL's; the reward is a function, or with PPO a model."""
    tokens = settings["new_tokens"]
    optimizer = {"lr": settings["lr"], "weight_decay": 0.0}
    model = {"model": settings["scoring"]}
    # Processes of one thread share the cores: the two models score at the same time, the sidecar trains beside the
    # actor.
    parts: dict[str, Any] = {
        "reward": model,
        "critic": model,
        "trainer": {"optimizer": optimizer, "checkpoint_every": 1_000_000, "reload_on_save": "none", "nice": 0},
    }
    if settings["algorithm"] != "ppo":
        parts = {"rewards": {"variety": {"function": "benchmarks.reward_functions:variety"}}}
    return {
        "run": {"dir": f"{settings['folder']}/run", "run_id": "bench"},
        "server": free_ports(),
        **parts,
        "actor": {
            "steps": 1_000_000,
            "checkpoint_every": 1_000_000,
            "threads": settings["threads"],
            "rollout_size": settings["rows"],
            "max_staleness": 0,
            "update": {"minibatch_size": settings["rows"]},
            "policy": {"model": settings["checkpoint"]},
            "prompts": {"path": settings["prompts"]},
            "generation": {"max_new_tokens": tokens, "min_new_tokens": tokens},
            "validation": {"size": 0},
            "algorithm": {
                "name": settings["algorithm"],
                "responses_per_prompt": settings["group"],
                "mask_unfinished": False,
            },
            "kl": {"coef": settings["kl_coef"]},
            "optimizer": optimizer,
        },
    }


class SteppedTrainer:
    """A trainer in its own process that runs steps on request; also measures the processes that serve it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str], servers: Sequence[int] = ()
    ) -> None:
        """`servers`: ids of processes whose CPU time and memory count as the contender's."""
        self.name, self._log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **env},
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout
        self._pids = [process.pid, *servers]

    def steps(self, count: int) -> dict[str, Any]:
        """Run `count` steps; return means per step, the last step's tokens, and peak memory.

        Raises RlhfError if the trainer exits.
        """
        cpu = cpu_seconds(self._pids)
        answers = [self._step(LAST if number == count else GO) for number in range(1, count + 1)]
        cpu = cpu_seconds(self._pids) - cpu
        phases = {name: sum(a["phases"].get(name, 0.0) for a in answers) / count for name in answers[0]["phases"]}
        return {
            "seconds_per_step": sum(answer["seconds"] for answer in answers) / count,
            "cpu_seconds_per_step": cpu / count,
            "steps": count,
            "tokens": answers[-1]["tokens"],
            "peak_rss_mb": peak_rss_mb(self._pids),
            "phases": phases,
        }

    def _step(self, request: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            self._input.write(request)
            self._input.flush()
        line = self._output.readline()
        if not line:
            code = self._process.wait()
            raise RlhfError(f"{self.name} ended with exit code {code}; {self._log} ends with:\n{tail(self._log)}")
        return dict(json.loads(line))

    def stop(self) -> None:
        """Close the process's input, which makes it exit; kill it if it does not exit in time."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Measure all cells. Raises RlhfError if a trainer fails, or if SmolLM2 is requested without its folder."""
    if SMOLLM2 in settings.models and settings.smollm2 == Path():
        raise RlhfError(f"--models {SMOLLM2} requires --smollm2 DIR, the model's folder; add it or drop {SMOLLM2}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: settings.threads])
    theirs = prepare_environment(settings.environment, record.say) if TRL in settings.contenders else None
    for model in settings.models:
        checkpoint = settings.smollm2 if model == SMOLLM2 else record.out / "models" / model
        if model in SIZES:
            make_checkpoint(SIZES[model], checkpoint, "policy")
        scoring = record.out / "models" / f"{model}-scoring"
        if "ppo" in settings.algorithms:
            make_scoring_model(checkpoint, scoring)
        for rows, new_tokens in (map(int, cell.split("x")) for cell in settings.cells):
            for algorithm in settings.algorithms:
                cell = dict(zip(CELL, (model, algorithm, rows, new_tokens), strict=True))
                shared = prepare_cell(settings, record.out, cell, checkpoint, scoring)
                with contextlib.ExitStack() as stack:
                    started = {name: running(name, shared, theirs) for name in settings.contenders}
                    steps = {name: stack.enter_context(side) for name, side in started.items()}
                    take_turns(steps, settings, cell, record)


def take_turns(
    contenders: dict[str, Steps],
    settings: argparse.Namespace,
    cell: dict[str, Any],
    record: Record,
) -> None:
    """Warm up all contenders, then give each one turn per round, starting with a different one each time.

    Args:
        contenders: for each name, a function that runs a number of steps and returns the measured means.
        settings: `seconds` and the faster contender's last warm-up step determine the number of steps of all turns.
    """
    warm: dict[str, float] = {}
    for name, steps in contenders.items():
        for _ in range(max(1, settings.warmup)):
            warm[name] = steps(1)["seconds_per_step"]
        record.say(f"{cell_name(cell)}: {name} warmed up, {warm[name]:.2f} s a step")
    count = max(1, min(MOST_STEPS, round(settings.seconds / min(warm.values()))))
    for number, name in in_turn(list(contenders), settings.rounds):
        sample = contenders[name](count)
        record.add({**cell, "contender": name, "round": number, **sample})
        seconds = sample["seconds_per_step"]
        record.say(f"{cell_name(cell)}: round {number + 1}/{settings.rounds}, {name} {seconds:.2f} s a step")


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return medians over the rounds for each cell and contender, with the seconds of each phase."""
    rows = []
    for key, own in grouped(result["samples"], *CELL, "contender").items():
        phases = {phase: statistics.median(s["phases"].get(phase, 0.0) for s in own) for phase in own[0]["phases"]}
        rows.append(
            {
                **dict(zip((*CELL, "contender"), key, strict=True)),
                **medians(own, "seconds_per_step", "cpu_seconds_per_step"),
                "peak_rss_mb": max(sample["peak_rss_mb"] for sample in own),
                "tokens": own[0]["tokens"],
                "phases": ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items()),
            }
        )
    return rows


def targets(result: Result) -> list[Target]:
    """Return, for each cell, our seconds per step divided by TRL's, and the same ratio of CPU seconds."""
    found = []
    for key, samples in grouped(result["samples"], *CELL).items():
        name = cell_name(dict(zip(CELL, key, strict=True)))
        found.append(
            Target(f"{name}: ours / TRL, seconds", ratio(samples, OURS, TRL, "seconds_per_step"), None, MOST_RATIO)
        )
        found.append(Target(f"{name}: ours / TRL, CPU time", ratio(samples, OURS, TRL, "cpu_seconds_per_step")))
    return found


def cell_name(cell: dict[str, Any]) -> str:
    """Return model, algorithm and size of a cell as text."""
    return f"{cell['model']} {cell['algorithm']} {cell['rows']}x{cell['new_tokens']}"
