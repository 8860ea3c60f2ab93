"""Reward functions with the signatures of those for TRL's GRPOTrainer: lists in, a list out."""

import asyncio
import re

loops = {}


def accuracy(completions, solution, log_extra=None, **kwargs):
    """Return 1 for the boxed solution, else 0; None where the solution is no number."""
    scores = []
    for completion, expected in zip(completions, solution, strict=True):
        found = re.search(r"\\boxed\{([^{}]*)\}", completion[0]["content"])
        scores.append(float(found is not None and found[1] == expected) if expected.isdecimal() else None)
    return scores


def echo(prompts, completions, **columns):
    """Return whether the arguments are those in the column `expected`, which is one list per argument."""
    given = {"prompts": prompts, "completions": completions, **columns}
    return [float(given | {"expected": None} == {**columns["expected"][0], "expected": None})] * len(prompts)


def contains(prompts, completions, answer):
    """A function without `**kwargs`."""
    return [float(one in text) for one, text in zip(answer, completions, strict=True)]


def shorter_than(completions, *, limit, **kwargs):
    """A function with an option."""
    return [float(len(text) < limit) for text in completions]


class Prefers:
    """A callable object with an option."""

    def __init__(self, word):
        self.word = word

    def __call__(self, prompts, completions, **kwargs):
        return [float(self.word in text) for text in completions]


async def awaits(completions, answer, **kwargs):
    """A coroutine function, as for a judge behind an API, whose session needs one event loop for all calls."""
    await asyncio.sleep(0)
    assert asyncio.get_running_loop() is loops.setdefault("first", asyncio.get_running_loop())
    return [None if right is None else float(right in text) for right, text in zip(answer, completions, strict=True)]


class Awaits:
    """A callable object whose call is a coroutine, with an option."""

    def __init__(self, word="a"):
        self.word = word

    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [float(self.word in text) for text in completions]


awaits_too = Awaits()


async def each_length(given):
    """A coroutine function of a sample, or of a group of them."""
    await asyncio.sleep(0)
    return [len(sample.text) for sample in given] if isinstance(given, list) else len(given.text)


async def hangs(sample):
    """A coroutine that never ends."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def by_task(completions, task, answer, **kwargs):
    """A function for one task of several, whose rows have other columns."""
    return [float(right in c) if t == "math" else None for t, right, c in zip(task, answer, completions, strict=True)]


def needs_trainer(completions, trainer_state):
    """A function of what only the trainer has."""
    return [float(trainer_state.global_step) for _ in completions]


def needs_ids(completion_ids, **kwargs):
    """A function of the sampled token ids."""
    return [float(len(ids)) for ids in completion_ids]


def one_too_many(completions, **kwargs):
    """A function with a bug."""
    return [0.0] * (len(completions) + 1)
