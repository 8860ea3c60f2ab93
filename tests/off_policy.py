"""Trains a tiny policy on sums, up to K steps ahead and with each correction, and prints a table of its accuracies.

`.venv/bin/python tests/off_policy.py DIR` (about a minute a run; DIR keeps what is done). docs/benchmarks.md quotes it.
"""

import argparse
import json
import random
import statistics
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import rlhf_triton as rt

CHARACTERS = ["<pad>", "</s>", *"0123456789+="]
EOS = 1
HELD_OUT = 512
START_ACCURACY = 0.37  # of the policy before it is trained with rewards
STEPS = 200
SETTINGS = {
    "actor.rollout_size": 64,
    "actor.update.minibatch_size": 64,
    "actor.generation.batch_size": 64,
    "actor.generation.max_new_tokens": 4,
    "actor.validation.size": HELD_OUT,
    "actor.optimizer.lr": 5e-5,
    "actor.kl.coef": 0.0,
    "actor.threads": 1,
}
GRPO = {"name": "grpo", "responses_per_prompt": 8, "mask_unfinished": False}
CORRECTIONS = {
    "sampled log-probs": {"old_logprobs": "sampler"},
    "clip (TIS)": {"correction": {"mode": "clip", "low": 0.0, "high": 2.0}},
    "mask (IcePop)": {"correction": {"mode": "mask", "low": 0.5, "high": 5.0}},
    "binary KL": {"correction": {"mode": "binary_kl", "high": 0.05}},
    "none": {"correction": {"mode": "none"}},
}


def right_answer(sample):
    """Return 1.0 for the sum, else 0.0."""
    return float((sample.response or "").strip() == sample.metadata["answer"])


def sums():
    """Return the training rows and the held-out rows."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(0).shuffle(rows)
    return rows[HELD_OUT:], rows[:HELD_OUT]


def save_policy(folder, rows, held_out):
    """Pretrain a policy until it samples START_ACCURACY of the held-out answers."""
    tokenizer = Tokenizer(WordLevel({character: i for i, character in enumerate(CHARACTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
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
    accuracy = 0.0
    step = 0
    while accuracy < START_ACCURACY:
        batch = draw.sample(rows, 128)
        texts = [fast(row["prompt"] + row["answer"])["input_ids"] + [EOS] for row in batch]
        width = max(map(len, texts))
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 20 == 0:
            accuracy = sampled_accuracy(model, fast, held_out)
            print(f"pretraining, step {step}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def sampled_accuracy(model, fast, rows):
    """Return the share of rows whose sampled response is the answer."""
    right = 0
    for length in {len(row["prompt"]) for row in rows}:
        chosen = [row for row in rows if len(row["prompt"]) == length]
        prompts = torch.tensor([fast(row["prompt"])["input_ids"] for row in chosen])
        found = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4, do_sample=True)
        for row, tokens in zip(chosen, found[:, length:], strict=True):
            right += fast.decode(tokens, skip_special_tokens=True) == row["answer"]
    return right / len(rows)


def accuracy(folder, steps_ahead, correction, seed, rows, held_out):
    """Train one run, unless its result is there; return the validation's accuracy after its last step."""
    result = folder / "results" / f"{steps_ahead} {correction} {seed}.json"
    if not result.is_file():
        run = rt.train(
            str(folder / "policy"),
            prompts=rows,
            validation=held_out,
            reward=right_answer,
            algorithm={**GRPO, **CORRECTIONS.get(correction, {})},
            steps=STEPS,
            dir=str(folder / "runs" / result.stem.replace(" ", "-")),
            **{**SETTINGS, "run.seed": seed, "actor.max_off_policy_steps": steps_ahead},
        )
        result.parent.mkdir(exist_ok=True)
        result.write_text(json.dumps([json.loads(line) for line in (run.path / "validations.jsonl").open()]))
    return json.loads(result.read_text())[-1]["reward"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--steps-ahead", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    rows, held_out = sums()
    if not (options.dir / "policy" / "config.json").is_file():
        save_policy(options.dir / "policy", rows, held_out)
    cells = [(0, ""), *((k, correction) for k in options.steps_ahead for correction in CORRECTIONS)]
    for steps_ahead, correction in cells:
        found = [accuracy(options.dir, steps_ahead, correction, seed, rows, held_out) for seed in options.seeds]
        print(
            steps_ahead,
            correction,
            *(f"{value:.3f}" for value in found),
            f"mean {statistics.mean(found):.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
