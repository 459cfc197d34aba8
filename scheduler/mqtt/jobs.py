"""The jobs behind the gateway: what devices ask for, what the engine does about it, who hears of it.

One object per (client, job id). While it runs, the same job sent again joins it; for a while after its end, the same
job sent again gets the same bytes again; a different job under its id is refused and changes nothing.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from drumline.metrics.instruments import RejectReason
from drumline.model.errors import DrumlineError, InvalidRequest, SchedulerClosed
from drumline.scheduler.engine import Engine, Job
from drumline.scheduler.mqtt.codec import (
    MAX_SUBMIT_BYTES,
    DeadMessage,
    JobState,
    ResultMessage,
    StateMessage,
    SubmitMessage,
    failed_message,
    parse_submit,
    read_id,
    rejected_message,
    result_message,
    with_correlation,
)
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.outbox import Observer, Outbox
from drumline.scheduler.mqtt.topics import Kind, Topics

logger = logging.getLogger("drumline.mqtt")

Key = tuple[str, str]
"""(client, job id)"""

NO_PROPERTIES: Mapping[str, str] = {}
TOLD_OF_PROGRESS = 64
"""How many of the oldest jobs hear each time how the queue moves; the others hear when they come nearer, or ask."""
EARLY_CANCELS = 256
EARLY_CANCEL_S = 5.0
"""Submits and cancels come over two connections, so a cancel may overtake its job: how long it is remembered."""


@dataclass(frozen=True)
class Limits:
    """Bounds of the edge. A result above `result_bytes` is a failed job (`too_large`)."""

    submit_bytes: int = MAX_SUBMIT_BYTES
    result_bytes: int = 2**20
    remembered_results: int = 1000
    remembered_bytes: int = 64 * 2**20


@dataclass(frozen=True)
class Reply:
    """Where a job's messages go, and what its sender wants to see on them.

    `with_properties`: the sender speaks MQTT 5, so the reply carries user properties. A plain job gets plain replies,
    which any 3.1.1 reader can take from any broker.
    """

    topics: Topics
    client: str
    job_id: str
    response_topic: str | None = None
    correlation_data: bytes | None = None
    correlation_text: str | None = None
    with_properties: bool = False

    def message(
        self, kind: str, payload: bytes, qos: int = 1, properties: Mapping[str, str] = NO_PROPERTIES
    ) -> Message:
        """A message to whoever sent the job; `kind` is `state`, `chunk` or `result`."""
        level = cast(Kind, "chunks" if kind == "chunk" else kind)
        named = {"kind": kind, "job_id": self.job_id} | dict(properties)
        return Message(
            topic=self.response_topic or self.topics.job(self.client, level, self.job_id),
            payload=with_correlation(payload, self.correlation_text),
            qos=qos,
            correlation_data=self.correlation_data,
            user_properties=tuple(named.items()) if self.with_properties else (),
        )


@dataclass
class Running:
    """A job in the engine. `reply` follows the latest sender of the same job."""

    digest: bytes
    job: Job
    reply: Reply
    told: tuple[JobState, int | None] | None = None

    def message(self, kind: str, payload: bytes, qos: int = 1) -> Message:
        """A message to whoever wants to hear of the job now."""
        return self.reply.message(kind, payload, qos)


@dataclass(frozen=True)
class Finished:
    """A terminal message that may be asked for again."""

    digest: bytes
    payload: bytes
    properties: dict[str, str]
    tokens: int


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
        self._finished: OrderedDict[Key, Finished] = OrderedDict()
        self._finished_bytes = 0
        self._early_cancels: OrderedDict[Key, float] = OrderedDict()
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
            self._count_rejection("invalid")
            self._reject(Reply(self._topics, client, submit.id), message, error)
            return
        self._submit(submit, reply, message)

    def cancel(self, message: Message, client: str, job_id: str) -> None:
        """Stop a job, queued or running; its result says how far it came."""
        running = self._running.get((client, job_id))
        if running is not None:
            running.job.cancel()
            return
        if (client, job_id) not in self._finished:
            self._early_cancels[client, job_id] = self._clock()
            while len(self._early_cancels) > EARLY_CANCELS:
                self._early_cancels.popitem(last=False)
        self._answer_state(self._plain_reply(message, client, job_id))

    def get(self, message: Message, client: str, job_id: str) -> None:
        """Send the state, and the result if there is one."""
        running = self._running.get((client, job_id))
        asked_from_elsewhere = message.response_topic is not None
        reply = running.reply if running and not asked_from_elsewhere else self._plain_reply(message, client, job_id)
        self._answer_state(reply)
        self._answer_result(reply)

    def refresh(self) -> None:
        """Tell of the jobs that moved since the last time: up the queue, or out of it."""
        for running in list(islice(self._running.values(), TOLD_OF_PROGRESS)):
            self._tell_progress(running)

    async def idle(self) -> None:
        """Wait until every job has ended and its terminal message is in the outbox."""
        await self._idle.wait()

    def bury(self, message: Message, client: str | None, job_id: str | None, code: str, error: Exception) -> None:
        """Put on record what cannot be answered to its sender."""
        letter = DeadMessage(
            topic=message.topic,
            client=client,
            job_id=job_id,
            code=code,
            field=error.field if isinstance(error, InvalidRequest) else None,
            reason=error.limit if isinstance(error, InvalidRequest) else str(error),
            payload_bytes=len(message.payload),
        )
        properties = (("code", code),) if _speaks_v5(message) else ()
        self._outbox.put("dead", Message(self._topics.dead, letter.encode(), qos=1, user_properties=properties))

    def _refuse_unread(self, message: Message, client: str, error: InvalidRequest) -> None:
        """Tell the sender where the id can be read all the same; put the rest on record."""
        job_id = read_id(message.payload, self._limits.submit_bytes)
        if job_id is not None:
            self._count_rejection("invalid")
            self._reject(self._plain_reply(message, client, job_id), message, error)
            return
        code: RejectReason = "too_large" if len(message.payload) > self._limits.submit_bytes else "unparsable"
        self._count_rejection(code)
        self.bury(message, client, None, code, error)

    def _submit(self, submit: SubmitMessage, reply: Reply, message: Message) -> None:
        key = (reply.client, reply.job_id)
        known = self._running.get(key) or self._finished.get(key)
        if known is None:
            self._accept(submit, reply, message)
        elif known.digest != submit.digest:
            self._refuse_id(reply, message, InvalidRequest("id", "is in use by a different job"))
        elif isinstance(known, Running):
            known.reply = reply
            self._answer_state(reply)
        else:
            self._answer_result(reply)

    def _accept(self, submit: SubmitMessage, reply: Reply, message: Message) -> None:
        if self.draining:
            self._count_rejection("draining")
            self._reject(reply, message, SchedulerClosed("the worker drains and takes no new jobs"))
            return
        expiry_s = message.message_expiry_s
        try:
            # A broker takes the time that a message waited off its expiry, so what is left is what the job has.
            job = self._engine.submit_nowait(submit.request(None if expiry_s is None else max(expiry_s, 1e-3)))
        except DrumlineError as error:
            self._reject(reply, message, error)
            return
        key = (reply.client, reply.job_id)
        running = self._running[key] = Running(submit.digest, job, reply)
        self._idle.clear()
        self._tell(reply, "accepted", self._where(job)[1], 0)
        cancelled_at = self._early_cancels.pop(key, None)
        if cancelled_at is not None and self._clock() - cancelled_at <= EARLY_CANCEL_S:
            job.cancel()
        self._spawn(self._deliver(running))

    async def _deliver(self, running: Running) -> None:
        """Pass on what the engine says until the job has ended; whatever breaks here ends this job alone."""
        reply = running.reply
        key = (reply.client, reply.job_id)
        tokens = 0
        try:
            async for chunk in running.job:
                self._tell_progress(running)
                self._outbox.put_chunk(running, chunk, ("chunk", *key, chunk.choice))
            result = await running.job.result()
            tokens = result.usage.generated_tokens
            outcome = result_message(reply.job_id, result)
            if len(payload := outcome.encode()) > self._limits.result_bytes:
                reason = f"the result is {len(payload)} bytes long, the limit is {self._limits.result_bytes}"
                outcome = failed_message(reply.job_id, "too_large", reason, result)
        except Exception as error:
            logger.exception("job %s of client %s broke", reply.job_id, reply.client)
            outcome = failed_message(reply.job_id, "failed", str(error) or type(error).__name__)
        del self._running[key]
        self._remember(key, Finished(running.digest, outcome.encode(), _result_properties(outcome), tokens))
        self._tell(running.reply, "done", None, tokens, qos=0)
        self._answer_result(running.reply)
        if not self._running:
            self._idle.set()

    def _remember(self, key: Key, finished: Finished) -> None:
        self._finished[key] = finished
        self._finished_bytes += len(finished.payload)
        while self._finished and (
            len(self._finished) > self._limits.remembered_results
            or self._finished_bytes > self._limits.remembered_bytes
        ):
            _, oldest = self._finished.popitem(last=False)
            self._finished_bytes -= len(oldest.payload)

    def _reject(self, reply: Reply, message: Message, error: DrumlineError) -> None:
        """Refuse a job for good: it was never accepted, so nothing is remembered and it may be sent again."""
        key = (reply.client, reply.job_id)
        if key in self._running or key in self._finished:
            self._refuse_id(reply, message, error)
            return
        outcome = rejected_message(reply.job_id, error)
        properties = _result_properties(outcome)
        self._outbox.put("result", reply.message("result", outcome.encode(), properties=properties))

    def _refuse_id(self, reply: Reply, message: Message, error: DrumlineError) -> None:
        """Refuse a job whose id belongs to another one.

        A terminal message would read as the end of that one, so the sender gets its state, with `code` beside it, and
        the refusal itself goes on record.
        """
        self._count_rejection("duplicate_id")
        self.bury(message, reply.client, reply.job_id, "duplicate_id", error)
        self._answer_state(reply, {"code": "duplicate_id"})

    def _answer_state(self, reply: Reply, properties: Mapping[str, str] = NO_PROPERTIES) -> None:
        key = (reply.client, reply.job_id)
        if (running := self._running.get(key)) is not None:
            state, position = self._where(running.job)
            self._tell(reply, state, position, running.job.generated, properties=properties)
        elif (finished := self._finished.get(key)) is not None:
            self._tell(reply, "done", None, finished.tokens, properties=properties)
        else:
            self._tell(reply, "unknown", None, 0, properties=properties)

    def _answer_result(self, reply: Reply) -> None:
        finished = self._finished.get((reply.client, reply.job_id))
        if finished is not None:
            self._outbox.put("result", reply.message("result", finished.payload, properties=finished.properties))

    def _tell_progress(self, running: Running) -> None:
        """QoS 0, in the place of an earlier one that still waits: the next change says it again."""
        state, position = now = self._where(running.job)
        if now == running.told or state == "done":
            return
        running.told = now
        self._tell(running.reply, state, position, running.job.generated, qos=0)

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
        properties: Mapping[str, str] = NO_PROPERTIES,
    ) -> None:
        payload = StateMessage(job_id=reply.job_id, state=state, position=position, tokens=tokens).encode()
        key = None if qos else ("state", reply.client, reply.job_id)
        self._outbox.put("state", reply.message("state", payload, qos, properties), key)

    def _plain_reply(self, message: Message, client: str, job_id: str) -> Reply:
        """Where to answer a message whose body says nothing of it; a bad response topic falls back to the default."""
        try:
            return self._reply(message, client, job_id, None, None)
        except InvalidRequest:
            return Reply(self._topics, client, job_id)

    def _reply(self, message: Message, client: str, job_id: str, topic: str | None, text: str | None) -> Reply:
        """Properties of MQTT 5 come before the JSON fields. Raises `InvalidRequest("response_topic")`."""
        response_topic = message.response_topic if message.response_topic is not None else topic
        if response_topic is not None:
            self._topics.check_reply(response_topic, client, self._reply_prefixes)
        return Reply(
            topics=self._topics,
            client=client,
            job_id=job_id,
            response_topic=response_topic,
            correlation_data=message.correlation_data,
            correlation_text=text,
            with_properties=_speaks_v5(message),
        )

    def _count_rejection(self, reason: RejectReason) -> None:
        """For what the engine never saw; it counts for itself what it refuses."""
        if self._observer is not None:
            self._observer.rejected(reason)


def _speaks_v5(message: Message) -> bool:
    """Whether the sender used anything that only MQTT 5 has."""
    given = (message.response_topic, message.correlation_data, message.message_expiry_s)
    return bool(message.user_properties) or any(value is not None for value in given)


def _result_properties(outcome: ResultMessage) -> dict[str, str]:
    code = {} if outcome.error is None else {"code": outcome.error.code}
    return {"status": outcome.status, **code}
