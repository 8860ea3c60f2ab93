"""Lets processes that a test starts run out of GPU memory, on a CPU, too."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = """\
import os, sys
sys.path.insert(0, {root!r})
import torch
if {condition}:
    from {module} import {owner}

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 1.00 GiB free.")

    {owner}.{name} = full
"""


def let_memory_be_short(patch, folder, module, owner, name, *, condition="True"):
    """Let `owner.name` of `module` raise torch.OutOfMemoryError in each Python process started from now on.

    Args:
        folder: gets a `sitecustomize.py`.
        condition: a Python expression that holds in the processes concerned.
    """
    text = TEMPLATE.format(root=str(ROOT), condition=condition, module=module, owner=owner, name=name)
    (folder / "sitecustomize.py").write_text(text)
    patch.setenv("PYTHONPATH", str(folder))
