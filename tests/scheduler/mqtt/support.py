"""A device, a worker and a bad network, for tests with a real broker."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, get_args
from uuid import uuid4

from drumline import Request, Scheduler
from drumline.metrics.definitions import Outcome, RejectReason
from drumline.model.language_model import LanguageModel
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.connection import (
    Connection,
    ConnectOptions,
    Message,
    ProtocolLevel,
    connect,
)
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.options import GatewayOptions
from drumline.scheduler.mqtt.reconnect import Backoff
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate, generate, metric
from tests.tiny import tiny_model

PATIENCE_S = 20.0
MODEL = tiny_model()
BODY = {"prompt": "drum", "max_tokens": 6, "ignore_eos": True}
RESULT_KEYS = ["job_id", "status", "stop_reason", "choices", "text", "token_ids", "usage", "timings", "error"]


async def expected_ids(**body: object) -> list[int]:
    """What the scheduler says without MQTT."""
    [result] = await generate(MODEL, Request(**body), rows=1)
    return list(result.token_ids)


def address(broker: EmbeddedBroker, protocol: ProtocolLevel = 5) -> BrokerAddress:
    return BrokerAddress(broker.host, broker.port if protocol == 5 else broker.port_v311)


class Device:
    """Publishes, and keeps what it hears in order."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.heard: list[Message] = []

    async def listen(self) -> None:
        async for message in self._connection.messages():
            self._inbox.put_nowait(message)

    async def send(self, topic: str, body: Any = b"", **properties: Any) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self._connection.publish(Message(topic, payload, qos=1, **properties))

    async def next(self, matches: Callable[[Message], bool] = lambda _: True) -> Message:
        """The next message that matches; the ones before it are only kept."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                message = await self._inbox.get()
                self.heard.append(message)
                if matches(message):
                    return message

    async def body(self, ending: str) -> dict[str, Any]:
        """The JSON of the next message whose topic ends so."""
        return json.loads((await self.next(lambda message: message.topic.endswith(ending))).payload)

    async def reply(self, kind: str) -> Message:
        """The next message with this user property `kind`."""
        return await self.next(lambda message: ("kind", kind) in message.user_properties)

    async def state(self, ending: str, state: str) -> dict[str, Any]:
        """The next state message that says so."""
        said = json.dumps({"state": state})[1:-1].replace(": ", ":").encode()
        return json.loads((await self.next(lambda m: m.topic.endswith(ending) and said in m.payload)).payload)


@asynccontextmanager
async def device(where: BrokerAddress, *filters: str, protocol: ProtocolLevel = 5) -> AsyncIterator[Device]:
    options = ConnectOptions(where, f"device-{uuid4().hex}", protocol)
    async with connect(options) as connection:
        await connection.subscribe(*filters, retained=True)
        this = Device(connection)
        listening = asyncio.create_task(this.listen())
        try:
            yield this
        finally:
            listening.cancel()
            await asyncio.wait([listening])


class HeldScheduler:
    """The real scheduler, each of whose requests stops at a gate, so that a test knows where a job stands."""

    def __init__(self, scheduler: Scheduler, gate: Gate) -> None:
        self._scheduler = scheduler
        self._gate = gate
        self.jobs: list[GenerationJob] = []

    async def submit(self, request: Request, **options: Any) -> GenerationJob:
        held = request.model_copy(update={"processors": (self._gate,)})
        self.jobs.append(await self._scheduler.submit(held, **options))
        return self.jobs[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class Counts:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str]] = []
        self.up: list[bool] = []

    def mqtt_message(self, direction: str, kind: str) -> None:
        self.messages.append((direction, kind))

    def mqtt_connected(self, connected: bool) -> None:
        self.up.append(connected)


@asynccontextmanager
async def serving(
    where: BrokerAddress,
    topics: Topics,
    *,
    gate: Gate | None = None,
    wrap: Callable[[Any], Any] = lambda engine: engine,
    model: LanguageModel = MODEL,
    options: GatewayOptions | None = None,
    observer: Counts | None = None,
    backoff: Callable[[], Backoff] = Backoff,
    worker: str | None = None,
    journal: Journal | None = None,
    edge_clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    """A scheduler over the tiny model, and a gateway before it."""
    async with Scheduler(model, **({"rows": 2} | settings)) as scheduler:
        gateway = Gateway(
            wrap(scheduler if gate is None else HeldScheduler(scheduler, gate)),
            where,
            journal=journal,
            worker=worker or f"w-{uuid4().hex[:8]}",
            version="test",
            topics=topics,
            options=options or GatewayOptions(refresh_s=0.02),
            observer=observer,
            backoff=backoff,
            clock=edge_clock,
        )
        try:
            async with gateway:
                yield gateway
        finally:
            if gate is not None:
                gate.open()


def counted(gateway: Gateway) -> tuple[Counter[str], Counter[str]]:
    """How many requests its engine counts by outcome, and how many refusals by reason; not those that are 0."""
    engine = gateway._engine
    outcomes = {value: metric(engine, "requests_total", outcome=value) for value in get_args(Outcome)}
    reasons = {value: metric(engine, "rejected_total", reason=value) for value in get_args(RejectReason)}
    return +Counter(outcomes), +Counter(reasons)


class Network:
    """A TCP proxy before the broker that can be cut without a word, and joined again."""

    def __init__(self, where: BrokerAddress) -> None:
        self._where = where
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self.port = 0

    async def __aenter__(self) -> "Network":
        await self.join()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.cut()

    @property
    def address(self) -> BrokerAddress:
        return BrokerAddress("127.0.0.1", self.port)

    def patient(self) -> Backoff:
        """A backoff that waits for the network instead of for the clock."""

        async def until_joined(_: float) -> None:
            await self._joined.wait()

        return Backoff(sleep=until_joined)

    async def join(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self._joined.set()

    async def cut(self) -> None:
        self._joined.clear()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        self._tasks.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        onward_reader, onward = await asyncio.open_connection(self._where.host, self._where.port)
        self._writers.add(onward)
        for source, sink in ((reader, onward), (onward_reader, writer)):
            self._tasks.add(asyncio.create_task(self._copy(source, sink)))

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        sink.close()
