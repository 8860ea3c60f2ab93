"""What a check found, and how several checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from python_backend.errors import RlhfError


class Level(Enum):
    """How serious a finding is; the value is what the report prints."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    """What was found; of a problem, also what to do."""
    level: Level = Level.OK

    def __str__(self) -> str:
        first, *others = self.text.splitlines() or [""]
        return "\n".join([f"{self.level.value:<8} {self.name:<16} {first}", *(f"{'':<26}{line}" for line in others)])


Check = Callable[[], Iterable[Finding]]


def failed(name: str, text: str) -> Finding:
    """Return the finding of a problem that keeps a run from working."""
    return Finding(name, text, Level.FAILED)


def warning(name: str, text: str) -> Finding:
    """Return the finding of something that works but may not last."""
    return Finding(name, text, Level.WARNING)


def run_checks(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    """Run each named check and yield what it finds; one that raises is a failed check, and the others still run."""
    for name, check in checks:
        try:
            yield from check()
        except (RlhfError, OSError) as error:
            yield failed(name, str(error))
        except Exception as error:  # a broken package may raise anything where it is imported
            yield failed(name, f"{type(error).__name__}: {error}")
