"""The device client against a real worker, and its overlay of chunks alone."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline import InvalidRequest, QueueFull, Request
from drumline.model.errors import JobCancelled
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.client import Client, RemoteJob
from drumline.scheduler.mqtt.codec import SubmitMessage
from drumline.scheduler.mqtt.connection import BrokerError, ProtocolLevel
from drumline.scheduler.mqtt.options import GatewayOptions, Limits
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Chunk
from tests.drive import Gate, generate
from tests.scheduler.mqtt.support import MODEL, address, device, serving

BODY = {"prompt": "drum", "max_tokens": 12, "ignore_eos": True}


def client_of(broker: EmbeddedBroker, topics: Topics, protocol: ProtocolLevel = 5, **options: object) -> Client:
    port = broker.port if protocol == 5 else broker.port_v311
    return Client(broker.host, port, protocol=protocol, topics=topics, **options)


@pytest.mark.parametrize("protocol", [5, 4])
async def test_jobs_side_by_side_over_one_connection(broker: EmbeddedBroker, topics: Topics, protocol: ProtocolLevel):
    bodies = [BODY | {"prompt": prompt, "max_tokens": count} for prompt, count in (("a", 3), ("bc", 12), ("def", 7))]
    async with serving(address(broker), topics), client_of(broker, topics, protocol) as client:
        jobs = await asyncio.gather(*(client.submit(**body) for body in bodies))
        streamed = [[chunk async for chunk in job] for job in jobs]
        results = [await job.result() for job in jobs]
    for body, chunks, result in zip(bodies, streamed, results, strict=True):
        [expected] = await generate(MODEL, Request(**body), rows=1)
        assert result.token_ids == expected.token_ids
        assert "".join(chunk.text for chunk in chunks) == result.text == expected.text
        assert sum((chunk.token_ids for chunk in chunks), ()) == expected.token_ids
        result.raise_for_status()


async def test_choices_seed_and_logprobs_come_back(broker: EmbeddedBroker, topics: Topics):
    fields = {"n": 2, "logprobs": 3, "sampling": {"temperature": 1.0, "seed": 2**63 + 5}}
    async with serving(address(broker), topics), client_of(broker, topics) as client:
        result = await (await client.submit(**BODY, **fields)).result()
    [expected] = await generate(MODEL, Request(**BODY, **fields), rows=2)
    assert result.seed == 2**63 + 5
    assert [choice.token_ids for choice in result.choices] == [choice.token_ids for choice in expected.choices]
    for choice, other in zip(result.choices, expected.choices, strict=True):
        assert [entry.id for entry in choice.logprobs] == list(choice.token_ids)
        assert [entry.logprob for entry in choice.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs]
        )


async def test_cancel_and_get(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with serving(address(broker), topics, gate=gate, rows=1), client_of(broker, topics) as client:
        job = await client.submit(**BODY)
        await gate.arrived()
        await job.cancel()
        await job.get()
        gate.open()
        result = await job.result()
    assert (result.status, result.stop_reason) == ("cancelled", "cancelled")
    assert job.state.job_id == job.id
    with pytest.raises(JobCancelled):
        result.raise_for_status()


async def test_refusals_are_the_schedulers_own_errors(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    options = GatewayOptions(refresh_s=0.02, limits=Limits(unfinished_jobs=2))
    async with (
        serving(address(broker), topics, gate=gate, rows=1, options=options),
        client_of(broker, topics, name="a") as client,
    ):
        with pytest.raises(InvalidRequest, match=r"sampling\.banned_ids") as invalid:
            await client.submit(**BODY, sampling={"banned_ids": [10**6]})
        assert invalid.value.field == "sampling.banned_ids"
        with pytest.raises(InvalidRequest, match="processors"):
            await client.submit(**BODY, processors=[print])
        runs = await client.submit(**BODY)
        await gate.arrived()
        waits = await client.submit(**BODY)
        with pytest.raises(QueueFull) as full:
            await client.submit(**BODY)
        assert (full.value.bound, full.value.limit, full.value.queued) == ("journal", 2, 2)
        with pytest.raises(InvalidRequest, match="still open"):
            await client.submit(**BODY, id=runs.id)
        async with client_of(broker, topics, name="a") as twin:
            with pytest.raises(InvalidRequest, match="in use by a different job"):
                await twin.submit("something else", id=runs.id)
        gate.open()
        [expected] = await generate(MODEL, Request(**BODY), rows=1)
        assert (await runs.result()).token_ids == (await waits.result()).token_ids == expected.token_ids


async def test_a_job_is_sent_again_until_a_worker_takes_it(broker: EmbeddedBroker, topics: Topics):
    async with (
        device(address(broker), topics.submit("a")) as this,
        client_of(broker, topics, name="a", resend_s=0.01) as client,
    ):
        submitting = asyncio.create_task(client.submit(**BODY))
        first, second = await this.next(), await this.next()
        assert first.payload == second.payload
        async with serving(address(broker), topics):
            job = await submitting
            [expected] = await generate(MODEL, Request(**BODY), rows=1)
            assert (await job.result()).token_ids == expected.token_ids


async def test_a_second_reader_and_a_client_outside_its_block_are_refused(broker: EmbeddedBroker, topics: Topics):
    client = client_of(broker, topics)
    with pytest.raises(BrokerError, match="enter the client first"):
        await client.submit(**BODY)
    async with serving(address(broker), topics), client:
        job = await client.submit(**BODY)
        assert [chunk async for chunk in job]
        with pytest.raises(InvalidRequest, match="already has a reader"):
            aiter(job)


async def test_a_job_that_is_given_up_is_cancelled(broker: EmbeddedBroker, topics: Topics):
    async with (
        device(address(broker), f"{topics.client('a')}/#") as this,
        client_of(broker, topics, name="a") as client,
    ):
        submitting = asyncio.create_task(client.submit(**BODY))
        job = await this.next()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
    cancel = await this.next()
    assert cancel.topic == topics.job("a", "cancel", json.loads(job.payload)["id"])
    assert (cancel.response_topic, cancel.correlation_data) == (job.response_topic, job.correlation_data)


async def test_nonsense_does_not_end_the_reader(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        device(address(broker), topics.submit("a")) as this,
        client_of(broker, topics, name="a") as client,
    ):
        job = await client.submit(**BODY)
        asked = await this.next()
        for kind in ("state", "chunk", "result"):
            for payload in (b"\xff", b"[" * 50_000, b"{}"):
                properties = {"user_properties": (("kind", kind),), "correlation_data": asked.correlation_data}
                await this.send(asked.response_topic, payload, **properties)
        await this.send(asked.response_topic, b"\xff", correlation_data=b"\xff")
        gate.open()
        [expected] = await generate(MODEL, Request(**BODY), rows=1)
        assert (await job.result()).token_ids == expected.token_ids


async def test_get_and_cancel_are_answered_to_this_client_alone(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
        client_of(broker, topics, name="a") as client,
    ):
        job = await client.submit(**BODY)
        await job.get()
        await job.cancel()
        get, cancel = await this.next(), await this.next()
        gate.open()
        await job.result()
    assert [get.topic, cancel.topic] == [topics.job("a", kind, job.id) for kind in ("get", "cancel")]
    for message in (get, cancel):
        assert (message.response_topic, message.correlation_data) == (client._replies, job.id.encode())


async def test_another_job_under_our_id_does_not_end_ours(broker: EmbeddedBroker, topics: Topics):
    """With MQTT 3.1.1 both hear the refusal of the second."""
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        client_of(broker, topics, 4, name="a") as client,
        device(address(broker), f"{topics.client('a')}/jobs/#") as twin,
    ):
        job = await client.submit(**BODY)
        await twin.send(topics.submit("a"), BODY | {"id": job.id, "prompt": "something else"})
        await twin.next(lambda message: b'"duplicate_id"' in message.payload)
        gate.open()
        [expected] = await generate(MODEL, Request(**BODY), rows=1)
        assert (await job.result()).token_ids == expected.token_ids


@given(st.text(alphabet="aä語🥁", min_size=1, max_size=12), st.data())
def test_overlay_yields_each_character_once_whatever_is_repeated(text: str, data: st.DataObject):
    """Tokens are characters here; pieces come in any order, some twice, some never, and may overlap."""
    bounds = st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(sorted)
    pieces = data.draw(st.lists(bounds, max_size=12))

    async def overlay() -> list[Chunk]:
        job = RemoteJob(Client("nowhere"), SubmitMessage(id="j", prompt="x"))
        for start, end in [*pieces, [0, len(text)]]:
            job._take_chunk(Chunk(0, start, start, text[start:end], tuple(range(start, end))))
        return [job._chunks.get_nowait() for _ in range(job._chunks.qsize())]

    chunks = asyncio.run(overlay())
    assert "".join(chunk.text for chunk in chunks) == text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(len(text)))
    assert [chunk.text_offset for chunk in chunks] == [chunk.first_token for chunk in chunks]
