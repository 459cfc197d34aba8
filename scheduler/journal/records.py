"""What goes into a journal and what comes out of it: frozen, so that the journal's thread may read them."""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

State = Literal["accepted", "running", "done"]
TerminalStatus = Literal["completed", "cancelled", "expired", "failed"]

STATES: tuple[State, ...] = get_args(State)
STATUSES: tuple[TerminalStatus, ...] = get_args(TerminalStatus)
DIGEST_BYTES = 32
TOKEN_BYTES = 4


@dataclass(frozen=True)
class AcceptedJob:
    """A job as it came. `body` is its JSON, `reply` JSON of where answers go, `seed` 0 … 2⁶⁴−1.

    `digest` (32 bytes) tells a repeated job from another one of the same id. `fingerprint` names all that its bits
    depend on, empty where that is unknown; `deadline_at` is in Unix seconds, None for never.
    """

    client: str
    job_id: str
    digest: bytes
    body: bytes
    reply: bytes
    seed: int
    fingerprint: str = ""
    deadline_at: float | None = None


@dataclass(frozen=True)
class Progress:
    """Tokens `first_token`, `first_token` + 1, … of one choice. `logprobs` is JSON, one item a token, or None."""

    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...] | None = None
    first_token: int = 0

    def encode(self) -> tuple[bytes, bytes | None]:
        """Ids as little-endian int32, log-probabilities as JSON. Raises `ValueError` for what does not fit that."""
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"logprobs: {len(self.logprobs)} for {len(self.token_ids)} tokens")
        try:
            ids = struct.pack(f"<{len(self.token_ids)}i", *self.token_ids)
        except struct.error as error:
            raise ValueError(f"token_ids: {error}") from None
        return ids, None if self.logprobs is None else json.dumps(self.logprobs, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Terminal:
    """How a job ended: the terminal message as it is sent, byte for byte, and its user properties."""

    payload: bytes
    status: TerminalStatus
    properties: Mapping[str, str] = field(default_factory=dict)
    generated_tokens: int = 0


@dataclass(frozen=True)
class JournaledJob:
    """What the journal knows of a job; times in Unix seconds.

    `number` is its place in the order of acceptance. `progress` holds a choice each, from its first token on; it is
    read with unfinished jobs and is empty for one that is done. `terminal` is there exactly when it is done.
    """

    number: int
    job: AcceptedJob
    state: State
    accepted_at: float
    terminal: Terminal | None = None
    finished_at: float | None = None
    published_at: float | None = None
    progress: tuple[Progress, ...] = ()


Piece = tuple[int, int, bytes, bytes | None]
"""(choice, first token, ids, log-probabilities), as they are stored"""


def joined(pieces: Iterable[Piece]) -> tuple[Progress, ...]:
    """A job's pieces, in order of choice and first token, as one `Progress` a choice.

    Raises `ValueError` where a piece overlaps the one before it, leaves a gap, or cannot be read.
    """
    ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    for choice, first_token, packed, encoded in pieces:
        known = ids.setdefault(choice, [])
        if first_token != len(known):
            raise ValueError(f"choice {choice}: {len(known)} tokens, then one that is number {first_token}")
        if not packed or len(packed) % TOKEN_BYTES:
            raise ValueError(f"choice {choice}: {len(packed)} bytes are no token ids")
        known.extend(struct.unpack(f"<{len(packed) // TOKEN_BYTES}i", packed))
        if encoded is not None:
            logprobs.setdefault(choice, []).extend(json.loads(encoded))
        if choice in logprobs and len(logprobs[choice]) != len(known):
            raise ValueError(f"choice {choice}: {len(logprobs[choice])} log-probabilities for {len(known)} tokens")
    return tuple(
        Progress(choice, tuple(known), tuple(logprobs[choice]) if choice in logprobs else None)
        for choice, known in ids.items()
    )
