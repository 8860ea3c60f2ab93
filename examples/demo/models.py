"""Trains the demo's tokenizer, language model and reward model, and initialises its critic.

Ordinary Hugging Face models in fp32 on the CPU; the same seed gives the same bits. A `Recipe` holds sizes and learning
rates.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from benchmarks.support.random_models import train_bpe

PAD, EOS = 0, 1
# Pairs whose gold scores differ by at most this are ties, which are not trained on: most sentences are neutral.
PAIR_MARGIN = 0.05
LOG_EVERY_S = 3.0
Rows = Sequence[Sequence[int]]
Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and learning rates, found by trial on this corpus. Muon trains the 2-D layer weights, AdamW the rest."""

    max_sentences: int | None = None
    every_nth_source: int = 1
    """Read every n-th file of the standard library; parsing all of them (1) takes 5 s."""
    vocab_size: int = 2048
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    mlp_width: int = 336
    lm_epochs: int = 2
    lm_batch: int = 64
    lm_muon_lr: float = 0.03
    lm_adamw_lr: float = 5e-3
    reward_epochs: int = 2
    reward_batch: int = 64
    reward_muon_lr: float = 0.01
    reward_adamw_lr: float = 1e-3
    num_samples: int = 4096
    """Continuations of the language model among the reward model's training texts."""
    prompt_tokens: int = 6
    new_tokens: int = 24
    num_standardization: int = 512
    """Samples of the initial policy whose rewards determine the standardization constants."""
    warmup_steps: int = 30
    num_threads: int = 2


FULL = Recipe()
QUICK = Recipe(
    max_sentences=1200,
    every_nth_source=3,
    vocab_size=512,
    width=32,
    num_layers=2,
    num_heads=2,
    mlp_width=64,
    lm_epochs=1,
    reward_epochs=1,
    num_samples=256,
    num_standardization=128,
    warmup_steps=5,
    num_threads=1,
)


def train_tokenizer(sentences: Sequence[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer: `<pad>` 0, `</s>` 1, no BOS; it adds no special tokens on its own."""
    return PreTrainedTokenizerFast(
        tokenizer_object=train_bpe(sentences, vocab_size=vocab_size, special=("<pad>", "</s>")),
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def train_language_model(rows: Rows, recipe: Recipe, *, seed: int, log: Log) -> LlamaForCausalLM:
    """Return a causal model trained on `rows`; each row's last token should be EOS."""
    model = _new_language_model(recipe, seed)
    generator = torch.Generator().manual_seed(seed)
    batches = [b for _ in range(recipe.lm_epochs) for b in _bucketed(rows, recipe.lm_batch, generator)]
    optimizers = _optimizers(model, recipe.lm_muon_lr, recipe.lm_adamw_lr)
    step = stepper(model, optimizers, recipe.warmup_steps, len(batches))
    progress = PreparationProgress("language model", len(batches), log)
    for batch in batches:
        loss = _next_token_losses(model, [rows[i] for i in batch]).mean()
        step(loss)
        progress.show(loss)
    return model.eval()


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, rows: Rows) -> float:
    """Return exp(mean negative log-likelihood per token); a row's first token is not predicted."""
    losses = [_next_token_losses(model, rows[i : i + 128]) for i in range(0, len(rows), 128)]
    return math.exp(torch.cat(losses).mean().item())


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, prompts: Rows, *, new_tokens: int, seed: int, batch_size: int = 512
) -> list[list[int]]:
    """Return each prompt with its continuation at temperature 1, up to and including EOS; PAD is never sampled.

    All prompts must have the same length, so that no row needs padding.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        tokens = torch.tensor(prompts[start : start + batch_size])
        ended = torch.zeros(len(tokens), dtype=torch.bool)
        step_input, cache = tokens, None
        for _ in range(new_tokens):
            output = model(input_ids=step_input, past_key_values=cache, use_cache=True)
            logits, cache = output.logits[:, -1].float(), output.past_key_values
            logits[:, PAD] = -math.inf
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            step_input = drawn.masked_fill(ended[:, None], PAD)
            tokens = torch.cat([tokens, step_input], dim=1)
            ended |= step_input[:, 0] == EOS
        rows += [[t for t in row if t != PAD] for row in tokens.tolist()]
    return rows


def train_reward_model(
    language_model: LlamaForCausalLM, rows: Rows, gold: Sequence[float], recipe: Recipe, *, seed: int, log: Log
) -> LlamaForSequenceClassification:
    """Return a Bradley-Terry reward model, initialised with the language model's body and a zero head.

    `gold` has one score per row.
    """
    model = LlamaForSequenceClassification(_single_output_config(language_model))
    model.model.load_state_dict(language_model.model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    optimizers = _optimizers(model, recipe.reward_muon_lr, recipe.reward_adamw_lr)
    train_on_pairs(
        lambda batch: _last_logits(model, [rows[i] for i in batch], chunk=16),
        gold,
        lambda num_steps: stepper(model, optimizers, recipe.warmup_steps, num_steps),
        epochs=recipe.reward_epochs,
        batch_size=recipe.reward_batch,
        seed=seed,
        log=log,
    )
    return model.eval()


def train_on_pairs(
    rewards_of: Callable[[list[int]], Tensor],
    gold: Sequence[float],
    make_step: Callable[[int], Callable[[Tensor], None]],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    log: Log,
) -> None:
    """Train a Bradley-Terry reward model in place.

    The loss is -log sigmoid(r_i - r_j), averaged over all in-batch pairs with gold_i - gold_j > `PAIR_MARGIN`.

    Args:
        rewards_of: returns the rewards [B] of the texts with these indices.
        gold: one score per text.
        make_step: returns the function that does one update with a loss, given the number of updates; see `stepper`.
    """
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(gold), generator=generator) for _ in range(epochs)]
    batches = [batch for order in orders for batch in order.split(batch_size)]
    targets, step = torch.tensor(gold), make_step(len(batches))
    progress = PreparationProgress("reward model", len(batches), log)
    for batch in batches:
        better = targets[batch][:, None] - targets[batch][None, :] > PAIR_MARGIN
        if better.any():
            rewards = rewards_of(batch.tolist())
            loss = F.softplus(rewards[None, :] - rewards[:, None])[better].mean()
            step(loss)
            progress.show(loss)


@torch.no_grad()
def score_rows(model: LlamaForSequenceClassification, rows: Rows) -> Tensor:
    """Return rewards [N], fp32: the logit at each row's last token (EOS if the row has one)."""
    return _last_logits(model, rows, chunk=128)


