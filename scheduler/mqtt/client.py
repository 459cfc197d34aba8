"""The device's side of MQTT: submit jobs, read them as they come, stop them.

One connection carries all jobs of a device. It comes back by itself, and every job that has no result yet is then sent
again under its id: the worker takes it for the same job.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from drumline.model.errors import DrumlineError, InvalidRequest
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
    Backoff,
    BrokerAddress,
    BrokerError,
    Connection,
    ConnectOptions,
    Message,
    Protocol,
    keep_connected,
)
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Chunk, Result

logger = logging.getLogger("drumline.mqtt.client")

RESEND_S = 5.0


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
        self._has_reader = False

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
        await self._client._send(Message(self._client._topics.cancel(self._client.name, self.id), b"", qos=1))

    async def get(self) -> None:
        """Ask for the state (see `state`), and for the result if there is one."""
        await self._client._send(Message(self._client._topics.get(self._client.name, self.id), b"", qos=1))

    async def _read(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        await self.result()  # a job that was refused, or lost with its client, raises here as well

    def _payload(self) -> bytes:
        return self._request.model_dump_json(exclude_none=True, exclude_defaults=True).encode()

    def _take_state(self, state: StateMessage, refused: bool) -> None:
        if refused:
            self._fail(InvalidRequest("id", f"{self.id} is in use by a different job"))
            return
        self.state = state
        if state.state != "unknown":
            self._accepted.set()

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
    MQTT 3.1.1 (`protocol=4`) to the default topics of `name`. A lost connection is looked for until it is back.
    """

    def __init__(
        self,
        host: str,
        port: int = 1883,
        *,
        name: str | None = None,
        protocol: Protocol = 5,
        username: str | None = None,
        password: str | None = None,
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
            BrokerAddress(host, port, username, password), f"{self.name}-{session[:8]}", protocol
        )
        self._resend_s = resend_s
        self._backoff = backoff
        self._open: dict[str, RemoteJob] = {}
        self._link: asyncio.Future[Connection] | None = None
        self._ever_connected = False
        self._keeper: asyncio.Task[None] | None = None

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
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self._fail_open("the client was closed")

    async def submit(self, prompt: str | None = None, *, id: str | None = None, **fields: Any) -> RemoteJob:
        """Send a job (`fields` are those of `Request`) and wait until a worker has accepted it.

        It is sent again, under the same id, until that happens. Raises `InvalidRequest`, `QueueFull` or
        `SchedulerClosed` as the worker's scheduler would; bound the wait for a worker with `asyncio.timeout`.
        """
        if prompt is not None:
            fields["prompt"] = prompt
        request = SubmitMessage(id=id or uuid4().hex, **fields)
        if request.id in self._open:
            raise InvalidRequest("id", f"job {request.id} of this client is still open")
        job = self._open[request.id] = RemoteJob(self, request)
        try:
            while not job._accepted.is_set():
                await self._send(self._submission(job))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._resend_s):
                        await job._accepted.wait()
        except BaseException:
            self._open.pop(request.id, None)
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

    def _submission(self, job: RemoteJob) -> Message:
        return Message(
            topic=self._topics.submit(self.name),
            payload=job._payload(),
            qos=1,
            response_topic=self._replies,
            correlation_data=job.id.encode() if self._replies else None,
        )

    async def _keep(self) -> None:
        try:
            await keep_connected(self._options, self._serve, self._backoff(), self._lost)
        except Exception:
            self._fail_open("the client broke")
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
            for job in list(self._open.values()):
                await connection.publish(self._submission(job))

    async def _read(self, connection: Connection) -> None:
        async for message in connection.messages():
            try:
                self._take(message)
            except DrumlineError as error:
                logger.warning("a message on %s was ignored: %s", message.topic, error)

    def _take(self, message: Message) -> None:
        properties = dict(message.user_properties)
        parsed = self._topics.parse(message.topic)
        job_id = parsed.job_id if parsed else (message.correlation_data or b"").decode(errors="replace")
        kind = parsed.kind if parsed else properties.get("kind")
        job = self._open.get(job_id or "")
        if job is None:
            return
        match kind:
            case "state":
                job._take_state(parse_state(message.payload), properties.get("code") == "duplicate_id")
            case "chunk" | "chunks":
                job._take_chunk(parse_chunk(message.payload))
            case "result":
                job._take_result(parse_result(message.payload))

    def _lost(self, error: BrokerError) -> None:
        if not self._ever_connected:
            raise error
        logger.warning("%s: %s", self.name, error)

    def _new_link(self) -> asyncio.Future[Connection]:
        self._link = asyncio.get_running_loop().create_future()
        return self._link

    def _fail_open(self, reason: str) -> None:
        for job in list(self._open.values()):
            job._fail(BrokerError(f"{reason} before job {job.id} ended"))
