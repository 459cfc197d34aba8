"""A worker with a journal, for tests that end it and start the next one."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drumline.scheduler.journal.errors import JournalFull
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.options import GatewayOptions
from drumline.scheduler.mqtt.reconnect import Backoff
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate
from tests.scheduler.mqtt.support import address, serving
from tests.tiny import tiny_model

EXACT = tiny_model(window=64, precision="int8")


class Killed(Exception):
    """Ends a worker without a drain; what it had not written is lost."""


def full_disk(path: Path) -> Callable[..., Awaitable[Any]]:
    """A method of a journal that cannot write."""

    async def refuse(*_: object) -> None:
        raise JournalFull(path, "cannot be written: database or disk is full")

    return refuse


@asynccontextmanager
async def worker(
    broker: EmbeddedBroker,
    topics: Topics,
    path: Path | None,
    gate: Gate | None = None,
    wrap: Callable[[Any], Any] = lambda engine: engine,
    model: object = EXACT,
    journal: dict[str, Any] | None = None,
    where: BrokerAddress | None = None,
    backoff: Callable[[], Backoff] = Backoff,
    rows: int = 2,
    queue_requests: int = 1024,
    **options: Any,
) -> AsyncIterator[Gateway]:
    settings = GatewayOptions(**{"refresh_s": 0.02, "progress_s": 0.01} | options)
    engine = {"model": model, "rows": rows, "queue_requests": queue_requests, "draft_tokens": 0}
    edge = {"options": settings, "backoff": backoff, "worker": "w"}
    async with (
        Journal(path, **journal or {}) as opened,
        serving(where or address(broker), topics, gate=gate, wrap=wrap, journal=opened, **engine, **edge) as gateway,
    ):
        yield gateway
