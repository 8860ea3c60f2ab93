"""The interface of a protocol of rewards: the rows of a request, and the reply with their rewards."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_triton.actor.capture.http import Body, HttpError
from rlhf_triton.client.reward_source import Row, RowResult
from rlhf_triton.client.served import ServedModel
from rlhf_triton.tools.gateway.rows import check_all


@dataclass(frozen=True)
class Results:
    """Rewards and errors of a request's rows."""

    rows: list[RowResult]
    served: ServedModel

    def single(self, name: str) -> list[float]:
        """Return the one reward of every row of the field `name`. Raises HttpError if a row has none, or several."""
        check_all(self.rows, name)
        return single_scores([row.rewards for row in self.rows])


def single_scores(scores: Sequence[Sequence[float]]) -> list[float]:
    """Return the one score of every row. Raises HttpError if the rows have several."""
    if several := next((len(row) for row in scores if len(row) != 1), 0):
        raise HttpError(
            501,
            f"the reward model returns {several} scores per row, this protocol has one: set reward.attribute_weights, "
            "or use /classify",
        )
    return [row[0] for row in scores]


class ScoredBody(Body, abc.ABC):
    """A body whose rows are scored."""

    @abc.abstractmethod
    def rows(self, served: ServedModel) -> list[Row]:
        """Return the rows. Raises HttpError if the served reward cannot score them."""

    def outputs(self, served: ServedModel) -> set[str]:
        """Return further tensors that the reply needs."""
        return set()

    @abc.abstractmethod
    def reply(self, results: Results) -> Any:
        """Return the body of the reply. Raises HttpError if the protocol cannot express it."""
