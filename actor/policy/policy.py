"""The policy: a Hugging Face causal LM that generates responses and computes their log-probs.

`actor.policy.update` trains it. On several ranks, rank 0 calls the methods, and the other ranks execute what it
announces. Sampling has its own list of operations, without collectives, so that it can run during an update.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.data.rollout_rows import Conversation, RolloutRow, padded
from rlhf_triton.actor.generation.engine import LocalGeneration
from rlhf_triton.actor.generation.generation import Generation
from rlhf_triton.actor.generation.row_sources import Finished, IsPaused, SamplingJob
from rlhf_triton.actor.policy.loading import (
    PolicyModels,
    check_lora_targets,
    check_positions,
    load_model,
)
from rlhf_triton.actor.policy.logprobs import TokenLogprobs
from rlhf_triton.actor.policy.samplers import OtherSamplers
from rlhf_triton.checkpoints.inspection import fingerprint_model
from rlhf_triton.checkpoints.language_models import check_language_model
from rlhf_triton.checkpoints.safetensors_header import read_header
from rlhf_triton.checkpoints.special_tokens import special_tokens
from rlhf_triton.checkpoints.tokenizer_loading import load_tokenizer
from rlhf_triton.config.actor import ActorSection, GenerationSection
from rlhf_triton.models.adapters import MergedWeights
from rlhf_triton.models.gpu import GpuStream
from rlhf_triton.models.host_waits import avoid_host_waits
from rlhf_triton.models.mapped_tensors import map_tensors
from rlhf_triton.training_engine.ranks import ALONE, AnyRanks
from rlhf_triton.training_engine.trained import TrainedModel, operations

logger = logging.getLogger(__name__)
PROOF_ROWS = 16  # rows of the first rollout on which generation's and a forward pass's log-probs are compared
MAX_DISAGREEMENT = 1e-3  # nats, between a token's log-prob in generation and in a plain forward pass


def local_generation(policy: Policy, settings: GenerationSection) -> Generation:
    """Return generation in this process."""
    return LocalGeneration(
        policy.causal(policy.generator),
        policy.tokenizer,
        settings,
        eos_ids=policy.eos_ids,
        pad_id=policy.pad_id,
        banned_ids=policy.banned_ids,
        token_budget=policy.settings.token_budget,
    )


class Policy:
    """The trained model, its frozen initial copy (the reference) and its optimizer, seen from one rank."""

    def __init__(
        self,
        actor: ActorSection,
        ranks: AnyRanks = ALONE,
        longest_row: tuple[int, str] | None = None,
        make_generation: Callable[[Policy, GenerationSection], Generation] = local_generation,
    ) -> None:
        """Load the policy, which must be the same on all ranks.

        On several ranks, or if updates run during rollouts, a copy generates, which stays fixed during an update. With
        LoRA, the reference needs no copy.

        Args:
            longest_row: maximum tokens of a row, and the settings that define it; default: from `actor`.
            make_generation: creates what generates responses with this policy.

        Raises:
            CheckpointError: the folder has no causal LM with a tokenizer, or rows may exceed the model's positions.
        """
        settings = actor.policy
        folder = settings.model
        check_language_model(folder)
        check_lora_targets(settings)
        self.settings = settings
        self.ranks = ranks
        self._samplers = OtherSamplers(ranks) if ranks.shards else None
        self._jobs = deque[SamplingJob]()  # on several ranks
        self._responding = threading.Lock()  # held by the thread that generates on ranks other than 0
        self.temperature = actor.generation.temperature
        self.tokenizer = load_tokenizer(folder)
        model = load_model(settings, as_stored=ranks.size > 1)
        check_positions(model, folder, *(longest_row or actor.longest_row))
        self.vocab_size: int = model.get_input_embeddings().num_embeddings
        self.fingerprint = fingerprint_model(folder)
        self._models = PolicyModels(
            model,
            settings,
            ranks,
            keeps_reference=actor.kl.uses_reference and actor.kl.reference == "actor",
            keeps_generator=actor.max_off_policy_steps > 0,
        )
        self.model = self._models.model
        self.generator = self._models.generator
        self.reference = self._models.reference
        self.causal = self._models.causal
        self.computing = self._models.computing
        # Only a copy can sample during an update; without one, sampling and update share the memory of one stream.
        stream_device = torch.device("cpu") if self.generator is self.model else self.generator.device
        self._stream = GpuStream(stream_device)
        avoid_host_waits(self.generator)
        causal = self.causal(self.model)
        special = special_tokens(self.tokenizer, causal.generation_config.eos_token_id, vocab_size=self.vocab_size)
        self._published_generation: dict[str, Any] = json.loads(causal.generation_config.to_json_string())
        for model in (self.model, self.generator):  # some versions refuse to save a published one that warns
            self.causal(model).generation_config = GenerationConfig()
        self.eos_ids = special.eos_ids
        self.pad_id = special.pad_id
        self.banned_ids = special.banned_ids
        if special.template_end is not None and ranks.rank == 0:
            logger.info(
                "responses also end with %r, the chat template's end of a reply, which neither the tokenizer nor the "
                "generation config names",
                self.tokenizer.convert_ids_to_tokens(special.template_end),
            )
        self.trained = TrainedModel(
            causal,
            settings,
            actor.optimizer,
            ranks,
            section="actor.policy",
            remedy="lower actor.generation.max_new_tokens",
            total_steps=actor.optimizer_steps,
        )
        self.token_logprobs = TokenLogprobs(self._models, temperature=self.temperature, banned_ids=self.banned_ids)
        # Whether generation's log-probs match those of a forward pass. None: checked on the first rollout. In bfloat16
        # rounding differs, so they are assumed not to match.
        self._generation_agrees: bool | None = None if settings.precision == "float32" else False
        self.generation = make_generation(self, actor.generation)
        self.halvings = [self.generation.memory, self.trained.memory]
        """Batch sizes of generation and training, which are halved when the GPU is out of memory."""

    @property
    def operations(self) -> dict[str, Callable[..., object]]:
        """Handlers by name of the operations that ranks other than 0 execute."""
        return {
            "renew_generator": self.renew_generator,
            **operations(lambda: self.trained),
            "gather_weights": lambda: MergedWeights(self.causal(self.model)).gather(),
        }

    def generate(
        self, prompts: Sequence[Prompt], *, seed: int, greedy: bool = False, finished: Finished = lambda *_: None
    ) -> list[Conversation]:
        """Generate a response or conversation for each prompt; the same seed gives the same result.

        `finished` and `greedy`: as in `SamplingJob`.
        """
        conversations: dict[int, Conversation] = {}

        def record(index: int, conversation: Conversation) -> None:
            conversations[index] = conversation
            finished(index, conversation)

        self.add(SamplingJob(dict(enumerate(prompts)), record, seed, greedy))
        while self.has_jobs:
            self.decode()
        return [conversations[index] for index in range(len(prompts))]

    @property
    def has_jobs(self) -> bool:
        """Whether there are unfinished conversations."""
        return bool(self._jobs) or self.generation.has_jobs

    def add(self, job: SamplingJob) -> None:
        """Add prompts that `decode` responds to; may be called in another thread."""
        if self._samplers is None:
            self.generation.add(job)
        else:
            self._jobs.append(job)

    @torch.no_grad()
    def decode(self, is_paused: IsPaused = lambda: False) -> None:
        """Generate until all jobs are done, or until `is_paused`; on several ranks, one job, without a pause."""
        with self.computing(), self._stream.running():
            if self._samplers is None:
                self.generation.decode(is_paused)
            elif self._jobs:  # each rank generates a share of the conversations
                self._samplers.respond(self.generation, self._jobs.popleft())

    def abandon(self) -> None:
        """Drop all jobs; call in the thread of `decode`."""
        self._jobs.clear()
        self.generation.abandon()
        if self._samplers is not None:
            self._samplers.abandon()

    def follow_sampling(self) -> None:
        """Execute the sampling that rank 0 announces; call on every other rank. Ends only by an exception."""
        assert self._samplers is not None

        def respond(
            prompts: Mapping[int, Prompt], finished: Finished, is_over: IsPaused, *, seed: int, greedy: bool
        ) -> None:
            with self._responding, self.computing(), self._stream.running():
                self.generation.run_rows(prompts, finished, is_over, seed=seed, greedy=greedy)

        self._samplers.follow(respond, self._own_logprobs)

    def logprobs(self, rows: Sequence[RolloutRow], *, reference: bool = False) -> list[np.ndarray]:
        """Return the log-probs of each row's tokens, float32 `[n]`, under the generator or the reference.

        Tokens that the policy did not sample have 0. Each rank computes the log-probs of some rows.
        """
        if self._samplers is None:
            return self._own_logprobs(rows, reference=reference)
        return self._samplers.logprobs(self._own_logprobs, rows, reference=reference)

    def _own_logprobs(self, rows: Sequence[RolloutRow], *, reference: bool) -> list[np.ndarray]:
        results = [np.zeros(len(row.tokens), np.float32) for row in rows]
        lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64)
        with torch.no_grad(), self._stream.running(), self._weights_of(reference) as model:

            def fill(chunk: Sequence[int]) -> None:
                tokens = padded([rows[i].tokens for i in chunk])
                mask = padded([rows[i].sampled for i in chunk])[:, 1:].float()
                logprobs = self.token_logprobs.compute(model, tokens, lengths[chunk], mask).cpu().numpy()
                for i, row_logprobs in zip(chunk, logprobs, strict=True):
                    results[i][1:] = row_logprobs[: len(results[i]) - 1]

            for chunk in self.trained.plan(lengths.tolist()):
                self.trained.memory.run_in_parts(fill, chunk)
        return results

    def sampled_logprobs(self, rows: Sequence[RolloutRow]) -> list[np.ndarray]:
        """Return the log-probs of each row's tokens, float32 `[n]`, under the policy that sampled them.

        Generation returns log-probs with the responses. For the first rows of the current policy they are compared with
        a forward pass over whole rows. If they differ, and always in bfloat16, forward passes compute the log-probs of
        all rows: under the current policy, also where an older one has sampled.
        """
        generated = [row.logprobs for row in rows if row.logprobs is not None]
        if len(generated) < len(rows) or not self.generation.has_policy_logprobs:
            return self.logprobs(rows)
        if self._generation_agrees is None:
            current = [row for row in rows if self._is_current(row)][:PROOF_ROWS]
            if current:
                self._generation_agrees = self._logprobs_agree(current)
        return self.logprobs(rows) if self._generation_agrees is False else generated

    def _is_current(self, row: RolloutRow) -> bool:
        """Return whether the generator's current weights sampled the row."""
        return row.policy_steps is None or bool((row.policy_steps[row.sampled] == self.generation.policy_step).all())

    def _logprobs_agree(self, rows: Sequence[RolloutRow]) -> bool:
        pairs = zip(self.logprobs(rows), rows, strict=True)
        difference = max(float(abs(computed - row.logprobs).max()) for computed, row in pairs)
        if difference <= MAX_DISAGREEMENT:
            return True
        logger.info(
            "log-probs are recomputed after generation: those from generation differ by up to %.2g nats", difference
        )
        return False

    def renew_generator(self, policy_step: int = 0) -> None:
        """Copy the policy's weights into the generator. Call only while both are idle; collective.

        Unfinished conversations continue with the new weights. `policy_step`: the last one whose update they contain.
        """
        self.ranks.announce("renew_generator", policy_step=policy_step)
        with self._responding:  # other ranks may still be ending what rank 0 has given up
            self._models.renew_generator()
            self.generation.renew(policy_step)
        self.ranks.gather(None)  # no rank may generate before its generator has the new weights

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder: safetensors, configuration, tokenizer; adapters are merged into the weights.

        Its generation config names this run's end-of-sequence and padding tokens.
        """
        self._save_model(folder)
        self.tokenizer.save_pretrained(folder)
        ends = [token for token in self.eos_ids if token < self.vocab_size] or self.eos_ids
        named = {"eos_token_id": ends if len(ends) > 1 else ends[0], "pad_token_id": self.pad_id}
        file = folder / GENERATION_CONFIG_NAME
        file.write_text(json.dumps({**self._published_generation, **named}, indent=2) + "\n")

    def _save_model(self, folder: Path) -> None:
        """Save the policy with its adapters merged in, one tensor at a time.

        The weights go through a file, from which `save_pretrained` maps them, because a merged or gathered copy may not
        fit into memory beside the policy.
        """
        causal = self.causal(self.generator)
        merged = folder / "merged.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks.announce("gather_weights")
        MergedWeights(self.causal(self.model)).write(merged)
        try:
            tensors = map_tensors(folder, read_header(merged))
            for tied in causal.all_tied_weights_keys:
                tensors.pop(tied, None)
            causal.save_pretrained(folder, state_dict=tensors)
        finally:
            merged.unlink()

    def close(self) -> None:
        """End the environments; calls in other threads that wait for servers or ranks raise CancelledError."""
        if self._samplers is not None:
            self._samplers.close()
        self.generation.close()

    @contextlib.contextmanager
    def _weights_of(self, reference: bool) -> Iterator[Any]:
        """Yield the reference if `reference` is True, otherwise the generator."""
        if not reference:
            yield self.generator
        elif self.reference is not None:
            yield self.reference
        else:
            assert self.settings.lora_rank, "the reference is on the server"
            with self.generator.disable_adapter():
                yield self.generator
