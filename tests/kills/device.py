"""A device that keeps all it hears, in order, and sends a job until it hears of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.connection import (
    BrokerError,
    Connection,
    ConnectOptions,
    Message,
    ProtocolLevel,
)
from drumline.scheduler.mqtt.reconnect import Backoff, keep_connected
from drumline.scheduler.mqtt.topics import Topics
from tests.kills.checker import Heard

RESEND_S = 1.0
ASK_S = 3.0
PATIENCE_S = 60.0


@dataclass(eq=False)
class Sent:
    """A job of a device."""

    id: str
    body: dict[str, Any]
    cancelled: bool = False
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    heard_at: float = 0.0


class Device:
    """A client of the name `name`; its session outlives its connections, so that it misses nothing.

    With `replies`, everything comes to a response topic. With `asks`, a job of which nothing was heard for a while is
    asked for (`get`): a broker that was killed may have lost a message that it had confirmed.
    """

    def __init__(
        self, where: BrokerAddress, name: str, protocol: ProtocolLevel = 5, replies: bool = False, asks: bool = True
    ) -> None:
        self.name = name
        self.jobs: dict[str, Sent] = {}
        self.heard: list[Heard] = []
        self.asked = self.resent = 0
        self._topics = Topics()
        self._replies = f"{self._topics.client(name)}/replies/all" if replies else None
        self._options = ConnectOptions(where, f"device-{name}", protocol, session_expiry_s=3600)
        self._asks = asks
        self._link: Connection | None = None
        self._linked = asyncio.Event()

    def submit(self, job_id: str, body: dict[str, Any]) -> Sent:
        """Note a job; it is sent until it is heard of."""
        sent = self.jobs[job_id] = Sent(job_id, {"id": job_id} | body)
        return sent

    async def send(self, sent: Sent) -> None:
        payload = json.dumps(sent.body).encode()
        await self._publish(self._topics.submit(self.name), payload, sent)

    async def cancel(self, sent: Sent) -> None:
        sent.cancelled = True
        await self._publish(self._topics.job(self.name, "cancel", sent.id), b"", sent)

    async def ask(self, sent: Sent) -> None:
        self.asked += 1
        await self._publish(self._topics.job(self.name, "get", sent.id), b"", sent)

    async def publish(self, topic: str, payload: bytes) -> None:
        """Anything; raises `BrokerError`."""
        async with asyncio.timeout(PATIENCE_S):
            await self._linked.wait()
        assert self._link is not None
        await self._link.publish(Message(topic, payload, qos=1))

    async def _publish(self, topic: str, payload: bytes, sent: Sent) -> None:
        """Best effort: what is lost is sent again."""
        message = Message(
            topic,
            payload,
            qos=1,
            response_topic=self._replies,
            correlation_data=sent.id.encode() if self._replies else None,
        )
        if self._link is not None:
            try:
                await self._link.publish(message)
            except BrokerError:
                self._link = None

    async def serve(self) -> None:
        backoff = Backoff(base_s=0.02, cap_s=0.1)
        await keep_connected(self._options, self._session, backoff, lambda error: None)

    async def _session(self, connection: Connection) -> None:
        own = self._topics.client(self.name)
        filters = [f"{own}/jobs/+/{kind}" for kind in ("state", "chunks", "result")]
        await connection.subscribe(*filters, *([self._replies] if self._replies else []))
        self._link = connection
        self._linked.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._insist())
            async for message in connection.messages():
                self._take(message)

    async def _insist(self) -> None:
        """Send what was not heard of; ask for what was not heard of again."""
        clock = asyncio.get_running_loop().time
        due: dict[str, float] = {}
        while True:
            for sent in [sent for sent in self.jobs.values() if not sent.ended.is_set()]:
                now = clock()
                if not sent.accepted.is_set():
                    if now >= due.get(sent.id, 0.0):
                        self.resent += sent.id in due
                        due[sent.id] = now + RESEND_S
                        await self.send(sent)
                elif self._asks and now >= max(sent.heard_at, due.get(sent.id, 0.0)) + ASK_S:
                    due[sent.id] = now
                    await self.ask(sent)
            await asyncio.sleep(0.02)

    def _take(self, message: Message) -> None:
        properties = dict(message.user_properties)
        parsed = self._topics.parse(message.topic)
        kind = parsed.kind if parsed else properties["kind"]
        job_id = parsed.job_id if parsed else properties["job_id"]
        sent = self.jobs[job_id]
        sent.heard_at = asyncio.get_running_loop().time()
        if kind == "state":
            state = json.loads(message.payload)["state"]
            if state != "accepted":
                return
            sent.accepted.set()
        elif kind == "result":
            document = json.loads(message.payload)
            if "offset" not in document or document["offset"] + len(document["body"]) == document["total"]:
                sent.ended.set()
                if document.get("status") != "rejected":  # a broker that was killed may have lost the first word
                    sent.accepted.set()
        else:
            sent.running.set()
            return
        self.heard.append(Heard((self.name, job_id), kind, message.payload))

    async def results(self, *jobs: Sent) -> None:
        """Wait for the ends of these, or of all."""
        async with asyncio.timeout(PATIENCE_S):
            for sent in jobs or list(self.jobs.values()):
                await sent.ended.wait()


@asynccontextmanager
async def device(where: BrokerAddress, name: str, **options: Any) -> AsyncIterator[Device]:
    this = Device(where, name, **options)
    serving = asyncio.create_task(this.serve())
    try:
        yield this
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        if not serving.cancelled():
            serving.result()
