"""Finds tritonserver (in the nvidia-pytriton wheel, on PATH, or at a given path) and prepares its environment.

A server that does not work with this Python is rejected here, before anything starts.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from rlhf_triton.errors import RlhfError
from rlhf_triton.path_alias import plain_alias

STUB = "triton_python_backend_stub"
_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py")
_SYSTEM_BACKENDS = Path("/opt/tritonserver/backends")
PYTHON_DIR = Path(sys.prefix) / "bin"
"""Folder to put first on PATH: a stub finds site-packages through the first python3 there, and ignores PYTHONPATH."""
SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "1",  # for Python processes that models start; stubs ignore it
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Further environment variables of the server."""
_PACKAGE = Path(__file__).absolute().parents[2]
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


class ServerStartError(RlhfError):
    """The server cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class TritonHome:
    """One installed tritonserver."""

    binary: Path
    """The executable."""
    backend_source_dir: Path
    """Folder that holds `python/libtriton_python.so`."""
    stub: Path
    """The python backend's stub for the running Python."""
    library_path: tuple[Path, ...]
    """Folders to put first in LD_LIBRARY_PATH: they hold the server's libraries and the interpreter's libpython."""
    from_wheel: bool
    """Whether the server is from the wheel: an old release, whose backend folder `lay_out_backends` must assemble."""


def find_tritonserver(explicit: Path | None = None) -> TritonHome:
    """Return the server at `explicit`, else the one in the nvidia-pytriton wheel, else the one on PATH.

    Raises:
        ServerStartError: no server was found, or its python backend does not work with this Python.
    """
    binary = _binary(explicit)
    root = binary.parent.parent
    stubs = root / "python_backend_stubs"
    from_wheel = stubs.is_dir()
    backends = root / "backends"
    if not (backends / "python" / _BACKEND_FILES[0]).is_file():
        backends = _SYSTEM_BACKENDS
    if not (backends / "python" / _BACKEND_FILES[0]).is_file():
        raise ServerStartError(
            f"{binary} has no python backend beside it (backends/python/{_BACKEND_FILES[0]}): "
            "install nvidia-pytriton, or use the tritonserver of an NGC image whose tag ends in -py3"
        )
    libraries = [libpython_dir()]
    if from_wheel:
        version = importlib.metadata.version("numpy")
        if int(version.split(".", 1)[0]) >= 2:
            raise ServerStartError(
                f"NumPy {version} is installed, but with NumPy 2 the models of this tritonserver return "
                'empty tensors: run `pip install "numpy<2"`'
            )
        libraries.insert(0, root.parents[1] / "nvidia_pytriton.libs")
    stub = _stub(stubs / _PYTHON / STUB if from_wheel else backends / "python" / STUB)
    return TritonHome(binary, backends, stub, tuple(libraries), from_wheel)


def lay_out_backends(home: TritonHome, into: Path) -> Path:
    """Return the folder for `--backend-directory`: the server's own, or `into` with links to the wheel's files."""
    if not home.from_wheel:
        return home.backend_source_dir
    folder = into.absolute() / "python"
    folder.mkdir(parents=True, exist_ok=True)
    # The package is for a Python without it, and for an editable install of one whose path is not ASCII: a stub cannot
    # open that, and would crash as Triton logs each message's source path.
    for source in (*(home.backend_source_dir / "python" / name for name in _BACKEND_FILES), home.stub, _PACKAGE):
        link = folder / source.name
        fresh = link.with_name(f".{link.name}.{os.getpid()}")
        fresh.symlink_to(source)
        fresh.replace(link)  # atomic: a server that runs from the same folder never finds it incomplete
    return folder.parent


def server_environment(home: TritonHome) -> dict[str, str]:
    """Return the environment for the server: a copy of this process's, changed so that stubs use the running Python."""
    libraries = [*map(str, home.library_path), os.environ.get("LD_LIBRARY_PATH", "")]
    return {
        **os.environ,
        **SETTINGS,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PATH": os.pathsep.join([str(plain_alias(PYTHON_DIR)), os.environ.get("PATH", os.defpath)]),
    }


def usage(home: TritonHome) -> subprocess.CompletedProcess[str]:
    """Run the server with `--help` and return its usage text, which some releases print to stderr."""
    command = [str(home.binary), "--help"]
    return subprocess.run(
        command, env=server_environment(home), capture_output=True, text=True, errors="replace", check=False, timeout=60
    )


def accepts(home: TritonHome, option: str) -> bool:
    """Return whether this release of the server lists `option` in its usage text."""
    text = usage(home)
    return option in (text.stdout + text.stderr).split()


def _binary(explicit: Path | None) -> Path:
    if explicit is not None:
        if not os.access(explicit, os.X_OK) or explicit.is_dir():
            raise ServerStartError(
                f"{explicit} is not an executable file: --tritonserver (server.tritonserver) takes the path "
                "of a tritonserver binary; without it the one in the nvidia-pytriton wheel is used"
            )
        return explicit.resolve()
    wheel = importlib.util.find_spec("pytriton")  # locates the package without importing it
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        binary = Path(folder) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return binary
    on_path = shutil.which("tritonserver")
    if on_path is None:
        raise ServerStartError(
            "no tritonserver found, neither in this Python's packages nor on PATH: "
            "run `pip install nvidia-pytriton`, or set server.tritonserver to the path of one"
        )
    return Path(on_path).resolve()


def libpython_dir() -> Path:
    """Return the folder of the running interpreter's libpython; the stub embeds it and needs the same patch release."""
    if not sys.base_prefix.isascii():
        raise ServerStartError(
            f"this Python is installed in {sys.base_prefix}, but Triton's python backend finds no standard library "
            "in a folder with characters beyond ASCII: create the virtual environment with a Python that is installed "
            "elsewhere, such as /usr/bin/python3 (the environment itself may stay)"
        )
    name = f"libpython{_PYTHON}.so.1.0"
    library_dir = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for folder in (library_dir, library_dir / multiarch, Path(sys.base_prefix) / "lib"):
        if (folder / name).exists():
            return folder
    raise ServerStartError(
        f"this Python ({sys.executable}) has no {name}, which Triton's python backend embeds: use a Python "
        "that has it (those of uv, conda and the python Docker images do; with pyenv, build with "
        f"PYTHON_CONFIGURE_OPTS=--enable-shared; on Debian, `apt install libpython{_PYTHON}`)"
    )


def _stub(path: Path) -> Path:
    if not path.is_file():
        versions = sorted(folder.name for folder in path.parents[1].glob("3.*"))
        hint = f"; there are stubs for {', '.join(versions)}" if versions else ""
        raise ServerStartError(
            f"this tritonserver has no python backend stub for Python {_PYTHON} ({path}){hint}: "
            "create the virtual environment with a Python that has one, or install another nvidia-pytriton"
        )
    built_for = re.search(rb"libpython(3\.\d+)", path.read_bytes())
    if built_for and built_for[1].decode() != _PYTHON:
        other = built_for[1].decode()
        raise ServerStartError(
            f"the python backend stub {path} is built for Python {other}, but this is Python {_PYTHON}: "
            f"run the command with Python {other}, or reinstall nvidia-pytriton"
        )
    return path
