"""Trains the demos' models: tokenizer, language model, reward models and the initial critic.

Ordinary Hugging Face models in fp32 on the CPU; equal seeds give bit-identical models. A `Recipe` holds the amounts.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

PAD = 0
EOS = 1
# Pairs whose gold scores differ by at most this are ties, which are not trained on: most sentences are neutral.
PAIR_MARGIN = 0.05
LOG_EVERY_S = 3.0
BATCH = 64
# Learning rates, found by trial on the demos' texts. Muon trains the 2-D layer weights, AdamW the rest.
LM_MUON_LR = 0.03
LM_ADAMW_LR = 5e-3
REWARD_MUON_LR = 0.01
REWARD_ADAMW_LR = 1e-3
ENCODER_LR = 2e-4
ENCODER_HEAD_LR = 1e-3
FROZEN_LAYERS = 2  # the encoder's lowest; its embeddings are frozen, too
VOCAB_SIZE = 2048
TokenRows = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Amounts of `make demo`."""

    max_sentences: int | None = None
    every_nth_source: int = 1
    """Read every n-th file of the standard library; parsing all of them (1) takes 5 s."""
    epochs: int = 2
    num_samples: int = 4096
    """Continuations of the language model among the reward model's training texts."""
    num_standardization: int = 512
    """Samples of the initial policy whose rewards determine the standardization constants."""


FULL = Recipe()
QUICK = Recipe(max_sentences=1200, every_nth_source=3, epochs=1, num_samples=256, num_standardization=128)


