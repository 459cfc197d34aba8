"""What systemd is told, over a datagram socket such as its own."""

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.scheduler.cli.health import Health
from drumline.scheduler.cli.systemd import Notifier, keep_told, telling_systemd

EXTEND = "EXTEND_TIMEOUT_USEC=60000000"


class Manager:
    """The end of the socket that systemd holds."""

    def __init__(self, name: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + name[1:] if name.startswith("@") else name)
        self.socket.settimeout(20.0)
        self.environment = {"NOTIFY_SOCKET": name}

    def hear(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")

    def silent(self) -> bool:
        self.socket.setblocking(False)
        try:
            self.socket.recv(4096)
        except BlockingIOError:
            return True
        finally:
            self.socket.settimeout(20.0)
        return False


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(f"@drumline-test-{os.getpid()}" if request.param == "abstract" else str(tmp_path / "notify"))
    with manager.socket:
        yield manager


class Ticks:
    """A sleep that ends when the test says so."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self._go = asyncio.Semaphore(0)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self._go.acquire()

    async def rounds(self, number: int) -> None:
        """Wait until so many rounds have passed."""
        async with asyncio.timeout(20):
            while len(self.slept) < number:  # noqa: ASYNC110 a list sets no event
                await asyncio.sleep(0)

    async def tick(self) -> None:
        """Let one more round pass."""
        self._go.release()
        await self.rounds(len(self.slept) + 1)


async def test_a_life_from_start_to_end(manager: Manager):
    health, ticks = Health(), Ticks()
    notifier = Notifier(manager.environment | {"WATCHDOG_USEC": "600000", "WATCHDOG_PID": str(os.getpid())})
    task = asyncio.create_task(keep_told(notifier, health, ticks.sleep))
    await ticks.rounds(1)
    assert manager.hear() == ["STATUS=the model is being loaded", EXTEND, "WATCHDOG=1"]
    await ticks.tick()
    assert manager.hear() == [EXTEND, "WATCHDOG=1"]
    health.starting = None
    await ticks.tick()
    assert manager.hear() == ["READY=1", "STATUS=ready", "WATCHDOG=1"]
    await ticks.tick()
    assert manager.hear() == ["WATCHDOG=1"]
    health.ended("a part\nended\udcff")
    await ticks.tick()
    assert manager.hear() == ["STATUS=a part ended?"]  # no sign of life: systemd starts it anew
    await ticks.tick()
    assert manager.silent()
    health._ended = ()
    health.draining = True
    await ticks.tick()
    assert manager.hear() == ["STOPPING=1", f"STATUS={health.ready()[0]}", EXTEND, "WATCHDOG=1"]
    assert set(ticks.slept) == {0.3}
    task.cancel()


async def test_stopping_is_told_however_short_the_end(manager: Manager):
    async with telling_systemd(Health(), Notifier(manager.environment)):
        pass
    assert manager.hear() == ["STOPPING=1"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"WATCHDOG_USEC": "5000000"}, 5.0),
        ({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}, None),  # meant for another process
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_who_the_watchdog_is_for(more: dict[str, str], expected: float | None):
    assert Notifier({"NOTIFY_SOCKET": "/run/x"} | more).watchdog_s == expected


async def test_where_nobody_asked_nothing_is_said_and_a_lost_socket_is_no_matter(tmp_path: Path):
    assert not Notifier({}).wanted
    async with telling_systemd(Health(), Notifier({})):
        pass
    async with telling_systemd(Health(), Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})):
        await asyncio.sleep(0)
