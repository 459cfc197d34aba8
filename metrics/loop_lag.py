"""How late an event loop wakes."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def watch_loop_lag(
    observe: Callable[[float], None],
    interval_s: float = 0.5,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Sleep `interval_s` seconds again and again and observe by how many seconds each sleep was late.

    Runs until cancelled: start it as a task with `observe=instruments.loop_lag`.
    """
    while True:
        planned = clock() + interval_s
        await sleep(interval_s)
        observe(max(0.0, clock() - planned))
