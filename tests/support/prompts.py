"""Prompt files, and the inputs of a run that reads them, with one token per byte."""

import tempfile
from collections import defaultdict
from pathlib import Path

from rlhf_triton.actor.data.prompt_reader import PromptReader
from rlhf_triton.actor.data.prompts import Positions, StepInputs
from rlhf_triton.config.actor import PromptFileSection
from rlhf_triton.store.jsonl import write_jsonl


class Bytewise:
    """A tokenizer without special tokens, whose tokens are bytes."""

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode()), "special_tokens_mask": [0] * len(text.encode())}

    def decode(self, ids):
        return bytes(ids).decode()


bytewise = Bytewise()


def write_prompts(path, texts):
    """Write a JSONL file with these texts, each of which is also the prompt's id."""
    write_jsonl(path, ({"text": text, "prompt_id": text} for text in texts))
    return path


def inputs_of(*files, seed=0, **limits):
    """Return the inputs of a run; `limits`: fields of PromptReader."""
    sources = [PromptFileSection(path=file) if isinstance(file, Path) else file for file in files]
    reader = PromptReader(tokenizer=bytewise, **{"max_tokens": 100, **limits})
    return StepInputs(sources, reader, seed=seed)


def prompts_of(inputs, step, count=4):
    """Read the `count` prompts of a step, after those of the steps before it, and record the positions."""
    if step - 1 not in inputs.positions:
        prompts_of(inputs, step - 1, count)
    found = inputs.read(count, inputs.positions[step - 1])
    inputs.record(step, found[-1][1])
    return [prompt for prompt, _ in found]


def one_prompt():
    """Return the inputs of a run with a single prompt, for tests of something else; the open file is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = inputs_of(write_prompts(Path(folder) / "prompts.jsonl", ["a"]))
    inputs.positions = defaultdict(Positions)
    return inputs
