"""Makes glibc's allocator keep the memory of one forward pass for the next.

By default glibc returns large freed blocks to the kernel, and every forward pass pays the page faults again: 4 to 7 %
of its CPU time. Resident memory then stays at its peak. The process sets this itself, because MALLOC_* variables would
also change tritonserver's own threads, and are the user's to set where the user starts the server.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
NEVER_TRIM = 2**31 - 1  # mallopt takes an int: the largest one
LARGEST_FROM_THE_HEAP = 1 << 30
LARGEST_IN_OLD_GLIBC = 1 << 25  # before 2.35


def keep_freed_memory() -> None:
    """Apply the setting to this process, for good; without effect if the C library has no `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_THE_HEAP) != 1:
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_OLD_GLIBC)
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    mallopt(M_ARENA_MAX, 1)  # because per-thread arenas release large blocks whatever the thresholds are
