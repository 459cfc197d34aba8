"""What devices ask for: a job, its end, news of it.

While a job runs, the same job sent again joins it; after its end, the same job sent again gets the same bytes again; a
different job under its id is refused and changes nothing.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from drumline.metrics.definitions import RejectReason
from drumline.model.errors import DrumlineError, EngineFailed, InvalidRequest, SchedulerClosed
from drumline.scheduler.engine import Engine
from drumline.scheduler.journal.errors import JournalError
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.journal.records import JournaledJob
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.answers import Answers
from drumline.scheduler.mqtt.codec import ErrorMessage, SubmitMessage, error_message, parse_submit, read_id
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.job_events import job_rejected
from drumline.scheduler.mqtt.jobs import Jobs
from drumline.scheduler.mqtt.outbox import Outbox
from drumline.scheduler.mqtt.quotas import QuotaExceeded, Usage
from drumline.scheduler.mqtt.reply import Reply, reply_to
from drumline.scheduler.mqtt.running import Key, Running
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.outcomes import reject_reason

logger = logging.getLogger("drumline.mqtt")

EARLY_CANCELS = 256
EARLY_CANCEL_S = 5.0
"""Submits and cancels come over two connections, so a cancel may overtake its job: how long it is remembered."""
MAX_PENDING = 64
"""Jobs that may be between arrival and acceptance at once; the broker holds back the others."""

Acknowledge = Callable[[], None]


class Handlers:
    """Handles submit, cancel and get; none of them waits, so that a reader never does."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        jobs: Jobs,
        topics: Topics,
        outbox: Outbox,
        answers: Answers,
        usage: Usage,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        submit_bytes: int,
        reply_prefixes: tuple[str, ...],
        clock: Callable[[], float],
    ) -> None:
        self._engine, self._journal, self._jobs = engine, journal, jobs
        self._topics, self._outbox, self._answers, self._usage = topics, outbox, answers, usage
        self._spawn, self._submit_bytes, self._reply_prefixes = spawn, submit_bytes, reply_prefixes
        self._clock = clock
        self._arriving: dict[Key, Running] = {}
        self._early_cancels: OrderedDict[Key, float] = OrderedDict()
        self._admissions = asyncio.Semaphore(MAX_PENDING)
        self._arrived = asyncio.Event()
        self.draining = self.retiring = False
        """Whether new jobs are left to the broker, for the next worker; or refused, where none will come."""

    async def room(self) -> None:
        """Wait until another job may be submitted."""
        async with self._admissions:
            pass

    def submit(self, message: Message, client: str, acknowledge: Acknowledge) -> None:
        """Accept a job, join it, answer it again, or refuse it. The broker may forget the message once that is done."""
        try:
            submit = parse_submit(message.payload, self._submit_bytes)
        except InvalidRequest as error:
            self._refuse_unread(message, client, error)
            acknowledge()
            return
        try:
            reply = self._reply(message, client, submit.id, submit.response_topic, submit.correlation_data)
        except InvalidRequest as error:
            self._spawn(self._reject(Reply(self._topics, client, submit.id), message, error, "invalid"))
            acknowledge()
            return
        key = (client, submit.id)
        known = self._jobs.running.get(key) or self._arriving.get(key)
        if known is None and self.retiring:
            leaving = SchedulerClosed("the worker retires and takes no new jobs")
            self._spawn(self._reject(reply, message, leaving, "draining"))
            acknowledge()
            return
        if known is None and self.draining:
            return
        if known is None:
            running = self._arriving[key] = Running(submit.digest, reply, message.payload)
            running.acknowledgements.append(acknowledge)
            self._spawn(self._arrive(running, submit, message))
        elif known.digest != submit.digest:
            self._spawn(self._refuse_id(reply, message, InvalidRequest("id", "is in use by a different job")))
            acknowledge()
        else:
            self._join(known, reply)
            known.acknowledgements.append(acknowledge)
            if known.number is not None:  # else it is not in the journal yet
                known.acknowledge()

    def cancel(self, message: Message, client: str, job_id: str) -> None:
        """Stop a job, queued or running; its result says how far it came."""
        key = (client, job_id)
        if (running := self._jobs.running.get(key)) is not None:
            self._jobs.cancel(running)
        elif (arriving := self._arriving.get(key)) is not None:
            arriving.cancelled = True
        elif self._outbox.has_room:
            self._spawn(self._cancel_unknown(message, key))
        else:
            self._remember_cancel(key)

    def get(self, message: Message, client: str, job_id: str) -> None:
        """Send the state, and the result if there is one."""
        if not self._outbox.has_room:
            reason = "too much waits to be sent"
            logger.warning(Event("get not answered", job=job_id, client=client, reason=reason))
            return
        running = self._jobs.running.get((client, job_id))
        asked_from_elsewhere = message.response_topic is not None
        reply = running.reply if running and not asked_from_elsewhere else self._plain_reply(message, client, job_id)
        self._spawn(self._answer(reply, with_result=True))

    async def settled(self) -> None:
        """Wait until whatever is arriving was accepted or refused."""
        while self._arriving:
            self._arrived.clear()
            await self._arrived.wait()

    async def _arrive(self, running: Running, submit: SubmitMessage, message: Message) -> None:
        """From arrival to acceptance or refusal; whatever breaks here ends this job alone."""
        try:
            async with self._admissions:
                await self._decide(running, submit, message)
        except SchedulerClosed as error:
            self._arriving.pop(running.key, None)
            if not self.retiring:
                return  # nobody acknowledged it: it is the next worker's
            await self._reject(running.reply, message, error)
        except DrumlineError as error:
            self._arriving.pop(running.key, None)
            await self._reject(running.reply, message, error)
        except Exception as error:
            logger.exception(Event("message not handled", topic=message.topic))
            self._outbox.bury(message, *running.key, "internal", error)
            if running.number is None:
                self._engine.outcomes.refused("failed", running.label)
                self._answers.rejected(running.reply, EngineFailed("the worker cannot handle this job"))
        finally:
            self._arriving.pop(running.key, None)
            self._arrived.set()
        running.acknowledge()

    async def _decide(self, running: Running, submit: SubmitMessage, message: Message) -> None:
        client, job_id = key = running.key
        done = await self._journal.find(client, job_id)
        if done is not None:
            del self._arriving[key]
            if done.job.digest == running.digest:
                self._answer_done(running.reply, done)
            else:
                await self._refuse_id(running.reply, message, InvalidRequest("id", "is in use by a different job"))
            return
        # A broker takes the time that a message waited off its expiry: what is left is what the job has.
        expiry_s = message.message_expiry_s
        request = await self._engine.check(submit.request(client, None if expiry_s is None else max(expiry_s, 1e-3)))
        self._usage.check(client, self._jobs.generating)
        running.seed = request.sampling.seed
        if request.deadline_s is not None:
            running.expires_at = self._clock() + request.deadline_s
        cancelled_at = self._early_cancels.pop(key, None)
        if cancelled_at is not None and self._clock() - cancelled_at <= EARLY_CANCEL_S:
            running.cancelled = True
        await self._jobs.accept(running, request.deadline_s)
        del self._arriving[key]

    def _refuse_unread(self, message: Message, client: str, error: InvalidRequest) -> None:
        """Tell the sender where the id can be read all the same; put the rest on record."""
        job_id = read_id(message.payload, self._submit_bytes)
        if job_id is not None:
            self._spawn(self._reject(self._plain_reply(message, client, job_id), message, error, "invalid"))
            return
        code: RejectReason = "too_large" if len(message.payload) > self._submit_bytes else "unparsable"
        self._engine.outcomes.refused(code, None)
        logger.info(job_rejected(client, None, code, error))
        self._outbox.bury(message, client, None, code, error)

    def _join(self, running: Running, reply: Reply) -> None:
        """The same job again: its sender may have missed something, so it hears all from the start."""
        self._jobs.redirect(running, reply)
        if running.number is None:
            return
        state, position = self._jobs.where(running)
        self._answers.state(reply, state, position, running.generated)
        for chunk in running.said:
            self._answers.chunk(running, chunk)

    async def _cancel_unknown(self, message: Message, key: Key) -> None:
        if await self._find(key) is None:
            self._remember_cancel(key)
        await self._answer(self._plain_reply(message, *key))

    def _remember_cancel(self, key: Key) -> None:
        self._early_cancels[key] = self._clock()
        while len(self._early_cancels) > EARLY_CANCELS:
            self._early_cancels.popitem(last=False)

    async def _reject(
        self, reply: Reply, message: Message, error: DrumlineError, reason: RejectReason | None = None
    ) -> None:
        """Refuse a job for good: it was never accepted, so nothing is remembered and it may be sent again."""
        key = (reply.client, reply.job_id)
        if isinstance(error, JournalError):  # what it says of this job now is not to be trusted
            reason = "journal"
        elif key in self._jobs.running or await self._find(key) is not None:
            await self._refuse_id(reply, message, error)
            return
        elif isinstance(error, QuotaExceeded):
            reason = "quota"
        reason = reason or reject_reason(error)
        self._engine.outcomes.refused(reason, "/".join(key))
        logger.info(job_rejected(*key, reason, error))
        self._early_cancels.pop(key, None)
        self._answers.rejected(reply, error)

    async def _refuse_id(self, reply: Reply, message: Message, error: DrumlineError) -> None:
        """Refuse a job whose id belongs to another one.

        Where the other one is answered, a terminal message would read as its end: there its state goes, with the
        refusal in it. A sender who is answered elsewhere gets the terminal message as well.
        """
        key = (reply.client, reply.job_id)
        self._engine.outcomes.refused("duplicate_id", "/".join(key))
        logger.info(job_rejected(*key, "duplicate_id", error))
        self._outbox.bury(message, *key, "duplicate_id", error)
        await self._answer(reply, error_message(error, "duplicate_id"))
        running, done = self._jobs.running.get(key), await self._find(key)
        others = running.reply if running else self._reply_of(done) if done else reply
        if reply.response_topic not in (None, others.response_topic):
            self._answers.rejected(reply, error, "duplicate_id")

    async def _answer(self, reply: Reply, error: ErrorMessage | None = None, with_result: bool = False) -> None:
        """The state of a job, and its result if that is wanted."""
        key = (reply.client, reply.job_id)
        running = self._jobs.running.get(key)
        if running is not None:
            state, position = self._jobs.where(running)
            self._answers.state(reply, state, position, running.generated, error=error)
            return
        done = None if key in self._arriving else await self._find(key)
        if (
            done is None or done.terminal is None
        ):  # one on its way in may still be refused: it is as if it were not there
            self._answers.state(reply, "unknown", error=error)
            return
        self._answers.state(reply, "done", None, done.terminal.generated_tokens, error=error)
        if with_result:
            self._answer_done(reply, done)

    def _answer_done(self, reply: Reply, done: JournaledJob) -> None:
        """The terminal message again, byte for byte."""
        if done.terminal is not None:
            self._answers.result(reply, done.terminal.payload, done.terminal.properties)

    async def _find(self, key: Key) -> JournaledJob | None:
        try:
            return await self._journal.find(*key)
        except JournalError as error:
            logger.error(Event("lookup failed", job=key[1], client=key[0], error=error))
            return None

    def _reply_of(self, done: JournaledJob) -> Reply:
        return Reply.decode(self._topics, done.job.client, done.job.job_id, done.job.reply)

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