def train_tokenizer(sentences: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: `<pad>` 0, `</s>` 1, no BOS; it adds no special tokens on its own."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "</s>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def train_language_model(rows: TokenRows, *, epochs: int, seed: int) -> LlamaForCausalLM:
    """Return a causal model of a million parameters trained on `rows`; each row's last token should be EOS."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=336,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    _train(
        "language model",
        model,
        _optimizers(model, LM_MUON_LR, LM_ADAMW_LR),
        [batch for _ in range(epochs) for batch in _bucketed(rows, generator)],
        lambda batch: _next_token_losses(model, [rows[i] for i in batch]).mean(),
    )
    return model.eval()


def sample(model: LlamaForCausalLM, prompts: TokenRows, *, new_tokens: int, seed: int) -> list[list[int]]:
    """Return each prompt with its continuation at temperature 1, up to and including EOS; PAD is never sampled.

    All prompts must have the same length, so that no row needs padding.
    """
    rows: list[list[int]] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for batch in torch.tensor(prompts).split(512):
            mask = torch.ones_like(batch)
            tokens = model.generate(
                batch, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=new_tokens, suppress_tokens=[PAD]
            )
            rows += [[t for t in row if t != PAD] for row in tokens.tolist()]
    return rows


def train_reward_model(
    policy: Path, rows: TokenRows, gold: Sequence[float], *, epochs: int, seed: int
) -> PreTrainedModel:
    """Return a Bradley-Terry reward model that starts from the language model in `policy`; see `_train_on_pairs`."""
    model = _with_zero_head(AutoModelForSequenceClassification, policy)
    optimizers = _optimizers(model, REWARD_MUON_LR, REWARD_ADAMW_LR)
    _train_on_pairs(model, optimizers, rows, gold, epochs=epochs, seed=seed)
    return model.eval()


def train_encoder(folder: Path, rows: TokenRows, gold: Sequence[float], *, epochs: int, seed: int) -> PreTrainedModel:
    """Return a Bradley-Terry reward model that starts from the pretrained BERT in `folder`; see `_train_on_pairs`."""
    model = BertForSequenceClassification.from_pretrained(
        folder, num_labels=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, local_files_only=True
    )
    torch.nn.init.zeros_(model.classifier.weight)
    for module in (model.bert.embeddings, *model.bert.encoder.layer[:FROZEN_LAYERS]):
        module.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.bert.parameters() if p.requires_grad], "lr": ENCODER_LR},
        {"params": list(model.classifier.parameters()), "lr": ENCODER_HEAD_LR},
    ]
    optimizers = [torch.optim.AdamW(groups, weight_decay=0.01)]
    _train_on_pairs(model, optimizers, rows, gold, epochs=epochs, seed=seed)
    return model


@torch.no_grad()
def score_rows(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    """Return a reward model's rewards [N] of rows of tokens, fp32."""
    return torch.cat([_rewards(model, rows[i : i + 128]) for i in range(0, len(rows), 128)])


def pair_accuracy(rewards: Tensor, gold: Sequence[float]) -> float:
    """Return the share of pairs with gold_i - gold_j > `PAIR_MARGIN` for which `rewards` [N] has r_i > r_j."""
    targets = torch.tensor(gold)
    better = targets[:, None] - targets[None, :] > PAIR_MARGIN
    return (rewards[:, None] > rewards[None, :])[better].float().mean().item()


def save_reward(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, rewards: Tensor) -> None:
    """Write a folder whose config has the mean and standard deviation of `rewards`, by which the server divides."""
    model.config.reward_standardization = {"mean": rewards.mean().item(), "std": rewards.std().item()}
    save_checkpoint(model, tokenizer, folder)


def save_critic(policy: Path, folder: Path, **settings: Any) -> None:
    """Write a critic that has the policy's body, with these `settings` in its config, and whose values are all 0."""
    critic = _with_zero_head(AutoModelForTokenClassification, policy, **settings)
    save_checkpoint(critic, AutoTokenizer.from_pretrained(policy), folder)


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write an ordinary Hugging Face folder: safetensors, config.json and the tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _with_zero_head(kind: Any, policy: Path, **settings: Any) -> Any:
    """Return a language model's body under a head of one output, which is zero; `kind`: an Auto class."""
    config = AutoConfig.from_pretrained(policy, num_labels=1, tie_word_embeddings=False, **settings)
    config.classifier_dropout = 0.0  # the default is 0.1
    model = kind.from_pretrained(policy, config=config, dtype=torch.float32)
    for parameter in model.score.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def _train(
    name: str,
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[list[int]],
    loss_of: Callable[[list[int]], Tensor],
) -> None:
    """Train a model in place, one update for each batch of indices, with the gradient norm clipped to 1.

    The learning rate warms up over a tenth of the updates, then follows a cosine to 0. Every few seconds, and after the
    last update, a line is logged: name, percent, loss, elapsed and remaining seconds.
    """
    total = len(batches)
    schedules = [get_cosine_schedule_with_warmup(optimizer, total // 10, total) for optimizer in optimizers]
    start = shown = time.monotonic()
    for done, batch in enumerate(batches, start=1):
        loss = loss_of(batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        now = time.monotonic()
        if now - shown >= LOG_EVERY_S or done == total:
            shown = now
            share = done / total
            seconds = now - start
            to_go = f"{seconds / share - seconds:.0f} s to go"
            print(f"{name}: {share:4.0%}  loss {loss.item():.3f}  {seconds:.0f} s, {to_go}")


def _train_on_pairs(
    model: PreTrainedModel,
    optimizers: Sequence[torch.optim.Optimizer],
    rows: TokenRows,
    gold: Sequence[float],
    *,
    epochs: int,
    seed: int,
) -> None:
    """Train a Bradley-Terry reward model in place on rows of tokens with one gold score each.

    The loss is -log sigmoid(r_i - r_j), averaged over all in-batch pairs with gold_i - gold_j > `PAIR_MARGIN`.
    """
    generator = torch.Generator().manual_seed(seed)
    targets = torch.tensor(gold)
    orders = [torch.randperm(len(gold), generator=generator) for _ in range(epochs)]

    def loss_of(batch: list[int]) -> Tensor:
        better = targets[batch][:, None] - targets[batch][None, :] > PAIR_MARGIN
        rewards = _rewards(model, [rows[i] for i in batch])
        losses = F.softplus(rewards[None, :] - rewards[:, None])[better]
        return losses.sum() / max(1, losses.numel())

    batches = [batch.tolist() for order in orders for batch in order.split(BATCH)]
    _train("reward model", model, optimizers, batches, loss_of)


def _bucketed(rows: TokenRows, generator: torch.Generator) -> list[list[int]]:
    """Return one epoch of batches of row indices in random order; a batch has rows of similar length."""
    order = torch.randperm(len(rows), generator=generator).tolist()
    window = 32 * BATCH
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        near = sorted(order[start : start + window], key=lambda i: len(rows[i]))
        batches += [near[i : i + BATCH] for i in range(0, len(near), BATCH)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _next_token_losses(model: LlamaForCausalLM, rows: TokenRows) -> Tensor:
    """Return the negative log-likelihoods of all tokens except each row's first, as one flat vector."""
    tokens = _padded(rows)  # on the right: in a causal model no real token sees the padding
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    real = tokens[:, 1:] != PAD
    # Drop the padding before the LM head: the logits are as wide as the vocabulary.
    return F.cross_entropy(model.lm_head(hidden[:, :-1][real]), tokens[:, 1:][real], reduction="none")


def _rewards(model: PreTrainedModel, rows: TokenRows) -> Tensor:
    """Return rewards [B]; a causal model's is the head's output at each row's last token."""
    tokens = _padded(rows)
    return model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[:, 0].float()


def _padded(rows: TokenRows) -> Tensor:
    """Return tokens [B, S]; `PAD` is also the padding id of the pretrained encoder."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


def _optimizers(model: PreTrainedModel, muon_lr: float, adamw_lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    matrix_ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in matrix_ids]
    return [_Muon(matrices, lr=muon_lr), torch.optim.AdamW(others, lr=adamw_lr, fused=True)]


class _Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` (https://kellerjordan.github.io/posts/muon) in fp32, with matrices of equal shape batched.

    The original works in bfloat16, one matrix at a time, which is ten times slower on a CPU without bfloat16 units.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        group = self.param_groups[0]
        shapes = sorted({tuple(p.shape) for p in group["params"]})
        for rows, columns in shapes:
            params = [p for p in group["params"] if p.shape == (rows, columns)]
            gradient = torch.stack([p.grad for p in params])
            state = self.state[params[0]]
            average = state.setdefault("momentum", torch.zeros_like(gradient))
            average.lerp_(gradient, 1 - group["momentum"])
            update = _orthogonalized(gradient.lerp(average, group["momentum"]))
            for param, direction in zip(params, update, strict=True):
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(direction, alpha=group["lr"] * math.sqrt(max(1.0, rows / columns)))


def _orthogonalized(matrices: Tensor) -> Tensor:
    """Return the matrices [N, R, C] with all singular values near 1, by five Newton-Schulz steps."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT.contiguous() if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):  # coefficients of the Muon post: a quintic polynomial that converges fast, but only roughly
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x
