"""Reward functions as users write them, and faulty ones. `by_row` does what a row's metadata says, so that one request
can mix all faults.
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
    """Return the length; with a negative weight, it is a length penalty."""
    return float(len(sample.tokens))


def token_sum(sample: Sample) -> float:
    """Return the sum of the token ids, which differs between nearly any two responses."""
    return float(sum(sample.tokens))


def equals_label(sample: Sample) -> float:
    """A verifier: return 1 if the response contains the row's label. A row without a label is an error, not a 0."""
    return float(str(sample.metadata["label"]) in (sample.response or sample.text))


def texts_fit(sample: Sample) -> float:
    """Return 1 if the text is the actor's prompt followed by its response."""
    return float(f"{sample.prompt}{sample.response}" == sample.text)


def by_row(sample: Sample) -> Any:
    """Do what `metadata["do"]` says; without it, return the number of tokens."""
    action = sample.metadata.get("do")
    return _ACTIONS[action](sample) if action else float(len(sample.tokens))


def label_or_trouble(sample: Sample) -> Any:
    """Return the row's label as its score; a label that is a word is an action of `_ACTIONS`."""
    label = sample.metadata["label"]
    return _ACTIONS[label](sample) if isinstance(label, str) else float(label)


def _raise(sample: Sample) -> float:
    raise RuntimeError(f"no verdict on {sample.metadata.get('label')!r}")


def _backtrack_for_ever(_: Sample) -> float:
    """Loop forever inside C code, where no Python signal handler runs."""
    return float(bool(re.fullmatch(r"(a|aa)+$", "a" * 200 + "b")))


def _start_a_program(sample: Sample) -> float:
    """Start a child process, like a verifier that runs the policy's code, and write its process id to a file."""
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
