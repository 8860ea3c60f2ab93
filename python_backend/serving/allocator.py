"""Makes glibc's allocator keep the memory of one forward pass for the next.

By default glibc returns large freed blocks to the kernel, so every forward pass incurs the page faults again: 4 to 7 %
of its CPU time. With these settings, resident memory stays at its peak. The process makes them itself, because
MALLOC_* environment variables would also change tritonserver's own threads and are left to the user who starts the
server.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
NEVER_TRIM = 2**31 - 1  # mallopt takes an int: the largest one
LARGEST_FROM_THE_HEAP = 1 << 30
LARGEST_IN_OLD_GLIBC = 1 << 25  # before 2.35


def keep_freed_memory() -> None:
    """Apply these settings to this process permanently; do nothing if the C library has no `mallopt`."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    if mallopt(M_MMAP_THRESHOLD, LARGEST_FROM_THE_HEAP) != 1:
        mallopt(M_MMAP_THRESHOLD, LARGEST_IN_OLD_GLIBC)
    mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    mallopt(M_ARENA_MAX, 1)  # because per-thread arenas release large blocks regardless of the thresholds
