"""A broker that goes away, and comes back."""

import json

import pytest

from drumline import Request
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import Backoff, BrokerError
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
    [expected] = await generate(MODEL, Request(**BODY), rows=1)
    assert [body["job_id"] for body in results] == ["one", "two", "three"]
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
