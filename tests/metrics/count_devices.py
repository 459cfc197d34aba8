"""Devices that do all that a worker counts, and keep count themselves of what they sent and what must become of it.

Nobody asks the worker's metrics here. `Wire` hears, beside the devices, every message that passes through the broker.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count

import pytest

from drumline import InvalidRequest, SamplingParams
from drumline.client import Client
from drumline.scheduler.mqtt.address import parse_broker_url
from drumline.scheduler.mqtt.client import RemoteJob
from drumline.scheduler.mqtt.codec import MAX_SUBMIT_BYTES, ResultMessage, parse_result
from drumline.scheduler.mqtt.connection import Connection, ConnectOptions, Message, connect
from drumline.scheduler.mqtt.quotas import QuotaExceeded
from tests.scheduler.mqtt.support import Device, device

ROWS = 4
CLIENTS = ("kitchen", "hall", "garden", "single", "patient", "attic")
LIMITS = json.dumps({"clients": {"single": {"jobs": 1}, "patient": {"live": 1}}})
PREFIX = "drumline/v1/clients"
LONG = {"max_tokens": 1_900, "ignore_eos": True, "priority": "high"}
EOS = 2
SHORT = 14
"""Tokens: so short a row is not taken away for a higher class."""


class Wire:
    """Every message that passes through the broker."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.heard: Counter[str] = Counter()
        self.letters: Counter[str] = Counter()
        """On the topic of what cannot be answered, by code."""
        self.results: dict[tuple[str, str], ResultMessage] = {}
        """Of accepted jobs, by client and id."""
        self._bytes: dict[tuple[str, str], bytes] = {}

    async def listen(self, connection: Connection) -> None:
        async for message in connection.messages():
            self._take(message)

    def _take(self, message: Message) -> None:
        levels = message.topic.removeprefix("drumline/v1/").split("/")
        if levels[-1] in ("submit", "cancel", "get"):
            self.sent[levels[-1]] += 1
        elif levels == ["dead"]:
            self.heard["dead"] += 1
            self.letters[json.loads(message.payload)["code"]] += 1
        elif levels[0] == "clients":
            kind = dict(message.user_properties).get("kind", levels[-1]).removesuffix("s")
            self.heard[kind] += 1
            if kind == "result":
                self._result(levels[1], message.payload)

    def _result(self, client: str, payload: bytes) -> None:
        result = parse_result(payload)
        if result.status != "rejected":
            key = (client, result.job_id)
            self.results[key] = result
            assert self._bytes.setdefault(key, payload) == payload


class Known:
    """What the devices know: messages sent by kind, accepted jobs by the outcome that they must have, refusals by
    reason, and those of them that go on record."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.sent: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.buried: Counter[str] = Counter()

    @property
    def seated(self) -> list[ResultMessage]:
        """Jobs that got a row: they took longer than they waited."""
        return [result for result in self.wire.results.values() if result.timings.queued_s < result.timings.total_s]


class Devices:
    """One `Client` a name, and `attic`, which speaks MQTT itself and so can say what no `Client` would."""

    def __init__(self, known: Known, clients: dict[str, Client], attic: Device) -> None:
        self.known, self.clients, self._attic = known, clients, attic
        self._numbers = count()

    async def submit(self, client: str, prompt: str = "Once upon a time", **fields: object) -> RemoteJob:
        self.known.sent["submit"] += 1
        return await self.clients[client].submit(prompt, id=f"{client}-job-{next(self._numbers)}", **fields)

    async def running(self, client: str, **fields: object) -> RemoteJob:
        """A job that has a row and a first token."""
        job = await self.submit(client, **fields)
        await anext(aiter(job))
        return job

    async def cancel(self, job: RemoteJob) -> None:
        self.known.sent["cancel"] += 1
        await job.cancel()
        await self.end(job, "cancelled")

    async def end(self, job: RemoteJob, outcome: str) -> None:
        assert (await job.result()).status == outcome
        self.known.outcomes[outcome] += 1

    async def run(self, client: str, outcome: str, **fields: object) -> None:
        await self.end(await self.submit(client, **fields), outcome)

    async def refused(self, client: str, reason: str, error: type[Exception], **fields: object) -> None:
        with pytest.raises(error):
            await self.submit(client, **fields)
        self.known.refused[reason] += 1

    async def send(self, job: object, client: str = "attic", **properties: object) -> None:
        """A submit of the attic's."""
        self.known.sent["submit"] += 1
        await self._attic.send(f"{PREFIX}/{client}/submit", job, **properties)

    async def ask(self, kind: str, job_id: str) -> None:
        """A cancel or a get of the attic's."""
        self.known.sent[kind] += 1
        await self._attic.send(f"{PREFIX}/attic/jobs/{job_id}/{kind}")

    async def hears(self, job_id: str, status: str) -> None:
        """The attic's next terminal message of this job."""
        assert (await self._attic.body(f"/{job_id}/result"))["status"] == status

    async def hears_state(self, job_id: str, state: str) -> None:
        await self._attic.state(f"/{job_id}/state", state)

    async def buried(self, reason: str) -> None:
        """A refusal that goes on record, where the attic listens."""
        assert (await self._attic.body("/dead"))["code"] == reason
        self.known.refused[reason] += 1
        self.known.buried[reason] += 1


async def drive(broker: str, enough: Callable[[], Awaitable[bool]], settled: Callable[[], Awaitable[None]]) -> Known:
    """All kinds of jobs, then more that complete until there are `enough`; what is known once all is `settled`."""
    async with at(broker) as devices:
        await while_all_rows_are_taken(devices)
        await asyncio.gather(*(part(devices) for part in (out_of_time, out_of_tokens, again_and_again, wave)))
        while not await enough():
            await wave(devices)
        await settled()
        return devices.known


