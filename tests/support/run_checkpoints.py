"""Checkpoints and prompts of a run: random Llamas, and a tokenizer that is learned from a few sentences."""

import dataclasses
from pathlib import Path

from random_models import random_llama
from tiny_checkpoints import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_triton.store.jsonl import write_jsonl

POSITIONS = 128
TEXTS = (
    "Return the number of items in the list.",
    "The parser reads a line and returns its words.",
    "A lovely evening by the sea makes everyone happy.",
    "Errors are terrible when no message explains them.",
    "Open the file, read it, and close it again.",
    "Good friends laugh together on a warm day.",
    "This method raises an exception if the key is missing.",
    "Bad weather ruined the sad little picnic.",
)
OTHER_TEXTS = (
    "zebra quartz jumped over vexing fjords; nymphs sphinx black waltz",
    "0123456789 +-*/ () [] {} <> == != and or not if else while for in",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'stranger' %}{{ raise_exception('a stranger cannot speak') }}"
    "{% endif %}{{ message.role[0] }} {{ message.content }}</s>{% endfor %}"
)


def make_tokenizer(texts=TEXTS, vocab_size=200, *, adds_bos=False):
    """Return a byte-pair tokenizer learned from `texts`; the ids of bos, eos and pad are 0, 1 and 2."""
    alphabet = sorted({letter for text in texts for letter in text.replace(" ", "Ġ")})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=POSITIONS,
        chat_template=CHAT_TEMPLATE,
    )


def save_policy(folder, family="llama", *, chat_template=CHAT_TEMPLATE, **settings):
    """Save a random language model of `family`, of a few thousand weights, with that tokenizer; return the folder."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 2, "eos_token_id": 1}
    save_tiny(folder, family, "language", **{**sizes, **settings})
    tokenizer.save_pretrained(folder)
    return folder


def make_checkpoint(folder, kind, tokenizer, *, seed):
    """Write a random Llama, `kind` reward, critic or policy. Weights that score are large, so that rows differ."""
    settings = {"initializer_range": 0.02 if kind == "policy" else 0.25}
    if kind == "reward":
        settings["reward_standardization"] = {"mean": 0.25, "std": 2.0}
    model = random_llama(kind, seed=seed, vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, **settings)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Paths of the checkpoints; `other_reward` has a vocabulary of its own, and its tokenizer adds BOS."""

    reward: Path
    critic: Path
    policy: Path
    other_reward: Path
    other_policy: Path
    prompts: Path


def make_checkpoints(folder):
    """Write all the checkpoints and prompts that a run needs."""
    ours = make_tokenizer()
    theirs = make_tokenizer(TEXTS + OTHER_TEXTS, vocab_size=160, adds_bos=True)
    prompts = folder / "prompts.jsonl"
    write_jsonl(prompts, ({"text": " ".join(text.split()[:3])} for text in TEXTS))
    return Checkpoints(
        make_checkpoint(folder / "reward", "reward", ours, seed=1),
        make_checkpoint(folder / "critic", "critic", ours, seed=2),
        make_checkpoint(folder / "policy", "policy", ours, seed=3),
        make_checkpoint(folder / "other-reward", "reward", theirs, seed=4),
        make_checkpoint(folder / "other-policy", "policy", theirs, seed=5),
        prompts,
    )
