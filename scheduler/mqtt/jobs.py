"""The jobs behind the gateway: what devices ask for, what the engine does about it, who hears of it.

One object per (client, job id). While it runs, the same job sent again joins it; for a while after its end, the same
job sent again gets the same bytes again; a different job under its id is refused and changes nothing.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from drumline.metrics.instruments import RejectReason
from drumline.model.errors import DrumlineError, InvalidRequest, SchedulerClosed
from drumline.scheduler.engine import Engine, Job
from drumline.scheduler.mqtt.codec import (
    MAX_SUBMIT_BYTES,
    ErrorMessage,
    JobState,
    ResultMessage,
    StateMessage,
    SubmitMessage,
    error_message,
    failed_message,
    parse_submit,
    read_id,
    rejected_message,
    result_message,
)
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.outbox import MAX_MESSAGE_BYTES, Observer, Outbox
from drumline.scheduler.mqtt.remembered import Finished, Key, Remembered, finished, result_properties
from drumline.scheduler.mqtt.reply import Reply, reply_to
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Chunk

logger = logging.getLogger("drumline.mqtt")

TOLD_OF_PROGRESS = 64
"""How many of the oldest jobs hear each time how the queue moves; the others hear when they come nearer, or ask."""
EARLY_CANCELS = 256
EARLY_CANCEL_S = 5.0
"""Submits and cancels come over two connections, so a cancel may overtake its job: how long it is remembered."""
MAX_PENDING = 64
"""Jobs that may be between arrival and acceptance at once, before the reader waits."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the edge. A result whose message is above `result_bytes` is a failed job (`too_large`)."""

    submit_bytes: int = MAX_SUBMIT_BYTES
    result_bytes: int = MAX_MESSAGE_BYTES
    remembered_results: int = 1000
    remembered_bytes: int = 64 * 2**20


@dataclass
class Running:
    """A job on its way to the engine (`job` is None) or in it. `reply` follows the latest sender of the same job.

    `said` is every chunk so far, for a sender who comes back in the middle.
    """

    digest: bytes
    reply: Reply
    job: Job | None = None
    cancelled: bool = False
    told: tuple[JobState, int | None] | None = None
    said: list[Chunk] = field(default_factory=list)

    @property
    def key(self) -> Key:
        """Which job it is."""
        return self.reply.client, self.reply.job_id

    def message(self, kind: str, payload: bytes, qos: int = 1) -> Message:
        """A message to whoever wants to hear of the job now."""
        return self.reply.message(kind, payload, qos)

    def cancel(self) -> None:
        """Stop it, as soon as the engine has it."""
        self.cancelled = True
        if self.job is not None:
            self.job.cancel()


