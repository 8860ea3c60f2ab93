"""Prepares `make demo-llm`: pretrained SmolLM2 and MiniLM, chat prompts, and a reward model trained to rank like VADER.

Each seed has its own folder; the pretrained models are in one folder beside them, which all seeds share.
"""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.gold import gold_scorer
from examples.demo.pretrained import PRETRAINED, Built, Log, build_once, build_pretrained, code_fingerprint
from rlhf_triton.store.jsonl import write_jsonl

# Chat prompts of `make demo-llm`: everyday topics in a few phrasings; the held-out prompts have other topics.


SYSTEM = "Reply in one short sentence."
PHRASINGS = (
    "Write one sentence about {}.",
    "What do you think of {}?",
    "Write a line of your diary about {}.",
    "Tell a friend about {}.",
    "Describe {}.",
    "How do you feel about {}?",
)
# Pleasant, unpleasant and neutral topics, so that the score also varies with the prompt.
TRAINING_TOPICS = (
    "the morning bus",
    "a broken umbrella",
    "your neighbour's garden",
    "the new bakery",
    "a long winter",
    "the school concert",
    "a lost wallet",
    "the old bridge",
    "moving house",
    "a noisy restaurant",
    "the village market",
    "a leaking roof",
    "your first bicycle",
    "the night train",
    "a job interview",
    "the public library",
    "a flat tyre",
    "an evening by the river",
    "the city in August",
    "a burnt dinner",
    "your grandmother's kitchen",
    "the dentist",
    "a power cut",
    "the football match",
    "a letter from abroad",
    "the hotel lobby",
    "a stray dog",
    "learning the violin",
    "the tax office",
    "a walk in the fog",
    "the office printer",
    "a cancelled flight",
    "the swimming pool",
    "an empty theatre",
    "a birthday cake",
    "the hospital corridor",
    "a storm at sea",
    "the museum shop",
    "a cheap apartment",
    "the last day of school",
    "mushroom soup",
    "a forgotten password",
    "the mountain hut",
    "an argument with a colleague",
    "a used car",
    "the harbour at dawn",
    "a funeral in the rain",
    "the zoo",
    "an old photograph",
    "a slow computer",
    "the wedding of a cousin",
    "a cold shower",
    "the street musician",
    "a mistake at work",
    "the apple harvest",
    "a crowded beach",
    "the lighthouse",
    "a sleepless night",
    "the chess club",
    "a broken promise",
    "the first snow",
    "a traffic jam",
    "the hardware store",
    "a visit to the castle",
)
HELD_OUT_TOPICS = (
    "the airport",
    "a torn coat",
    "your desk",
    "the flower stall",
    "a heat wave",
    "the choir",
    "a stolen phone",
    "the canal",
    "a garden fence",
    "an overpriced café",
    "the flea market",
    "a flooded cellar",
    "your old teacher",
    "the ferry",
    "a driving test",
    "the post office",
    "a missed appointment",
    "a picnic in the park",
    "the suburbs",
    "a stale sandwich",
    "your aunt's piano",
    "a toothache",
    "a thunderstorm",
    "the marathon",
    "a postcard",
    "the waiting room",
    "the neighbour's cat",
    "painting a wall",
    "a parking fine",
    "a hike through the forest",
    "the vending machine",
    "a delayed parcel",
    "the skating rink",
    "a deserted street",
    "a surprise party",
    "the pharmacy",
    "a shipwreck",
    "the art gallery",
    "a shared flat",
    "the summer holidays",
    "pumpkin bread",
    "a wrong number",
    "the campsite",
    "a quarrel between brothers",
    "a wooden boat",
    "the sunrise",
    "a hard goodbye",
    "the aquarium",
    "a box of old toys",
    "a software update",
)


def chats(topics: Sequence[str], name: str) -> Iterator[dict[str, Any]]:
    """Yield a row of prompts.jsonl for each topic in each phrasing; consecutive prompts have different topics."""
    texts = [phrasing.format(topic) for phrasing in PHRASINGS for topic in topics]
    for number, text in enumerate(texts):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        yield {"messages": messages, "prompt_id": f"{name}-{number:05d}"}


