"""A broker that goes away, and comes back."""

import asyncio
import json
from collections.abc import Callable

import pytest

from drumline import Request, SamplingParams
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.client import Client, RemoteJob
from drumline.scheduler.mqtt.connection import BrokerError, Connection, ConnectOptions
from drumline.scheduler.mqtt.reconnect import Backoff, keep_connected
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate, generate
from tests.scheduler.mqtt.support import BODY, MODEL, Network, address, device, serving


async def test_the_will_speaks_for_a_worker_whose_line_was_cut(broker: EmbeddedBroker, topics: Topics):
    async with (
        Network(address(broker)) as network,
        device(address(broker), topics.worker_status("w")) as this,
        serving(network.address, topics, worker="w", backoff=network.patient),
    ):
        birth = json.loads((await this.next(lambda message: b'"online"' in message.payload)).payload)
        await network.cut()
        will = json.loads((await this.next(lambda message: b'"offline"' in message.payload)).payload)
        assert (will["started_at"], will["worker"]) == (birth["started_at"], "w")
        await network.join()
        await this.next(lambda message: b'"online"' in message.payload)


async def test_results_of_an_outage_are_delivered_after_it(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        Network(address(broker)) as network,
        device(address(broker), f"{topics.client('a')}/jobs/#", topics.worker_status("w")) as this,
        serving(network.address, topics, gate=gate, rows=1, worker="w", backoff=network.patient) as gateway,
    ):
        for name in ("one", "two", "three"):
            await this.send(topics.submit("a"), BODY | {"id": name})
            await this.state(f"{name}/state", "accepted")
        await network.cut()
        await this.next(lambda message: b'"offline"' in message.payload)
        gate.open()
        for job in gateway._engine.jobs:
            await job.result()
        await network.join()
        results = [await this.body("/result") for _ in range(3)]
    of_two = [message for message in this.heard if "/jobs/two/" in message.topic]
    chunks = [json.loads(message.payload) for message in of_two if message.topic.endswith("/chunks")]
    after_chunks = [message.payload for message in of_two[-2:]]
    [expected] = await generate(MODEL, Request(**BODY), rows=1)
    assert [body["job_id"] for body in results] == ["one", "two", "three"]
    assert [chunk["token_ids"] for chunk in chunks] == [list(expected.token_ids)]  # one, grown while nobody heard it
    assert [b'"done"' in payload for payload in after_chunks] == [True, False]
    assert b'"status":"completed"' in after_chunks[1]
    assert [body["token_ids"] for body in results] == [list(expected.token_ids)] * 3


async def test_a_client_comes_back_to_its_job(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        Network(address(broker)) as network,
        Client("127.0.0.1", network.port, name="a", topics=topics, backoff=network.patient) as client,
    ):
        job = await client.submit(**BODY)
        await gate.arrived()
        await network.cut()
        gate.open()
        await network.join()
        texts = [chunk.text async for chunk in job]
        result = await job.result()
    [expected] = await generate(MODEL, Request(**BODY), rows=1)
    assert result.token_ids == expected.token_ids
    assert "".join(texts) == result.text == expected.text


async def test_a_job_that_its_worker_forgot_is_sent_to_the_next(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    body = BODY | {"sampling": {"temperature": 1.0}}
    async with Client(broker.host, broker.port, name="a", topics=topics, resend_s=0.05) as client:

        async def first_worker() -> RemoteJob:
            async with serving(address(broker), topics, gate=gate, rows=1, worker="w"):
                job = await client.submit(**body)
                await gate.arrived()
                gate.step()
                await gate.arrived()
                raise Gone(job)

        with pytest.raises(Gone) as gone:
            await first_worker()
        [job] = gone.value.args
        async with serving(address(broker), topics, worker="w"):
            texts = [chunk.text async for chunk in job]
            result = await job.result()
    sampling = SamplingParams(temperature=1.0, seed=result.seed)
    [expected] = await generate(MODEL, Request(**BODY, sampling=sampling), rows=1)
    assert result.token_ids == expected.token_ids
    assert "".join(texts) == result.text == expected.text


class Gone(Exception):
    """Ends a worker without a drain, as a crash would."""


async def test_a_client_that_broke_says_so_to_the_next_job(broker: EmbeddedBroker, topics: Topics):
    def broken(_: float) -> None:
        raise ZeroDivisionError("a bug of ours")

    async with Network(address(broker)) as network:
        async with Client("127.0.0.1", network.port, backoff=lambda: Backoff(sleep=broken), topics=topics) as client:
            await network.cut()
            await asyncio.wait([client._keeper])
            with pytest.raises(BrokerError, match=r"the client broke \(a bug of ours\)"):
                await client.submit(**BODY)
        with pytest.raises(BrokerError, match="the client was closed"):
            await client.submit(**BODY)


async def test_a_client_that_never_reached_the_broker_says_so(broker: EmbeddedBroker):
    async with Network(address(broker)) as network:
        pass
    with pytest.raises(BrokerError, match=f"cannot connect to 127.0.0.1:{network.port}"):
        async with Client("127.0.0.1", network.port):
            pytest.fail("nobody listens there any more")


async def test_closing_a_client_ends_its_jobs(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with serving(address(broker), topics, gate=gate, rows=1):
        async with Client(broker.host, broker.port, topics=topics) as client:
            job = await client.submit(**BODY)
        with pytest.raises(BrokerError, match=f"closed before job {job.id} ended"):
            await job.result()
        gate.open()


def test_backoff_grows_to_its_cap_with_full_jitter_and_forgets_after_calm():
    backoff = Backoff(base_s=1.0, cap_s=8.0, calm_s=10.0, random=lambda: 0.5)
    assert [backoff.next_s(held_s=0.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert backoff.next_s(held_s=10.0) == 0.5
    backoff.failures = 10_000
    assert backoff.next_s(held_s=0.0) == 4.0


async def test_an_attempt_that_takes_long_to_fail_is_not_one_that_held(broker: EmbeddedBroker):
    async with Network(address(broker)) as network:
        pass
    now_s, waits = 0.0, []

    def clock() -> float:
        nonlocal now_s
        now_s += 60.0
        return now_s

    assert await lost_times(4, network.address, clock, waits) == 4
    assert waits == [1.0, 2.0, 4.0, 8.0]


async def test_a_connection_holds_from_its_subscription_on(broker: EmbeddedBroker):
    now_s, waits = 0.0, []

    def clock() -> float:
        nonlocal now_s
        now_s += 60.0
        return now_s

    assert await lost_times(3, address(broker), clock, waits) == 3
    assert waits == [1.0, 1.0, 1.0]
    waits.clear()
    assert await lost_times(3, address(broker), lambda: 7.0, waits) == 3
    assert waits == [1.0, 2.0, 4.0]


async def lost_times(times: int, where: BrokerAddress, clock: Callable[[], float], waits: list[float]) -> int:
    """Connect and lose it at once, so many times; `waits` takes how long the backoff would have slept."""
    losses = 0

    async def session(connection: Connection) -> None:
        await connection.subscribe("t")
        raise BrokerError("gone")

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    def lost(error: BrokerError) -> None:
        nonlocal losses
        if losses == times:
            raise Gone
        losses += 1

    backoff = Backoff(base_s=1.0, random=lambda: 1.0, sleep=sleep, clock=clock)
    with pytest.raises(Gone):
        await keep_connected(ConnectOptions(where, "backing-off"), session, backoff, lost)
    return losses
