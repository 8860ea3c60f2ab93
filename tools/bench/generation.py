"""`python -m tools bench generation --out DIR`: writing responses over slots beside what transformers offers.
Given: models, prompts and the length of each response. Returns: DIR/result.json and a table; ratios are of samples of
one round. All write the same number of tokens for each prompt: how long a response gets is given, not drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.machine import describe_machine, describe_versions, now_utc
from tools.bench.trace import SEED, SIZES, VOCAB_SIZE, trace_lengths

PLAIN = "generate"
BARS = {"varied": 1.5, "equal": 1.0}
QUICK: dict[str, Any] = {
    "models": "tiny", "rows": 12, "longest": 12, "repeats": 1, "slots": "4", "continuous": False,
}  # fmt: skip
LONGEST_PROMPT = 64
Contender = Callable[[], dict[int, list[int]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; 0 when done, whatever the bars say."""
    arguments = parse_arguments(argv)
    result = measure(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1))
    print(report(result))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(prog="python -m tools bench generation", description="Tokens/s of generation.")
    parser.add_argument("--out", type=Path, required=True, help="folder of result.json")
    parser.add_argument("--models", default="1m,7m", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rows", type=int, default=64, help="prompts")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest response")
    parser.add_argument("--slots", default="16,32,64", help="of ours")
    parser.add_argument("--repeats", type=int, default=5, help="matched rounds")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument(
        "--no-continuous", dest="continuous", action="store_false", help="leave transformers' continuous batching out"
    )
    parser.add_argument("--quick", action="store_true", help="seconds only: shows that it works, measures nothing")
    if "--quick" in (argv if argv is not None else sys.argv):
        parser.set_defaults(**QUICK)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples of every contender on every model and workload."""
    import torch

    torch.set_num_threads(arguments.threads)
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    result: dict[str, Any] = {
        "date": now_utc(), "machine": describe_machine(), "versions": describe_versions(), "settings": settings,
        "samples": [], "greedy_identical": {},
    }  # fmt: skip
    prompts = make_prompts(arguments.rows)
    for name in arguments.models.split(","):
        model = make_model(name)
        result["greedy_identical"][name] = identical(model, prompts, arguments)
        for workload in BARS:
            lengths = response_lengths(workload, arguments.rows, arguments.longest)
            contenders = contenders_of(model, prompts, lengths, arguments)
            for number in range(arguments.repeats):
                names = list(contenders)
                for contender in names[number % len(names) :] + names[: number % len(names)]:
                    start = time.monotonic()
                    written = contenders[contender]()
                    seconds = time.monotonic() - start
                    assert [len(written[i]) for i in range(len(prompts))] == lengths, f"{contender} wrote other lengths"
                    sample = {"model": name, "workload": workload, "round": number, "contender": contender}
                    result["samples"].append({**sample, "seconds": seconds, "tokens": sum(lengths)})
                    print(f"{name}  {workload}  round {number}  {contender}: {seconds:.2f} s", file=sys.stderr)
    return result


def make_prompts(count: int) -> list[np.ndarray]:
    """Of the scoring trace's lengths, at most 64 tokens."""
    generator = np.random.default_rng(SEED + 3)
    return [generator.integers(3, VOCAB_SIZE, min(n, LONGEST_PROMPT)) for n in trace_lengths(count)]


def response_lengths(workload: str, count: int, longest: int) -> list[int]:
    """`equal`: all as long as they may be; `varied`: the scoring trace's lengths (log-normal), with its longest row cut
    to a quarter more than `longest`, so that some responses are cut off, as in a run."""
    if workload == "equal":
        return [longest] * count
    drawn = trace_lengths(2 * count)[count:] / trace_lengths(2 * count)[count:].max()
    return np.clip(np.rint(drawn * longest * 1.25), 1, longest).astype(int).tolist()


