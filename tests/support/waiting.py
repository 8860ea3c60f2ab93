"""Waits for a condition, in tests that no event or return value tells of it."""

import asyncio
import subprocess
import time


def wait_for(condition, *children, timeout_s=240.0):
    """Return when `condition` holds; fail when one of the children has ended, or after `timeout_s`.

    `children`: of `rlhf_triton.tools.server.child`, or of subprocess.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        for child in children:
            if child.poll() is not None:
                is_plain = isinstance(child, subprocess.Popen)
                raise AssertionError(child.communicate() if is_plain else child.exit_message())
        if time.monotonic() > deadline:
            paths = [child.log_path for child in children if not isinstance(child, subprocess.Popen)]
            logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in paths)
            raise AssertionError(f"waited {timeout_s:g} s in vain:\n{logs}")
        time.sleep(0.005)


async def until(condition):
    """Return when `condition` holds, which other tasks make true."""
    while not condition():
        await asyncio.sleep(0.001)
