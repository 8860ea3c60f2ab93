"""Builds the extension once for each version of torch, Python and its sources; `python -m simulated_cuda.build`.

Without importing torch, which must find the extension loaded when it is imported.
"""

import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[2] / "build" / "simulated_cuda"
SOURCES = ("simcuda.cpp", "simkernels.cpp", "simnccl.cpp")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-DTORCH_EXTENSION_NAME=simcuda", "-DTORCH_API_INCLUDE_EXTENSION_H")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


class BuildError(Exception):
    """The extension cannot be built; the message says why in one sentence."""


def torch_folder():
    """Return the folder of the installed torch. Raises BuildError if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("The simulated device needs torch, which is not installed.")
    return Path(spec.submodule_search_locations[0])


def has_real_cuda():
    """Return whether the installed torch is a CUDA build, which needs no simulated GPUs."""
    return not re.search(r"^cuda\b[^=]*= None$", (torch_folder() / "version.py").read_text(), re.MULTILINE)


def built():
    """Return the folder with `simcuda.so` and `own_checks.txt`, building them if needed.

    Several processes may call it at once: one builds, the others wait.

    Raises:
        BuildError: there is no compiler, no Python header, or the sources do not fit this torch.
    """
    folder = CACHE / _key()
    if (folder / "simcuda.so").exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "simcuda.so").exists():
            partial = CACHE / f"{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            (partial / "own_checks.txt").write_text("\n".join(_own_checks()))
            _compile(partial)
            partial.rename(folder)
    return folder


def _key():
    sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("sim*.*")))
    digest = hashlib.sha256(sources + " ".join(FLAGS).encode()).hexdigest()[:12]
    version = re.search(r"__version__ = '([^']+)'", (torch_folder() / "version.py").read_text())
    assert version
    return f"torch-{version[1]}-{sys.implementation.cache_tag}-{digest}"


def _compile(folder):
    compiler = shutil.which("g++")
    headers = Path(sysconfig.get_path("include"))
    torch = torch_folder()
    if compiler is None:
        raise BuildError(
            "The simulated device needs the compiler g++, which is not on the PATH (Debian: apt install g++)."
        )
    if not (headers / "Python.h").exists():
        raise BuildError(
            f"The simulated device needs Python.h, which is not in {headers} (Debian: apt install python3-dev)."
        )
    includes = [f"-isystem{path}" for path in (torch / "include", torch / "include/torch/csrc/api/include", headers)]
    started = [
        _start([compiler, *FLAGS, *includes, "-c", str(HERE / name), "-o", f"{name}.o"], folder) for name in SOURCES
    ]
    for process in started:
        _finish(process)
    objects = [f"{name}.o" for name in SOURCES]
    _finish(_start([compiler, "-shared", *objects, f"-L{torch / 'lib'}", *LIBRARIES, "-o", "simcuda.so"], folder))
    for name in objects:
        (folder / name).unlink()


def _start(command, folder):
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(process):
    output, _ = process.communicate()
    if process.returncode:
        errors = [line for line in output.splitlines() if "error" in line]
        raise BuildError(
            f"The simulated device does not compile with this torch: {' '.join(errors[:1]) or output[-300:]}"
        )


def _own_checks():
    """Return the operators that check the devices of their arguments themselves, and take scalars of the host."""
    import yaml

    declared = torch_folder().parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = {each["func"].split("(")[0]: each for each in yaml.load(declared.read_text(), Loader=loader)}

    def checks(entry):
        # Kernels through TensorIterator check devices as they are set up; functional variants are their out variant.
        structured = entries.get(entry.get("structured_delegate", ""), entry)
        iterates = "TensorIteratorBase" in structured.get("structured_inherits", "")
        return iterates or "NoCheck" in (entry.get("device_check"), structured.get("device_check"))

    return [f"aten::{name}" for name, entry in entries.items() if checks(entry)]


if __name__ == "__main__":
    try:
        if not has_real_cuda():
            print(built())
    except BuildError as error:
        sys.exit(str(error))
