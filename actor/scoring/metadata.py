"""What the server receives beside a row: the prompt's other columns and, where they are needed, its texts and group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actor.data.prompts import PromptError
from actor.data.rollout import Prompt
from python_backend.client.served import ServedModel
from python_backend.rewards.function import PROMPT_KEY, RESPONSE_KEY
from python_backend.rewards.groups import GROUP_KEY
from python_backend.wire.contract import STEP_ENDS


def check_prompts(reward: ServedModel, prompts: Sequence[Prompt]) -> None:
    """Raise PromptError if a prompt column has a name that the actor uses for rewards."""
    reserved = {PROMPT_KEY, RESPONSE_KEY, *((GROUP_KEY,) if reward.groupwise else ())}
    for prompt in prompts if reward.reads_texts else ():
        taken = reserved & prompt.metadata.keys()
        if taken:
            raise PromptError(
                f"prompt {prompt.prompt_id} has a column {sorted(taken)[0]!r}, the name under which reward "
                "functions receive the prompt's or the response's text or group; rename the column"
            )
        if reward.granularity and STEP_ENDS in prompt.metadata:
            raise PromptError(
                f"prompt {prompt.prompt_id} has a column {STEP_ENDS!r}, the name of a response's steps in its "
                "metadata; rename the column"
            )


def row_metadata(reward: ServedModel, prompt: Prompt, response: str, group: int) -> dict[str, Any]:
    """Return a row's metadata; `group` is the row's group within the request, sent if a function is groupwise."""
    texts = {PROMPT_KEY: prompt.text, RESPONSE_KEY: response} if reward.reads_texts else {}
    return {**prompt.metadata, **texts, **({GROUP_KEY: group} if reward.groupwise else {})}
