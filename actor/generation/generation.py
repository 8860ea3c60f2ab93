"""The interface of what generates responses: decoding in this process, or vLLM servers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from rlhf_triton.actor.data.prompt_reader import Prompt
from rlhf_triton.actor.generation.conversations import ConversationRunner, ConversationSource
from rlhf_triton.actor.generation.row_sources import Finished, IsPaused, PromptSource, SamplingJob
from rlhf_triton.config.actor import GenerationSection
from rlhf_triton.models.out_of_memory import MemoryBudget

JobSource = PromptSource | ConversationSource


class Generation(ABC):
    """Generates responses with the sampling settings of one configuration."""

    has_policy_logprobs: bool
    """Whether the log-probs of responses are the policy's own, not another engine's."""

    def __init__(self, settings: GenerationSection, *, eos_ids: list[int], banned_ids: list[int]) -> None:
        self._settings = settings
        self._eos_ids = eos_ids
        self._banned_ids = banned_ids
        self.runner: ConversationRunner | None = None
        """Runs conversations with environments; None: every prompt has one response."""
        self.memory = MemoryBudget(
            "actor.generation.batch_size", settings.batch_size, remedy="lower actor.generation.max_new_tokens"
        )
        """How many responses fit into the GPU's memory at the same time; vLLM's servers bound their own."""
        self.policy_step = 0
        """The last step whose update the model's weights contain."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise TemplateError if the chat template cannot render conversations that start from the prompts."""
        if self.runner is not None:
            self.runner.check_prompts(prompts)

    def run_rows(
        self,
        prompts: Mapping[int, Prompt],
        finished: Finished,
        is_over: IsPaused = lambda: False,
        *,
        seed: int,
        greedy: bool = False,
    ) -> None:
        """Generate the responses to prompts, given by index, or drop them once `is_over`, which `decode` calls.

        Other arguments as in `SamplingJob`.
        """
        if prompts:
            self.add(SamplingJob(dict(prompts), finished, seed, greedy))
            self.decode(is_over)
            if self.has_jobs:
                self.abandon()

    def _new_source(self) -> JobSource:
        """Return a source of rows, prompts or conversations with environments, without jobs."""
        if self.runner is not None:
            return ConversationSource(self.runner)
        return PromptSource(max_new_tokens=self._settings.max_new_tokens)

    @property
    @abstractmethod
    def has_jobs(self) -> bool:
        """Whether there are unfinished conversations."""

    @abstractmethod
    def add(self, job: SamplingJob) -> None:
        """Add prompts, each of which `decode` gives a response, or with a `runner` a conversation with an environment.

        May be called in another thread than `decode`, in which the job's `finished` is called.
        """

    @abstractmethod
    def decode(self, is_paused: IsPaused = lambda: False) -> None:
        """Generate until all jobs are done, or until `is_paused`."""

    @abstractmethod
    def wake(self) -> None:
        """End the wait of `decode` in another thread for environments, so that it calls its `is_paused`."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop all jobs; call in the thread of `decode`."""

    @abstractmethod
    def renew(self, policy_step: int) -> None:
        """Use the model's current weights, whose last update is of this step; called by `Policy.renew_generator`."""

    @abstractmethod
    def close(self) -> None:
        """End the environments; a `decode` that waits in another thread raises CancelledError."""