@asynccontextmanager
async def at(broker: str) -> AsyncIterator[Devices]:
    address = parse_broker_url(broker)
    known = Known(Wire())
    async with AsyncExitStack() as stack:
        link = await stack.enter_async_context(connect(ConnectOptions(address, "wire")))
        await link.subscribe("drumline/v1/#")
        listening = asyncio.create_task(known.wire.listen(link))
        clients = {
            # Nothing is sent again by itself.
            name: await stack.enter_async_context(Client(address.host, address.port, name=name, resend_s=60))
            for name in CLIENTS
            if name != "attic"
        }
        attic = await stack.enter_async_context(device(address, f"{PREFIX}/attic/jobs/+/+", "drumline/v1/dead"))
        yield Devices(known, clients, attic)
        listening.cancel()
        await asyncio.wait([listening])


async def while_all_rows_are_taken(devices: Devices) -> None:
    """Jobs that end, or are refused, without ever having a row; then those that hold the rows are cancelled."""
    holders = await asyncio.gather(*(devices.running(name, **LONG) for name in ("single", "patient", "hall", "hall")))
    waves = [asyncio.create_task(wave(devices)) for _ in range(2)]
    await asyncio.gather(
        *(cancelled_while_it_waits(devices, name) for name in ("kitchen", "garden", "patient")),
        *(devices.run(name, "expired", deadline_s=0.3) for name in ("kitchen", "patient")),
        devices.run("garden", "completed", max_tokens=0),
        *(devices.refused("single", "quota", QuotaExceeded) for _ in range(2)),
        devices.refused("hall", "invalid", InvalidRequest, stop_ids=(10**6,)),
        from_the_attic(devices, holders[0]),
    )
    await asyncio.gather(*(devices.cancel(job) for job in holders))
    await asyncio.gather(*waves)


async def cancelled_while_it_waits(devices: Devices, client: str) -> None:
    await devices.cancel(await devices.submit(client))


async def from_the_attic(devices: Devices, running: RemoteJob) -> None:
    """What no `Client` would send."""
    await devices.send({"id": "brief", "prompt": "Hello"}, message_expiry_s=1)
    await devices.hears("brief", "expired")
    devices.known.outcomes["expired"] += 1

    await devices.ask("cancel", "early")  # it overtakes its job, and holds
    await devices.hears_state("early", "unknown")
    await devices.send({"id": "early", "prompt": "Hello"})
    await devices.hears("early", "cancelled")
    devices.known.outcomes["cancelled"] += 1

    for wrong in ({"max_tokens": -1}, {"colour": "red"}, {"response_topic": "elsewhere"}):
        await devices.send({"id": "wrong", "prompt": "Hello"} | wrong)
        await devices.hears("wrong", "rejected")
        devices.known.refused["invalid"] += 1

    await devices.send(b"this is no JSON")
    await devices.buried("unparsable")
    await devices.send({"prompt": "whose is this?"})
    await devices.buried("unparsable")
    await devices.send({"id": "large", "prompt": "x" * MAX_SUBMIT_BYTES})
    await devices.buried("too_large")
    await devices.send({"id": running.id, "prompt": "Something else"}, "single")
    await devices.buried("duplicate_id")


async def out_of_time(devices: Devices) -> None:
    """They run into their deadlines with rows of their own."""
    jobs = await asyncio.gather(*(devices.running(name, **LONG, deadline_s=1.5) for name in ("kitchen", "hall")))
    await asyncio.gather(*(devices.end(job, "expired") for job in jobs))


async def out_of_tokens(devices: Devices) -> None:
    """Everything is masked: a row can end like that, and no other notices."""
    for client in ("garden", "hall"):
        nothing = SamplingParams(allowed_ids=(EOS,))
        await devices.run(client, "failed", min_tokens=1, max_tokens=4, sampling=nothing)


async def again_and_again(devices: Devices) -> None:
    """One job, sent five times, and asked for when it is done; another one under its id is refused."""
    job = {"id": "again", "prompt": "One, two, three,", "max_tokens": SHORT, "sampling": {"seed": 7}}
    for _ in range(3):
        await devices.send(job)
    await devices.hears("again", "completed")
    devices.known.outcomes["completed"] += 1
    for _ in range(2):
        await devices.send(job)
        await devices.hears("again", "completed")
    await devices.ask("get", "again")
    await devices.hears("again", "completed")
    await devices.ask("get", "never")
    await devices.hears_state("never", "unknown")
    await devices.ask("cancel", "again")  # too late
    await devices.hears_state("again", "done")
    await devices.send(job | {"max_tokens": 3})
    await devices.buried("duplicate_id")


async def wave(devices: Devices) -> None:
    """Jobs that complete: of all classes, several lengths, one with two answers, one that is streamed."""
    tale = "Once upon a time, in a small town by the sea, there lived an old clockmaker who"
    await asyncio.gather(
        devices.run("kitchen", "completed", prompt=tale, max_tokens=SHORT, priority="low"),
        devices.run("hall", "completed", prompt=tale, max_tokens=7, n=2, sampling=SamplingParams(temperature=0.8)),
        devices.run("garden", "completed", max_tokens=1, priority="high"),
        streamed(devices),
    )


async def streamed(devices: Devices) -> None:
    job = await devices.submit("garden", "The capital of France is", max_tokens=9, ignore_eos=True)
    said = [token_id async for chunk in job for token_id in chunk.token_ids]
    assert tuple(said) == (await job.result()).token_ids
    await devices.end(job, "completed")
