"""Trains the reward model of `make demo-llm`: a pretrained sentence encoder with a Bradley-Terry head."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from examples.demo.models import save_checkpoint, stepper, train_on_pairs

# The encoder scores only the reply; without a template, a chat prompt would be an error.
REPLY_TEMPLATE = "{{ messages[-1]['content'] }}"


BATCH = 64
BODY_LR, HEAD_LR = 2e-4, 1e-3
FROZEN_LAYERS = 2  # the lowest; the embeddings are frozen, too


def load_encoder(folder: Path) -> BertForSequenceClassification:
    """Return the encoder with a head of one output, whose weights are zero, and without dropout."""
    model = BertForSequenceClassification.from_pretrained(
        folder, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, local_files_only=True
    )
    torch.nn.init.zeros_(model.classifier.weight)
    return model


def train_reward(
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    gold: Sequence[float],
    *,
    epochs: int,
    seed: int,
    log: Callable[[str], None],
) -> None:
    """Train `model` in place on `gold`, one score per text; see `train_on_pairs`."""
    frozen = [model.bert.embeddings, *model.bert.encoder.layer[:FROZEN_LAYERS]]
    for module in frozen:
        module.requires_grad_(False)
    body = [p for p in model.bert.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": body, "lr": BODY_LR},
        {"params": list(model.classifier.parameters()), "lr": HEAD_LR},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    train_on_pairs(
        lambda batch: _scores(model, tokenizer, [texts[i] for i in batch]),
        gold,
        lambda num_steps: stepper(model, [optimizer], max(1, num_steps // 10), num_steps),
        epochs=epochs,
        batch_size=BATCH,
        seed=seed,
        log=log,
    )


@torch.no_grad()
def score_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tensor:
    """Return rewards [N] of the texts, tokenised with the special tokens of the encoder."""
    return torch.cat([_scores(model, tokenizer, texts[i : i + 64]) for i in range(0, len(texts), 64)])


def _scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Tensor:
    rows = tokenizer(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
    return model(**rows).logits[:, 0].float()


def save_reward(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, mean: float, std: float
) -> None:
    """Write an ordinary Hugging Face folder whose config has the scores' mean and standard deviation."""
    model.config.reward_standardization = {"mean": mean, "std": std}
    tokenizer.chat_template = REPLY_TEMPLATE
    save_checkpoint(model, tokenizer, folder)
