"""The worker's side of MQTT: its connections, which outlive the broker's bad days.

Jobs come, and everything is published, on one connection; cancels and gets come on another, so that a flood of jobs
never holds up a cancel; a third one hears whether another worker has our name.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Self
from uuid import uuid4

from drumline.metrics.definitions import MessageKind
from drumline.model.errors import InvalidRequest
from drumline.scheduler.engine import Engine
from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.answers import Answers
from drumline.scheduler.mqtt.clocks import Clocks
from drumline.scheduler.mqtt.codec import shortened
from drumline.scheduler.mqtt.connection import (
    BrokerError,
    Connection,
    ConnectOptions,
    Message,
    PublishRefused,
)
from drumline.scheduler.mqtt.handlers import MAX_PENDING, Handlers
from drumline.scheduler.mqtt.home_assistant import discovery
from drumline.scheduler.mqtt.jobs import Jobs, Spawn
from drumline.scheduler.mqtt.options import GatewayOptions
from drumline.scheduler.mqtt.outbox import Observer, Outbox
from drumline.scheduler.mqtt.quotas import Usage
from drumline.scheduler.mqtt.reconnect import Backoff, keep_connected
from drumline.scheduler.mqtt.status import Status
from drumline.scheduler.mqtt.topics import NAME, REQUEST_KINDS, Topics

logger = logging.getLogger("drumline.mqtt")

FAREWELL_TIMEOUT_S = 2.0
ARRIVAL_TIMEOUT_S = 5.0
"""What the end of a worker leaves to jobs that have come and are not accepted yet."""
REMEMBERED_BYTES = 64 * 2**20
"""Bodies and answers of ended jobs that a worker without a journal keeps for those who ask again."""


class Gateway:
    """Serves one engine over MQTT.

    `run()` serves until cancelled or stopped; `async with` runs it in the background, from the first moment both
    connections stand. `stop()` is the clean end. Raises `InvalidRequest` for a worker name that is no topic level.
    """

    def __init__(
        self,
        engine: Engine,
        broker: BrokerAddress,
        *,
        journal: Journal | None = None,
        worker: str = "main",
        model: str | None = None,
        version: str = "",
        topics: Topics | None = None,
        options: GatewayOptions | None = None,
        observer: Observer | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._broker = broker
        self._worker = worker
        self._model = engine.statistics().model if model is None else model
        self._version = version
        self._topics = topics or Topics()
        self._options = options or GatewayOptions()
        self._observer = observer
        self._backoff = backoff
        self._sleep = sleep
        self._clock = clock
        self._wall_clock = wall_clock
        self._up: set[str] = set()
        self._outbox = Outbox(self._topics, observer)
        self._link: Connection | None = None
        self._status = Status(
            engine,
            self._outbox,
            self._topics.worker_status(worker),
            worker,
            self._model,
            version,
            round(wall_clock(), 3),
            clock,
        )
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._begun = False
        self._failure: Exception | None = None
        self._drain_s = self._options.drain_s
        self._runner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._runner = asyncio.create_task(self.run(), name="drumline-gateway")
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([ready, self._runner], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._cancel_runner()
            raise
        finally:
            ready.cancel()
        if self._runner.done():
            await self._runner
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is None:
            return
        if error is not None:
            await self._cancel_runner()
            return
        try:
            await self.stop()
            await self._runner
        except asyncio.CancelledError:  # somebody does not want to wait for the clean end
            await self._cancel_runner()
            raise

    async def ready(self) -> None:
        """Wait until both connections stand for the first time."""
        await self._ready.wait()

    @property
    def connected(self) -> bool:
        """Whether both connections to the broker stand now."""
        return self._up == {"jobs", "control"}

    async def wait_ended(self) -> None:
        """Wait until `run` has ended, whatever ended it; raises what it raised, unless it was cancelled."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self, drain_s: float | None = None) -> None:
        """The clean end of `run`: drain for `drain_s`, deliver, say `offline`, disconnect.

        None takes the `drain_s` of the options, `math.inf` waits as long as the jobs take. Subscriptions are left in
        place, so the broker keeps what is sent until we are back.
        """
        if drain_s is not None:
            self._drain_s = drain_s
        self._stopping.set()
        if self._begun:
            await self._ended.wait()

    async def run(self) -> None:
        """Serve until stopped or cancelled. A lost broker is no reason to end: it is looked for until it is back."""
        self._begun = True
        try:
            async with self._opened_journal() as journal, asyncio.TaskGroup() as tasks:
                jobs, handlers = self._parts(journal, tasks.create_task)
                await jobs.restore()
                serving = [
                    tasks.create_task(self._keep("jobs", lambda link: self._serve_jobs(link, handlers))),
                    tasks.create_task(self._keep("control", lambda link: self._serve_control(link, handlers))),
                    tasks.create_task(self._keep("alone", self._stay_alone)),
                    tasks.create_task(self._refresh(jobs)),
                    tasks.create_task(self._save(jobs)),
                    tasks.create_task(self._watch(jobs)),
                ]
                await self._stopping.wait()
                await self._wind_down(jobs, handlers)
                for task in serving:
                    task.cancel()
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._ended.set()

    @asynccontextmanager
    async def _opened_journal(self) -> AsyncIterator[Journal]:
        """The one that we were given, or one in memory."""
        if self._journal is not None:
            yield self._journal
            return
        most = self._options.limits.unfinished_jobs
        async with Journal(None, max_unfinished=most, keep_bytes=REMEMBERED_BYTES, clock=self._wall_clock) as journal:
            yield journal

    def _parts(self, journal: Journal, spawn: Spawn) -> tuple[Jobs, Handlers]:
        options = self._options
        answers = Answers(self._outbox, options.limits.result_bytes)
        usage = Usage(options.quotas, self._clock)
        jobs = Jobs(
            self._engine,
            journal,
            self._topics,
            answers,
            usage,
            spawn,
            Clocks(self._clock, journal.now, self._sleep),
            options.on_change,
            options.show_text,
        )
        handlers = Handlers(
            self._engine,
            journal,
            jobs,
            self._topics,
            self._outbox,
            answers,
            usage,
            spawn,
            options.limits.submit_bytes,
            options.reply_prefixes,
            self._clock,
        )
        self._status.waiting = lambda: len(jobs.waiting)
        return jobs, handlers

    async def _wind_down(self, jobs: Jobs, handlers: Handlers) -> None:
        """Finish what the time allows, and deliver it. What is sent meanwhile waits at the broker, unless we retire."""
        logger.info(Event("draining", jobs=len(jobs.running), limit_s=self._drain_s))
        self._status.state = "draining"
        handlers.draining, handlers.retiring = True, self._options.retire
        self._status.tell()
        if self._options.retire and self._link is not None:
            with suppress(BrokerError):
                await self._link.unsubscribe(self._topics.submit_filter)
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
                await handlers.settled()
        await jobs.drain(None if math.isinf(self._drain_s) else self._drain_s)
        try:
            async with asyncio.timeout(self._options.flush_s):
                await self._outbox.flushed()
        except TimeoutError:
            logger.error(Event("messages not delivered", messages=len(self._outbox), reason="the broker is away"))

    async def _keep(self, name: str, session: Callable[[Connection], Awaitable[None]]) -> None:
        own = name == "alone"  # a name that no other worker can have, and take from us
        options = ConnectOptions(
            address=self._broker,
            client_id=f"drumline-{self._worker}-{self._topics.digest}-{uuid4().hex[:12] if own else name}",
            protocol=self._options.protocol,
            will=self._status.message("offline") if name == "jobs" else None,
            keepalive_s=self._options.keepalive_s,
            # What is sent while we are away waits for us, cancels, too.
            session_expiry_s=0 if own else self._options.session_expiry_s,
            receive_maximum=MAX_PENDING if name == "jobs" else None,
        )

        def lost(error: BrokerError) -> None:
            logger.warning(Event("connection lost", connection=name, error=error))

        await keep_connected(options, session, self._backoff(), lost)

    async def _serve_jobs(self, connection: Connection, handlers: Handlers) -> None:
        if self._stopping.is_set() and self._options.retire:
            await connection.unsubscribe(self._topics.submit_filter)
        else:
            await connection.subscribe(self._topics.submit_filter)
        self._link = connection
        self._announce()
        self._status.tell()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._outbox.send(connection))
                tasks.create_task(self._read(connection, handlers, self._room))
                self._note_link("jobs", True)
        except asyncio.CancelledError:
            # A clean disconnect takes the will back, so nobody else says that we are gone.
            with suppress(BrokerError, PublishRefused, TimeoutError):
                async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                    await connection.publish(self._status.message("offline"))
            raise
        finally:
            self._note_link("jobs", False)

    async def _serve_control(self, connection: Connection, handlers: Handlers) -> None:
        await connection.subscribe(*self._topics.control_filters)
        self._note_link("control", True)
        try:
            await self._read(connection, handlers, self._no_wait)
        finally:
            self._note_link("control", False)

    async def _stay_alone(self, connection: Connection) -> None:
        """Hear whether a worker of our name is started."""
        await connection.subscribe(self._status.topic)
        async for message in connection.messages():
            if not message.retain:
                self._status.check_alone(message)

    async def _room(self, handlers: Handlers) -> None:
        """New jobs wait at the broker until there is room for what they will make."""
        await self._outbox.room()
        await handlers.room()

    async def _no_wait(self, handlers: Handlers) -> None:
        """A cancel is never held up."""

    async def _read(
        self, connection: Connection, handlers: Handlers, room: Callable[[Handlers], Awaitable[None]]
    ) -> None:
        """The one reader of a connection: no message may end it."""
        async for message in connection.messages():
            await room(handlers)
            acknowledge = partial(connection.acknowledge, message)
            # The broker replays a retained message to each new subscription: a job would be run again for ever.
            if message.retain:
                acknowledge()
                continue
            try:
                self._handle(message, handlers, acknowledge)
            except Exception as error:
                logger.exception(Event("message not handled", topic=message.topic))
                self._outbox.bury(message, None, None, "internal", error)
                acknowledge()

    def _handle(self, message: Message, handlers: Handlers, acknowledge: Callable[[], None]) -> None:
        match self._topics.parse(message.topic):
            case (client, "submit", None):
                self._count("submit")
                handlers.submit(message, client, acknowledge)
            case (client, "cancel", str(job_id)):
                self._count("cancel")
                handlers.cancel(message, client, job_id)
            case (client, "get", str(job_id)):
                self._count("get")
                handlers.get(message, client, job_id)
            case _:
                error = InvalidRequest("topic", f"client and job id must match {NAME.pattern}")
                logger.info(Event("message refused", topic=shortened(message.topic), error=error.limit))
                self._outbox.bury(message, None, None, "invalid", error)
                kind = next(known for known in REQUEST_KINDS if message.topic.endswith(f"/{known}"))
                self._count(kind)
                if kind == "submit":
                    self._engine.outcomes.refused("invalid", None)
                acknowledge()

    def _count(self, kind: MessageKind) -> None:
        if self._observer is not None:
            self._observer.mqtt_message("in", kind)

    async def _refresh(self, jobs: Jobs) -> None:
        while True:
            await self._sleep(self._options.refresh_s)
            jobs.refresh()
            self._status.tell_news(self._options.status_s)

    async def _watch(self, jobs: Jobs) -> None:
        """End, where nothing more can be done for the jobs: whoever looks after us starts the next worker."""
        await jobs.broken

    async def _save(self, jobs: Jobs) -> None:
        while True:
            await self._sleep(self._options.progress_s)
            jobs.save()

    def _announce(self) -> None:
        """Let Home Assistant find us."""
        if (prefix := self._options.home_assistant) is not None:
            message = discovery(prefix, self._topics, self._worker, self._model, self._version)
            self._outbox.put("status", message, key="home_assistant")

    def _note_link(self, name: str, up: bool) -> None:
        (self._up.add if up else self._up.discard)(name)
        if self.connected:
            logger.info(Event("connected", broker=self._broker.url))
            self._ready.set()
        if self._observer is not None:
            self._observer.mqtt_connected(self.connected)

    async def _cancel_runner(self) -> None:
        """End at once. The body of the `async with` is what failed first; what fails here as well is only logged."""
        runner = self._runner
        if runner is None:
            return
        runner.cancel()
        await asyncio.wait([runner])
        if not runner.cancelled() and (error := runner.exception()) is not None:
            logger.error(Event("gateway failed"), exc_info=error)
