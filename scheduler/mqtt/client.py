"""The device's side of MQTT: submit jobs, read them as they come, stop them.

One connection carries all jobs of a device. It comes back by itself, and every job that has no result yet is then sent
again under its id: the worker takes it for the same job. A job that a worker took and then forgot (it was started anew)
is sent again as well, with the seed that it had, so that the answer is the same.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self
from uuid import uuid4

from drumline.model.errors import DrumlineError, InvalidRequest
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.address import BrokerAddress, Tls
from drumline.scheduler.mqtt.codec import (
    ResultMessage,
    StateMessage,
    SubmitMessage,
    parse_chunk,
    parse_result,
    parse_state,
    to_result,
)
from drumline.scheduler.mqtt.connection import (
    BrokerError,
    Connection,
    ConnectOptions,
    Message,
    ProtocolLevel,
    PublishRefused,
)
from drumline.scheduler.mqtt.parts import Joined, read_part
from drumline.scheduler.mqtt.reconnect import Backoff, keep_connected
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Chunk, Result

logger = logging.getLogger("drumline.mqtt.client")

RESEND_S = 5.0
FAREWELL_TIMEOUT_S = 2.0


class RemoteJob:
    """A job that a worker runs for us. `async for chunk in job` streams it; `await job.result()` waits for the end.

    Chunks are overlaid by their offsets: repeated ones are dropped, and where one was lost on the way the rest comes
    from the result, so that the joined texts of a choice are always its answer. One reader only.
    """

    def __init__(self, client: "Client", request: SubmitMessage) -> None:
        self.id = request.id
        self.state: StateMessage | None = None
        self._client = client
        self._request = request
        self._accepted = asyncio.Event()
        self._outcome: asyncio.Future[ResultMessage] = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._seen: dict[int, Chunk] = {}
        self._parts = Joined()
        self._has_reader = False
        self._was_heard_of = True

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Chunks as they come, the last ones from the result; a second iterator raises `InvalidRequest`."""
        if self._has_reader:
            raise InvalidRequest("job", f"{self.id} already has a reader")
        self._has_reader = True
        return self._read()

    async def result(self) -> Result:
        """Wait for the end; raises only for a job that was refused: what the scheduler raised, or `BrokerError`."""
        return to_result(await asyncio.shield(self._outcome))

    async def cancel(self) -> None:
        """Stop it, queued or running; its result says how far it came."""
        await self._client._send(self._client._request("cancel", self))

    async def get(self) -> None:
        """Ask for the state (see `state`), and for the result if there is one."""
        await self._client._send(self._client._request("get", self))

    async def _read(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        await self.result()  # a job that was refused, or lost with its client, raises here as well

    def _payload(self) -> bytes:
        return self._request.model_dump_json(exclude_none=True, exclude_defaults=True).encode()

    def _take_state(self, state: StateMessage) -> None:
        # With MQTT 3.1.1 we also hear of the refusal of another job under our id: ours was accepted and goes on.
        if state.error is not None and not self._accepted.is_set():
            self._fail(InvalidRequest("id", f"{self.id} is in use by a different job"))
            return
        self.state = state
        if state.state != "unknown":
            self._accepted.set()

    @property
    def _is_forgotten(self) -> bool:
        """Whether a worker had it, and now there is none that knows it."""
        known = self.state is None or self.state.state != "unknown"
        return not known and self._accepted.is_set() and not self._outcome.done()

    def _take_chunk(self, chunk: Chunk) -> None:
        """Pass on what is new in it, unless something before it is missing."""
        seen = self._seen.get(chunk.choice, Chunk(chunk.choice, 0, 0, "", ()))
        tokens, characters = len(seen.token_ids) - chunk.first_token, len(seen.text) - chunk.text_offset
        if tokens < 0 or characters < 0:
            return
        new = replace(
            chunk,
            first_token=len(seen.token_ids),
            text_offset=len(seen.text),
            text=chunk.text[characters:],
            token_ids=chunk.token_ids[tokens:],
            logprobs=None if chunk.logprobs is None else chunk.logprobs[tokens:],
        )
        if new.text or new.token_ids:
            self._seen[chunk.choice] = replace(
                seen, text=seen.text + new.text, token_ids=seen.token_ids + new.token_ids
            )
            self._chunks.put_nowait(new)

    def _take_result(self, message: ResultMessage) -> None:
        if self._outcome.done():
            return
        for choice in message.choices:
            self._take_chunk(Chunk(choice.choice, 0, 0, choice.text, choice.token_ids, choice.logprobs))
        self._outcome.set_result(message)
        self._end()

    def _fail(self, error: DrumlineError) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # whoever waits for the result sees it; nobody has to
            self._end()

    def _raise_refusal(self) -> None:
        """For a job that ended without having been accepted."""
        if self._outcome.done() and (message := self._outcome.result()).status == "rejected":
            to_result(message)

    def _end(self) -> None:
        self._client._open.pop(self.id, None)
        self._accepted.set()
        self._chunks.put_nowait(None)


class Client:
    """A device. `async with Client(host, port, name="sensor-1") as client` connects or raises `BrokerError`.

    With MQTT 5 everything comes to a topic of this client object alone (response topic, correlation data); with
    MQTT 3.1.1 (`protocol=4`) to the default topics of `name`. A lost connection is looked for until it is back. `tls`
    encrypts; brokers take that on a port of its own, by custom 8883.
    """

    def __init__(
        self,
        host: str,
        port: int = 1883,
        *,
        name: str | None = None,
        protocol: ProtocolLevel = 5,
        username: str | None = None,
        password: str | None = None,
        tls: Tls | None = None,
        topics: Topics | None = None,
        resend_s: float = RESEND_S,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        session = uuid4().hex
        self.name = name or f"client-{session[:12]}"
        self._topics = topics or Topics()
        self._own = self._topics.client(self.name)
        self._replies = f"{self._own}/replies/{session}" if protocol == 5 else None
        self._options = ConnectOptions(
            BrokerAddress(host, port, username, password, tls), f"{self.name}-{session[:8]}", protocol
        )
        self._resend_s = resend_s
        self._backoff = backoff
        self._open: dict[str, RemoteJob] = {}
        self._link: asyncio.Future[Connection] | None = None
        self._ever_connected = False
        self._keeper: asyncio.Task[None] | None = None
        self._farewells: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        waits: list[asyncio.Future[Any]] = [self._new_link()]
        self._keeper = asyncio.create_task(self._keep(), name="drumline-client")
        try:
            await asyncio.wait([*waits, self._keeper], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.__aexit__(None, None, None)
            raise
        if self._keeper.done():
            await self._keeper
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=FAREWELL_TIMEOUT_S)
        ending = [*self._farewells, *([] if self._keeper is None else [self._keeper])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)  # what broke the keeper has been told to every job
        self._fail_open("the client was closed")

    async def submit(self, prompt: str | None = None, *, id: str | None = None, **fields: Any) -> RemoteJob:
        """Send a job (`fields` are those of `Request`) and wait until a worker has accepted it.

        It is sent again, under the same id, until that happens; giving up (a cancellation, a timeout) cancels it, for
        it may still reach a worker. Without a seed it gets one here. Raises `InvalidRequest`, `QueueFull` or
        `SchedulerClosed` as the worker's scheduler would; bound the wait for a worker with `asyncio.timeout`.
        """
        if prompt is not None:
            fields["prompt"] = prompt
        request = _with_seed(SubmitMessage(id=id or uuid4().hex, **fields))
        if request.id in self._open:
            raise InvalidRequest("id", f"job {request.id} of this client is still open")
        job = self._open[request.id] = RemoteJob(self, request)
        try:
            while not job._accepted.is_set():
                await self._send(self._submission(job))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._resend_s):
                        await job._accepted.wait()
        except BaseException as error:
            self._open.pop(request.id, None)
            if isinstance(error, asyncio.CancelledError):
                self._take_back(job)
            raise
        job._raise_refusal()
        return job

    async def _send(self, message: Message) -> None:
        """Publish on this connection or, when it is lost, on the next."""
        while True:
            link = self._link
            if link is None:
                raise BrokerError("enter the client first: async with Client(…)")
            connection = await asyncio.shield(link)
            try:
                await connection.publish(message)
            except BrokerError:
                if self._link is link:
                    self._new_link()
            else:
                return

    def _take_back(self, job: RemoteJob) -> None:
        """Cancel a job that nobody waits for any more; whoever gave up does not wait for this either."""

        async def cancel() -> None:
            with suppress(DrumlineError):
                await job.cancel()

        task = asyncio.create_task(cancel(), name="drumline-client-farewell")
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    def _submission(self, job: RemoteJob) -> Message:
        return self._message(self._topics.submit(self.name), job._payload(), job)

    def _request(self, kind: Literal["cancel", "get"], job: RemoteJob) -> Message:
        return self._message(self._topics.job(self.name, kind, job.id), b"", job)

    def _message(self, topic: str, payload: bytes, job: RemoteJob) -> Message:
        """With MQTT 5, a message that is answered to this client object alone."""
        return Message(
            topic=topic,
            payload=payload,
            qos=1,
            response_topic=self._replies,
            correlation_data=job.id.encode() if self._replies else None,
        )

    async def _keep(self) -> None:
        try:
            await keep_connected(self._options, self._serve, self._backoff(), self._lost)
        except Exception as error:
            self._fail_open(f"the client broke ({error})")
            raise

    async def _serve(self, connection: Connection) -> None:
        if self._replies:
            await connection.subscribe(self._replies)
        else:
            await connection.subscribe(*(f"{self._own}/jobs/+/{kind}" for kind in ("state", "chunks", "result")))
        self._ever_connected = True
        link = self._new_link() if self._link is None or self._link.done() else self._link
        link.set_result(connection)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(connection))
            tasks.create_task(self._poll(connection))
            for job in list(self._open.values()):
                await self._send_again(connection, job)

    async def _poll(self, connection: Connection) -> None:
        """Ask for every accepted job that was not heard of since the last round: its worker may have forgotten it."""
        while True:
            await asyncio.sleep(self._resend_s)
            for job in list(self._open.values()):
                if job._accepted.is_set() and not job._was_heard_of:
                    with suppress(PublishRefused):  # a broker that forbids asking does not forbid waiting
                        await connection.publish(self._request("get", job))
                job._was_heard_of = False

    async def _send_again(self, connection: Connection, job: RemoteJob) -> None:
        try:
            await connection.publish(self._submission(job))
        except (InvalidRequest, PublishRefused) as error:
            job._fail(error)

    async def _read(self, connection: Connection) -> None:
        """The one reader of a connection: no message may end it."""
        async for message in connection.messages():
            try:
                job = self._take(message)
            except Exception as error:
                logger.warning(Event("message ignored", topic=message.topic, error=error))
                continue
            if job is not None and job._is_forgotten:
                await self._send_again(connection, job)

    def _take(self, message: Message) -> RemoteJob | None:
        """Pass a message on to its job; returns it, if it is one of ours."""
        properties = dict(message.user_properties)
        parsed = self._topics.parse(message.topic)
        job_id = parsed.job_id if parsed else (message.correlation_data or b"").decode(errors="replace")
        kind = parsed.kind if parsed else properties.get("kind")
        job = self._open.get(job_id or "")
        if job is None:
            return None
        job._was_heard_of = True
        match kind:
            case "state":
                job._take_state(parse_state(message.payload))
            case "chunk" | "chunks":
                job._take_chunk(parse_chunk(message.payload))
            case "result":
                part = read_part(message.payload)
                payload = message.payload if part is None else job._parts.add(part)
                if payload is not None:
                    job._take_result(parse_result(payload))
        return job

    def _lost(self, error: BrokerError) -> None:
        if not self._ever_connected:
            raise error
        logger.warning(Event("connection lost", client=self.name, error=error))

    def _new_link(self) -> asyncio.Future[Connection]:
        self._link = asyncio.get_running_loop().create_future()
        return self._link

    def _fail_open(self, reason: str) -> None:
        """The end of the client: whoever waits for a job, or for a connection to submit one, is told."""
        link = self._link if self._link is not None and not self._link.done() else self._new_link()
        link.set_exception(BrokerError(reason))
        link.exception()  # nobody has to be waiting
        for job in list(self._open.values()):
            job._fail(BrokerError(f"{reason} before job {job.id} ended"))


def _with_seed(request: SubmitMessage) -> SubmitMessage:
    """The same request with a seed: one that is run twice must say the same twice."""
    return request if request.sampling.seed is not None else request.with_seed(secrets.randbits(64))
