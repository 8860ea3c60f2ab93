"""Benchmark of the project's decoder against transformers. All contenders generate the same numbers of tokens."""

import argparse
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from actor.generation.slots import Decoder, Prompts, Rules
from benchmarks.measurement import Option, Record, Result, Target, grouped, speeds, time_in_turn
from benchmarks.workload import SEED, SIZES, VOCAB_SIZE, make_model, trace_lengths

PLAIN = "generate"
LEAST_SPEEDUP = {"varied": 1.5, "equal": 1.0}
LONGEST_PROMPT = 64
OPTIONS = {
    "models": Option(["1m", "7m"], f"any of {', '.join(SIZES)}", quick=["tiny"], known=SIZES),
    "rows": Option(64, "number of prompts", quick=12),
    "longest": Option(128, "tokens of the longest response", quick=12),
    "slots": Option([16, 32, 64], "numbers of slots of our decoder", quick=[4]),
    "repeats": Option(5, "rounds; each measures every contender", quick=1),
}


def measure(settings: argparse.Namespace, record: Record) -> None:
    """Time every contender on every model and workload."""
    torch.set_num_threads(1)
    prompts = make_prompts(settings.rows)
    record.result["greedy_identical"] = {}
    for name in settings.models:
        model = make_model("policy", SIZES[name], 1024)
        record.result["greedy_identical"][name] = identical(model, prompts, settings.slots[0], settings.longest)
        for workload in LEAST_SPEEDUP:
            lengths = response_lengths(workload, settings.rows, settings.longest)
            contenders = {PLAIN: functools.partial(plain, model, prompts, lengths)}
            for slots in settings.slots:
                contenders[f"slots-{slots}"] = functools.partial(ours, model, prompts, lengths, slots)
            time_in_turn(record, contenders, settings.repeats, model=name, workload=workload, tokens=sum(lengths))


def summarise(result: Result) -> list[dict[str, Any]]:
    """Return each contender's tokens/s, and its speed-up over one plain `generate` call."""
    return speeds(result["samples"], PLAIN, "model", "workload")


def targets(result: Result) -> list[Target]:
    """Return our speed-up with the best number of slots, and the share of identical greedy responses, by model."""
    found = []
    for (model, workload), rows in grouped(result["summary"], "model", "workload").items():
        timed = [row for row in rows if row["contender"].startswith("slots") and row["speed_up"] is not None]
        best, contender = max(((row["speed_up"], row["contender"]) for row in timed), default=(None, ""))
        name = f"{model}, {workload} lengths: ours / {PLAIN}, times as fast"
        found.append(Target(name, best, LEAST_SPEEDUP[workload], None, contender))
    shares = result["greedy_identical"].items()
    return found + [Target(f"{model}: identical greedy responses, share", share, 1.0) for model, share in shares]


def make_prompts(count: int) -> list[np.ndarray]:
    """Return random prompts with the trace's lengths, but at most `LONGEST_PROMPT` tokens each."""
    generator = np.random.default_rng(SEED + 3)
    return [generator.integers(3, VOCAB_SIZE, min(n, LONGEST_PROMPT)) for n in trace_lengths(count)]


def response_lengths(workload: str, count: int, longest: int) -> list[int]:
    """Return the number of response tokens of each prompt.

    All are `longest` for the workload `equal`; otherwise they are the trace's log-normal lengths, scaled so that
    some of them are clipped to `longest`.
    """
    if workload == "equal":
        return [longest] * count
    drawn = trace_lengths(2 * count)[count:] / trace_lengths(2 * count)[count:].max()
    return np.clip(np.rint(drawn * longest * 1.25), 1, longest).astype(int).tolist()


def decoder_of(lengths: Sequence[int]) -> Any:
    """Return a decoder class whose response `i` ends after `lengths[i]` tokens."""

    class GivenLengths(Decoder):
        def _ends_by_itself(self, row: Any) -> bool:
            return bool(row.written >= lengths[row.index])

    return GivenLengths


def ours(model: Any, prompts: list[np.ndarray], lengths: list[int], slots: int) -> dict[int, list[int]]:
    """Generate with our decoder; return the tokens of each response by prompt index."""
    written: dict[int, list[int]] = {}
    draws = torch.rand(len(prompts), max(lengths), dtype=torch.float64)
    decoder = decoder_of(lengths)(model, Rules(max(lengths), [], [0, 1, 2]), slots=slots)
    given = dict(enumerate(prompts))
    partner = Prompts(given, lambda index, turn: written.update({index: turn.tokens}), max_new_tokens=max(lengths))
    decoder.run(partner, lambda index: iter(draws[index].tolist()))
    assert [len(written[i]) for i in range(len(prompts))] == lengths, "responses of other lengths than given"
    return written


def plain(model: Any, prompts: list[np.ndarray], lengths: list[int]) -> dict[int, list[int]]:
    """Generate with one call of `generate` for all prompts; return the tokens of each response by prompt index."""
    width = max(map(len, prompts))
    goals = torch.tensor(lengths)

    class GivenLengths(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return input_ids.shape[1] - width >= goals

    stops = StoppingCriteriaList([GivenLengths()])
    # Special tokens are suppressed, so that responses end by their length alone.
    sampling = {"do_sample": True, "top_k": 0, "suppress_tokens": [0, 1, 2]}
    output = generate(model, prompts, max(lengths), sampling, stopping_criteria=stops)
    return {i: row[:n].tolist() for i, (row, n) in enumerate(zip(output, lengths, strict=True))}


def generate(model: Any, prompts: list[np.ndarray], longest: int, rules: dict[str, Any], **arguments: Any) -> Any:
    """Call `generate` on the prompts, padded on the left; return the new tokens `[N, at most longest]`."""
    width = max(map(len, prompts))
    ids, attention = torch.full((len(prompts), width), 2), torch.zeros(len(prompts), width, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.from_numpy(prompt)
        attention[i, width - len(prompt) :] = 1
    config = GenerationConfig(max_new_tokens=longest, eos_token_id=1, pad_token_id=2, **rules)
    return model.generate(ids, attention_mask=attention, generation_config=config, **arguments)[:, width:]


def identical(model: Any, prompts: list[np.ndarray], slots: int, longest: int) -> float:
    """Return the share of prompts whose greedy response is the same from our decoder and from `generate`."""
    written: dict[int, list[int]] = {}
    partner = Prompts(
        dict(enumerate(prompts)), lambda index, turn: written.update({index: turn.tokens}), max_new_tokens=longest
    )
    Decoder(model, Rules(longest, [1], [0, 2]), slots=slots).run(partner, None)
    output = generate(model, prompts, longest, {"do_sample": False, "suppress_tokens": [0, 2]})
    return statistics.fmean(row[: len(written[i])].tolist() == written[i] for i, row in enumerate(output))
