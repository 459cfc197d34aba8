"""The worker's side of MQTT: two connections that outlive the broker's bad days, and the worker's own status.

Jobs come, and everything is published, on one connection; cancels and gets come on another, so that a flood of jobs
never holds up a cancel.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from drumline.metrics.instruments import MessageKind
from drumline.model.errors import InvalidRequest
from drumline.scheduler.engine import Engine
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.codec import WorkerState, WorkerStatus
from drumline.scheduler.mqtt.connection import (
    BrokerError,
    Connection,
    ConnectOptions,
    Message,
    ProtocolLevel,
    PublishRefused,
)
from drumline.scheduler.mqtt.jobs import Jobs, Limits
from drumline.scheduler.mqtt.outbox import Observer, Outbox
from drumline.scheduler.mqtt.reconnect import Backoff, keep_connected
from drumline.scheduler.mqtt.topics import NAME, Topics

logger = logging.getLogger("drumline.mqtt")

FAREWELL_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class GatewayOptions:
    """Settings of the edge; times in seconds.

    `reply_prefixes` are allowed for response topics beside the client's own subtree; `session_expiry_s` is how long the
    broker keeps jobs for us while we are away.
    """

    protocol: ProtocolLevel = 5
    limits: Limits = field(default_factory=Limits)
    reply_prefixes: tuple[str, ...] = ()
    keepalive_s: int = 30
    session_expiry_s: int = 3600
    refresh_s: float = 0.5
    status_s: float = 5.0
    drain_s: float = 30.0
    flush_s: float = 10.0


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
        self._broker = broker
        self._worker = worker
        self._model = engine.statistics().model if model is None else model
        self._version = version
        self._topics = topics or Topics()
        self._status_topic = self._topics.worker_status(worker)
        self._options = options or GatewayOptions()
        self._observer = observer
        self._backoff = backoff
        self._sleep = sleep
        self._clock = clock
        self._started_at = round(wall_clock(), 3)
        self._state: WorkerState = "online"
        self._told: WorkerStatus | None = None
        self._told_at = clock()
        self._up: set[str] = set()
        self._outbox = Outbox(self._topics, observer)
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
            async with asyncio.TaskGroup() as tasks:
                jobs = Jobs(
                    self._engine,
                    self._topics,
                    self._outbox,
                    tasks.create_task,
                    self._options.limits,
                    self._options.reply_prefixes,
                    self._observer,
                    self._clock,
                )
                serving = [
                    tasks.create_task(self._keep("jobs", lambda link: self._serve_jobs(link, jobs))),
                    tasks.create_task(self._keep("control", lambda link: self._serve_control(link, jobs))),
                    tasks.create_task(self._refresh(jobs)),
                ]
                await self._stopping.wait()
                await self._wind_down(jobs)
                for task in serving:
                    task.cancel()
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._ended.set()

    async def _wind_down(self, jobs: Jobs) -> None:
        """Drain the engine and deliver its last results."""
        self._state = "draining"
        jobs.draining = True
        self._tell_status()
        await self._engine.drain(None if math.isinf(self._drain_s) else self._drain_s)
        await jobs.idle()
        try:
            async with asyncio.timeout(self._options.flush_s):
                await self._outbox.flushed()
        except TimeoutError:
            logger.error("the broker is away: %d messages were not delivered", len(self._outbox))

    async def _keep(self, name: str, session: Callable[[Connection], Awaitable[None]]) -> None:
        options = ConnectOptions(
            address=self._broker,
            client_id=f"drumline-{self._worker}-{name}",
            protocol=self._options.protocol,
            will=self._status_message("offline") if name == "jobs" else None,
            keepalive_s=self._options.keepalive_s,
            session_expiry_s=self._options.session_expiry_s if name == "jobs" else 0,
        )

        def lost(error: BrokerError) -> None:
            logger.warning("%s connection: %s", name, error)

        await keep_connected(options, session, self._backoff(), lost)

    async def _serve_jobs(self, connection: Connection, jobs: Jobs) -> None:
        await connection.subscribe(self._topics.submit_filter)
        self._tell_status()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._outbox.send(connection))
                tasks.create_task(self._read(connection, jobs, self._room))
                self._note_link("jobs", True)
        except asyncio.CancelledError:
            # A clean disconnect takes the will back, so nobody else says that we are gone.
            with suppress(BrokerError, PublishRefused, TimeoutError):
                async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                    await connection.publish(self._status_message("offline"))
            raise
        finally:
            self._note_link("jobs", False)

    async def _serve_control(self, connection: Connection, jobs: Jobs) -> None:
        await connection.subscribe(*self._topics.control_filters)
        self._note_link("control", True)
        try:
            await self._read(connection, jobs, self._no_wait)
        finally:
            self._note_link("control", False)

    async def _room(self, jobs: Jobs) -> None:
        """New jobs wait at the broker until there is room for what they will make."""
        await self._outbox.room()
        await jobs.room()

    async def _no_wait(self, jobs: Jobs) -> None:
        """A cancel is never held up."""

    async def _read(self, connection: Connection, jobs: Jobs, room: Callable[[Jobs], Awaitable[None]]) -> None:
        """The one reader of a connection: no message may end it."""
        async for message in connection.messages():
            await room(jobs)
            # The broker replays a retained message to each new subscription: a job would be run again for ever.
            if message.retain:
                continue
            try:
                self._handle(message, jobs)
            except Exception as error:
                logger.exception("a message on %s could not be handled", message.topic)
                self._outbox.bury(message, None, None, "internal", error)

    def _handle(self, message: Message, jobs: Jobs) -> None:
        match self._topics.parse(message.topic):
            case (client, "submit", None):
                self._count("submit")
                jobs.submit(message, client)
            case (client, "cancel", str(job_id)):
                self._count("cancel")
                jobs.cancel(message, client, job_id)
            case (client, "get", str(job_id)):
                self._count("get")
                jobs.get(message, client, job_id)
            case _:
                error = InvalidRequest("topic", f"client and job id must match {NAME.pattern}")
                self._outbox.bury(message, None, None, "invalid", error)

    def _count(self, kind: MessageKind) -> None:
        if self._observer is not None:
            self._observer.mqtt_message("in", kind)

    async def _refresh(self, jobs: Jobs) -> None:
        while True:
            await self._sleep(self._options.refresh_s)
            jobs.refresh()
            stale = self._clock() - self._told_at >= self._options.status_s
            if stale or self._status(self._state) != self._told:
                self._tell_status()

    def _tell_status(self) -> None:
        self._told = self._status(self._state)
        self._told_at = self._clock()
        self._outbox.put("status", self._status_message(self._state), key="status")

    def _status_message(self, state: WorkerState) -> Message:
        return Message(self._status_topic, self._status(state).encode(), qos=1, retain=True)

    def _status(self, state: WorkerState) -> WorkerStatus:
        statistics = self._engine.statistics()
        return WorkerStatus(
            worker=self._worker,
            status=state,
            queue_depth=statistics.queued,
            rows_live=statistics.live,
            rows=statistics.rows,
            model=self._model,
            version=self._version,
            started_at=self._started_at,
        )

    def _note_link(self, name: str, up: bool) -> None:
        (self._up.add if up else self._up.discard)(name)
        if self.connected:
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
            logger.error("the gateway failed", exc_info=error)