# The encoder scores only the reply; without a template, a chat prompt would be an error.
REPLY_TEMPLATE = "{{ messages[-1]['content'] }}"


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
    """Return the folder with `reward` and the prompt files; build it and download what it needs. Raises RlhfError."""
    code = code_fingerprint("torch", "transformers", "tokenizers", "gguf", "vaderSentiment")
    pretrained = build_once(out_dir.with_name(PRETRAINED), code, lambda folder: build_pretrained(folder, log), log)
    recipe = QUICK if quick else FULL
    fingerprint = {"seed": seed, "quick": quick, **code}
    return build_once(out_dir, fingerprint, lambda folder: _build(folder, pretrained.root, recipe, seed, log), log)


def _build(root: Path, pretrained: Path, recipe: LlmRecipe, seed: int, log: Log) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer

    from examples.demo import models as m
    from rlhf_triton.python_backend.models.modeling import quiet_transformers

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
    tokenizer = AutoTokenizer.from_pretrained(pretrained / "encoder")
    rows, unseen_rows = (tokenizer(part, truncation=True, max_length=128)["input_ids"] for part in (texts, unseen))
    log(f"reward model: {len(texts)} texts, ranked by VADER")
    score = gold_scorer()
    gold = [score(text) for text in texts]
    model = m.train_encoder(pretrained / "encoder", rows, gold, epochs=recipe.epochs, seed=seed, log=log)
    accuracy = m.pair_accuracy(m.score_rows(model, unseen_rows), [score(text) for text in unseen])
    log(f"reward model: pairwise accuracy {accuracy:.3f} on unseen topics")
    tokenizer.chat_template = REPLY_TEMPLATE
    constants = m.save_reward(model, tokenizer, root / "reward", m.score_rows(model, rows))
    seconds = time.monotonic() - start
    log(f"prepared in {seconds:.0f} s")
    return {"pair_accuracy": accuracy, "num_texts": len(texts), **constants, "seconds": seconds}


def _sample(policy_folder: Path, prompts_file: Path, number: int, recipe: LlmRecipe, seed: int, log: Log) -> list[str]:
    """Return pieces of replies to `number` prompts; a prompt is repeated only after all others have been used."""
    from rlhf_triton.actor.data.prompt_reader import PromptReader, read_prompts
    from rlhf_triton.actor.policy.policy import Policy
    from rlhf_triton.config import GenerationSection, OptimizerSection, PolicySection, PromptsSection

    generation = GenerationSection(
        max_new_tokens=recipe.new_tokens * recipe.pieces_per_reply,
        temperature=recipe.temperature,
        batch_size=recipe.batch,
    )
    longest = PromptsSection().max_tokens
    settings = PolicySection(model=policy_folder, lora_rank=1)
    longest_row = longest + generation.max_new_tokens, "the prompts of the demo; shorten them"
    policy = Policy(settings, generation, OptimizerSection(), longest_row=longest_row)
    known = read_prompts(prompts_file, PromptReader(policy.tokenizer, longest))
    epochs = range(0, number, len(known))
    prompts = [prompt for epoch in epochs for prompt in random.Random(seed + epoch).sample(known, len(known))][:number]
    texts, start = [], time.monotonic()
    for done in range(0, number, recipe.batch):
        for (sample,) in policy.generate(prompts[done : done + recipe.batch], seed=seed + done):
            texts += _pieces(policy.tokenizer, sample.tokens[sample.sampled].tolist(), recipe.new_tokens)
        share, seconds = min(1.0, (done + recipe.batch) / number), time.monotonic() - start
        log(f"sampling replies: {share:4.0%}  {seconds:.0f} s, {seconds / share - seconds:.0f} s to go")
    return texts


def _pieces(tokenizer: Any, reply: list[int], size: int) -> list[str]:
    """Cut a reply into pieces of `size` tokens and return their texts, without those of three words or fewer."""
    parts = [reply[start : start + size] for start in range(0, len(reply), size)]
    texts = [tokenizer.decode(part, skip_special_tokens=True).strip() for part in parts]
    return [text for text in texts if len(text.split()) > 3]
