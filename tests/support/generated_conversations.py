"""Conversations of a policy with random weights: tokenizer, prompts, and the rows that it generates."""

import string

import numpy as np
import torch
from messages import user
from random_models import random_llama
from run_checkpoints import TEXTS
from settings import actor_section
from tiny_tokenizers import make_text_tokenizer

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.generation.engine import LocalGeneration

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(content="{{ m.content }}", template=CHATML):
    """Return a tokenizer whose chat template writes `content` for a message's content."""
    made = template.replace("{{ m.content }}", content)
    return make_text_tokenizer("qwen2", [*TEXTS, string.printable], chat_template=made, model_max_length=512)


TOKENIZER = tokenizer_of()
EOS = TOKENIZER.eos_token_id
BANNED = [token for token in TOKENIZER.all_special_ids if token != EOS]


def sampled_of(row):
    return row.tokens[row.sampled].tolist()


def random_policy(bias):
    """Return a policy with random weights and a bias for the end-of-reply token."""
    made = random_llama("policy", seed=1, vocab_size=160, max_position_embeddings=512, initializer_range=0.3).eval()
    added = bias * torch.nn.functional.one_hot(torch.tensor(EOS), 160)
    made.lm_head.register_forward_hook(lambda _, __, logits: logits + added)
    return made


def prompts_of(count):
    said = [user("Play." * (i % 3)) for i in range(count)]
    return [Prompt(str(i), "", np.array([5]), {"messages": [said[i]], "turns": 1 + i % 4}) for i in range(count)]


def generated_rows(model, agent, prompts, uses_slots=None, **settings):
    """Return the rows of one conversation per prompt."""
    given = {"max_new_tokens": 8, "generation_batch_size": 3, **settings}
    engine = LocalGeneration(
        model, TOKENIZER, actor_section(**given).generation, eos_ids=[EOS], pad_id=0, banned_ids=BANNED
    )
    engine.uses_slots = uses_slots
    engine.runner = agent
    found = {}
    engine.run_rows(dict(enumerate(prompts)), lambda i, rows: found.update({i: rows}), seed=3)
    return [found[i] for i in range(len(prompts))]
