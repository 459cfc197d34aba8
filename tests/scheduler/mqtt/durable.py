"""A worker with a journal, for tests that end it and start the next one."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drumline import Scheduler
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.options import GatewayOptions
from drumline.scheduler.mqtt.reconnect import Backoff
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate
from tests.scheduler.mqtt.support import HeldScheduler, address
from tests.tiny import tiny_model

EXACT = tiny_model(window=64, precision="int8")


class Killed(Exception):
    """Ends a worker without a drain; what it had not written is lost."""


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
    async with (
        Journal(path, **journal or {}) as opened,
        Scheduler(model, rows=rows, queue_requests=queue_requests, draft_tokens=0) as scheduler,
    ):
        engine: Any = wrap(scheduler if gate is None else HeldScheduler(scheduler, gate))
        gateway = Gateway(
            engine,
            where or address(broker),
            journal=opened,
            worker="w",
            version="test",
            topics=topics,
            options=settings,
            backoff=backoff,
        )
        try:
            async with gateway:
                yield gateway
        finally:
            if gate is not None:
                gate.open()
