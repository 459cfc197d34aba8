"""Accepted jobs: from the journal to the engine, and their outcomes back into the journal and out.

Nothing is said of a job before the journal has it. It waits here in the order of acceptance while the engine is full;
what is generated is kept in the journal now and then; its outcome is published once the journal has that, and done
with once the broker has confirmed it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast

from drumline.model.errors import DrumlineError, EngineFailed, SchedulerClosed
from drumline.model.stop_reason import StopReason
from drumline.scheduler.engine import Engine, Job
from drumline.scheduler.journal.errors import JournalError
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.journal.records import AcceptedJob, JournaledJob, Terminal
from drumline.scheduler.mqtt.answers import Answers
from drumline.scheduler.mqtt.codec import JobState, ResultMessage, failed_message, result_message
from drumline.scheduler.mqtt.quotas import Usage
from drumline.scheduler.mqtt.reply import Reply
from drumline.scheduler.mqtt.running import Key, Running, reloaded
from drumline.scheduler.mqtt.topics import Topics

logger = logging.getLogger("drumline.mqtt")

TOLD_OF_PROGRESS = 64
"""How many of the oldest jobs hear each time how the queue moves; the others hear when they come nearer, or ask."""
RETRY_S = 1.0
"""Between attempts to write an outcome to a journal that takes none."""
PAGE = 500

OnChange = Literal["restart", "fail"]
"""What becomes of a job that was begun under another fingerprint: from its first token, or not at all."""


@dataclass(frozen=True)
class Clocks:
    """Injected: seconds of this process, Unix seconds, and a way to wait."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]


