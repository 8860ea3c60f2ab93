"""OpenRLHF's protocol, `--reward.remote_url http://host:port/get_reward`."""

from typing import Any

from rlhf_triton.actor.capture.http import HttpError
from rlhf_triton.client.reward_source import Row, text_row
from rlhf_triton.client.served import ServedModel
from rlhf_triton.tools.gateway.protocols.scored_body import Results, ScoredBody
from rlhf_triton.tools.gateway.rows import BoundedRows


class OpenRLHFRequest(ScoredBody):
    """A request of OpenRLHF's `SingleTurnAgentExecutor`."""

    query: BoundedRows[str]
    """Prompt and response of each row as one text, with special tokens: see `reward.add_special_tokens`."""
    prompts: BoundedRows[str | None] | None = None
    """The prompts alone, for reward functions."""
    labels: BoundedRows[Any] | None = None
    """Column `label` of each row, for reward functions."""

    def rows(self, served: ServedModel) -> list[Row]:
        for name, column in (("prompts", self.prompts), ("labels", self.labels)):
            if column and len(column) != len(self.query):
                raise HttpError(
                    400, f"{name}: {len(column)} entries, must be one for each of {len(self.query)} queries"
                )
        labels = [{"label": label} for label in self.labels] if self.labels else [{}] * len(self.query)
        rows = []
        for query, prompt, label in zip(self.query, self.prompts or [None] * len(self.query), labels, strict=True):
            if prompt is None or not query.startswith(prompt):  # the tokenizer may have changed the prompt
                rows.append(Row((query,), metadata=label))
            else:
                rows.append(text_row(prompt, query[len(prompt) :], label))
        return rows

    def reply(self, results: Results) -> dict[str, Any]:
        """Return rewards, also as `scores`, by which OpenRLHF filters prompts, and the terms of a weighted sum."""
        rewards = results.single("query")
        terms: dict[str, list[float | None]] = {}
        for i, name in enumerate(results.served.components):
            column = [row.components[i] for row in results.rows]
            if None not in column:  # a term of weight 0 may have failed
                terms[name] = column
        return {"rewards": rewards, "scores": rewards, "extra_logs": terms}
