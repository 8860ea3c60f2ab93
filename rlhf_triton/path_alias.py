"""ASCII aliases for paths that Triton's Python backend cannot handle.

The backend starts a model through a shell without quoting the paths of the model and of its own folder. In the model's
process, an isolated embedded Python, file names are ASCII regardless of locale, PYTHONUTF8 and PYTHONIOENCODING.
"""

import functools
import os
import re
from pathlib import Path

_PLAIN = re.compile(r"[\w.-]*", re.ASCII)


def special_prefix(path: Path) -> Path | None:
    """Return `path` up to its last name with characters other than ASCII letters, digits and `_.-`; None if plain."""
    return next((part for part in (path, *path.parents) if not _PLAIN.fullmatch(part.name)), None)


@functools.cache  # each alias is an open file
def plain_alias(path: Path) -> Path:
    """Return a path without special characters to the same place, valid for this user while this process lives.

    A path without special characters is returned unchanged. Raises OSError if its part with special characters does not
    exist.
    """
    prefix = special_prefix(path)
    if prefix is None:
        return path
    descriptor = os.open(str(prefix).encode(errors="surrogateescape"), os.O_PATH)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}", path.relative_to(prefix))
