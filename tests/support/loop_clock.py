"""Lets the clock of the running event loop jump, so that a test waits for no deadline and none passes by accident."""

import asyncio


def advance(seconds):
    """Let the loop's clock jump: what waits for a time up to then comes due in the loop's next turn."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds


async def hurried(call):
    """Return the result of `call`, which waits for a deadline: the clock jumps by a second every millisecond."""
    task = asyncio.ensure_future(call)
    while not task.done():
        advance(1.0)
        await asyncio.wait([task], timeout=0.001)
    return await task
