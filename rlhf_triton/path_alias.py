"""Plain names for paths that Triton's Python backend does not take as they are.

The backend starts a model through a shell, with the paths of the model and of its own folder unquoted. In the model's
process, an isolated embedded Python, file names are ASCII whatever the locale, PYTHONUTF8 and PYTHONIOENCODING say.
"""

import functools
import os
import re
from pathlib import Path

_PLAIN = re.compile(r"[\w.-]*", re.ASCII)


def odd_part(path: Path) -> Path | None:
    """Return `path` up to its last name with characters beyond ASCII letters, digits and `_.-`; None without one."""
    return next((part for part in (path, *path.parents) if not _PLAIN.fullmatch(part.name)), None)


@functools.cache  # each alias is an open file
def plain_alias(path: Path) -> Path:
    """Return a plain path to the same place, valid for processes of this user as long as this process lives.

    A plain path is returned unchanged. Raises OSError if the part with odd characters does not exist.
    """
    odd = odd_part(path)
    if odd is None:
        return path
    descriptor = os.open(str(odd).encode(errors="surrogateescape"), os.O_PATH)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}", path.relative_to(odd))