def pair_accuracy(rewards: Tensor, gold: Sequence[float]) -> float:
    """Return the share of pairs with gold_i - gold_j > `PAIR_MARGIN` for which `rewards` [N] has r_i > r_j."""
    targets = torch.tensor(gold)
    better = targets[:, None] - targets[None, :] > PAIR_MARGIN
    return (rewards[:, None] > rewards[None, :])[better].float().mean().item()


def start_critic(language_model: LlamaForCausalLM) -> LlamaForTokenClassification:
    """Return a critic whose values are all 0: the language model's body and a zero head, without dropout."""
    config = _single_output_config(language_model)
    config.classifier_dropout = 0.0  # the default is 0.1
    critic = LlamaForTokenClassification(config)
    critic.model.load_state_dict(language_model.model.state_dict())
    torch.nn.init.zeros_(critic.score.weight)
    torch.nn.init.zeros_(critic.score.bias)
    return critic.eval()


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary Hugging Face folder: safetensors, config.json and the tokenizer."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if shown:
        logging.enable_progress_bar()


class PreparationProgress:
    """Logs a line every few seconds: name, percent, loss, elapsed and remaining seconds."""

    def __init__(self, name: str, total: int, log: Log) -> None:
        self._name, self._total, self._log = name, total, log
        self._done, self._start = 0, time.monotonic()
        self._shown = self._start

    def show(self, loss: Tensor) -> None:
        """Count one step; log a line after the last step, or if LOG_EVERY_S have passed since the last line."""
        self._done += 1
        now = time.monotonic()
        if now - self._shown >= LOG_EVERY_S or self._done == self._total:
            self._shown = now
            share = self._done / self._total
            seconds = now - self._start
            to_go = f"{seconds / share - seconds:.0f} s to go"
            self._log(f"{self._name}: {share:4.0%}  loss {loss.item():.3f}  {seconds:.0f} s, {to_go}")


def _new_language_model(recipe: Recipe, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.width,
        intermediate_size=recipe.mlp_width,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _single_output_config(language_model: LlamaForCausalLM) -> LlamaConfig:
    config = copy.deepcopy(language_model.config)
    config.num_labels = 1
    config.tie_word_embeddings = False  # no output embedding to tie
    return config


def _bucketed(rows: Rows, batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Yield one epoch of batches of row indices in random order; a batch has rows of similar length."""
    order = torch.randperm(len(rows), generator=generator).tolist()
    window = 32 * batch_size
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        near = sorted(order[start : start + window], key=lambda i: len(rows[i]))
        batches += [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
    for i in torch.randperm(len(batches), generator=generator).tolist():
        yield batches[i]


def _padded(rows: Rows) -> tuple[Tensor, Tensor]:
    """Return tokens [B, S], padded on the right, and lengths [B]. In a causal model no real token sees the padding."""
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)
    return tokens, torch.tensor([len(row) for row in rows])


def _next_token_losses(model: LlamaForCausalLM, rows: Rows) -> Tensor:
    """Return the negative log-likelihoods of all tokens except each row's first, as one flat vector."""
    tokens, lengths = _padded(rows)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    real = torch.arange(1, tokens.shape[1])[None, :] < lengths[:, None]
    # Drop the padding before the LM head: the logits are as wide as the vocabulary.
    return F.cross_entropy(model.lm_head(hidden[:, :-1][real]), tokens[:, 1:][real], reduction="none")


def _last_logits(model: LlamaForSequenceClassification, rows: Rows, *, chunk: int) -> Tensor:
    """Return the head's output at index length - 1 of each row, [B]. Rows of similar length share a forward pass."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    parts = []
    for start in range(0, len(order), chunk):
        tokens, lengths = _padded([rows[i] for i in order[start : start + chunk]])
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        parts.append(model.score(hidden[torch.arange(len(lengths)), lengths - 1])[:, 0].float())
    return torch.cat(parts)[torch.tensor(order).argsort()]


def _optimizers(model: PreTrainedModel, muon_lr: float, adamw_lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if ".layers." in n and p.ndim == 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    return [_Muon(matrices, lr=muon_lr), torch.optim.AdamW(others, lr=adamw_lr, fused=True)]


def stepper(
    model: PreTrainedModel, optimizers: Sequence[torch.optim.Optimizer], warmup_steps: int, num_steps: int
) -> Callable[[Tensor], None]:
    """Return a function that does one update: backward, clip the gradient norm to 1, optimizer step.

    The learning rate warms up linearly, then follows a cosine to 0.
    """

    def rate(step: int) -> float:
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / num_steps)))
        return min(1.0, (step + 1) / warmup_steps) * cosine

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]

    def update(loss: Tensor) -> None:
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()

    return update


class _Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` (https://kellerjordan.github.io/posts/muon) in fp32, with matrices of equal shape batched.

    The original works in bfloat16, one matrix at a time, which takes 60 % of a step on a CPU without bfloat16 units.
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
