"""Benchmark of training on responses of older policies: accuracies with each correction, up to K steps ahead.

A tiny policy is pretrained on sums until it samples a share of the held-out answers; then each run trains it, with the
sums as rewards, and all runs on as many responses. Algorithms with a critic train and serve it beside the policy. The
folder keeps the policy and each run's result: a benchmark that is started again goes on.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

import rlhf_triton as rt
from benchmarks.measuring import Measurement, Record, grouped
from rlhf_triton.store.jsonl import read_jsonl

CHARACTERS = ["<pad>", "</s>", *"0123456789+="]
EOS = 1
HELD_OUT = 512
MAX_PROMPT_TOKENS = 8
MAX_NEW_TOKENS = 4
CHECK_EVERY = 20  # pretraining steps between two measurements of the accuracy
SETTINGS: dict[str, Any] = {
    "actor.rollout_size": 64,
    "actor.update.minibatch_size": 64,
    "actor.generation.batch_size": 64,
    "actor.prompts.max_tokens": MAX_PROMPT_TOKENS,
    "actor.generation.max_new_tokens": MAX_NEW_TOKENS,
    "actor.validation.size": HELD_OUT,
    "actor.optimizer.lr": 5e-5,
    "actor.kl.coef": 0.0,
    "actor.threads": 1,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo", "responses_per_prompt": 8, "mask_unfinished": False},
    "ppo": {"name": "ppo", "mask_unfinished": False},
    "sao": {"name": "sao", "mask_unfinished": False},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "sampled log-probs": {"old_logprobs": "sampler"},
    "clip (TIS)": {"correction": {"mode": "clip", "low": 0.0, "high": 2.0}},
    "mask (IcePop)": {"correction": {"mode": "mask", "low": 0.5, "high": 5.0}},
    "binary KL": {"correction": {"mode": "binary_kl", "high": 0.05}},
    "none": {"correction": {"mode": "none"}},
}
Sums: TypeAlias = Sequence[Mapping[str, str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's options."""
    add = parser.add_argument
    add("--algorithms", nargs="+", choices=ALGORITHMS, default=["grpo"], help="actor.algorithm.name")
    add("--steps-ahead", type=int, nargs="+", default=[1, 2], help="actor.max_off_policy_steps, beside 0")
    add("--corrections", nargs="+", choices=CORRECTIONS, default=[*CORRECTIONS], help="of the policy loss")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run for each")
    add("--steps", type=int, default=200, help="steps of a run")
    add("--start-accuracy", type=float, default=0.37, help="sampled accuracy at which pretraining ends")


def measure(settings: argparse.Namespace, record: Record) -> list[dict[str, Any]]:
    """Train all runs that have no result yet; return a row for each algorithm, number of steps ahead and correction."""
    rows, held_out = sums()
    policy = record.out / "policy"
    if not (policy / "config.json").is_file():
        pretrain(policy, rows, held_out, settings.start_accuracy, record)
    cells = [(0, ""), *((ahead, name) for ahead in settings.steps_ahead for name in settings.corrections)]
    for algorithm in settings.algorithms:
        for steps_ahead, correction in cells:
            for seed in settings.seeds:
                cell = {"algorithm": algorithm, "steps_ahead": steps_ahead, "correction": correction, "seed": seed}
                result = trained(record.out, cell, settings.steps, rows, held_out)
                record.add({**cell, **result})
                record.say(f"{cell}: accuracy {result['before']:.3f} -> {result['after']:.3f}")
    return summary(record.samples)


def summary(samples: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return the accuracies of each cell's seeds, and their mean; and the median duration of a step."""
    return [
        {
            "algorithm": algorithm,
            "steps ahead": steps_ahead,
            "correction": correction,
            **{f"seed {sample['seed']}": sample["after"] for sample in cell},
            "mean": mean(sample["after"] for sample in cell),
            "seconds a step": median(sample["step_s"] for sample in cell),
        }
        for (algorithm, steps_ahead, correction), cell in grouped(
            samples, "algorithm", "steps_ahead", "correction"
        ).items()
    ]


def sums() -> tuple[Sums, Sums]:
    """Return the training rows and the held-out rows."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(0).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def right_answer(sample: rt.Sample) -> float:
    """Return 1.0 for the sum, else 0.0."""
    return float((sample.response or "").strip() == sample.metadata["answer"])


def trained(out: Path, cell: Mapping[str, Any], steps: int, rows: Sums, held_out: Sums) -> dict[str, float]:
    """Train one run, unless its result is there; return its accuracies and the median of its steps' durations."""
    name = " ".join(map(str, cell.values()))
    file = out / "results" / f"{name}.json"
    if not file.is_file():
        run = rt.train(
            str(out / "policy"),
            prompts=rows,
            validation=held_out,
            reward=right_answer,
            algorithm={**ALGORITHMS[cell["algorithm"]], **CORRECTIONS.get(cell["correction"], {})},
            steps=steps,
            dir=str(out / "runs" / name.replace(" ", "-")),
            **{**SETTINGS, "run.seed": cell["seed"], "actor.max_off_policy_steps": cell["steps_ahead"]},
        )
        before, *_, after = read_jsonl(run.path / "validations.jsonl")
        step_s = median(line["timers/step_time"] for line in read_jsonl(run.path / "metrics.jsonl"))
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"before": before["reward"], "after": after["reward"], "step_s": step_s}))
    found: dict[str, float] = json.loads(file.read_text())
    return found


def pretrain(folder: Path, rows: Sums, held_out: Sums, start_accuracy: float, record: Record) -> None:
    """Train a policy by cross-entropy until it samples `start_accuracy` of the held-out answers; save it."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    characters = {character: i for i, character in enumerate(CHARACTERS)}
    fast = Tokenizer(models.WordLevel(characters, unk_token="<pad>"))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = random.Random(1)
    accuracy = -1.0
    step = 0
    while accuracy < start_accuracy:
        batch = draw.sample(rows, 128)
        texts = [tokenizer(row["prompt"] + row["answer"])["input_ids"] + [EOS] for row in batch]
        width = max(map(len, texts))
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % CHECK_EVERY == 0:
            accuracy = sampled_accuracy(model, tokenizer, held_out)
            record.say(f"pretraining, step {step}: loss {loss.item():.3f}, sampled accuracy {accuracy:.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sampled_accuracy(model: Any, tokenizer: Any, rows: Sums) -> float:
    """Return the share of rows whose sampled response is the answer."""
    import torch

    right = 0
    for length in {len(row["prompt"]) for row in rows}:
        chosen = [row for row in rows if len(row["prompt"]) == length]
        prompts = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in chosen])
        found = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=MAX_NEW_TOKENS, do_sample=True
        )
        for row, tokens in zip(chosen, found[:, length:], strict=True):
            right += tokenizer.decode(tokens, skip_special_tokens=True) == row["answer"]
    return right / len(rows)
