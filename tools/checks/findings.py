"""The types of the checks before a start. Only the standard library is imported: other packages may be broken."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlhf_triton.errors import RlhfError, reason_of


class Level(Enum):
    """The severity of a finding; its value is printed in the report."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    text: str
    """The result of a check; a problem also has its remedy."""
    level: Level = Level.OK

    def __str__(self) -> str:
        first, *others = self.text.splitlines() or [""]
        return "\n".join([f"{self.level.value:<8} {self.name:<16} {first}", *(f"{'':<26}{line}" for line in others)])


def failed(name: str, text: str) -> Finding:
    """Return the finding of a problem that keeps a run from working."""
    return Finding(name, text, Level.FAILED)


def warning(name: str, text: str) -> Finding:
    """Return the finding of something that works but may not last."""
    return Finding(name, text, Level.WARNING)


@dataclass(frozen=True)
class Check:
    """A row of `CHECKS` (`tools/checks/preflight.py`)."""

    name: str
    when: tuple[str, ...]
    """Commands that run it: `doctor` prints its findings, the others refuse to start if it fails."""
    find: Callable[[Any], Iterable[Finding]]
    """Takes the `CheckedRun`; an RlhfError is a failure, too."""
    needs: str = ""
    """Name of a check: unless that one was made and passed, this one is not made."""
    needs_actor: bool = False
    """Whether the configuration must have a section `actor`."""


def found_by(name: str, find: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yield a check's findings; an exception counts as a failure."""
    try:
        yield from find(*arguments)
    except RlhfError as error:
        yield failed(name, str(error))
    except OSError as error:
        yield failed(name, reason_of(error))
    except Exception as error:  # a broken package may raise anything where it is imported
        yield failed(name, f"{type(error).__name__}: {error}")
