"""What waits to be published: one order for everything, kept over lost connections.

Everything stays here until it was handed over (QoS 0) or the broker has confirmed it (QoS 1), and goes out again in its
old place when the connection is lost first. A message may itself be what the broker drops us for: those that were on
their way at a loss go one at a time afterwards, and one that costs the connection again and again is cut into
smaller ones.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

from drumline.metrics.definitions import Direction, MessageKind
from drumline.model.errors import DrumlineError, InvalidRequest
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.codec import DeadMessage, shortened
from drumline.scheduler.mqtt.connection import MAX_UNCONFIRMED, Connection, Message, PublishRefused
from drumline.scheduler.mqtt.entries import Addressed, Entry, Growing, Ready, Smaller
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Chunk

logger = logging.getLogger("drumline.mqtt")

MAX_MESSAGE_BYTES = 512 * 2**10
"""Well below the 1 MiB that some brokers stop at."""
SMALL_BYTES = 2**10
MAX_LOSSES = 3
MAX_LOSSES_OF_A_SMALL_ONE = 10
"""No broker drops us for the size of such a message, so it is taken for the cause late: one that is put aside waits for
the next worker."""
DEFAULT_ROOM = 10_000
DEFAULT_ROOM_BYTES = 64 * 2**20


class Observer(Protocol):
    """Counts what happens at the edge; `metrics.instruments.Instruments` is one."""

    def mqtt_message(self, direction: Direction, kind: MessageKind) -> None:
        """A message came (`in`) or was taken by the broker (`out`)."""

    def mqtt_connected(self, connected: bool) -> None:
        """The connections to the broker stand, or not all of them do."""


class Outbox:
    """Takes messages at any time, sends them while there is a connection.

    `room` and `room_bytes` bound what waits: beyond them QoS 0 is let go, and `has_room` tells those who would make
    more. A message above `message_bytes` is not sent, and goes on record.
    """

    def __init__(
        self,
        topics: Topics,
        observer: Observer | None = None,
        room: int = DEFAULT_ROOM,
        room_bytes: int = DEFAULT_ROOM_BYTES,
        message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._topics = topics
        self._observer = observer
        self._room = room
        self._room_bytes = room_bytes
        self._message_bytes = message_bytes
        self._waiting: OrderedDict[int, Entry] = OrderedDict()
        self._by_key: dict[Hashable, Entry] = {}
        self._on_their_way: dict[int, Entry] = {}
        self._numbered = 0
        self._bytes = 0
        self._something_waits = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._note_change()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._on_their_way)

    @property
    def has_room(self) -> bool:
        """Whether what waits is within its bounds."""
        return len(self) < self._room and self._bytes < self._room_bytes

    def put(
        self,
        kind: MessageKind,
        message: Message,
        key: Hashable = None,
        *,
        smaller: Smaller | None = None,
        confirmed: Callable[[], None] | None = None,
        at_end: bool = False,
    ) -> None:
        """Queue a message; with a `key`, in the place of the one that waits under it, or, `at_end`, after everything.

        `smaller` makes the messages that are sent in its stead when it costs the connection again and again;
        `confirmed` is called when the broker has all of it, or when it is known that it never will.
        """
        if message.qos == 0 and not self.has_room:
            return
        waiting = None if key is None else self._by_key.get(key)
        if waiting is not None and at_end:
            self._remove(waiting)
            waiting = None
        if isinstance(waiting, Ready):
            waiting.replace(message)
            self._count_bytes(waiting, waiting.size_bytes)
            self._note_change()
        else:
            self._append(Ready(kind, message, key, smaller, confirmed))

    def put_chunk(self, reply: Addressed, chunk: Chunk, key: Hashable) -> None:
        """Queue a chunk, or add it to the one under `key` that still waits for the socket."""
        if not self.has_room:
            return
        last = self._by_key.get(key)
        if isinstance(last, Growing) and last.grow(chunk):
            self._count_bytes(last, last.size_bytes)
            self._note_change()
        else:
            self._append(Growing(reply, chunk, key))

    def bury(self, message: Message, client: str | None, job_id: str | None, code: str, error: Exception) -> None:
        """Put on record what cannot be answered to its sender, or what cannot be sent."""
        letter = DeadMessage(
            topic=shortened(message.topic),
            client=client,
            job_id=job_id,
            code=code,
            field=shortened(error.field) if isinstance(error, InvalidRequest) else None,
            reason=shortened(error.limit if isinstance(error, InvalidRequest) else str(error)),
            payload_bytes=len(message.payload),
        )
        properties = (("code", code),) if message.uses_v5 else ()
        self.put("dead", Message(self._topics.dead, letter.encode(), qos=1, user_properties=properties))

    async def room(self) -> None:
        """Wait until there is room: for those whose messages are answers to anybody who sends us something."""
        await self._has_room.wait()

    async def flushed(self) -> None:
        """Wait until everything was delivered."""
        await self._is_empty.wait()

    async def send(self, connection: Connection) -> None:
        """Publish what comes, in order, until cancelled or the connection is lost (`BrokerError`)."""
        slots = asyncio.Semaphore(MAX_UNCONFIRMED)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await slots.acquire()
                    entry = await self._next()
                    publishing = tasks.create_task(self._publish(connection, entry, slots))
                    if entry.alone or not entry.lasting:  # a chunk is unsent until it is in the socket, and grows
                        await asyncio.wait([publishing])
        finally:
            self._take_back()

    async def _publish(self, connection: Connection, entry: Entry, slots: asyncio.Semaphore) -> None:
        message = entry.message()
        try:
            self._check_size(entry, message)
            await connection.publish(message)
        except (InvalidRequest, PublishRefused) as error:
            self._give_up(entry, message, error)
        else:
            if self._observer is not None:
                self._observer.mqtt_message("out", entry.kind)
        finally:
            slots.release()
        del self._on_their_way[entry.number]
        self._count_bytes(entry, 0)
        self._note_change()
        if isinstance(entry, Ready) and entry.confirmed is not None:
            entry.confirmed()

    def _check_size(self, entry: Entry, message: Message) -> None:
        """The size of a result is checked by whoever puts it here, who can say something smaller."""
        if entry.kind != "result" and message.size_bytes > self._message_bytes:
            raise InvalidRequest("message", f"is {message.size_bytes} bytes long, the limit is {self._message_bytes}")

    def _give_up(self, entry: Entry, message: Message, error: DrumlineError) -> None:
        """Log what will never be delivered, and put it on record where somebody waits for it."""
        logger.error(Event("message not sent", kind=entry.kind, topic=shortened(message.topic), error=error))
        if entry.lasting and entry.kind not in ("dead", "status"):
            parsed = self._topics.parse(message.topic)
            job_id = parsed.job_id if parsed else dict(message.user_properties).get("job_id")
            code = "refused" if isinstance(error, PublishRefused) else "invalid"
            self.bury(message, parsed.client if parsed else None, job_id, code, error)

    async def _next(self) -> Entry:
        """The oldest that waits, moved to those on their way."""
        await self._something_waits.wait()
        number, entry = self._waiting.popitem(last=False)
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        self._on_their_way[number] = entry
        self._note_change()
        return entry

    def _append(self, entry: Entry) -> None:
        self._numbered += 1
        entry.number = self._numbered
        self._waiting[entry.number] = entry
        if entry.key is not None:
            self._by_key[entry.key] = entry
        self._count_bytes(entry, entry.size_bytes)
        self._note_change()

    def _remove(self, entry: Entry) -> None:
        """Take out one that waits."""
        del self._waiting[entry.number]
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]
        self._count_bytes(entry, 0)
        self._note_change()

    def _take_back(self) -> None:
        """After a loss: what was not handed over comes first again, unless it is what we are dropped for."""
        lost = list(self._on_their_way.values())
        self._on_their_way.clear()
        for entry in reversed(lost):
            entry.alone = True
            self._waiting[entry.number] = entry
            self._waiting.move_to_end(entry.number, last=False)
            if entry.key is not None:
                self._by_key.setdefault(entry.key, entry)
        if len(lost) == 1:
            self._blame(lost[0])
        self._note_change()

    def _blame(self, entry: Entry) -> None:
        """The only one on its way at a loss: after some times it is taken for the cause, and put aside."""
        message = entry.message()
        entry.losses += 1
        if entry.losses < (MAX_LOSSES_OF_A_SMALL_ONE if message.size_bytes <= SMALL_BYTES else MAX_LOSSES):
            return
        error = InvalidRequest("message", f"of {message.size_bytes} bytes cost the connection {entry.losses} times")
        self._remove(entry)
        pieces = entry.divided() if isinstance(entry, Ready) else []
        for piece in reversed(pieces):
            self._append(piece)
            self._waiting.move_to_end(piece.number, last=False)
        if pieces:
            topic = shortened(message.topic)
            logger.warning(Event("message split", kind=entry.kind, topic=topic, parts=len(pieces), reason=error.limit))
        else:
            self._give_up(entry, message, error)

    def _count_bytes(self, entry: Entry, size_bytes: int) -> None:
        self._bytes += size_bytes - entry.counted_bytes
        entry.counted_bytes = size_bytes

    def _note_change(self) -> None:
        for event, holds in (
            (self._something_waits, bool(self._waiting)),
            (self._has_room, self.has_room),
            (self._is_empty, len(self) == 0),
        ):
            if holds:
                event.set()
            else:
                event.clear()
