"""Which actor owns a run: the one that rewound it last. What an earlier owner sent is refused, however late it arrives.

A client names itself in a header as `<session>/<n>`, where n counts the rewinds that it has asked for. Requests without
that header are taken as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from python_backend.store.durable import is_number
from python_backend.wire.contract import StepConflict

KEPT_OWNERS = 8


@dataclass(frozen=True)
class Sender:
    """Who sent a request."""

    session: str
    rewinds: int = 0

    @classmethod
    def parse(cls, text: str | None) -> Sender | None:
        """The sender that a header names; None without one."""
        session, _, rewinds = str(text or "").rpartition("/")
        return cls(session, int(rewinds)) if session and is_number(rewinds) else None

    def __str__(self) -> str:
        return f"{self.session}/{self.rewinds}"


def owners_after(sender: Sender | None, owners: Sequence[str]) -> list[str]:
    """The owners, newest first, once `sender` has rewound the run."""
    return [str(sender or ""), *owners][:KEPT_OWNERS]


def refuse_superseded(sender: Sender | None, owners: Sequence[str], run_id: str) -> None:
    """Raise StepConflict if `sender` owned the run and does no longer."""
    if sender is None or not owners:
        return
    newest, *before = (Sender.parse(owner) for owner in owners)
    if newest is not None and newest.session == sender.session:
        is_late = sender.rewinds < newest.rewinds
    else:
        is_late = any(owner is not None and owner.session == sender.session for owner in before)
    if is_late:
        raise StepConflict(
            f"run {run_id!r} was rewound after this request was sent: whoever asked for that last owns the run, and "
            "other actors must stop"
        )
