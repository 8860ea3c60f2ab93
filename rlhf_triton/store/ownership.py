"""Run ownership: the last actor to rewind a run owns it, and requests of earlier owners are rejected.

A client identifies itself in a header as `<session>/<n>`, where n is the number of rewinds that it has requested.
Requests that it sent before its own last rewind but that arrive later are therefore rejected as well. Requests without
the header are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_triton.store.durable import is_number
from rlhf_triton.wire.contract import ContractError

KEPT_OWNERS = 8  # limits the size of the rewind entry; requests of even earlier owners are not recognised


@dataclass(frozen=True)
class Sender:
    """The client that sent a request."""

    session: str
    rewinds: int = 0

    @classmethod
    def parse(cls, text: str | None) -> Sender | None:
        """Parse `<session>/<n>`; return None if the header is missing or malformed."""
        session, _, rewinds = str(text or "").rpartition("/")
        return cls(session, int(rewinds)) if session and is_number(rewinds) else None

    def __str__(self) -> str:
        return f"{self.session}/{self.rewinds}"


def owners_after(sender: Sender | None, owners: Sequence[str]) -> list[str]:
    """Return the owners, newest first, after a rewind by `sender`."""
    return [str(sender or ""), *owners][:KEPT_OWNERS]


def refuse_superseded(sender: Sender | None, owners: Sequence[str], run_id: str) -> None:
    """Raise ContractError if `sender` is an earlier owner, or sent the request before its own last rewind."""
    if sender is None or not owners:
        return
    newest, *before = (Sender.parse(owner) for owner in owners)
    rewound = f"run {run_id!r} was rewound after this request was sent"
    if newest is not None and newest.session == sender.session:
        if sender.rewinds < newest.rewinds:
            raise ContractError(f"{rewound}, by the same client; send the steps after the rewind instead")
    elif any(owner is not None and owner.session == sender.session for owner in before):
        raise ContractError(f"{rewound}, by another client, which now owns it; stop this one")
