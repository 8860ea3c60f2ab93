"""Reward functions as users write them, and such as go wrong in every way that a function can.
Given: a `Sample`. Returns: a score; `by_row` does what the row's own metadata says, so that one request holds all.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from python_backend.rewards.function import Sample


def num_tokens(sample: Sample) -> float:
    """The length: with a negative weight a penalty."""
    return float(len(sample.tokens))


def token_sum(sample: Sample) -> float:
    """Differs between nearly any two responses."""
    return float(sum(sample.tokens))


def equals_label(sample: Sample) -> float:
    """A verifier: 1 if the response holds the row's label. A row without a label is an error, not a 0."""
    return float(str(sample.metadata["label"]) in (sample.response or sample.text))


def texts_fit(sample: Sample) -> float:
    """1 if prompt and response, as the actor sends them, make up the text."""
    return float(f"{sample.prompt}{sample.response}" == sample.text)


def by_row(sample: Sample) -> Any:
    """What `metadata["do"]` says; the number of tokens without it."""
    action = sample.metadata.get("do")
    return _ACTIONS[action](sample) if action else float(len(sample.tokens))


def label_or_trouble(sample: Sample) -> Any:
    """The row's label as its score; a label that is a word is something to do."""
    label = sample.metadata["label"]
    return _ACTIONS[label](sample) if isinstance(label, str) else float(label)


def _raise(sample: Sample) -> float:
    raise RuntimeError(f"no verdict on {sample.metadata.get('label')!r}")


def _backtrack_for_ever(_: Sample) -> float:
    """Endless inside C code, where no Python signal handler runs."""
    return float(bool(re.fullmatch(r"(a|aa)+$", "a" * 200 + "b")))


def _start_a_program(sample: Sample) -> float:
    """As a verifier does that runs the policy's code; its process id is left in a file."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    with open(sample.metadata["pid_file"], "w") as file:  # noqa: PTH123 - written as users write
        file.write(str(child.pid))
    return float(child.wait())


_ACTIONS: dict[str, Any] = {
    "raise": _raise,
    "exit": lambda _: sys.exit("enough"),
    "die": lambda _: os._exit(3),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "sleep": lambda _: time.sleep(3600),
    "loop": _backtrack_for_ever,
    "program": _start_a_program,
    "nan": lambda _: float("nan"),
    "infinity": lambda _: float("inf"),
    "text": lambda _: "1.0",
    "none": lambda _: None,
    "print": lambda _: print("a word to the log") or 1.0,
    "memory": lambda _: float(len(bytearray(1 << 33))),
    "pid": lambda _: os.getpid(),
    "huge": lambda sample: float(len(sample.metadata["blob"])),
}