class Jobs:
    """Holds every job that is not done. `spawn` starts a task that lives as long as the worker."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        topics: Topics,
        answers: Answers,
        usage: Usage,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        clocks: Clocks,
        on_change: OnChange = "restart",
    ) -> None:
        self._engine, self._journal, self._topics, self._answers = engine, journal, topics, answers
        self._usage, self._spawn, self._clocks, self._on_change = usage, spawn, clocks, on_change
        self.running: dict[Key, Running] = {}
        self._waiting: dict[Key, Running] = {}
        self._in_engine: set[Running] = set()
        self._changed = asyncio.Event()
        self._leaving = False

    @property
    def waiting(self) -> int:
        """Accepted jobs that the engine does not have yet."""
        return len(self._waiting)

    async def restore(self) -> None:
        """Take up what an earlier worker left: unfinished jobs, in their order, and outcomes not confirmed yet."""
        number = 0
        while page := await self._journal.unfinished(number, PAGE):
            for journaled in page:
                self._restore(journaled)
            number = page[-1].number
        self._spawn(self._publish_again())
        self._spawn(self._feed())

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
        self._enter(running)
        self._answers.state(running.reply, "accepted", len(self._waiting) - 1, 0)
        if running.cancelled:
            self.cancel(running)

    def cancel(self, running: Running) -> None:
        """Stop a job, wherever it is; its result says how far it came."""
        running.cancel()
        if self._waiting.pop(running.key, None) is not None:
            self._spawn(self._settle(running, "cancelled"))

    def where(self, running: Running) -> tuple[JobState, int | None]:
        """Its state, and how many are ahead of it."""
        if running.job is None:
            return ("queued", None) if running.number is not None else ("unknown", None)
        state = cast(JobState, running.job.state)
        return state, self._engine.queue_position(running.job.id) if state == "queued" else None

    def refresh(self) -> None:
        """Tell of the jobs that moved since the last time, and end those whose time is up while they wait."""
        for running in list(islice(self.running.values(), TOLD_OF_PROGRESS)):
            if running.job is not None:
                self._tell_progress(running)
        now = self._clocks.monotonic()
        for running in [r for r in self._waiting.values() if r.expires_at is not None and r.expires_at <= now]:
            del self._waiting[running.key]
            self._spawn(self._settle(running, "deadline"))

    def save(self) -> None:
        """Give the journal the tokens that it does not have yet."""
        for running in self._in_engine:
            if running.number is not None:
                for piece in running.unsaved():
                    self._journal.progress(running.number, piece)

    def generating(self, client: str) -> int:
        """Tokens of what runs for a client."""
        return sum(running.generated for running in self._in_engine if running.key[0] == client)

    async def drain(self, timeout_s: float | None) -> None:
        """Finish what the time allows. The rest stays in a durable journal, else it ends `cancelled`."""
        if self._journal.durable:
            self._leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not self._in_engine if self._leaving else not self.running)
        if not self._leaving:
            for running in list(self._waiting.values()):
                self.cancel(running)
        await self._engine.drain(0)
        await self._until(lambda: not self._in_engine if self._leaving else not self.running)
        self._leave()

    def _leave(self) -> None:
        """Nothing more goes to the engine."""
        self._leaving = True
        self._changed.set()

    def _restore(self, journaled: JournaledJob) -> None:
        left_s = None if journaled.job.deadline_at is None else journaled.job.deadline_at - self._journal.now()
        expires_at = None if left_s is None else self._clocks.monotonic() + left_s
        running = reloaded(journaled, self._topics, expires_at)
        self._usage.accepted(running.reply.client)
        if running.progress and journaled.job.fingerprint != self._engine.fingerprint:
            if self._on_change == "fail":
                self.running[running.key] = running
                reason = "the model, or what computes it, changed while the job ran"
                self._spawn(self._end(running, failed_message(running.reply.job_id, "changed", reason)))
                return
            logger.warning("job %s of client %s begins again: the model changed", *reversed(running.key))
            self._journal.restart(journaled.number, self._engine.fingerprint)
            running.progress, running.kept = (), {}
        self._enter(running)

    async def _publish_again(self) -> None:
        number = 0
        while page := await self._journal.unpublished(number, PAGE):
            for journaled in page:
                if journaled.terminal is not None:
                    job = journaled.job
                    reply = Reply.decode(self._topics, job.client, job.job_id, job.reply)
                    await self._answers.room()
                    self._publish(reply, journaled.number, journaled.terminal)
            number = page[-1].number

    def _enter(self, running: Running) -> None:
        self.running[running.key] = self._waiting[running.key] = running
        self._changed.set()

    async def _feed(self) -> None:
        """Give the engine what waits, the oldest first; it makes us wait while it is full."""
        while not self._leaving:
            self._changed.clear()
            running = next((r for r in self._waiting.values() if self._usage.may_run(r.reply.client)), None)
            if running is None:
                await self._changed.wait()
                continue
            running.submitting = asyncio.ensure_future(self._submit(running))
            leaving = asyncio.ensure_future(self._until(lambda: self._leaving))
            await asyncio.wait([running.submitting, leaving], return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            self._entered(running, running.submitting)

    async def _submit(self, running: Running) -> Job:
        request = running.request(self._clocks.monotonic())
        priority = self._usage.capped(running.reply.client, request.priority)
        return await self._engine.submit(request.model_copy(update={"priority": priority}), progress=running.progress)

    def _entered(self, running: Running, submitting: "asyncio.Task[Job]") -> None:
        running.submitting = None
        if not submitting.done() or submitting.cancelled():
            submitting.cancel()
            return  # it was cancelled, and is being settled; or we leave, and it stays in the journal
        error = submitting.exception()
        if self._waiting.pop(running.key, None) is None:
            if error is None:  # cancelled in the moment in which the engine took it
                submitting.result().cancel()
            return
        if isinstance(error, SchedulerClosed):
            self._waiting[running.key] = running
            self._leaving = True
        elif error is not None:
            if not isinstance(error, DrumlineError):
                logger.error("job %s of client %s broke", *reversed(running.key), exc_info=error)
            self._spawn(self._end(running, failed_message(running.reply.job_id, "failed", str(error))))
        else:
            running.job = submitting.result()
            self._in_engine.add(running)
            self._usage.started(running.reply.client)
            self._spawn(self._follow(running, running.job))

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
            outcome = result_message(running.reply.job_id, result)
        except Exception as error:
            logger.exception("job %s of client %s broke", *reversed(running.key))
            outcome = failed_message(running.reply.job_id, "failed", str(error) or type(error).__name__)
        if self._leaving and outcome.status == "cancelled" and not running.cancelled:
            self.save()
        else:
            await self._end(running, outcome)
        self._in_engine.discard(running)
        self._usage.stopped(running.reply.client)
        self._changed.set()

    async def _settle(self, running: Running, reason: StopReason) -> None:
        """End a job that the engine never had, or has no more."""
        try:
            result = await self._engine.settle(running.request(self._clocks.monotonic()), reason, running.progress)
            outcome = result_message(running.reply.job_id, result)
        except EngineFailed as error:
            outcome = failed_message(running.reply.job_id, "failed", str(error))
        await self._end(running, outcome)

    async def _end(self, running: Running, outcome: ResultMessage) -> None:
        """Write the outcome down, then tell it."""
        number = cast(int, running.number)
        status = outcome.status
        tokens = 0 if outcome.usage is None else outcome.usage.generated_tokens
        if status == "rejected":
            raise ValueError("an accepted job cannot be rejected")
        terminal = Terminal(outcome.encode(), status, outcome.properties, tokens)
        await self._write(number, terminal)
        self._answers.state(running.reply, "done", None, tokens, qos=0)
        self._publish(running.reply, number, terminal)
        prompt = 0 if outcome.usage is None else outcome.usage.prompt_tokens
        self._usage.ended(running.reply.client, prompt + tokens)
        del self.running[running.key]
        self._changed.set()

    async def _write(self, number: int, terminal: Terminal) -> None:
        """Until it is written: a result that were told without could be told again in other words."""
        while True:
            try:
                await self._journal.finish(number, terminal)
            except JournalError as error:
                logger.error("an outcome cannot be written, it waits: %s", error)
                await self._clocks.sleep(RETRY_S)
            else:
                return

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
