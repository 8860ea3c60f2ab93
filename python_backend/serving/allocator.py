"""Makes glibc's allocator keep the memory of one forward pass for the next.

By default glibc returns large freed blocks to the kernel, and every forward pass pays the page faults again.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
NEVER_TRIM = 2**31 - 1  # mallopt takes an int: the largest one
LARGEST_FROM_THE_HEAP = 1 << 30


def use_allocator(setting: str) -> bool:
    """Apply the allocator setting `default` or `retain` to this process; `retain` cannot be undone.

    Returns False if the C library has no `mallopt` or rejects a value.
    """
    if setting == "default":
        return True
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # A single arena, because per-thread arenas release large blocks whatever the thresholds are.
    settings = ((M_MMAP_THRESHOLD, LARGEST_FROM_THE_HEAP), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_ARENA_MAX, 1))
    return all([mallopt(name, value) == 1 for name, value in settings])
