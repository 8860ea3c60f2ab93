"""Loads the extension into the process before torch, which asks for CUDA's hooks once, when it is imported."""

import ctypes
import importlib.util
import sys

from simulated_cuda.build import built, torch_folder

NUM_GPUS = 8
TORCH_LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libshm.so", "libtorch_python.so")  # in the order of their needs


def load():
    """Return the extension, built if needed. Raises BuildError."""
    folder = built()
    for name in TORCH_LIBRARIES:
        ctypes.CDLL(str(torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    spec = importlib.util.spec_from_file_location("simcuda", folder / "simcuda.so")
    native = importlib.util.module_from_spec(spec)
    sys.modules["simcuda"] = native
    spec.loader.exec_module(native)
    native.set_num_gpus(NUM_GPUS)
    native.set_own_checks((folder / "own_checks.txt").read_text().split("\n"))
    return native
