"""`generate`, the one seam to how responses are written: by our own decoding, or by `transformers` where it must be.
Given: token prompts, a seed. Returns: each response as soon as it has ended.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from actor.decoding import Decoder, Finished, Rules
from actor.slot_cache import cache_layers
from python_backend.config import ActorSection

logger = logging.getLogger(__name__)
PROOF_TOKENS = 4
NEAR = {"float32": 0.02, "bfloat16": 0.2}  # of the logits' standard deviation


class Generation:
    """Writes responses under one configuration."""

    def __init__(
        self, model: Any, tokenizer: Any, settings: ActorSection, *, eos_ids: list[int], pad_id: int,
        banned_ids: list[int],
    ) -> None:  # fmt: skip
        """`model`: a causal LM, adapters in place."""
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._eos_ids, self._pad_id, self._banned_ids = eos_ids, pad_id, banned_ids
        self._decodes: bool | None = None  # whether our own decoding fits the model; found out with the first prompts

    def run(self, prompts: Sequence[np.ndarray], finished: Finished, *, seed: int, greedy: bool = False) -> None:
        """Write a response to each prompt.

        Args:
            prompts: int64 `[length]` each.
            finished: gets the prompt's index, the response and whether it ended by itself; when it has ended.
            seed: the same draws the same responses. With our own decoding a response depends on `seed` and its index
                alone, not on what is written beside it (but for the last bits of its probabilities).
            greedy: take the likeliest tokens.
        """
        if self._decodes is None:
            self._decodes = self._settings.decoding == "slots" and self._is_proven(prompts)
        if not self._decodes:
            self._plain(prompts, finished, seed=seed, greedy=greedy)
            return
        draws = None
        if not greedy:
            shape = len(prompts), self._settings.max_new_tokens
            draws = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        decoder = Decoder(self._model, self._rules(), slots=self._settings.generation_batch)
        decoder.run(prompts, draws, finished)

    def _rules(self) -> Rules:
        s = self._settings
        return Rules(
            s.max_new_tokens, self._eos_ids, self._banned_ids, s.min_new_tokens, s.temperature, s.top_k, s.top_p,
            s.repetition_penalty, self._has_stop if s.stop_strings else None,
        )  # fmt: skip

    def _has_stop(self, response: Sequence[int]) -> bool:
        text = self._tokenizer.decode(response, skip_special_tokens=False)
        return any(stop in text for stop in self._settings.stop_strings)

    @torch.no_grad()
    def _is_proven(self, prompts: Sequence[np.ndarray]) -> bool:
        """Whether what our own decoding takes for the likeliest tokens is so in plain forwards over whole rows."""
        why = "it keeps more than keys and values from token to token"
        if cache_layers(self._model):
            by_length = sorted(prompts, key=len)
            tried = [by_length[0], by_length[len(by_length) // 2], by_length[-1]]
            written: dict[int, list[int]] = {}
            try:
                decoder = Decoder(self._model, Rules(PROOF_TOKENS, [], self._banned_ids), slots=2)
                decoder.run(tried, None, lambda index, response, _: written.update({index: response}))
                if all(self._are_likeliest(tried[index], response) for index, response in written.items()):
                    return True
                why = "it would write other tokens than in plain forwards"
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:  # a model's own code
                why = f"{type(error).__name__}: {error}"
        logger.warning("the policy generates with transformers' own generate(), which is slower: %s", why)
        return False

    def _are_likeliest(self, prompt: np.ndarray, response: list[int]) -> bool:
        row = torch.tensor([[*prompt.tolist(), *response]], device=self._model.device)
        logits = self._model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        spread = float(logits.std())
        logits[:, self._banned_ids] = -torch.inf
        chosen = logits.gather(-1, row[0, len(prompt) :, None])[:, 0]
        return bool((logits.amax(-1) - chosen <= NEAR[self._settings.precision] * spread).all())

    def _plain(self, prompts: Sequence[np.ndarray], finished: Finished, *, seed: int, greedy: bool) -> None:
        """`generation_batch` at a time, of similar lengths, by `transformers`."""
        torch.manual_seed(seed)
        order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
        size = self._settings.generation_batch
        for batch in (order[i : i + size] for i in range(0, len(order), size)):
            width = len(prompts[batch[0]])
            ids = torch.full((len(batch), width), self._pad_id, dtype=torch.int64)
            for row, index in zip(ids, batch, strict=True):
                row[width - len(prompts[index]) :] = torch.from_numpy(prompts[index])
            lengths = torch.tensor([len(prompts[index]) for index in batch])
            attention = (torch.arange(width)[None] >= width - lengths[:, None]).long()
            device = self._model.device
            output = self._model.generate(
                ids.to(device), attention_mask=attention.to(device), tokenizer=self._tokenizer,
                generation_config=self._generation_config(greedy),
            ).cpu()  # fmt: skip
            for row, index in zip(output[:, width:], batch, strict=True):
                end = self._end_of(row)
                finished(index, row[:end].tolist(), end is not None)

    def _generation_config(self, greedy: bool) -> GenerationConfig:
        s = self._settings
        sampling = {} if greedy else {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
        return GenerationConfig(
            do_sample=not greedy,
            max_new_tokens=s.max_new_tokens,
            min_new_tokens=s.min_new_tokens or None,
            repetition_penalty=s.repetition_penalty,
            stop_strings=list(s.stop_strings) or None,
            pad_token_id=self._pad_id,
            eos_token_id=self._eos_ids,
            suppress_tokens=self._banned_ids or None,
            **sampling,
        )

    def _end_of(self, row: Tensor) -> int | None:
        """Tokens of the response in `row`, up to the end of sequence or of a stop string; None if there is neither."""
        ends = torch.isin(row, torch.tensor(self._eos_ids)).nonzero().flatten()
        end = int(ends[0]) + 1 if ends.numel() else None
        if not self._settings.stop_strings:
            return end
        longest = row.numel() if end is None else end
        tokens = row[:longest].tolist()
        if not self._has_stop(tokens):
            return end
        return bisect.bisect_left(range(longest + 1), True, key=lambda count: self._has_stop(tokens[:count]))
