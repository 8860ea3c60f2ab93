"""Decodes prompts with given random draws."""

from dataclasses import replace

import numpy as np

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.generation.row_sources import PromptSource, SamplingJob


def asking(prompts, found, draws, *, most):
    """Asks for a response to each of these prompts, which goes into `found`."""

    def finished(index, conversation):
        found[index] = responses([*conversation])[0]

    source = PromptSource(max_new_tokens=most)
    next_rows = source.next_rows
    source.next_rows = lambda **wait: [replace(row, draws=draws(row.index)) for row in next_rows(**wait)]
    source.add(SamplingJob({i: Prompt("", "", tokens) for i, tokens in enumerate(prompts)}, finished, seed=0))
    return source


def one_response(decoder, tokens, draws, most):
    found = {}
    decoder.run(asking([np.array(tokens)], found, lambda _: draws, most=most))
    return found[0]


def responses(rows):
    return [row.tokens[row.sampled].tolist() for row in rows]
