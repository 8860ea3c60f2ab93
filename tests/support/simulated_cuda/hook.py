"""Loads the simulated GPUs when torch is imported: the extension before it, `torch.cuda` after it.

A process that never imports torch pays for one entry in `sys.meta_path`.
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder


def simulate_on_import():
    """Give this process the simulated GPUs once it imports torch; torch must not be imported yet."""
    if any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        return
    if "torch" in sys.modules:
        if "simulated_cuda.device" not in sys.modules:
            raise ImportError("torch is imported already: load the simulated device before it")
        return
    sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        from simulated_cuda import build

        sys.meta_path.remove(self)  # torch's own spec, from the other finders
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None and not build.has_real_cuda():
            spec.loader = _TorchLoader(spec.loader)
        return spec


class _TorchLoader(Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        from simulated_cuda import extension

        module.__spec__.loader = module.__loader__ = self._loader
        extension.load()
        self._loader.exec_module(module)
        from simulated_cuda import device

        device.install()
