"""Prompt files, and the inputs of a run that reads them, with one token per byte."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_triton.actor.data.prompt_reader import PromptReader
from rlhf_triton.actor.data.prompts import StepInputs
from rlhf_triton.config import PromptFileSection
from rlhf_triton.store.jsonl import write_jsonl


class Bytewise:
    """A tokenizer without special tokens, whose tokens are bytes."""

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode()), "special_tokens_mask": [0] * len(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


bytewise = Bytewise()


def write_prompts(path: Path, texts: Sequence[str]) -> Path:
    """Write a JSONL file with these texts, each of which is also the prompt's id."""
    write_jsonl(path, ({"text": text, "prompt_id": text} for text in texts))
    return path


def inputs_of(
    *files: PromptFileSection | Path, per_step: int = 4, responses: int = 1, seed: int = 0, **limits: Any
) -> StepInputs:
    """Return the inputs of a run; `limits`: fields of PromptReader."""
    sources = [PromptFileSection(path=file) if isinstance(file, Path) else file for file in files]
    reader = PromptReader(bytewise, **{"max_tokens": 100, **limits})
    return StepInputs(sources, reader, seed=seed, prompts_per_step=per_step, responses_per_prompt=responses)


def one_prompt() -> StepInputs:
    """Return the inputs of a run with a single prompt, for tests of something else; the open file is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        return inputs_of(write_prompts(Path(folder) / "prompts.jsonl", ["a"]), per_step=1)
