"""Finding tritonserver, and the sentence for each Python that cannot run it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from python_backend.config import ServerSection
from python_backend.path_alias import plain_alias
from tools.server.container import BODY_LIMIT
from tools.server.triton_home import (
    STUB,
    ServerStartError,
    TritonHome,
    accepts,
    find_tritonserver,
    lay_out_backends,
    server_environment,
)
from tools.server.tritonserver import TritonServer

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHER = "3.8"


@pytest.fixture
def wheel() -> TritonHome:
    return find_tritonserver(None)


def copy_of(wheel: TritonHome, root: Path, stubs: dict[str, str]) -> Path:
    """A wheel's tree under `root`; `stubs` says which Python's stub stands in which folder."""
    binary = root / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (binary.parent.parent / "backends").symlink_to(wheel.backend_source_dir)
    for folder, version in stubs.items():
        place = binary.parent.parent / "python_backend_stubs" / folder
        place.mkdir(parents=True)
        (place / STUB).symlink_to(wheel.stub.parents[1] / version / STUB)
    return binary


def test_the_wheel_is_found(wheel: TritonHome) -> None:
    assert wheel.from_wheel
    assert os.access(wheel.binary, os.X_OK)
    assert wheel.stub.parent.name == PYTHON
    assert (wheel.library_path[1] / f"libpython{PYTHON}.so.1.0").exists()


def test_backends_are_laid_out_again_and_again(
    wheel: TritonHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package, where its path is not ASCII: in an editable install the stub's Python cannot open that."""
    for package, names in ((tmp_path / "plain", set()), (tmp_path / "ü", {"ü"})):
        monkeypatch.setattr("tools.server.triton_home._PACKAGE", package)
        folder = lay_out_backends(wheel, tmp_path / "backends") / "python"
        assert {path.name for path in folder.iterdir()} == {
            "libtriton_python.so",
            "triton_python_backend_utils.py",
            STUB,
            *names,
        }
        assert (folder / STUB).resolve() == wheel.stub.resolve()


def test_environment_of_the_server(wheel: TritonHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = server_environment(wheel)
    assert environment["PATH"].split(os.pathsep)[0] == str(plain_alias(Path(sys.prefix) / "bin"))
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep) == [*map(str, wheel.library_path), "/mine"]
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert os.environ["LD_LIBRARY_PATH"] == "/mine"


def test_a_system_server_keeps_its_own_backends(wheel: TritonHome, tmp_path: Path) -> None:
    """The layout of the NGC image: stub beside the backend's library, no folder of stubs."""
    binary = tmp_path / "tritonserver" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    backends = lay_out_backends(wheel, binary.parent.parent / "backends")
    home = find_tritonserver(binary)
    assert not home.from_wheel
    assert home.backend_source_dir == backends
    assert lay_out_backends(home, tmp_path / "elsewhere") == backends
    assert not (tmp_path / "elsewhere").exists()


def test_an_option_is_known_if_the_server_lists_it(wheel: TritonHome, tmp_path: Path) -> None:
    assert accepts(wheel, "--http-port")
    assert not accepts(wheel, BODY_LIMIT)
    newer = tmp_path / "tritonserver"
    newer.write_text(f"#!/bin/sh\necho 'Usage: tritonserver [options]'\necho '  {BODY_LIMIT} <integer>' >&2; exit 1\n")
    newer.chmod(0o755)
    home = dataclasses.replace(wheel, binary=newer)
    assert accepts(home, BODY_LIMIT)
    server = TritonServer(home, tmp_path, ServerSection(), tmp_path / "log", backends=tmp_path, control_key="key")
    assert f"{BODY_LIMIT}={256 << 20}" in server._command()


def test_path_is_the_last_resort(wheel: TritonHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = copy_of(wheel, tmp_path, {PYTHON: PYTHON})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(binary.parent))
    assert find_tritonserver(None).binary == binary


def test_no_tritonserver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match=r"no tritonserver found, .* `pip install nvidia-pytriton`"):
        find_tritonserver(None)


def test_a_path_that_is_no_executable(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"nothing is not an executable file: --tritonserver \("):
        find_tritonserver(tmp_path / "nothing")
    with pytest.raises(ServerStartError, match="is not an executable file"):
        find_tritonserver(tmp_path)


def test_a_server_without_a_python_backend(tmp_path: Path) -> None:
    binary = shutil.copy("/bin/true", tmp_path / "tritonserver")
    with pytest.raises(ServerStartError, match=r"has no python backend beside it .* ends in -py3"):
        find_tritonserver(Path(binary))


def test_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second NumPy cannot be installed beside the first, so its version is played."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.1")
    with pytest.raises(ServerStartError, match=r'NumPy 2\.3\.1 is installed, .*`pip install "numpy<2"`'):
        find_tritonserver(None)


def test_a_python_without_libpython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path) if name == "LIBDIR" else None)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(ServerStartError, match=rf"has no libpython{PYTHON}\.so\.1\.0, .*: use a Python that has it"):
        find_tritonserver(None)


def test_a_python_that_the_stub_cannot_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", "/srv/jörg/python")
    with pytest.raises(
        ServerStartError, match=r"installed in /srv/jörg/python, .* a Python that is installed elsewhere"
    ):
        find_tritonserver(None)


def test_a_stub_of_another_python(wheel: TritonHome, tmp_path: Path) -> None:
    binary = copy_of(wheel, tmp_path, {PYTHON: OTHER})
    sentence = rf"is built for Python {OTHER}, but this is Python {PYTHON}: run the command with"
    with pytest.raises(ServerStartError, match=sentence):
        find_tritonserver(binary)
