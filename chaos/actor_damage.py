"""Tests damaged actor checkpoints: repeatedly kills a small run, damages its newest checkpoint, and resumes the run.

The run must resume from the newest intact checkpoint and end with the same policy as an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

from actor.policy.checkpoint import saved_steps
from benchmarks.learning import configuration, make_checkpoints
from chaos.verdict import Verdict, verdict
from python_backend.checkpoints.inspection import WEIGHTS_FILE
from python_backend.monitoring.log_lines import say
from python_backend.store.weights import sha256_of
from tools.server.log import tail

STEPS_A_ROUND = 3
ROLLOUT_SIZE = 16
ALGORITHM = "rloo"  # has no critic; the main crash test covers the critic's journal and versions
DEADLINE_S = 600.0
LOOK_EVERY_S = 0.02
PROMISE = "an actor whose newest checkpoint is damaged resumes from the newest intact one and ends with the same policy"


def damage_actor_checkpoints(folder: Path, rounds: int, generator: random.Random) -> Verdict:
    """Compare an undisturbed run with one whose actor is killed `rounds` times; return the verdict.

    After each kill the newest checkpoint is damaged. Both runs are in `folder`.
    """
    folder.mkdir(parents=True)
    make_checkpoints(folder, seed=0)
    steps = STEPS_A_ROUND * (rounds + 1)
    calm, disturbed = (_write_config(folder, name, steps) for name in ("calm", "disturbed"))
    found = [] if _finish(calm) == 0 else [f"the undisturbed run failed:\n{tail(calm.with_suffix('.log'))}"]
    for number in range(rounds):
        if not found:
            _kill_actor(disturbed, generator.randint(2, STEPS_A_ROUND))
            what, found = _damage_newest(disturbed, generator)
            say(f"{number + 1:>3}/{rounds}  {what}")
    if not found and _finish(disturbed) != 0:
        found.append(f"the disturbed run failed:\n{tail(disturbed.with_suffix('.log'))}")
    if not found and _policy_of(calm) != _policy_of(disturbed):
        found.append("the policy differs from that of the undisturbed run")
    return verdict(PROMISE, rounds, found)


def _write_config(folder: Path, name: str, steps: int) -> Path:
    arguments = argparse.Namespace(steps=steps, rollout_size=ROLLOUT_SIZE)
    data = configuration(arguments, folder, ALGORITHM, 0)
    data["run"] |= {"dir": str(folder / name), "deterministic": True}
    data["actor"] |= {"checkpoint_every": 1, "keep_checkpoints": 3}
    path = folder / f"{name}.json"  # JSON is YAML
    path.write_text(json.dumps(data, indent=1))
    return path


def _start(config: Path) -> subprocess.Popen[bytes]:
    with config.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "tools", "run", "--config", str(config)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _finish(config: Path) -> int:
    return _start(config).wait(DEADLINE_S)


def _kill_actor(config: Path, after: int) -> None:
    """Start the run, and kill its actor once it has saved checkpoints of `after` more steps."""
    run, steps = _start(config), _checkpoints(config)
    enough = max(saved_steps(steps), default=0) + after
    while run.poll() is None and max(saved_steps(steps), default=0) < enough:
        time.sleep(LOOK_EVERY_S)
    with contextlib.suppress(psutil.NoSuchProcess):  # the run has ended
        for process in psutil.Process(run.pid).children(recursive=True):
            if "actor" in process.cmdline():
                process.kill()
    run.wait(DEADLINE_S)


def _damage_newest(config: Path, generator: random.Random) -> tuple[str, list[str]]:
    """Truncate or overwrite a file of the newest checkpoint; return what was damaged, or violations that prevent it."""
    steps = saved_steps(_checkpoints(config))
    if len(steps) < 2:  # an intact checkpoint must remain
        return "nothing to damage", [f"too few checkpoints, steps {steps}:\n{tail(config.with_suffix('.log'))}"]
    files = sorted(path for path in (_checkpoints(config) / str(steps[-1])).rglob("*") if path.stat().st_size > 64)
    path = generator.choice(files)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    if generator.random() < 0.5:
        del data[middle:]
    else:
        data[middle : middle + 32] = bytes(32)
    path.write_bytes(data)
    return f"actor checkpoint: damaged {path.relative_to(_checkpoints(config))}", []


def _checkpoints(config: Path) -> Path:
    return config.with_suffix("") / "checkpoints" / "actor"


def _policy_of(config: Path) -> str:
    return sha256_of(config.with_suffix("") / "policy" / WEIGHTS_FILE)
