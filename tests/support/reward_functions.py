"""Reward functions as users write them, and faulty ones. `by_row` does what a row's metadata says, so that one request
can mix all faults.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlhf_triton import count


def num_tokens(sample):
    """Return the length; with a negative weight, it is a length penalty."""
    return float(len(sample.tokens))


def share_of_word(sample):
    """Return the share of `w7` among the words of the response."""
    words = (sample.response or "").split()
    return words.count("w7") / len(words) if words else 0.0


def length(sample):
    """Return the number of characters."""
    return float(len(sample.text))


def token_sum(sample):
    """Return the sum of the token ids, which differs between nearly any two responses."""
    return float(sum(sample.tokens))


def texts_fit(sample):
    """Return 1 if the text is the actor's prompt followed by its response."""
    return float(f"{sample.prompt}{sample.response}" == sample.text)


def rank(group):
    """Ranking: return the part of the other responses that are shorter than this one; 0 if there are no others."""
    lengths = [len(sample.tokens) for sample in group]
    return [sum(other < length for other in lengths) / max(1, len(group) - 1) for length in lengths]


def distinct(group):
    """Diversity: return 1 divided by the number of equal responses."""
    texts = [sample.response for sample in group]
    return [1.0 / texts.count(text) for text in texts]


def wins(group, *, margin=0.0):
    """Pairwise: return the number of others that this response beats, by more than `margin`, as an array."""
    import numpy as np  # slow, and only needed here

    scores = [float(sample.metadata["score"]) for sample in group]
    return np.asarray([sum(one > other + margin for other in scores) for one in scores])


def by_group(group):
    """Do what the first sample's `metadata["do"]` says; without it, return the size of the group for each sample."""
    action = group[0].metadata.get("do")
    return _GROUP_ACTIONS[action](group) if action else [float(len(group))] * len(group)


class Scaled:
    """Returns the number of tokens times an option, and counts what it did."""

    def __init__(self, factor, *, timeout_s):
        if factor <= 0:
            raise ValueError(f"factor: {factor}, must be above 0")
        self.factor = factor
        self.timeout_s = timeout_s

    def __call__(self, sample):
        """Score one sample."""
        count("calls")
        count("tokens", len(sample.tokens))
        return by_row(sample) * self.factor + self.timeout_s


class Keyed:
    """Does what `by_row` does, and needs a key."""

    def __init__(self, api_key_env):
        if api_key_env not in os.environ:
            raise ValueError(f"api_key_env: {api_key_env} is not set")

    def __call__(self, sample):
        """Score one sample."""
        return by_row(sample)


def by_row(sample):
    """Do what `metadata["do"]` says; without it, return the number of tokens."""
    action = sample.metadata.get("do")
    return _ACTIONS[action](sample) if action else float(len(sample.tokens))


def label_or_trouble(sample):
    """Return the row's label as its score; a label that is a word is an action of `_ACTIONS`."""
    count("calls")
    label = sample.metadata["label"]
    return _ACTIONS[label](sample) if isinstance(label, str) else float(label)


def _raise(sample):
    raise RuntimeError(f"no verdict on {sample.metadata.get('label')!r}")


def _backtrack_for_ever(sample):
    """Loop forever inside C code, where no Python signal handler runs; first, write the process id to a file."""
    if "pid_file" in sample.metadata:
        Path(sample.metadata["pid_file"]).write_text(str(os.getpid()))
    return float(bool(re.fullmatch(r"(a|aa)+$", "a" * 200 + "b")))


def _start_a_program(sample):
    """Start a child process, like a verifier that runs the policy's code, and write its process id to a file."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    Path(sample.metadata["pid_file"]).write_text(str(child.pid))
    return float(child.wait())


def _start_a_daemon(sample):
    """Start a program that leaves the worker's session and its parent, write its process id to a file, and hang."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)"
    with Path(sample.metadata["pid_file"]).open("w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, start_new_session=True, check=True)
    time.sleep(3600)


def _fork(sample):
    """Return in two processes, like policy code that a verifier executes."""
    os.fork()
    return float(len(sample.tokens))


def _write_to_the_pool(data):
    """Write to the socket between worker and pool, whose number is an argument of the worker."""
    return float(os.write(int(sys.argv[2]), data))


def _reply(results):
    """Reply as the worker does, but with other results; the number is that of the third message."""
    reply = f'{{"number": 3, "results": {results}, "counts": {{}}}}'.encode()
    return _write_to_the_pool(len(reply).to_bytes(4, "big") + reply)


_ACTIONS = {
    "fork": _fork,
    "garbled frame": lambda _: _write_to_the_pool(b"\0\0\0\1x"),
    "foreign frame": lambda _: _write_to_the_pool(b"\0\0\0\2{}"),
    "two results": lambda _: _reply('[{"score": 1.0}, {"score": 2.0}]'),
    "foreign result": lambda _: _reply('[{"value": 1.0}]'),
    "no results": lambda _: _reply("null"),
    "raise": _raise,
    "exit": lambda _: sys.exit("enough"),
    "die": lambda _: os._exit(3),
    "crash": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "loop": _backtrack_for_ever,
    "program": _start_a_program,
    "daemon": _start_a_daemon,
    "nan": lambda _: float("nan"),
    "infinity": lambda _: float("inf"),
    "text": lambda _: "1.0",
    "none": lambda _: None,
    "print": lambda _: print("a word to the log") or 1.0,
    "memory": lambda _: float(len(bytearray(1 << 33))),
    "pid": lambda _: os.getpid(),
    "inherited": lambda sample: sum(name in os.environ for name in sample.metadata["names"]),
    "huge": lambda sample: float(len(sample.metadata["blob"])),
}
_GROUP_ACTIONS = {
    **{name: lambda group, name=name: _ACTIONS[name](group[0]) for name in ("die", "text")},
    "number": lambda _: 1.0,
    "few": lambda group: [1.0] * (len(group) - 1),
    "many": lambda group: (1.0 for _ in range(len(group) + 1)),
    "gaps": lambda group: [1.0, None, float("nan"), "x", 0][: len(group)],
    "dict": lambda group: dict.fromkeys(range(len(group)), 1.0),
    "set": lambda _: {0.5},
}
