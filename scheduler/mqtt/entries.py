"""What waits in the outbox: a message as it stands, or a chunk that takes in the next ones."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Protocol

from drumline.metrics.definitions import MessageKind
from drumline.scheduler.mqtt.codec import encode_chunk
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.request import Chunk

MAX_COALESCED_TOKENS = 1024
"""A chunk is not grown beyond this (alternatives of log-probabilities count too), so that it stays a small message."""
TOKEN_BYTES = 40
"""About what a token takes in a chunk, for the bound on what waits."""

Smaller = Callable[[], "list[tuple[Message, Smaller]]"]
"""The same in smaller messages, for a broker that does not take one; none where it cannot be made smaller."""


def after(count: int, then: Callable[[], None] | None) -> Callable[[], None] | None:
    """Calls `then` when it has been called so many times."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0 and then is not None:
            then()

    return None if then is None else one


class Addressed(Protocol):
    """Turns a payload into a message to whoever asked; where that is may change while the message waits."""

    def message(self, kind: MessageKind, payload: bytes, qos: int = 1) -> Message:
        """The message to publish."""


class Waiting:
    """What both kinds have: a place in the outbox, and how often the connection was lost over it.

    `alone`: it was on its way at a loss, and goes alone until it is known whether it was the cause; `losses` counts
    those while it was alone.
    """

    def __init__(self, kind: MessageKind, key: Hashable) -> None:
        self.kind = kind
        self.key = key
        self.number = 0
        self.counted_bytes = 0
        self.alone = False
        self.losses = 0


class Ready(Waiting):
    """A message; a newer one may take its place.

    `confirmed` is called when the broker has it, or has refused it.
    """

    def __init__(
        self,
        kind: MessageKind,
        message: Message,
        key: Hashable = None,
        smaller: Smaller | None = None,
        confirmed: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(kind, key)
        self._message = message
        self._smaller = smaller
        self.confirmed = confirmed

    @property
    def lasting(self) -> bool:
        """Whether it must be delivered even if the connection is lost first."""
        return self._message.qos > 0

    @property
    def size_bytes(self) -> int:
        """How much it holds in memory."""
        return self._message.size_bytes

    def replace(self, message: Message) -> None:
        """Say something newer instead."""
        self._message = message

    def divided(self) -> "list[Ready]":
        """The same in smaller messages; none where there are none."""
        pieces = [] if self._smaller is None else self._smaller()
        confirmed = after(len(pieces), self.confirmed)
        return [Ready(self.kind, message, None, smaller, confirmed) for message, smaller in pieces]

    def message(self) -> Message:
        """What to publish."""
        return self._message


class Growing(Waiting):
    """A chunk, which takes in the next ones while it waits."""

    lasting = False

    def __init__(self, reply: Addressed, chunk: Chunk, key: Hashable) -> None:
        super().__init__("chunk", key)
        self._reply = reply
        self._pieces = [chunk]
        self._tokens = len(chunk.token_ids)
        self._characters = len(chunk.text)
        self._weight = _weight(chunk)

    @property
    def size_bytes(self) -> int:
        """About how much it holds in memory."""
        return self._characters + TOKEN_BYTES * self._weight

    def grow(self, chunk: Chunk) -> bool:
        """Take `chunk` in if it continues this one and leaves it small; says whether it did."""
        first, weight = self._pieces[0], _weight(chunk)
        follows = (first.first_token + self._tokens, first.text_offset + self._characters)
        if follows != (chunk.first_token, chunk.text_offset) or (first.logprobs is None) != (chunk.logprobs is None):
            return False
        if self._weight + weight > MAX_COALESCED_TOKENS:
            return False
        self._pieces.append(chunk)
        self._tokens += len(chunk.token_ids)
        self._characters += len(chunk.text)
        self._weight += weight
        return True

    def message(self) -> Message:
        """What to publish, made at the last moment."""
        first, *_ = pieces = self._pieces
        joined = replace(
            first,
            text="".join(piece.text for piece in pieces),
            token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
            logprobs=None
            if first.logprobs is None
            else tuple(entry for piece in pieces for entry in piece.logprobs or ()),
        )
        return self._reply.message("chunk", encode_chunk(joined), qos=0)


Entry = Ready | Growing


def _weight(chunk: Chunk) -> int:
    return len(chunk.token_ids) + sum(len(entry.top) for entry in chunk.logprobs or ())
