"""Trains the reward model of `make demo-llm`: a pretrained sentence encoder with a Bradley-Terry head."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from tools.demo.models import PreparationProgress, save_checkpoint

# The encoder scores only the reply; without a template, a chat prompt would be an error.
REPLY_TEMPLATE = "{{ messages[-1]['content'] }}"


@dataclass(frozen=True, kw_only=True)
class RewardRecipe:
    """Batch size, learning rates and frozen layers of the reward model's training."""

    epochs: int = 4
    batch: int = 64
    lr: float = 2e-4
    head_lr: float = 1e-3
    frozen_layers: int = 2
    """Number of lowest layers that are frozen; the embeddings are frozen too."""
    pair_margin: float = 0.05
    """Pairs whose gold scores differ by at most this are ties, which are not trained on."""


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
    recipe: RewardRecipe,
    *,
    seed: int,
    log: Callable[[str], None],
) -> None:
    """Train `model` in place; the loss is the mean -log sigmoid(r_i - r_j) over in-batch pairs that are not ties."""
    frozen = [model.bert.embeddings, *model.bert.encoder.layer[: recipe.frozen_layers]]
    for module in frozen:
        module.requires_grad_(False)
    body = [p for p in model.bert.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": body, "lr": recipe.lr},
        {"params": list(model.classifier.parameters()), "lr": recipe.head_lr},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(texts), generator=generator) for _ in range(recipe.epochs)]
    batches = [batch for order in orders for batch in order.split(recipe.batch)]
    warmup = max(1, len(batches) // 10)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * step / len(batches)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    targets, progress = torch.tensor(gold), PreparationProgress("reward model", len(batches), log)
    for batch in batches:
        better = targets[batch][:, None] - targets[batch][None, :] > recipe.pair_margin
        rewards = _scores(model, tokenizer, [texts[i] for i in batch.tolist()])
        loss = F.softplus(rewards[None, :] - rewards[:, None])[better].sum() / better.sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress.show(loss)


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
