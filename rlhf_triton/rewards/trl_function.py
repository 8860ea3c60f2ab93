"""Adapter for reward functions with TRL's signature."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_triton.rewards.replies import last_reply, reply_start
from rlhf_triton.rewards.sample import MESSAGES_KEY, PROMPT_KEY, REPLY_KEY, RESPONSE_KEY, Sample
from rlhf_triton.rewards.scores import NOT_APPLICABLE, group_scores
from rlhf_triton.user_code import UserFunction

COMPLETIONS = "completions"  # parameter by which a function with TRL's signature is recognised
TRL_ARGUMENTS = ("prompts", COMPLETIONS)
# Arguments that TRL's trainer passes but this project cannot: the server does not know the response's tokens.
OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments", "completion_ids")


class TrlFunction:
    """Adapter that calls a function with TRL's signature, `(prompts, completions, **columns)`, for samples."""

    def __init__(
        self, function: UserFunction, parameters: Mapping[str, inspect.Parameter], needed: Sequence[str]
    ) -> None:
        """`needed`: parameters without a default; as in TRL, they are None for rows without the column."""
        self._function = function
        self._needed = needed
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._names = None if takes_all else parameters.keys()

    def __call__(self, sample_or_group: Sample | list[Sample]) -> Any:
        """Return the score of a sample, or a list of scores for a list of samples; None becomes NOT_APPLICABLE."""
        samples = sample_or_group if isinstance(sample_or_group, list) else [sample_or_group]
        prompts, completions = zip(*map(_texts, samples), strict=True)
        sent = {name for sample in samples for name in sample.metadata}
        columns = {*sent, *self._needed} - {PROMPT_KEY, RESPONSE_KEY, MESSAGES_KEY, REPLY_KEY}
        lists = {
            **{name: [sample.metadata.get(name) for sample in samples] for name in columns},
            "prompts": [*prompts],
            COMPLETIONS: [*completions],
        }
        scores = self._function(
            **{name: value for name, value in lists.items() if self._names is None or name in self._names}
        )
        values = [NOT_APPLICABLE if score is None else score for score in group_scores(scores, len(samples))]
        return values if isinstance(sample_or_group, list) else values[0]


def _texts(sample: Sample) -> tuple[Any, Any]:
    """Return a sample's prompt and completion, each a text or a list of chat messages."""
    messages = sample.metadata.get(MESSAGES_KEY)
    text = sample.text if sample.response is None else sample.response
    if not isinstance(messages, list):
        return sample.prompt, text
    if reply := sample.metadata.get(REPLY_KEY):
        return messages[: len(messages) - last_reply(reply)], reply
    end = reply_start(messages) if sample.response is None else len(messages)
    return messages[:end], messages[end:] or [{"role": "assistant", "content": text}]
