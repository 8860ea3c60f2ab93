"""Writes log lines as JSON: one object per line, with run, step and weights version."""

import contextlib
import functools
import json
import logging
import sys
import threading
from datetime import datetime, timezone
from typing import Any, TextIO

logger = logging.getLogger(__name__)
_position: dict[str, int | None] = {"step": None, "version": None}
_PREFIXES = {"error: ": logging.ERROR, "warning: ": logging.WARNING}


def set_log_position(*, step: int | None = None, version: int | None = None) -> None:
    """Set the step and the critic's weights version of later log lines; None leaves a value unchanged.

    The position belongs to the process, not to a thread or task: all of them work on the current step or the next one.
    """
    position = {"step": step, "version": version}
    _position.update({name: value for name, value in position.items() if value is not None})


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning once per process."""
    logger.warning(message)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line; `extra={"step": ..., "version": ...}` overrides the position."""

    def __init__(self, process: str, run: str, rank: int = 0) -> None:
        """`process`: actor, sidecar, server or gateway; `run`: the run's identity."""
        super().__init__()
        self._origin: dict[str, Any] = {"process": process, "run": run, **({"rank": rank} if rank else {})}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line in ASCII, so that it is valid in any encoding of stderr."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._origin,
            "step": getattr(record, "step", _position["step"]),
            "version": getattr(record, "version", _position["version"]),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_json(process: str, run: str, *, rank: int = 0, level: int = logging.INFO) -> None:
    """Log to stderr as JSON, including warnings and uncaught exceptions."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process, run, rank))
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)

    def log_uncaught(*exception: Any) -> None:
        logger.critical("uncaught exception", exc_info=exception)

    sys.excepthook = log_uncaught
    threading.excepthook = lambda args: log_uncaught(*args[:3])  # type, value, traceback

    def log_ignored(args: Any) -> None:  # an exception in __del__, which Python only prints
        logger.error("exception ignored in %r", args.object, exc_info=tuple(args[:3]))

    sys.unraisablehook = log_ignored


def is_json() -> bool:
    """Return whether this process logs JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def say(text: str, file: TextIO | None = None) -> None:
    """Print `text` to `file` (default: stdout), or, if this process logs JSON, log it at the level of its prefix.

    A terminal that has gone, or a full disk, is no error.
    """
    if not is_json():
        with contextlib.suppress(OSError):
            print(text, file=file, flush=True)
        return
    message = text.removeprefix("  | ")  # a line of the server's log
    prefix = next(filter(message.startswith, _PREFIXES), "")
    logger.log(_PREFIXES.get(prefix, logging.INFO), "%s", message.removeprefix(prefix))


def parsed(line: str) -> tuple[str, str] | None:
    """Return the level and the message of a line that `JsonFormatter` wrote; None for any other line."""
    try:
        fields = json.loads(line)
        return str(fields["level"]), str(fields["message"])
    except (ValueError, TypeError, LookupError):
        return None


def as_text(line: str) -> str:
    """Return a log line as text; converts lines of `JsonFormatter`."""
    return " ".join(parsed(line) or [line])
