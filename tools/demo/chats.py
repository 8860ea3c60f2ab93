"""Chat prompts of `make demo-llm`: everyday topics in a few phrasings; the held-out prompts have other topics."""

from collections.abc import Iterator, Sequence
from typing import Any

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
    "the morning bus", "a broken umbrella", "your neighbour's garden", "the new bakery", "a long winter",
    "the school concert", "a lost wallet", "the old bridge", "moving house", "a noisy restaurant",
    "the village market", "a leaking roof", "your first bicycle", "the night train", "a job interview",
    "the public library", "a flat tyre", "an evening by the river", "the city in August", "a burnt dinner",
    "your grandmother's kitchen", "the dentist", "a power cut", "the football match", "a letter from abroad",
    "the hotel lobby", "a stray dog", "learning the violin", "the tax office", "a walk in the fog",
    "the office printer", "a cancelled flight", "the swimming pool", "an empty theatre", "a birthday cake",
    "the hospital corridor", "a storm at sea", "the museum shop", "a cheap apartment", "the last day of school",
    "mushroom soup", "a forgotten password", "the mountain hut", "an argument with a colleague", "a used car",
    "the harbour at dawn", "a funeral in the rain", "the zoo", "an old photograph", "a slow computer",
    "the wedding of a cousin", "a cold shower", "the street musician", "a mistake at work", "the apple harvest",
    "a crowded beach", "the lighthouse", "a sleepless night", "the chess club", "a broken promise",
    "the first snow", "a traffic jam", "the hardware store", "a visit to the castle",
)  # fmt: skip
HELD_OUT_TOPICS = (
    "the airport", "a torn coat", "your desk", "the flower stall", "a heat wave",
    "the choir", "a stolen phone", "the canal", "a garden fence", "an overpriced café",
    "the flea market", "a flooded cellar", "your old teacher", "the ferry", "a driving test",
    "the post office", "a missed appointment", "a picnic in the park", "the suburbs", "a stale sandwich",
    "your aunt's piano", "a toothache", "a thunderstorm", "the marathon", "a postcard",
    "the waiting room", "the neighbour's cat", "painting a wall", "a parking fine", "a hike through the forest",
    "the vending machine", "a delayed parcel", "the skating rink", "a deserted street", "a surprise party",
    "the pharmacy", "a shipwreck", "the art gallery", "a shared flat", "the summer holidays",
    "pumpkin bread", "a wrong number", "the campsite", "a quarrel between brothers", "a wooden boat",
    "the sunrise", "a hard goodbye", "the aquarium", "a box of old toys", "a software update",
)  # fmt: skip


def chats(topics: Sequence[str], name: str) -> Iterator[dict[str, Any]]:
    """Yield a row of prompts.jsonl for each topic in each phrasing; consecutive prompts have different topics."""
    texts = [phrasing.format(topic) for phrasing in PHRASINGS for topic in topics]
    for number, text in enumerate(texts):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        yield {"messages": messages, "prompt_id": f"{name}-{number:05d}"}
