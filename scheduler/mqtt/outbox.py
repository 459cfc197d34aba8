"""What waits to be published: one order for everything, kept over lost connections.

A QoS 1 message stays here until the broker has confirmed it, and goes out again in its old place when the connection is
lost first. QoS 0 (chunks, progress) is worth sending only while somebody may be listening: without a connection it is
let go, because the result says it all again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Hashable
from dataclasses import replace
from typing import Protocol

from drumline.metrics.instruments import Direction, MessageKind, RejectReason
from drumline.model.errors import InvalidRequest
from drumline.scheduler.mqtt.codec import encode_chunk
from drumline.scheduler.mqtt.connection import MAX_UNCONFIRMED, Connection, Message
from drumline.scheduler.request import Chunk

logger = logging.getLogger("drumline.mqtt")

MAX_COALESCED_TOKENS = 1024
"""A chunk is not grown beyond this, so that it stays far below any broker's message size."""
DEFAULT_ROOM = 10_000


class Observer(Protocol):
    """Counts what happens at the edge; the exporter implements it."""

    def message(self, direction: Direction, kind: MessageKind) -> None:
        """A message came (`in`) or was handed to the broker (`out`)."""

    def connected(self, up: bool) -> None:
        """The connections to the broker stand, or not all of them do."""

    def rejected(self, reason: RejectReason) -> None:
        """A job was refused."""


class Reply(Protocol):
    """Turns a payload into a message to whoever asked; where that is may change while the message waits."""

    def message(self, kind: MessageKind, payload: bytes, qos: int = 1) -> Message:
        """The message to publish."""


class Ready:
    """A waiting message; a newer one may take its place."""

    def __init__(self, kind: MessageKind, message: Message, key: Hashable = None) -> None:
        self.kind = kind
        self.key = key
        self._message = message

    @property
    def lasting(self) -> bool:
        """Whether it must be delivered even if the connection is lost first."""
        return self._message.qos > 0

    def replace(self, message: Message) -> None:
        """Say something newer instead."""
        self._message = message

    def message(self) -> Message:
        """What to publish."""
        return self._message


class Growing:
    """A waiting chunk, which takes in the next ones while it waits."""

    kind: MessageKind = "chunk"
    lasting = False

    def __init__(self, reply: Reply, chunk: Chunk, key: Hashable) -> None:
        self.key = key
        self._reply = reply
        self._chunk = chunk

    def grow(self, chunk: Chunk) -> bool:
        """Take `chunk` in if it continues this one and leaves it small; says whether it did."""
        mine = self._chunk
        follows = (mine.first_token + len(mine.token_ids), mine.text_offset + len(mine.text))
        if follows != (chunk.first_token, chunk.text_offset) or (mine.logprobs is None) != (chunk.logprobs is None):
            return False
        if len(mine.token_ids) + len(chunk.token_ids) > MAX_COALESCED_TOKENS:
            return False
        self._chunk = replace(
            mine,
            text=mine.text + chunk.text,
            token_ids=mine.token_ids + chunk.token_ids,
            logprobs=None if mine.logprobs is None else mine.logprobs + (chunk.logprobs or ()),
        )
        return True

    def message(self) -> Message:
        """What to publish, made at the last moment."""
        return self._reply.message("chunk", encode_chunk(self._chunk), qos=0)


Entry = Ready | Growing


class Outbox:
    """Takes messages at any time, sends them while there is a connection."""

    def __init__(self, observer: Observer | None = None, room: int = DEFAULT_ROOM) -> None:
        self._observer = observer
        self._room = room
        self._online = False
        self._waiting: deque[Entry] = deque()
        self._by_key: dict[Hashable, Entry] = {}
        self._on_their_way: dict[int, Entry] = {}
        self._sent = 0
        self._something_waits = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._note_change()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._on_their_way)

    def put(self, kind: MessageKind, message: Message, key: Hashable = None) -> None:
        """Queue a message; with a `key`, in the place of the one that waits under it."""
        if message.qos == 0 and not self._takes_transient:
            return
        waiting = None if key is None else self._by_key.get(key)
        if isinstance(waiting, Ready):
            waiting.replace(message)
        else:
            self._append(Ready(kind, message, key))

    def put_chunk(self, reply: Reply, chunk: Chunk, key: Hashable) -> None:
        """Queue a chunk, or add it to the one under `key` that still waits for the socket."""
        if not self._takes_transient:
            return
        last = self._by_key.get(key)
        if not (isinstance(last, Growing) and last.grow(chunk)):
            self._append(Growing(reply, chunk, key))

    async def room(self) -> None:
        """Wait until there is room: for those whose messages are answers to anybody who sends us something."""
        await self._has_room.wait()

    async def flushed(self) -> None:
        """Wait until everything was delivered."""
        await self._is_empty.wait()

    async def send(self, connection: Connection) -> None:
        """Publish what comes, in order, until cancelled or the connection is lost (`BrokerError`)."""
        slots = asyncio.Semaphore(MAX_UNCONFIRMED)
        self._online = True
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await slots.acquire()
                    number, entry = await self._next()
                    publishing = tasks.create_task(self._publish(connection, entry, number, slots))
                    if not entry.lasting:
                        await asyncio.wait([publishing])  # unsent until it is in the socket; the next ones coalesce
        finally:
            self._online = False
            self._take_back()

    @property
    def _takes_transient(self) -> bool:
        return self._online and len(self) < self._room

    async def _publish(self, connection: Connection, entry: Entry, number: int, slots: asyncio.Semaphore) -> None:
        try:
            await connection.publish(entry.message())
        except InvalidRequest:
            logger.exception("a %s message cannot be sent at all", entry.kind)
        finally:
            slots.release()
        del self._on_their_way[number]
        self._note_change()
        if self._observer is not None:
            self._observer.message("out", entry.kind)

    async def _next(self) -> tuple[int, Entry]:
        """The oldest that waits, moved to those on their way, and its number there."""
        await self._something_waits.wait()
        entry = self._waiting.popleft()
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        self._sent += 1
        self._on_their_way[self._sent] = entry
        self._note_change()
        return self._sent, entry

    def _append(self, entry: Entry) -> None:
        self._waiting.append(entry)
        if entry.key is not None:
            self._by_key[entry.key] = entry
        self._note_change()

    def _take_back(self) -> None:
        """After a loss: what was not confirmed comes first again; what would be stale is let go."""
        self._waiting.extendleft(reversed(self._on_their_way.values()))
        self._on_their_way.clear()
        self._waiting = deque(entry for entry in self._waiting if entry.lasting)
        self._by_key = {entry.key: entry for entry in self._waiting if entry.key is not None}
        self._note_change()

    def _note_change(self) -> None:
        for event, holds in (
            (self._something_waits, bool(self._waiting)),
            (self._has_room, len(self) < self._room),
            (self._is_empty, len(self) == 0),
        ):
            if holds:
                event.set()
            else:
                event.clear()
