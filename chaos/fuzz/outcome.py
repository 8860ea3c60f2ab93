"""Findings of a stage of the fuzz test: what counts as a defect, and how it is printed."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from chaos.fuzz.client import HANG_S, Answer

LONGEST_WAIT_S = {"plain": 1.0, "guarded": 1.0, "gateway": 2.0}
GATEWAY_MB = 300.0  # above its memory at the start
# A status 500 counts as a defect, unless its message contains one of these, which tritonserver's own parsers send.
TRITONS_OWN = ("failed to parse the request JSON buffer", "Unable to parse", "unexpected", "Unexpected")


@dataclass
class StageOutcome:
    """Findings of one stage."""

    stage: str
    sent: collections.Counter[str] = field(default_factory=collections.Counter)
    """Number of requests by the status of their answer."""
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    outages: list[str] = field(default_factory=list)
    """Failed requests of the good client."""
    lost: list[str] = field(default_factory=list)
    """Requests whose connection broke; if the server died, one of the first of them killed it."""
    longest_good_wait_s: float = 0.0
    good_answers: int = 0
    gateway_mb: float = 0.0
    """Most memory of the gateway, above that at the start."""

    @property
    def passed(self) -> bool:
        """Whether no defect was found, the good client never waited long, and the gateway stayed small."""
        is_quick = self.longest_good_wait_s <= LONGEST_WAIT_S[self.stage] and self.gateway_mb <= GATEWAY_MB
        return is_quick and not (self.hangs or self.wrong or self.restarts or self.outages)

    def judge(self, request: str, answer: Answer) -> None:
        """Count the answer to a request, and note what is wrong with it."""
        self.sent[str(answer.status)] += 1
        what = f"{request}: {answer.status} {answer.text}"
        if answer.hung:
            self.hangs.append(what)
        elif answer.status is None or "Socket closed" in answer.text:
            self.lost.append(what)
        elif answer.status in ("500", "INTERNAL", "UNKNOWN") and not any(words in answer.text for words in TRITONS_OWN):
            self.wrong.append(what)
        elif answer.status == "200":
            self.wrong += [f"{what} {name} has shape {shape}" for name, shape in answer.outputs.items() if 0 in shape]

    def describe(self) -> str:
        """Return the findings in a few lines."""
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.sent.items()))
        lines = [
            f"{self.stage}: {self.sent.total()} requests ({counts})",
            f"  {len(self.wrong)} wrong answers, {len(self.hangs)} hangs above {HANG_S:g} s, "
            f"{len(self.outages)} outages, {len(self.restarts)} restarts",
            f"  good client: {self.good_answers} answers, longest wait {self.longest_good_wait_s:.2f} s "
            f"(at most {LONGEST_WAIT_S[self.stage]:g} s); gateway: {self.gateway_mb:.0f} of {GATEWAY_MB:g} MB",
        ]
        kinds = [self.wrong, self.hangs, self.restarts, self.lost, self.outages]
        return "\n".join([*lines, *(f"  ! {line[:400]}" for found in kinds for line in found[:8])])
