"""What devices are told, put into the outbox: states, chunks, terminal messages."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from drumline.model.errors import DrumlineError
from drumline.scheduler.mqtt.codec import (
    ErrorCode,
    ErrorMessage,
    JobState,
    StateMessage,
    rejected_message,
)
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.entries import Smaller, after
from drumline.scheduler.mqtt.outbox import Outbox
from drumline.scheduler.mqtt.parts import PartMessage, split
from drumline.scheduler.mqtt.reply import Reply
from drumline.scheduler.request import Chunk


class Follower(Protocol):
    """Whoever follows a job; where that is may change while it runs."""

    @property
    def key(self) -> tuple[str, str]:
        """Which job it is."""

    def message(self, kind: str, payload: bytes, qos: int = 1) -> Message:
        """A message to whoever wants to hear of the job now."""


class Answers:
    """One verb a kind of message; a result above `result_bytes` is sent in parts."""

    def __init__(self, outbox: Outbox, result_bytes: int) -> None:
        self._outbox, self._result_bytes = outbox, result_bytes

    async def room(self) -> None:
        """Wait until what waits to be sent is within its bounds."""
        await self._outbox.room()

    def state(
        self,
        reply: Reply,
        state: JobState,
        position: int | None = None,
        tokens: int = 0,
        *,
        qos: int = 1,
        error: ErrorMessage | None = None,
    ) -> None:
        """Where a job stands. At QoS 0 it takes the place of an earlier one that still waits."""
        told = StateMessage(job_id=reply.job_id, state=state, position=position, tokens=tokens, error=error)
        properties = {} if error is None else {"code": error.code}
        key = None if qos else ("state", reply.client, reply.job_id)
        self._outbox.put("state", reply.message("state", told.encode(), qos, properties), key, at_end=state == "done")

    def chunk(self, follower: Follower, chunk: Chunk) -> None:
        """New tokens of a job."""
        self._outbox.put_chunk(follower, chunk, ("chunk", *follower.key, chunk.choice))

    def result(
        self,
        reply: Reply,
        payload: bytes,
        properties: Mapping[str, str],
        confirmed: Callable[[], None] | None = None,
    ) -> None:
        """A terminal message; `confirmed` is called once the broker has all of it."""
        message = reply.message("result", payload, properties=properties)
        whole = PartMessage(job_id=reply.job_id, offset=0, total=len(payload.decode()), body=payload.decode())
        if message.size_bytes <= self._result_bytes:
            self._put(message, lambda: self._split(reply, whole, properties, message.size_bytes // 2), confirmed)
            return
        around = message.size_bytes - len(payload)  # topic, properties, correlation
        parts = self._split(reply, whole, properties, max(1, self._result_bytes - around))
        confirmed = after(len(parts), confirmed)
        for part, smaller in parts:
            self._put(part, smaller, confirmed)

    def rejected(self, reply: Reply, error: DrumlineError, code: ErrorCode | None = None) -> None:
        """A job that was never accepted."""
        outcome = rejected_message(reply.job_id, error, code)
        self.result(reply, outcome.encode(), outcome.properties)

    def _put(self, message: Message, smaller: Smaller, confirmed: Callable[[], None] | None) -> None:
        self._outbox.put("result", message, smaller=smaller, confirmed=confirmed)

    def _split(
        self, reply: Reply, whole: PartMessage, properties: Mapping[str, str], limit_bytes: int
    ) -> list[tuple[Message, Smaller]]:
        marked = dict(properties) | {"part": "true"}

        def smaller(part: PartMessage) -> list[tuple[Message, Smaller]]:
            return self._split(reply, part, properties, limit_bytes // 2) if len(part.body) > 1 else []

        return [
            (reply.message("result", part.encode(), properties=marked), partial(smaller, part))
            for part in split(whole, limit_bytes)
        ]
