"""Generates responses by slot-based decoding, or by `transformers` for models that it does not support."""

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.reply_parts import first_stop
from rlhf_triton.actor.data.rollout_rows import Conversation
from rlhf_triton.actor.generation.cache import cache_layers
from rlhf_triton.actor.generation.generation import Generation, JobSource
from rlhf_triton.actor.generation.row_sources import IsPaused, PromptSource, RowId, RowSource, SamplingJob
from rlhf_triton.actor.generation.slots import DecodedRow, Decoder, SamplingSettings, TokenSampler
from rlhf_triton.config.actor import GenerationSection
from rlhf_triton.models.adapters import with_merged_layers
from rlhf_triton.models.device_errors import is_device_error, is_out_of_memory
from rlhf_triton.models.gpu import to_device
from rlhf_triton.models.precision import in_float32

logger = logging.getLogger(__name__)
PROOF_TOKENS = 4  # tokens per prompt on which slot-based decoding and plain forward passes are compared
MORE_STOP_TOKENS = 16
NEAR = 0.01  # total variation distance: at most one token in a hundred would be drawn differently
NEAR_ROUNDED = 0.25  # the same in bfloat16, where rounding differs; reading a wrong token gives a larger distance


class LocalGeneration(Generation):
    """Generates in this process."""

    has_policy_logprobs = True

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
        super().__init__(settings, eos_ids=eos_ids, banned_ids=banned_ids)
        self._token_budget = token_budget
        self._model = model
        self._tokenizer = tokenizer
        self._pad_id = pad_id
        # How many trailing tokens to decode when looking for a stop string. A token is at least one byte; the extra
        # tokens are needed because the first ones of a window may decode differently without their predecessors.
        self._stop_tokens = max((len(stop.encode()) for stop in settings.stop_strings), default=0) + MORE_STOP_TOKENS
        # On a CPU, merging would cost more than the few kernels that it saves.
        self._merges = model is not None and model.device.type != "cpu"
        self.uses_slots: bool | None = None
        """Whether slot-based decoding supports the model; None before the first `run`."""
        self._adding = threading.Lock()
        self._jobs: list[SamplingJob] = []  # with unfinished conversations
        self._added: queue.SimpleQueue[SamplingJob] = queue.SimpleQueue()  # not in `_row_source` yet
        self._row_source: JobSource | None = None  # from the first row of the jobs to the end of all of them
        self._decoder: Decoder | None = None
        self._waiting_rows: list[DecodedRow] = []  # for transformers' `generate`

    def renew(self, policy_step: int) -> None:
        self.policy_step = policy_step
        if self._decoder is not None:
            self._decoder.renew()

    def close(self) -> None:
        if self._row_source is not None:
            self._row_source.close()
        if self.runner is not None:
            self.runner.close()

    @property
    def has_jobs(self) -> bool:
        self._jobs = [job for job in self._jobs if job.prompts]
        return bool(self._jobs)

    def add(self, job: SamplingJob) -> None:
        with self._adding:
            self._jobs.append(job)
            self._added.put(job)
        self.wake()

    def wake(self) -> None:
        if (source := self._row_source) is not None:
            source.wake()

    def abandon(self) -> None:
        self._end()
        self._jobs = []
        self._added = queue.SimpleQueue()

    def decode(self, is_paused: IsPaused = lambda: False) -> None:
        """Generate until all jobs are done, or until `is_paused`, which is called before each forward pass."""
        try:
            remaining = self._num_unfinished()
            work = functools.partial(self._decode, is_paused)
            self.memory.run(work, least=1, most=lambda: max(remaining, self._num_unfinished()))
        except BaseException:
            self.abandon()
            raise

    def _num_unfinished(self) -> int:
        return sum(len(job.prompts) for job in self._jobs)

    def _decode(self, is_paused: IsPaused, slots: int) -> None:
        """Generate with this many slots; after out-of-memory, unfinished conversations restart with the same draws."""
        try:
            with self._merged_adapters():
                source = self._row_source or self._open_row_source()
                if self.uses_slots is None:
                    self.uses_slots = self._is_proven([prompt for job in self._jobs for prompt in job.prompts.values()])

                def is_interrupted() -> bool:
                    while not self._added.empty():
                        source.add(self._added.get())
                    return is_paused()

                if self.uses_slots:
                    if self._decoder is None:
                        budget = self._token_budget and max(1, self._token_budget * slots // self._settings.batch_size)
                        settings = self._sampling_settings()
                        self._decoder = Decoder(self._model, settings, slots=slots, token_budget=budget)
                    self._decoder.run(source, is_interrupted, policy_step=self.policy_step)
                else:
                    self._generate_with_transformers(source, is_interrupted, slots)
        except RuntimeError:  # perhaps out of memory: the cache must be free before the next attempt
            self._end()
            raise
        if not source.size:
            self._end()

    def _open_row_source(self) -> JobSource:
        """Create the source of the decoder's rows for all jobs."""
        source = self._new_source()
        with self._adding:
            self._added = queue.SimpleQueue()
            jobs = [*self._jobs]
        self._row_source = source
        for job in jobs:
            source.add(job)
        return source

    def _end(self) -> None:
        """Close the source of the rows, and free the decoder's cache."""
        source = self._row_source
        self._row_source = self._decoder = None
        self._waiting_rows = []
        if source is not None:
            source.close()

    @contextlib.contextmanager
    def _merged_adapters(self) -> Iterator[None]:
        """Merge the adapters into the generator's layers within the block, on a GPU with enough memory."""
        with contextlib.ExitStack() as stack:
            if self._merges:
                try:
                    stack.enter_context(with_merged_layers(self._model))
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    self._merges = False
                    logger.warning("generation is slower: there is no memory to merge the adapters into the weights")
            yield

    def _sampling_settings(self) -> SamplingSettings:
        s = self._settings
        return SamplingSettings(
            max_new_tokens=s.max_new_tokens,
            eos_ids=self._eos_ids,
            banned_ids=self._banned_ids,
            min_new_tokens=s.min_new_tokens,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            has_stop_string=self._has_stop if s.stop_strings else None,
        )

    def _has_stop(self, response: Sequence[int]) -> bool:
        """Return whether a stop string ends the response; checked after each token, so the last one completes it."""
        early = self._settings.min_new_tokens
        if len(response) <= early:
            return False
        begin = max(0, len(response) - self._stop_tokens)
        text, ignored = (
            self._tokenizer.decode(part, skip_special_tokens=False)
            for part in (response[begin:], response[begin:early])
        )
        return first_stop(text, ignored, self._settings.stop_strings) is not None

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

        def watch(rows: list[RowId], logits: Tensor) -> None:
            for row, probabilities in zip(rows, logits.softmax(-1), strict=True):
                distributions[row.conversation].append(probabilities)

        settings = SamplingSettings(
            max_new_tokens=min(PROOF_TOKENS, self._settings.max_new_tokens), eos_ids=[], banned_ids=self._banned_ids
        )
        decoder = Decoder(self._model, settings, slots=len(starts), watch=watch)
        row_source = PromptSource(max_new_tokens=settings.max_new_tokens)
        prompts = {i: Prompt("", "", start) for i, start in enumerate(starts)}

        def on_finished(index: int, rows: Conversation) -> None:
            responses[index] = rows[0].tokens[len(starts[index]) :].tolist()

        row_source.add(SamplingJob(prompts, on_finished, seed=0, greedy=True))
        decoder.run(row_source)
        distances = []
        for index, start in enumerate(starts):
            row = torch.tensor([[*start.tolist(), *responses[index]]], device=self._model.device)
            logits = self._model(input_ids=row, use_cache=False).logits[0, len(start) - 1 : -1].float()
            logits[:, self._banned_ids] = -torch.inf
            distances.append((logits.softmax(-1) - torch.stack(distributions[index])).abs().sum(-1) / 2)
        return float(torch.cat(distances).max())

    def _generate_with_transformers(self, source: RowSource, is_paused: IsPaused, size: int) -> None:
        """Generate turns with transformers' `generate`, in batches of `size` rows of similar length.

        `is_paused` is called before each batch; `_waiting_rows` keeps the rows that are left.
        """
        while source.size and not is_paused():
            if not self._waiting_rows:
                new_rows = map(DecodedRow, source.next_rows(wait=True))
                self._waiting_rows = sorted(new_rows, key=lambda row: (-len(row.tokens), row.new.id))
            batch = self._waiting_rows[:size]
            self._waiting_rows = self._waiting_rows[size:]
            if not batch:  # woken
                continue
            self._transformers_turns(batch, source.longest)
            for row in batch:
                source.deliver(row.new.id, row.turn(self._sampling_settings()))

    def _transformers_turns(self, rows: list[DecodedRow], longest: int) -> None:
        """Sample the next turn of each row with transformers' `generate`; the first row must be the longest."""
        padded = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        ids = padded([torch.tensor(row.tokens) for row in rows], padding_value=self._pad_id)
        attention = padded([torch.ones(len(row.tokens), dtype=torch.int64) for row in rows])
        step = _GenerateHooks(self._sampling_settings(), rows, longest, self._model.device, self.policy_step)
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

    def __init__(
        self, settings: SamplingSettings, rows: list[DecodedRow], longest: int, device: torch.device, policy_step: int
    ) -> None:
        self._sampler = TokenSampler(settings, device)
        self._policy_step = policy_step
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
        self._sampler.append(rows, scores[active].float(), *inputs, policy_step=self._policy_step)
        chosen = torch.tensor([[row.tokens[-1]] for row in self._rows], device=scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def ended(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which rows have finished their turn, bool `[rows]`."""
        active = set(self._active())
        return torch.tensor([i not in active for i in range(len(self._rows))], device=input_ids.device)
