"""One job of a device, from its arrival to its terminal message."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from drumline.scheduler.engine import Job
from drumline.scheduler.journal.records import JournaledJob
from drumline.scheduler.journal.records import Progress as Piece
from drumline.scheduler.mqtt.codec import JobState, parse_submit
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.reply import Reply
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.progress import Progress
from drumline.scheduler.request import Chunk, Request, TokenLogprob

Key = tuple[str, str]
"""(client, job id)"""
SOON_S = 1e-6
"""What is left of a deadline that has passed: the engine ends such a job, with what it has."""


@dataclass(eq=False)
class Running:
    """A job; its `number` in the journal is None until it is accepted, its `job` None until the engine has it.

    `reply` follows the latest sender of the same job; `said` is every chunk so far, for a sender who comes back in the
    middle; `kept` counts the tokens of each choice that the journal has.
    """

    digest: bytes
    reply: Reply
    body: bytes
    number: int | None = None
    seed: int | None = None
    expires_at: float | None = None
    """On the monotonic clock."""
    progress: tuple[Progress, ...] = ()
    """What an earlier worker had of it."""
    job: Job | None = None
    cancelled: bool = False
    ending: bool = False
    """Whether its outcome is being written down."""
    acknowledgements: list[Callable[[], None]] = field(default_factory=list)
    """What tells the broker that the job has arrived, each time it was sent before it was accepted."""
    told: tuple[JobState, int | None] | None = None
    said: list[Chunk] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    submitting: asyncio.Task[Job] | None = None
    _saved_chunks: int = 0

    @property
    def key(self) -> Key:
        """Which job it is."""
        return self.reply.client, self.reply.job_id

    @property
    def label(self) -> str:
        """How people know it."""
        return "/".join(self.key)

    @property
    def seated(self) -> bool:
        """Whether the engine had a row for it."""
        return self.job is not None and self.job.started_at is not None

    @property
    def generated(self) -> int:
        """Tokens so far, over all choices."""
        return sum(len(entry.token_ids) for entry in self.progress) if self.job is None else self.job.generated

    def message(self, kind: str, payload: bytes, qos: int = 1) -> Message:
        """A message to whoever wants to hear of the job now."""
        return self.reply.message(kind, payload, qos)

    def request(self, now: float) -> Request:
        """What the engine is to run: the seed and the time that are left to it are those that it was accepted with."""
        left_s = None if self.expires_at is None else max(self.expires_at - now, SOON_S)
        return parse_submit(self.body, len(self.body)).request(self.reply.client, left_s).with_seed(self.seed)

    def set_out(self, submit: Coroutine[Any, Any, Job]) -> "asyncio.Task[Job]":
        """Send it to the engine. Who waits for that acts on an error; where the worker ends meanwhile nobody does, and
        asyncio is not to complain of that."""
        self.submitting = asyncio.ensure_future(submit)
        self.submitting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.submitting

    def cancel(self) -> None:
        """Stop it, wherever it is in the engine or on its way there."""
        self.cancelled = True
        if self.submitting is not None:
            self.submitting.cancel()
        if self.job is not None:
            self.job.cancel()

    def acknowledge(self) -> None:
        """The broker may forget it."""
        while self.acknowledgements:
            self.acknowledgements.pop()()

    def unsaved(self) -> list[Piece]:
        """The tokens that the journal does not have yet; from now on it does."""
        new, self._saved_chunks = self.said[self._saved_chunks :], len(self.said)
        pieces = []
        for chunk in new:
            known = self.kept.get(chunk.choice, 0)
            skipped = max(0, known - chunk.first_token)  # a job that went on says again what it had
            ids, logprobs = chunk.token_ids[skipped:], chunk.logprobs and chunk.logprobs[skipped:]
            if ids:
                values = None if logprobs is None else tuple((known.id, known.logprob, known.top) for known in logprobs)
                pieces.append(Piece(chunk.choice, ids, values, chunk.first_token + skipped))
                self.kept[chunk.choice] = chunk.first_token + len(chunk.token_ids)
        return pieces


def reloaded(journaled: JournaledJob, topics: Topics, expires_at: float | None) -> Running:
    """A job as the journal has it, with what was generated of it."""
    job = journaled.job
    progress = tuple(_progress(piece) for piece in journaled.progress)
    return Running(
        digest=job.digest,
        reply=Reply.decode(topics, job.client, job.job_id, job.reply),
        body=job.body,
        number=journaled.number,
        seed=job.seed,
        expires_at=expires_at,
        progress=progress,
        kept={entry.choice: len(entry.token_ids) for entry in progress},
    )


def _progress(piece: Piece) -> Progress:
    if piece.logprobs is None:
        return Progress(piece.choice, piece.token_ids)
    logprobs = (
        TokenLogprob(token_id, logprob, tuple((other, value) for other, value in top))
        for token_id, logprob, top in piece.logprobs
    )
    return Progress(piece.choice, piece.token_ids, tuple(logprobs))
