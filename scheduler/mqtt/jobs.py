"""Accepted jobs: from the journal to the engine, and their outcomes back into the journal and out.

Nothing is said of a job before the journal has it. It waits here in the order of acceptance while the engine is full;
what is generated is kept in the journal now and then; its outcome is published once the journal has that, and done
with once the broker has confirmed it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Literal, cast

from drumline.model.errors import DrumlineError, EngineFailed, InvalidRequest, SchedulerClosed
from drumline.model.stop_reason import StopReason
from drumline.scheduler.engine import Engine, Job
from drumline.scheduler.journal.errors import JobFinished, JournalError, JournalFull
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.journal.records import AcceptedJob, JournaledJob, Terminal
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.answers import Answers
from drumline.scheduler.mqtt.clocks import Clocks
from drumline.scheduler.mqtt.codec import ErrorCode, JobState, ResultMessage, failed_message, result_message
from drumline.scheduler.mqtt.job_events import job_ended, job_event
from drumline.scheduler.mqtt.quotas import Usage
from drumline.scheduler.mqtt.reply import Reply
from drumline.scheduler.mqtt.running import Key, Running, reloaded
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.mqtt.waiting import Waiting
from drumline.scheduler.request import Result

logger = logging.getLogger("drumline.mqtt")

TOLD_OF_PROGRESS = 64
"""How many of the oldest jobs hear each time how the queue moves; the others hear when they come nearer, or ask."""
RETRY_S = 1.0
"""Between attempts to write an outcome to a full disk."""
PAGE = 500

OnChange = Literal["restart", "fail"]
"""What becomes of a job that was begun under another fingerprint: from its first token, or not at all."""
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Jobs:
    """Holds every job that is not done. `spawn` starts a task that lives as long as the worker."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        topics: Topics,
        answers: Answers,
        usage: Usage,
        spawn: Spawn,
        clocks: Clocks,
        on_change: OnChange = "restart",
        show_text: bool = False,
    ) -> None:
        self._engine, self._journal, self._topics, self._answers = engine, journal, topics, answers
        self._usage, self._spawn, self._clocks, self._on_change = usage, spawn, clocks, on_change
        self._show_text = show_text
        self.running: dict[Key, Running] = {}
        self.waiting = Waiting()
        self._in_engine: set[Running] = set()
        self._changed = asyncio.Event()
        self._leaving = False
        self._begun_again = 0
        self._services: list[asyncio.Task[None]] = []
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the worker can do no more for its jobs: they stay in the journal, for the next one."""

    async def restore(self) -> None:
        """Take up what an earlier worker left: unfinished jobs, in their order, and outcomes not confirmed yet."""
        number = 0
        while page := await self._journal.unfinished(number, PAGE):
            await asyncio.gather(*map(self._restore, page))
            number = page[-1].number
        if self.running:
            logger.info(Event("jobs resumed", jobs=len(self.running)))
        if self._begun_again:
            reason = "the model, or what computes it, changed"
            logger.warning(Event("jobs begin again", jobs=self._begun_again, reason=reason))
        self._services = [self._spawn(self._publish_again()), self._spawn(self._feed())]

    async def accept(self, running: Running, deadline_s: float | None) -> None:
        """Put a job in the journal, and tell its sender; raises `QueueFull`, `JournalError`."""
        client, job_id = running.key
        self._usage.accepted(client)
        try:
            running.number = await self._journal.accept(
                AcceptedJob(
                    client,
                    job_id,
                    running.digest,
                    running.body,
                    running.reply.encode(),
                    cast(int, running.seed),
                    self._engine.fingerprint,
                    None if deadline_s is None else self._clocks.wall() + deadline_s,
                )
            )
        except BaseException:
            self._usage.ended(client, 0)
            raise
        logger.debug(job_event("job accepted", running, number=running.number))
        self._answers.state(running.reply, "accepted", len(self.waiting), 0)
        self._enter(running)
        if running.cancelled:
            self.cancel(running)

    def cancel(self, running: Running) -> None:
        """Stop a job, wherever it is; its result says how far it came."""
        running.cancel()
        if running.submitting is None and self.waiting.remove(running):
            self._spawn_for(running, partial(self._settle, running, "cancelled"))

    def redirect(self, running: Running, reply: Reply) -> None:
        """Its sender, come back, wants to hear of it here."""
        running.reply = reply
        if running.number is not None:
            self._journal.redirect(running.number, reply.encode())

    def where(self, running: Running) -> tuple[JobState, int | None]:
        """Its state, and how many are ahead of it."""
        if running.job is None:
            return "queued", None
        state = cast(JobState, running.job.state)
        return state, self._engine.queue_position(running.job.id) if state == "queued" else None

    def refresh(self) -> None:
        """Tell of the jobs that moved since the last time, and end those whose time is up while they wait."""
        for running in list(islice(self.running.values(), TOLD_OF_PROGRESS)):
            if running.job is not None:
                self._tell_progress(running)
        now = self._clocks.monotonic()
        late = [r for r in self.waiting if r.expires_at is not None and r.expires_at <= now and r.submitting is None]
        for running in late:
            self.waiting.remove(running)
            self._spawn_for(running, partial(self._settle, running, "deadline"))

    def save(self) -> None:
        """Give the journal the tokens that it does not have yet."""
        for running in self._in_engine:
            if running.number is not None and not running.ending:
                for piece in running.unsaved():
                    self._journal.progress(running.number, piece)

    def generating(self, client: str) -> int:
        """Tokens of what runs for a client."""
        return sum(running.generated for running in self._in_engine if running.reply.client == client)

    async def drain(self, timeout_s: float | None) -> None:
        """Finish what the time allows. The rest stays in a durable journal, else it ends `cancelled`."""
        if self._journal.durable:
            self._leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(self._nothing_left)
        if not self._leaving:
            for running in list(self.waiting):
                self.cancel(running)
        await self._engine.drain(0)
        await self._until(self._nothing_left)
        self._leave()
        for task in self._services:
            task.cancel()

    def _nothing_left(self) -> bool:
        return not self._in_engine if self._leaving else not self.running

    def _leave(self) -> None:
        """Nothing more goes to the engine."""
        self._leaving = True
        self._changed.set()

    def _break(self, error: DrumlineError) -> None:
        """Leave, and have the worker end with this error."""
        self._leave()
        if not self.broken.done():
            self.broken.set_exception(error)

    def _spawn_for(self, running: Running, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """What breaks in one job ends that job alone."""

        async def guarded() -> None:
            try:
                await work()
            except JournalError as error:
                self._break(error)
            except Exception as error:
                logger.exception(job_event("job broke", running))
                await self._end(running, failed_message(running.reply.job_id, "failed", _reason(error)))

        self._spawn(guarded())

    async def _restore(self, journaled: JournaledJob) -> None:
        left_s = None if journaled.job.deadline_at is None else journaled.job.deadline_at - self._clocks.wall()
        expires_at = None if left_s is None else self._clocks.monotonic() + left_s
        running = reloaded(journaled, self._topics, expires_at)
        self._usage.accepted(running.reply.client)
        if journaled.job.fingerprint != self._engine.fingerprint:
            if running.progress and self._on_change == "fail":
                self.running[running.key] = running
                reason = "the model, or what computes it, changed while the job ran"
                self._spawn_for(running, partial(self._fail, running, "changed", reason))
                return
            self._begun_again += bool(running.progress)
            await self._journal.restart(journaled.number, self._engine.fingerprint)
            running.progress, running.kept = (), {}
        logger.debug(job_event("job resumed", running, tokens=running.generated))
        self._enter(running)

    async def _publish_again(self) -> None:
        number = 0
        try:
            while page := await self._journal.unpublished(number, PAGE):
                for journaled in page:
                    if journaled.terminal is not None:
                        job = journaled.job
                        reply = Reply.decode(self._topics, job.client, job.job_id, job.reply)
                        await self._answers.room()
                        self._publish(reply, journaled.number, journaled.terminal)
                number = page[-1].number
        except JournalError as error:
            self._break(error)

    def _enter(self, running: Running) -> None:
        self.running[running.key] = running
        self.waiting.add(running)
        self._changed.set()

    async def _feed(self) -> None:
        """Give the engine what waits, the oldest first; it makes us wait while it is full, and so do results that no
        broker takes."""
        while not self._leaving:
            await self._answers.room()
            self._changed.clear()
            running = self.waiting.first(self._usage.may_run)
            if running is None:
                await self._changed.wait()
                continue
            submitting = running.set_out(self._submit(running))
            leaving = asyncio.ensure_future(self._until(lambda: self._leaving))
            try:
                await asyncio.wait([submitting, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                running.submitting = None
                if not submitting.done():
                    submitting.cancel()
            self._submitted(running, submitting)

    async def _submit(self, running: Running) -> Job:
        request = running.request(self._clocks.monotonic())
        priority = self._usage.capped(running.reply.client, request.priority)
        return await self._engine.submit(
            request.model_copy(update={"priority": priority}),
            progress=running.progress,
            label=running.label,
            accepted=True,
        )

    def _submitted(self, running: Running, submitting: "asyncio.Task[Job]") -> None:
        """The engine has it, or will not have it, or we leave and it stays in the journal."""
        if not submitting.done():
            return
        error = None if submitting.cancelled() else submitting.exception()
        if isinstance(error, SchedulerClosed | EngineFailed) and self._journal.durable:
            self._leave()
            if isinstance(error, EngineFailed):
                self._break(error)
            return
        self.waiting.remove(running)
        if submitting.cancelled() or isinstance(error, SchedulerClosed):
            self._spawn_for(running, partial(self._settle, running, "cancelled"))
        elif isinstance(error, InvalidRequest) and error.field == "deadline_s":  # `refuse_late`
            self._spawn_for(running, partial(self._settle, running, "deadline"))
        elif error is not None:
            self._spawn_for(running, partial(self._fail, running, "failed", _reason(error)))
        else:
            running.job = submitting.result()
            logger.debug(job_event("job in the engine", running, engine_job=running.job.id))
            self._in_engine.add(running)
            self._usage.started(running.reply.client)
            self._spawn_for(running, partial(self._follow, running, running.job))

    async def _follow(self, running: Running, job: Job) -> None:
        """Pass on what the engine says until the job has ended."""
        if running.cancelled:
            job.cancel()
        try:
            async for chunk in job:
                self._tell_progress(running)
                running.said.append(chunk)
                self._answers.chunk(running, chunk)
            result = await job.result()
            if self._stays(running, job, result):
                logger.info(job_event("job kept", running, tokens=running.generated))
                self.save()
            else:
                await self._end(running, result_message(running.reply.job_id, result), result)
        finally:
            self._in_engine.discard(running)
            self._usage.stopped(running.reply.client)
            self._changed.set()

    def _stays(self, running: Running, job: Job, result: Result) -> bool:
        """Whether the job is the next worker's: we leave, or the engine broke before it had a row. (One that had may be
        the reason, and would break the next worker, too.)"""
        if not self._journal.durable:
            return False
        if result.status == "failed" and not self._engine.statistics().healthy:
            self._break(EngineFailed(result.error or "the engine failed"))
            return job.started_at is None
        return self._leaving and result.status == "cancelled" and not running.cancelled

    async def _settle(self, running: Running, reason: StopReason) -> None:
        """End a job that the engine never had, or has no more."""
        result = await self._engine.settle(
            running.request(self._clocks.monotonic()), reason, running.progress, running.label
        )
        await self._end(running, result_message(running.reply.job_id, result), result)

    async def _fail(self, running: Running, code: ErrorCode, reason: str) -> None:
        """End a job that the engine will not have, whose tokens count for nothing."""
        settled, job_id = None, running.reply.job_id
        with suppress(InvalidRequest):  # its prompt may have no place in this model
            settled = await self._engine.settle(running.request(self._clocks.monotonic()), "error", (), running.label)
        lost = None if settled is None else result_message(job_id, settled)
        await self._end(running, failed_message(job_id, code, reason, lost), settled)

    async def _end(self, running: Running, outcome: ResultMessage, result: Result | None = None) -> None:
        """Write the outcome down and count it, then tell it; `result` is the engine's, if it had the job."""
        running.ending = True
        status = outcome.status
        if status == "rejected":
            raise ValueError("an accepted job cannot be rejected")
        tokens = 0 if outcome.usage is None else outcome.usage.generated_tokens
        number = cast(int, running.number)
        ours = Terminal(outcome.encode(), status, outcome.properties, tokens)
        terminal = await self._written(running, number, ours, result)
        if terminal is not None:
            logger.info(job_ended(running, outcome, self._show_text))
            self._answers.state(running.reply, "done", None, terminal.generated_tokens, qos=0)
            self._publish(running.reply, number, terminal)
        prompt = 0 if outcome.usage is None else outcome.usage.prompt_tokens
        self._usage.ended(running.reply.client, prompt + tokens)
        self.running.pop(running.key, None)
        self._changed.set()

    async def _written(
        self, running: Running, number: int, terminal: Terminal, result: Result | None
    ) -> Terminal | None:
        """The outcome that is in the journal, counted when it got there; None where it cannot before we leave.

        What were told without could be told again in other words, so a full disk is waited for.
        """
        while True:
            try:
                await self._journal.finish(number, terminal)
            except JobFinished:
                done = await self._journal.find(*running.key)
                return None if done is None else done.terminal
            except JournalFull as error:
                if self._leaving:
                    return None
                logger.error(job_event("outcome waits", running, error=error))
                await self._clocks.sleep(RETRY_S)
            else:
                self._engine.outcomes.ended(running.label, terminal.status, result, running.seated)
                return terminal

    def _publish(self, reply: Reply, number: int, terminal: Terminal) -> None:
        def confirmed() -> None:
            with suppress(JournalError):  # closed: it will be published again
                self._journal.published(number)

        self._answers.result(reply, terminal.payload, terminal.properties, confirmed)

    def _tell_progress(self, running: Running) -> None:
        """QoS 0, in the place of an earlier one that still waits: the next change says it again."""
        state, position = now = self.where(running)
        if now == running.told or state == "done":
            return
        running.told = now
        self._answers.state(running.reply, state, position, running.generated, qos=0)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
