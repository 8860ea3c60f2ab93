"""Generates responses by slot-based decoding, or by `transformers` for models that it does not support."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import Conversation
from rlhf_triton.actor.generation.cache import cache_layers
from rlhf_triton.actor.generation.conversations import ConversationRunner, ConversationSource
from rlhf_triton.actor.generation.slots import (
    DecodedRow,
    Decoder,
    Draws,
    Finished,
    PromptSource,
    RowSource,
    SamplingSettings,
    TokenSampler,
)
from rlhf_triton.config import GenerationSection
from rlhf_triton.models.adapters import with_merged_layers
from rlhf_triton.models.gpu import is_device_error, to_device
from rlhf_triton.models.out_of_memory import MemoryBudget, is_out_of_memory
from rlhf_triton.models.precision import in_float32

logger = logging.getLogger(__name__)
PROOF_TOKENS = 4  # tokens per prompt on which slot-based decoding and plain forward passes are compared
MORE_STOP_TOKENS = 16
DRAWN_AT_ONCE = 64
NEAR = 0.01  # total variation distance: at most one token in a hundred would be drawn differently
NEAR_ROUNDED = 0.25  # the same in bfloat16, where rounding differs; reading a wrong token gives a larger distance


class Generation:
    """Generates responses with the sampling settings of one configuration."""

    has_policy_logprobs = True
    """Whether the log-probs of responses are the policy's own, not another engine's."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: GenerationSection,
        *,
        eos_ids: list[int],
        pad_id: int,
        banned_ids: list[int],
        token_budget: int | None = None,
    ) -> None:
        """
        Args:
            model: a causal LM, with its adapters if it has any.
            token_budget: maximum tokens of one forward pass over prompts.
        """
        self._token_budget = token_budget
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._eos_ids, self._pad_id, self._banned_ids = eos_ids, pad_id, banned_ids
        # How many trailing tokens to decode when looking for a stop string. A token is at least one byte; the extra
        # tokens are needed because the first ones of a window may decode differently without their predecessors.
        self._stop_tokens = max((len(stop.encode()) for stop in settings.stop_strings), default=0) + MORE_STOP_TOKENS
        self.memory = MemoryBudget(
            "actor.generation.batch_size", settings.batch_size, remedy="lower actor.generation.max_new_tokens"
        )
        """How many responses fit into the GPU's memory at the same time."""
        # On a CPU, merging would cost more than the few kernels that it saves.
        self._merges = model is not None and model.device.type != "cpu"
        self.uses_slots: bool | None = None
        """Whether slot-based decoding supports the model; None before the first `run`."""
        self.runner: ConversationRunner | None = None
        """Runs conversations with environments; None: every prompt has one response."""
        self._row_source: RowSource | None = None  # row source of the `run` in progress

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise TemplateError if the chat template cannot render conversations that start from the prompts."""
        if self.runner is not None:
            self.runner.check_prompts(prompts)

    def renew(self) -> None:
        """For engines that copy the weights: use the model's current ones. Called by `Policy.renew_sampler`."""

    def close(self) -> None:
        """End the environments; a `run` that waits in another thread raises CancelledError."""
        if self._row_source is not None:
            self._row_source.close()
        if self.runner is not None:
            self.runner.close()

    def run(self, prompts: Sequence[Prompt], finished: Finished, *, seed: int, greedy: bool = False) -> None:
        """Generate a response to each prompt, or with a `runner` a conversation with an environment.

        Args:
            finished: called with the prompt's index and the conversation as soon as the conversation ends.
            seed: the same seed gives the same responses. A response depends only on its prompt, its index and `seed`,
                not on the other rows in the batch, except for rounding of probabilities.
            greedy: take the most likely token instead of sampling.
        """
        self.run_rows(dict(enumerate(prompts)), finished, seed=seed, greedy=greedy)

    def run_rows(self, prompts: Mapping[int, Prompt], finished: Finished, *, seed: int, greedy: bool) -> None:
        """Generate the responses to some of the prompts of `run`; `prompts`: by index."""
        missing = list(prompts)

        def record(index: int, conversation: Conversation) -> None:
            missing.remove(index)
            finished(index, conversation)

        def respond(slots: int) -> None:
            """Generate the `missing` responses; after out-of-memory, unfinished rows restart with the same draws."""
            draws = None if greedy else functools.cache(functools.partial(uniform_draws, seed))
            remaining = {row: prompts[row] for row in missing}
            with self._merged_adapters(), self._open_row_source(remaining, record, seed) as row_source:
                if self.uses_slots is None:
                    self.uses_slots = self._is_proven([*remaining.values()])
                if self.uses_slots:
                    budget = self._token_budget and max(1, self._token_budget * slots // self._settings.batch_size)
                    decoder = Decoder(self._model, self._sampling_settings(), slots=slots, token_budget=budget)
                    decoder.run(row_source, draws)
                else:
                    self._generate_with_transformers(row_source, draws, slots)

        if prompts:
            self.memory.run(respond, least=1, most=len(prompts))

    @contextlib.contextmanager
    def _open_row_source(self, prompts: Mapping[int, Prompt], finished: Finished, seed: int) -> Iterator[RowSource]:
        """Yield the source of the decoder's rows, prompts or conversations with environments; close it at the end."""
        if self.runner is not None:
            row_source: RowSource = ConversationSource(self.runner, prompts, finished, seed=seed)
        else:
            row_source = PromptSource(prompts, finished, max_new_tokens=self._settings.max_new_tokens)
        self._row_source = row_source
        try:
            yield row_source
        finally:
            self._row_source = None
            row_source.close()

    @contextlib.contextmanager
    def _merged_adapters(self) -> Iterator[None]:
        """Merge the adapters into the sampler's layers within the block, on a GPU with enough memory."""
        with contextlib.ExitStack() as stack:
            if self._merges:
                try:
                    stack.enter_context(with_merged_layers(self._model))
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    self._merges = False
                    logger.warning("generation keeps the adapters apart, which is slower: no memory to merge them")
            yield

    def _sampling_settings(self) -> SamplingSettings:
        s = self._settings
        return SamplingSettings(
            s.max_new_tokens,
            self._eos_ids,
            self._banned_ids,
            s.min_new_tokens,
            s.temperature,
            s.top_k,
            s.top_p,
            self._has_stop if s.stop_strings else None,
        )

    def _has_stop(self, response: Sequence[int]) -> bool:
        """Return whether the response contains a stop string; checked after each token, so the last one completes it.

        As in vLLM, a stop string that ends within the first `min_new_tokens` tokens is ordinary text.
        """
        early = self._settings.min_new_tokens
        if len(response) <= early:
            return False
        begin = max(0, len(response) - self._stop_tokens)
        text = self._tokenizer.decode(response[begin:], skip_special_tokens=False)
        ignored = 0
        if begin < early:  # rstrip: a character whose bytes are incomplete here may still complete a stop string
            ignored = len(self._tokenizer.decode(response[begin:early], skip_special_tokens=False).rstrip("\ufffd"))
        return any(text.find(stop, max(0, ignored - len(stop) + 1)) >= 0 for stop in self._settings.stop_strings)

    @torch.no_grad()
    def _is_proven(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether slot-based decoding matches forward passes over whole rows in float32; log why if not."""
        why = "the model caches more than keys and values between tokens"
        if cache_layers(self._model):
            longest = max((prompt.tokens for prompt in prompts), key=len)
            try:
                with in_float32(self._model):
                    is_near = self._decoder_distance(longest) <= NEAR
                if torch.is_autocast_enabled(self._model.device.type):  # autocast runs other kernels
                    is_near = is_near and self._decoder_distance(longest) <= NEAR_ROUNDED
                if is_near:
                    return True
                why = "slot-based decoding would sample from a different distribution than plain forward passes"
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
                if is_out_of_memory(error) or is_device_error(error):
                    raise
                why = f"{type(error).__name__}: {error}"  # raised by a model's own code
        logger.warning("the policy uses transformers' generate(), which is slower: %s", why)
        return False

    def _decoder_distance(self, prompt: np.ndarray) -> float:
        """Return the largest total variation distance between slot-based decoding and plain forward passes.

        Decodes the prompt together with two of its suffixes, so that rows of different lengths share a batch.
        """
        prompt = np.resize(prompt, max(2, len(prompt)))  # doubles a single token, so that the suffixes are shorter
        starts = [prompt, prompt[len(prompt) // 2 :], prompt[-1:]]
        distributions: list[list[Tensor]] = [[] for _ in starts]
        responses: dict[int, list[int]] = {}

        def watch(indices: list[int], logits: Tensor) -> None:
            for index, probabilities in zip(indices, logits.softmax(-1), strict=True):
                distributions[index].append(probabilities)

        settings = SamplingSettings(min(PROOF_TOKENS, self._settings.max_new_tokens), [], self._banned_ids)
        decoder = Decoder(self._model, settings, slots=len(starts), watch=watch)
        row_source = PromptSource(
            {i: Prompt("", "", start) for i, start in enumerate(starts)},
            lambda index, rows: responses.update({index: rows[0].tokens[len(starts[index]) :].tolist()}),
            max_new_tokens=settings.max_new_tokens,
        )
        decoder.run(row_source, None)
        distances = []
        for index, start in enumerate(starts):
            row = torch.tensor([[*start.tolist(), *responses[index]]], device=self._model.device)
            logits = self._model(input_ids=row, use_cache=False).logits[0, len(start) - 1 : -1].float()
            logits[:, self._banned_ids] = -torch.inf
            distances.append((logits.softmax(-1) - torch.stack(distributions[index])).abs().sum(-1) / 2)
        return float(torch.cat(distances).max())

    def _generate_with_transformers(self, row_source: RowSource, draws: Draws | None, size: int) -> None:
        """Generate all turns with transformers' `generate`, in batches of `size` rows of similar length."""
        while new_rows := row_source.next_rows(wait=True):
            rows = [DecodedRow(index, [*tokens], len(tokens), draws and draws(index)) for index, tokens in new_rows]
            rows.sort(key=lambda row: (-len(row.tokens), row.index))
            for batch in (rows[i : i + size] for i in range(0, len(rows), size)):
                self._transformers_turns(batch, row_source.longest)
                for row in batch:
                    row_source.deliver(row.index, row.turn(self._sampling_settings()))

    def _transformers_turns(self, rows: list[DecodedRow], longest: int) -> None:
        """Sample the next turn of each row with transformers' `generate`; the first row must be the longest."""
        padded = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        ids = padded([torch.tensor(row.tokens) for row in rows], padding_value=self._pad_id)
        attention = padded([torch.ones(len(row.tokens), dtype=torch.int64) for row in rows])
        step = _GenerateHooks(self._sampling_settings(), rows, longest, self._model.device)
        own_config = self._model.generation_config  # its sampling settings would change the distribution
        self._model.generation_config = GenerationConfig()
        try:
            self._model.generate(
                ids.to(self._model.device),
                attention_mask=attention.to(self._model.device),
                generation_config=GenerationConfig(max_new_tokens=longest, pad_token_id=self._pad_id),
                logits_processor=LogitsProcessorList([step.sample]),
                stopping_criteria=StoppingCriteriaList([step.ended]),
            )
        finally:
            self._model.generation_config = own_config


class _GenerateHooks:
    """Hooks that make `generate` sample as slot-based decoding does: with the same draws, settings and log-probs."""

    def __init__(self, settings: SamplingSettings, rows: list[DecodedRow], longest: int, device: torch.device) -> None:
        self._sampler = TokenSampler(settings, device)
        self._sampling_settings = settings
        self._rows = rows
        self._longest = longest

    def _active(self) -> list[int]:
        return [i for i, row in enumerate(self._rows) if not row.is_over(self._sampling_settings, self._longest)]

    def sample(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draw a token for each row whose turn is not over; return scores that force `generate` to take it."""
        active = self._active()
        rows = [self._rows[i] for i in active]
        inputs = to_device(scores.device, *self._sampler.inputs(rows))
        self._sampler.append(rows, scores[active].float(), *inputs)
        chosen = torch.tensor([[row.tokens[-1]] for row in self._rows], device=scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def ended(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which rows have finished their turn, bool `[rows]`."""
        active = set(self._active())
        return torch.tensor([i not in active for i in range(len(self._rows))], device=input_ids.device)


def uniform_draws(seed: int, index: int) -> Iterator[float]:
    """Yield the draws, uniform in [0, 1), for the tokens sampled in row `index`.

    Philox computes each number from its key and position, so rows have independent numbers, the same on any rank.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, index], np.uint64)))
    while True:
        yield from generator.random(DRAWN_AT_ONCE).tolist()
