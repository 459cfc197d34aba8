"""Connections that come back: the next attempt after a lost one, and how long to wait before it."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from drumline.scheduler.mqtt.connection import BrokerError, Connection, ConnectOptions, connect


@dataclass
class Backoff:
    """How long to wait before the next attempt: random, so that many workers do not return at once ("full jitter").

    The n-th failure in a row waits random × min(cap_s, base_s · 2ⁿ); a connection that held for `calm_s` ends the row.
    It holds from its first subscription on: an attempt that only took long to fail has held for 0 s.
    """

    base_s: float = 0.25
    cap_s: float = 30.0
    calm_s: float = 10.0
    random: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    failures: int = 0

    def next_s(self, held_s: float) -> float:
        """The wait after a connection that held for `held_s`."""
        if held_s >= self.calm_s:
            self.failures = 0
        wait_s = self.random() * min(self.cap_s, self.base_s * 2.0 ** min(self.failures, 64))
        self.failures += 1
        return wait_s


async def keep_connected(
    options: ConnectOptions,
    session: Callable[[Connection], Awaitable[None]],
    backoff: Backoff,
    on_lost: Callable[[BrokerError], None],
) -> None:
    """Run `session` on a connection, and again on a new one each time it is lost, until cancelled or it returns.

    `on_lost` hears of every failed attempt, and may raise to make an end of it.
    """
    while True:
        lost: BrokerError | None = None
        held_s = 0.0
        try:
            async with connect(options, backoff.clock) as connection:
                try:
                    await session(connection)
                finally:
                    if connection.subscribed_at is not None:
                        held_s = backoff.clock() - connection.subscribed_at
        except* BrokerError as group:
            lost = _first(group)
        if lost is None:
            return
        on_lost(lost)
        await backoff.sleep(backoff.next_s(held_s))


def _first(group: BaseExceptionGroup[BrokerError]) -> BrokerError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, BrokerError) else BrokerError(str(error))
