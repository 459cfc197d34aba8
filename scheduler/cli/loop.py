"""Running a command's event loop. Only the command line chooses a loop and handles signals; the library never does."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on uvloop where there is one. SIGTERM and a lost terminal cancel it, as Ctrl-C does."""
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop  # not on Windows

    return uvloop.run(_cancelled_by_signals(main))


def on_signals(action: Callable[[], object]) -> None:
    """What SIGTERM and Ctrl-C do from now on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, action)


@contextmanager
def handled(**actions: Any) -> Iterator[None]:
    """What signals, by their names, do without an event loop while the block runs; those that the platform has."""
    before = {
        number: signal.signal(number, action)
        for name, action in actions.items()
        if (number := getattr(signal, name, None)) is not None
    }
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action or signal.SIG_DFL)


@contextmanager
def on_switch(action: Callable[[], object]) -> Iterator[None]:
    """What SIGUSR2 does while the block runs, and nothing before and after it, where it would end the process."""
    on_usr2(action)
    try:
        yield
    finally:
        on_usr2(int)


def on_usr2(action: Callable[[], object]) -> None:
    """What SIGUSR2 does from now on, on platforms that have it."""
    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, action)


async def in_thread(work: Callable[[], T]) -> T:
    """What `work` returns, or raises. Unlike `asyncio.to_thread`, no loop waits for it that is ended meanwhile."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="drumline-start")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)


async def _cancelled_by_signals(main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    if task is not None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await main
