"""Has glibc's allocator keep a forward's memory for the next one: page faults cost more than the memory."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
NEVER_TRIM = 2**31 - 1
LARGEST_FROM_THE_HEAP = 1 << 30


def use_allocator(setting: str) -> bool:
    """Apply `default` or `retain` to this process; False if the C library cannot. It cannot be taken back."""
    if setting == "default":
        return True
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # One arena: a thread's own arena hands large blocks back whatever the thresholds say.
    settings = ((M_MMAP_THRESHOLD, LARGEST_FROM_THE_HEAP), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_ARENA_MAX, 1))
    return all([mallopt(name, value) == 1 for name, value in settings])
