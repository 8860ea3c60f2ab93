"""`python_backend.serving.allocator`: a freed block stays in the process for the next forward pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

MIB = 1 << 20
PROGRAM = """
import psutil
from python_backend.serving.allocator import keep_freed_memory
{call}
before = psutil.Process().memory_info().rss
b"x" * (64 << 20)  # larger than any block that glibc keeps on its own
print(psutil.Process().memory_info().rss - before)
"""


@pytest.mark.parametrize("keeps", [False, True])
def test_a_large_freed_block_stays_in_the_process(keeps: bool):
    program = PROGRAM.format(call="keep_freed_memory()" if keeps else "")
    resident = int(subprocess.check_output([sys.executable, "-c", program]))
    assert (resident > 60 * MIB) == keeps, f"{resident / MIB:.1f} MiB more are resident"
