"""Functions and classes of the user's: how the configuration names them, their import, and their errors.

Imports only the standard library, so that worker processes start fast.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_triton.errors import BadScore, FunctionError

FILE_SPEC = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
MODULE_SPEC = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")
MAX_ERROR_CHARACTERS = 500  # longer messages are truncated before they are sent
TIMEOUT_OPTION = "timeout_s"  # parameter through which a class receives the time limit of its calls
KEY_OPTION = "api_key_env"  # option of a judge, and of any function that needs a key: the key's environment variable
CALLERS = {  # files whose frames only lead to the user's code
    __file__,
    *(str(Path(__file__).with_name("rewards") / name) for name in ("function.py", "scores.py", "trl_function.py")),
}
UserFunction = Callable[..., Any]
_sources: dict[Path, bytes] = {}


def check_spec(spec: str) -> str:
    """Return `spec` unchanged. Raises ValueError unless it is `file.py:name` or `package.module:name`."""
    if not FILE_SPEC.fullmatch(spec) and not MODULE_SPEC.fullmatch(spec):
        raise ValueError(f"{spec!r} does not name a function; write path/to/file.py:name or package.module:name")
    return spec


def with_absolute_path(spec: str, place: Callable[[Path], Path]) -> str:
    """Replace the path of a file spec by `place(path)`; return a module spec unchanged."""
    match = FILE_SPEC.fullmatch(spec)
    return f"{place(Path(match['file']))}:{match['name']}" if match else spec


def import_function(spec: str) -> UserFunction:
    """Return the function or class that `spec` names. Raises FunctionError if it cannot be imported for any reason."""
    check_spec(spec)
    source, _, name = spec.rpartition(":")
    try:
        module = _import_file(Path(source)) if FILE_SPEC.fullmatch(spec) else importlib.import_module(source)
    except KeyboardInterrupt:  # Ctrl-C during the import
        raise
    except BaseException as error:  # user code may even call sys.exit
        raise FunctionError(f"{spec} cannot be imported: {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        what = (
            f"has no {name!r}" if function is None else f"defines {name!r} as {type(function).__name__}, not a function"
        )
        raise FunctionError(f"{spec} cannot be imported: {source} {what}")
    return function


def read_sources(specs: Iterable[str]) -> dict[str, str]:
    """Return {path: content} of the files that the specs name, without those that cannot be read."""
    sources = {}
    for match in filter(None, map(FILE_SPEC.fullmatch, specs)):
        with contextlib.suppress(OSError):
            sources[match["file"]] = Path(match["file"]).read_bytes().decode("latin-1")  # keeps each byte
    return sources


def source_digest(spec: str) -> str | None:
    """Return the SHA-256 of the file that a spec names; None for a module, or if the file cannot be read."""
    source = next(iter(read_sources([spec]).values()), None)
    return None if source is None else hashlib.sha256(source.encode("latin-1")).hexdigest()


def keep_sources(sources: Mapping[str, str]) -> None:
    """Make `import_function` import these contents of files, whatever the files contain by then."""
    _sources.update({Path(file): source.encode("latin-1") for file, source in sources.items()})


def describe(error: BaseException) -> str:
    """Return the error as one line: type, message (at most `MAX_ERROR_CHARACTERS`), file name and line number."""
    if isinstance(error, (BadScore, FunctionError)):
        return str(error)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    line = line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + " …"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename not in CALLERS and "importlib" not in frame.filename]
    return f"{line} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else line


def _import_file(path: Path) -> ModuleType:
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "reward_function_file"
    module_spec = importlib.util.spec_from_file_location(name, path)
    source = _sources.get(path)
    if (source is None and not path.is_file()) or module_spec is None or module_spec.loader is None:
        raise FileNotFoundError(f"{path} does not exist")
    # As `python file.py` does, so that the file can import its neighbours.
    sys.path.insert(0, str(path.parent.absolute()))
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    if source is None:
        module_spec.loader.exec_module(module)
    else:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module
