"""The policy: a Hugging Face causal LM that writes responses, gives log-probs, and learns by PPO.
Given: prompts, rollouts, batches. Returns: rollouts, log-probs `[B, S-1]`, update statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from actor.ppo_loss import entropy, ppo_policy_loss, token_logprobs
from actor.rollout import PPOBatch, Prompt, Rollout
from python_backend.batching import plan_micro_batches
from python_backend.checkpoints import CheckpointError, check_checkpoint
from python_backend.config import ActorSection
from python_backend.tokenization import load_tokenizer

MAX_ROWS = 1024  # the token budget bounds a micro-batch long before


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Log-probs are taken under `temperature`, without top-k and top-p."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float


class Policy:
    """The model in training, its frozen start (the reference), and its optimizer."""

    def __init__(self, folder: Path, settings: ActorSection) -> None:
        """Raises CheckpointError if `folder` holds no causal LM with a tokenizer."""
        check_checkpoint(folder)
        self.settings = settings
        try:
            self.tokenizer = load_tokenizer(folder)
            model = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be loaded as a policy: {error}") from error
        self.model = model.to(settings.device).eval()
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.eos_ids = _eos_ids(model, self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else self.eos_ids[0]
        bos = self.tokenizer.bos_token_id
        self.banned_ids = sorted({i for i in (self.pad_id, bos) if i is not None} - set(self.eos_ids))
        self.sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_k, settings.top_p)
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=settings.betas,
        )
        self.optimizer_step = 0

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], *, seed: int) -> Rollout:
        """Sample one response per prompt; the same seed draws the same responses."""
        lengths = [prompt.tokens.size for prompt in prompts]
        width = max(lengths)
        ids = torch.full((len(prompts), width), self.pad_id, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, width - lengths[i] :] = torch.from_numpy(prompt.tokens)
        attention = (torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]).long()
        torch.manual_seed(seed)
        device = self.model.device
        output = self.model.generate(
            ids.to(device), attention_mask=attention.to(device), generation_config=self._generation_config()
        ).cpu()
        return self._unpad(list(prompts), output, lengths, width)

    def logprobs(self, rollout: Rollout, *, reference: bool = False) -> Tensor:
        """Log-prob `[B, S-1]` of token t+1 at position t, under the policy or its frozen start."""
        model = self.reference if reference else self.model
        out = torch.zeros(rollout.tokens.shape[0], rollout.tokens.shape[1] - 1)
        with torch.no_grad():
            for rows in self._plan(rollout.lengths):
                tokens, lengths = _trim(rollout.tokens[rows], rollout.lengths[rows])
                part = self._token_logprobs(model, tokens, lengths)[0].cpu()
                out[rows, : part.shape[1]] = part
        return out

    def update(self, batch: PPOBatch, *, seed: int) -> dict[str, float]:
        """PPO over the batch: `ppo_epochs` shuffled passes in minibatches; returns `train_optim/…` means."""
        s = self.settings
        generator = torch.Generator().manual_seed(seed)
        totals: dict[str, float] = {}
        tokens_seen = steps = 0.0
        norm_sum = 0.0
        for _ in range(s.ppo_epochs):
            order = torch.randperm(len(batch.lengths), generator=generator)
            for rows in order.split(s.minibatch_size):
                num_tokens = float(batch.policy_mask[rows].sum())
                if num_tokens == 0:
                    continue
                for name, value in self._minibatch(batch, rows, num_tokens).items():
                    totals[name] = totals.get(name, 0.0) + value
                norm_sum += self._step()
                tokens_seen, steps = tokens_seen + num_tokens, steps + 1
        means = {name: total / max(1.0, tokens_seen) for name, total in totals.items()}
        means["loss"] = totals.get("loss", 0.0) / max(1.0, steps)
        means.update(grad_norm=norm_sum / max(1.0, steps), lr=s.lr, optim_step=float(self.optimizer_step))
        return {f"train_optim/{name}": value for name, value in means.items()}

    def save(self, folder: Path) -> None:
        """Write an ordinary Hugging Face folder: safetensors, configuration, tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _minibatch(self, batch: PPOBatch, rows: Tensor, num_tokens: float) -> dict[str, float]:
        s = self.settings
        totals: dict[str, float] = {}
        for chunk in self._plan(batch.lengths[rows]):
            picked = rows[chunk]
            tokens, lengths = _trim(batch.tokens[picked], batch.lengths[picked])
            width = tokens.shape[1] - 1
            logprobs, logits = self._token_logprobs(self.model, tokens, lengths)
            old, advantages, mask = (
                tensor[picked, :width].to(logprobs.device)
                for tensor in (batch.logprobs, batch.advantages, batch.policy_mask)
            )
            loss, stats = ppo_policy_loss(
                logprobs, old, advantages, mask,
                clip_ratio_low=s.clip_ratio, clip_ratio_high=s.clip_ratio, num_tokens=num_tokens,
            )  # fmt: skip
            if s.entropy_bonus:
                token_entropy = entropy(logits, temperature=s.temperature, banned_token_ids=self.banned_ids)
                bonus = s.entropy_bonus * (token_entropy * mask).sum() / num_tokens
                loss = loss - bonus
                stats["scaled_entropy"] = bonus.detach() * num_tokens
            loss.backward()
            for name, value in {**stats, "loss": loss.detach()}.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def _step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the policy's gradient is not finite at optimizer step {self.optimizer_step}; lower actor.lr "
                f"({self.settings.lr:g}) or look at the rewards of this step in metrics.jsonl"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        return float(norm)

    def _plan(self, lengths: Tensor) -> list[list[int]]:
        return plan_micro_batches(lengths.tolist(), token_budget=self.settings.token_budget, max_rows=MAX_ROWS)

    def _token_logprobs(self, model: Any, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        tokens = tokens.to(model.device)
        attention = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).long().to(model.device)
        logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
        temperature = self.settings.temperature
        return token_logprobs(logits, tokens, temperature=temperature, banned_token_ids=self.banned_ids), logits

    def _generation_config(self) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            pad_token_id=self.pad_id,
            eos_token_id=self.eos_ids,
            suppress_tokens=self.banned_ids or None,
        )

    def _unpad(self, prompts: list[Prompt], output: Tensor, lengths: list[int], width: int) -> Rollout:
        responses, ended = [], []
        eos = torch.tensor(self.eos_ids)
        for row in output[:, width:]:
            ends = torch.isin(row, eos).nonzero().flatten()
            ended.append(bool(ends.numel()))
            responses.append(row[: int(ends[0]) + 1] if ends.numel() else row)
        total = [length + response.numel() for length, response in zip(lengths, responses, strict=True)]
        tokens = torch.full((len(prompts), max(total)), self.pad_id, dtype=torch.int64)
        for i, (length, response) in enumerate(zip(lengths, responses, strict=True)):
            tokens[i, :length] = output[i, width - length : width]
            tokens[i, length : total[i]] = response
        return Rollout(prompts, tokens, torch.tensor(total), torch.tensor(lengths), torch.tensor(ended))


def join_rollouts(parts: Sequence[Rollout], pad_id: int) -> Rollout:
    """Several rollouts as one, padded to the longest."""
    width = max(part.tokens.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(part.tokens, (0, width - part.tokens.shape[1]), value=pad_id) for part in parts]
    return Rollout(
        [prompt for part in parts for prompt in part.prompts],
        torch.cat(padded),
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.prompt_lengths for part in parts]),
        torch.cat([part.is_end for part in parts]),
    )


def _trim(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    return tokens[:, : int(lengths.max())], lengths


def _eos_ids(model: Any, tokenizer: Any) -> list[int]:
    eos = model.generation_config.eos_token_id
    ids = eos if isinstance(eos, list) else [eos]
    found = sorted({i for i in (*ids, tokenizer.eos_token_id) if i is not None})
    if not found:
        raise CheckpointError("the policy's tokenizer and generation config name no end-of-sequence token")
    return found
