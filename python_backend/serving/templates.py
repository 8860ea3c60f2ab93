"""Templates that turn a prompt and a response into the text that a reward model scores."""

from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlhf_triton.errors import reason_of
from rlhf_triton.monitoring.log_lines import warn_once
from rlhf_triton.rewards.sample import RESPONSE_KEY, Sample
from rlhf_triton.wire.contract import MESSAGES, METADATA, ContractError


class RowTemplate:
    """A Jinja template, rendered in a sandbox and with the whitespace control of transformers' chat templates.

    Its variables are `text` (the sentence), `response`, `prompt`, `messages` and `metadata`. `response` comes from the
    metadata, by default the sentence; `prompt` comes from the metadata or, in a chat, is the content of the last
    message. Keys missing from the metadata are undefined; using them is an error.
    """

    def __init__(self, source: str) -> None:
        """Compile the template. Raises ValueError if it is invalid."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False
        )
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"reward.template is not valid Jinja: {reason_of(error)}") from error
        self._reads_last = "prompt" in source and MESSAGES not in source

    def render(self, index: int, sentence: str, metadata: dict[str, Any]) -> str:
        """Return the text of row `index`. Raises ContractError if rendering fails or gives no text."""
        columns = _without_nulls(metadata)
        if self._reads_last and len(columns.get(MESSAGES, ())) > 1:
            warn_once(
                "reward.template reads the prompt, which of a chat is only its last message; read messages to score "
                "the others as well"
            )
        variables = {
            "text": sentence,
            "metadata": columns,
            "response": columns.get(RESPONSE_KEY, sentence),
            "prompt": Sample(sentence, metadata=columns).prompt,
            "messages": columns.get(MESSAGES),
        }
        try:
            text = self._template.render(_without_nulls(variables))
            text.encode()  # raises on lone surrogates: JSON may contain them, tokenizers reject them
        except Exception as error:  # the template is the user's own code and may raise any exception
            raise ContractError(
                f"{METADATA}[{index}]: reward.template cannot be rendered: {reason_of(error)}"
            ) from error
        if not text.strip():
            raise ContractError(f"{METADATA}[{index}]: reward.template gives an empty text for {sentence[:80]!r}")
        return text


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without None, which means that a row lacks the column."""
    return {name: value for name, value in values.items() if value is not None}