class Jobs:
    """Handles submit, cancel and get; none of them waits, so that a reader never does."""

    def __init__(
        self,
        engine: Engine,
        topics: Topics,
        outbox: Outbox,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        limits: Limits,
        reply_prefixes: tuple[str, ...] = (),
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._topics = topics
        self._outbox = outbox
        self._spawn = spawn
        self._limits = limits
        self._reply_prefixes = reply_prefixes
        self._observer = observer
        self._clock = clock
        self._running: dict[Key, Running] = {}
        self._finished = Remembered(limits.remembered_results, limits.remembered_bytes)
        self._early_cancels: OrderedDict[Key, float] = OrderedDict()
        self._admissions = asyncio.Semaphore(MAX_PENDING)
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def submit(self, message: Message, client: str) -> None:
        """Accept a job, join it, answer it again, or refuse it."""
        try:
            submit = parse_submit(message.payload, self._limits.submit_bytes)
        except InvalidRequest as error:
            self._refuse_unread(message, client, error)
            return
        try:
            reply = self._reply(message, client, submit.id, submit.response_topic, submit.correlation_data)
        except InvalidRequest as error:
            self._reject(Reply(self._topics, client, submit.id), message, error, "invalid")
            return
        key = (client, submit.id)
        known = self._running.get(key) or self._finished.get(key)
        if known is None:
            self._accept(submit, reply, message)
        elif known.digest != submit.digest:
            self._refuse_id(reply, message, InvalidRequest("id", "is in use by a different job"))
        elif isinstance(known, Running):
            self._join(known, reply)
        else:
            self._answer_result(reply)

    def cancel(self, message: Message, client: str, job_id: str) -> None:
        """Stop a job, queued or running; its result says how far it came."""
        key = (client, job_id)
        running = self._running.get(key)
        if running is not None:
            running.cancel()
            return
        if self._finished.get(key) is None:
            self._early_cancels[key] = self._clock()
            while len(self._early_cancels) > EARLY_CANCELS:
                self._early_cancels.popitem(last=False)
        if self._outbox.has_room:
            self._answer_state(self._plain_reply(message, client, job_id))

    def get(self, message: Message, client: str, job_id: str) -> None:
        """Send the state, and the result if there is one."""
        if not self._outbox.has_room:
            logger.warning("a get of client %s is not answered: too much waits to be sent", client)
            return
        running = self._running.get((client, job_id))
        asked_from_elsewhere = message.response_topic is not None
        reply = running.reply if running and not asked_from_elsewhere else self._plain_reply(message, client, job_id)
        self._answer_state(reply)
        self._answer_result(reply)

    def refresh(self) -> None:
        """Tell of the jobs that moved since the last time: up the queue, or out of it."""
        for running in list(islice(self._running.values(), TOLD_OF_PROGRESS)):
            if running.job is not None:
                self._tell_progress(running, running.job)

    async def room(self) -> None:
        """Wait until another job may be submitted."""
        async with self._admissions:
            pass

    async def idle(self) -> None:
        """Wait until every job has ended and its terminal message is in the outbox."""
        await self._idle.wait()

    def _refuse_unread(self, message: Message, client: str, error: InvalidRequest) -> None:
        """Tell the sender where the id can be read all the same; put the rest on record."""
        job_id = read_id(message.payload, self._limits.submit_bytes)
        if job_id is not None:
            self._reject(self._plain_reply(message, client, job_id), message, error, "invalid")
            return
        code: RejectReason = "too_large" if len(message.payload) > self._limits.submit_bytes else "unparsable"
        self._count_rejection(code)
        self._outbox.bury(message, client, None, code, error)

    def _join(self, running: Running, reply: Reply) -> None:
        """The same job again: its sender may have missed something, so it hears all from the start."""
        running.reply = reply
        if running.job is None:
            return
        self._answer_state(reply)
        for chunk in running.said:
            self._put_chunk(running, chunk)

    def _accept(self, submit: SubmitMessage, reply: Reply, message: Message) -> None:
        """Hold the id for the job, and leave the rest to a task of its own: tokenising a long text takes time."""
        if self.draining:
            error = SchedulerClosed("the worker drains and takes no new jobs")
            self._reject(reply, message, error, "draining")
            return
        running = Running(submit.digest, reply)
        self._running[running.key] = running
        self._idle.clear()
        self._spawn(self._run(running, submit, message))

    async def _run(self, running: Running, submit: SubmitMessage, message: Message) -> None:
        """From arrival to the terminal message; whatever breaks here ends this job alone."""
        try:
            async with self._admissions:
                # A broker takes the time that a message waited off its expiry: what is left is what the job has.
                expiry_s = message.message_expiry_s
                request = submit.request(running.reply.client, None if expiry_s is None else max(expiry_s, 1e-3))
                job = await self._engine.submit(request, wait=False)
        except Exception as error:
            self._forget(running)
            if isinstance(error, DrumlineError):
                self._reject(running.reply, message, error)
            else:
                logger.exception("a message on %s could not be handled", message.topic)
                self._outbox.bury(message, *running.key, "internal", error)
            return
        running.job = job
        self._tell(running.reply, "accepted", self._where(job)[1], 0)
        cancelled_at = self._early_cancels.pop(running.key, None)
        if running.cancelled or (cancelled_at is not None and self._clock() - cancelled_at <= EARLY_CANCEL_S):
            job.cancel()
        await self._deliver(running, job)

    async def _deliver(self, running: Running, job: Job) -> None:
        """Pass on what the engine says until the job has ended."""
        client, job_id = running.key
        tokens = 0
        try:
            async for chunk in job:
                self._tell_progress(running, job)
                running.said.append(chunk)
                self._put_chunk(running, chunk)
            result = await job.result()
            tokens = result.usage.generated_tokens
            outcome = result_message(job_id, result)
        except Exception as error:
            logger.exception("job %s of client %s broke", job_id, client)
            outcome = failed_message(job_id, "failed", str(error) or type(error).__name__)
        self._tell(running.reply, "done", None, tokens, qos=0)
        self._finish(running, outcome, tokens)

    def _finish(self, running: Running, outcome: ResultMessage, tokens: int) -> None:
        """Send the terminal message, or the failure that says that it is too large, and remember what was sent."""
        reply = running.reply
        job = finished(running.digest, outcome, tokens, reply.response_topic)
        if (reason := self._too_large(message := _result(reply, job))) is not None:
            outcome = failed_message(reply.job_id, "too_large", reason, outcome)
            job = finished(running.digest, outcome, tokens, reply.response_topic)
            message = _result(reply, job)

        def instead(reason: str) -> Message:
            failed = failed_message(reply.job_id, "too_large", reason, outcome)
            job = finished(running.digest, failed, tokens, reply.response_topic)
            self._finished.put(running.key, job)
            return _result(reply, job)

        self._outbox.put("result", message, instead=instead)
        self._finished.put(running.key, job)
        self._forget(running)

    def _forget(self, running: Running) -> None:
        del self._running[running.key]
        if not self._running:
            self._idle.set()

    def _too_large(self, message: Message) -> str | None:
        size, limit = message.size_bytes, self._limits.result_bytes
        return f"the result is {size} bytes long, the limit is {limit}" if size > limit else None

    def _reject(self, reply: Reply, message: Message, error: DrumlineError, reason: RejectReason | None = None) -> None:
        """Refuse a job for good: it was never accepted, so nothing is remembered and it may be sent again.

        `reason` counts what the engine never saw; it counts for itself what it refuses.
        """
        key = (reply.client, reply.job_id)
        if key in self._running or self._finished.get(key) is not None:
            self._refuse_id(reply, message, error)
            return
        if reason is not None:
            self._count_rejection(reason)
        self._early_cancels.pop(key, None)
        self._put_rejected(reply, rejected_message(reply.job_id, error))

    def _refuse_id(self, reply: Reply, message: Message, error: DrumlineError) -> None:
        """Refuse a job whose id belongs to another one.

        Where the other one is answered, a terminal message would read as its end: there its state goes, with the
        refusal in it. A sender who is answered elsewhere gets the terminal message as well.
        """
        key = (reply.client, reply.job_id)
        self._count_rejection("duplicate_id")
        self._outbox.bury(message, *key, "duplicate_id", error)
        self._answer_state(reply, error_message(error, "duplicate_id"))
        running, done = self._running.get(key), self._finished.get(key)
        others = running.reply.response_topic if running else done.response_topic if done else None
        if reply.response_topic not in (None, others):
            self._put_rejected(reply, rejected_message(reply.job_id, error, "duplicate_id"))

    def _put_rejected(self, reply: Reply, outcome: ResultMessage) -> None:
        message = reply.message("result", outcome.encode(), properties=result_properties(outcome))
        self._outbox.put("result", message)

    def _put_chunk(self, running: Running, chunk: Chunk) -> None:
        self._outbox.put_chunk(running, chunk, ("chunk", *running.key, chunk.choice))

    def _answer_state(self, reply: Reply, error: ErrorMessage | None = None) -> None:
        key = (reply.client, reply.job_id)
        running, done = self._running.get(key), self._finished.get(key)
        if running is not None and running.job is not None:
            state, position = self._where(running.job)
            self._tell(reply, state, position, running.job.generated, error=error)
        elif running is None and done is not None:
            self._tell(reply, "done", None, done.tokens, error=error)
        else:  # one that the engine has not taken yet may still be refused: it is as if it were not there
            self._tell(reply, "unknown", None, 0, error=error)

    def _answer_result(self, reply: Reply) -> None:
        """The terminal message again, byte for byte; one that the asker's own additions make too large is not sent."""
        done = self._finished.get((reply.client, reply.job_id))
        if done is None:
            return
        message = _result(reply, done)
        if (reason := self._too_large(message)) is not None and len(done.payload) <= self._limits.result_bytes:
            self._outbox.bury(message, reply.client, reply.job_id, "too_large", InvalidRequest("message", reason))
            return
        self._outbox.put("result", message)

    def _tell_progress(self, running: Running, job: Job) -> None:
        """QoS 0, in the place of an earlier one that still waits: the next change says it again."""
        state, position = now = self._where(job)
        if now == running.told or state == "done":
            return
        running.told = now
        self._tell(running.reply, state, position, job.generated, qos=0)

    def _where(self, job: Job) -> tuple[JobState, int | None]:
        state = cast(JobState, job.state)
        return state, self._engine.queue_position(job.id) if state == "queued" else None

    def _tell(
        self,
        reply: Reply,
        state: JobState,
        position: int | None,
        tokens: int,
        qos: int = 1,
        error: ErrorMessage | None = None,
    ) -> None:
        told = StateMessage(job_id=reply.job_id, state=state, position=position, tokens=tokens, error=error)
        properties = {} if error is None else {"code": error.code}
        key = None if qos else ("state", reply.client, reply.job_id)
        message = reply.message("state", told.encode(), qos, properties)
        self._outbox.put("state", message, key, at_end=state == "done")

    def _plain_reply(self, message: Message, client: str, job_id: str) -> Reply:
        """Where to answer a message whose body says nothing of it; a bad response topic falls back to the default."""
        try:
            return self._reply(message, client, job_id)
        except InvalidRequest:
            return Reply(self._topics, client, job_id)

    def _reply(
        self, message: Message, client: str, job_id: str, topic: str | None = None, text: str | None = None
    ) -> Reply:
        return reply_to(message, self._topics, client, job_id, self._reply_prefixes, topic, text)

    def _count_rejection(self, reason: RejectReason) -> None:
        if self._observer is not None:
            self._observer.rejected(reason)


def _result(reply: Reply, job: Finished) -> Message:
    return reply.message("result", job.payload, properties=job.properties)
