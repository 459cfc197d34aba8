"""sd_notify: telling systemd how the worker is, where it asked to be told (`Type=notify`, `WatchdogSec=`)."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from drumline.scheduler.cli.health import Health

INTERVAL_S = 0.5
PATIENCE_S = 60
"""How long systemd is to wait for our next word while we start or drain, which may take longer than its timeouts."""


class Notifier:
    """The socket that systemd named in the environment. Nothing is raised where it has gone."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self.watchdog_s = _watchdog_s(environment)
        """How long it waits for a sign of life; None where it does not."""

    @property
    def wanted(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._address)

    def tell(self, states: Mapping[str, object]) -> None:
        """Send these states, such as `{"READY": 1}`, as one message."""
        text = "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in states.items())
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(text.encode(errors="replace"), self._address)  # a path may be no text


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    usec, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not usec.isdecimal() or pid not in ("", str(os.getpid())):
        return None
    return int(usec) / 1e6 or None


@asynccontextmanager
async def telling_systemd(health: Health, notifier: Notifier | None = None) -> AsyncIterator[None]:
    """Keep systemd informed while the block runs, from the event loop: when that hangs, signs of life end, too."""
    notifier = notifier or Notifier()
    task = asyncio.create_task(keep_told(notifier, health)) if notifier.wanted else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            notifier.tell({"STOPPING": 1})


async def keep_told(
    notifier: Notifier, health: Health, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
) -> None:
    """Until cancelled: READY once, STATUS when it changes, WATCHDOG while the worker is healthy, then STOPPING."""
    interval_s = min(INTERVAL_S, (notifier.watchdog_s or INTERVAL_S) / 2)
    was_ready = stopping = False
    told_status = ""
    while True:
        troubles, missing = health.health(), health.ready()
        states: dict[str, object] = {}
        if not missing and not was_ready:
            was_ready = True
            states["READY"] = 1
        if health.draining and not stopping:
            stopping = True
            states["STOPPING"] = 1
        if (status := "; ".join(missing) or "ready") != told_status:
            told_status = states["STATUS"] = status
        if not troubles:
            if not was_ready or stopping:
                states["EXTEND_TIMEOUT_USEC"] = PATIENCE_S * 1_000_000
            if notifier.watchdog_s is not None:
                states["WATCHDOG"] = 1
        if states:
            notifier.tell(states)
        await sleep(interval_s)