def make_model(name: str) -> Any:
    """A causal LM of that size with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from python_backend.modeling import quiet_transformers

    quiet_transformers()
    size = SIZES[name]
    heads = max(1, size.width // 64)
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=size.width, intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=1024, pad_token_id=2, bos_token_id=0, eos_token_id=1, initializer_range=0.1,
    )).eval()  # fmt: skip


def contenders_of(
    model: Any, prompts: list[np.ndarray], lengths: list[int], arguments: argparse.Namespace
) -> dict[str, Contender]:
    """Each writes `lengths[i]` tokens for prompt i, drawn at temperature 1."""
    found: dict[str, Contender] = {PLAIN: lambda: plain(model, prompts, lengths)}
    if arguments.continuous:
        found["continuous"] = lambda: continuous(model, prompts, lengths)
    for slots in map(int, arguments.slots.split(",")):
        found[f"slots-{slots}"] = lambda slots=slots: ours(model, prompts, lengths, slots)  # type: ignore[misc]
    return found


def ours(model: Any, prompts: list[np.ndarray], lengths: list[int], slots: int) -> dict[int, list[int]]:
    """Our own decoding."""
    import torch

    from actor.decoding import Decoder, Rules

    class GivenLengths(Decoder):
        def _ends_by_itself(self, row: Any) -> bool:
            return bool(row.written >= lengths[row.index])

    written: dict[int, list[int]] = {}
    longest = max(lengths)
    draws = torch.rand(len(prompts), longest, dtype=torch.float64)
    GivenLengths(model, Rules(longest, [], [0, 1, 2]), slots=slots).run(
        prompts, draws, lambda index, response: written.update({index: response.tokens})
    )
    return written


def plain(model: Any, prompts: list[np.ndarray], lengths: list[int]) -> dict[int, list[int]]:
    """One call of `generate` for all prompts."""
    import torch
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    width = max(map(len, prompts))
    goals = torch.tensor(lengths)

    class GivenLengths(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return input_ids.shape[1] - width >= goals

    ids, attention = padded_left(prompts)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=1, pad_token_id=2, suppress_tokens=[0, 1, 2]
    )
    stops = StoppingCriteriaList([GivenLengths()])
    output = model.generate(ids, attention_mask=attention, generation_config=config, stopping_criteria=stops)
    return {i: row[width : width + n].tolist() for i, (row, n) in enumerate(zip(output, lengths, strict=True))}


def continuous(model: Any, prompts: list[np.ndarray], lengths: list[int]) -> dict[int, list[int]]:
    """transformers' continuous batching, each request with its own length."""
    from transformers import GenerationConfig

    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=2)
    written: dict[int, list[int]] = {}
    with model.continuous_batching_context_manager(generation_config=config, block=True, timeout=5) as manager:
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(prompt.tolist(), request_id=str(i), max_new_tokens=length)
        while len(written) < len(prompts):
            answer = manager.get_result(timeout=1)
            if answer is not None and answer.is_finished():
                written[int(answer.request_id)] = answer.generated_tokens
    return written


def identical(model: Any, prompts: list[np.ndarray], arguments: argparse.Namespace) -> float:
    """Share of prompts to which both write the same, greedily, to an end of sequence or the longest length."""
    from transformers import GenerationConfig

    from actor.decoding import Decoder, Rules

    written: dict[int, list[int]] = {}
    slots = int(arguments.slots.split(",")[0])
    Decoder(model, Rules(arguments.longest, [1], [0, 2]), slots=slots).run(
        prompts, None, lambda index, response: written.update({index: response.tokens})
    )
    ids, attention = padded_left(prompts)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=arguments.longest, eos_token_id=1, pad_token_id=2, suppress_tokens=[0, 2]
    )
    output = model.generate(ids, attention_mask=attention, generation_config=config)[:, ids.shape[1] :]
    return statistics.fmean(row[: len(written[i])].tolist() == written[i] for i, row in enumerate(output))


def padded_left(prompts: list[np.ndarray]) -> tuple[Any, Any]:
    """`input_ids` and `attention_mask` `[N, longest]`."""
    import torch

    width = max(map(len, prompts))
    ids, attention = torch.full((len(prompts), width), 2), torch.zeros(len(prompts), width, dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.from_numpy(prompt)
        attention[i, width - len(prompt) :] = 1
    return ids, attention


def report(result: dict[str, Any]) -> str:
    """Tokens/s, and how many times as fast as one plain call, of each contender."""
    lines = []
    for model, share in result["greedy_identical"].items():
        for workload, bar in BARS.items():
            samples = [s for s in result["samples"] if (s["model"], s["workload"]) == (model, workload)]
            names = list(dict.fromkeys(sample["contender"] for sample in samples))
            lines.append(f"{model}, {workload}, {samples[0]['tokens']} tokens:  tokens/s  x {PLAIN}")
            for name in names:
                seconds = statistics.median(s["seconds"] for s in samples if s["contender"] == name)
                times = speedup(samples, name)
                lines.append(f"  {name:<24}{samples[0]['tokens'] / seconds:>10,.0f}{times:>9.2f}")
            best = max(speedup(samples, name) for name in names if name.startswith("slots"))
            lines.append(f"  {'PASS' if best >= bar else 'MISS'}: {best:.2f} x, must be >= {bar:g}")
        lines.append(f"  {'PASS' if share == 1 else 'MISS'}: {share:.0%} of the greedy responses are identical")
    return "\n".join(lines)


def speedup(samples: Sequence[dict[str, Any]], name: str) -> float:
    """Median over the rounds of the plain call's seconds by those of `name`."""
    seconds = {(sample["contender"], sample["round"]): sample["seconds"] for sample in samples}
    rounds = {sample["round"] for sample in samples}
    return statistics.median(seconds[PLAIN, number] / seconds[name, number] for number in rounds)


if __name__ == "__main__":
    sys.exit(main())
