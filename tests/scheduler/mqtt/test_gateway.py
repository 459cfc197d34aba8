"""Jobs over a real broker, answered by the real scheduler over a tiny model."""

import asyncio
import json
import math

import pytest

from drumline import InvalidRequest, Scheduler
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.options import GatewayOptions, Limits
from drumline.scheduler.mqtt.parts import Joined, read_part
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate
from tests.scheduler.mqtt.support import BODY, MODEL, RESULT_KEYS, Counts, address, device, expected_ids, serving


async def test_a_job_with_a_response_topic_is_answered_there(broker: EmbeddedBroker, topics: Topics):
    reply_topic = f"{topics.client('a')}/replies"
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/#") as this,
    ):
        await this.send(
            topics.submit("a"), BODY | {"id": "j1"}, response_topic=reply_topic, correlation_data=b"\x00\xff"
        )
        result = await this.reply("result")
    heard = [message for message in this.heard if message.topic == reply_topic]
    assert {message.correlation_data for message in heard} == {b"\x00\xff"}
    assert not [message for message in this.heard if "/jobs/" in message.topic]
    kinds = [dict(message.user_properties)["kind"] for message in heard]
    assert kinds[0] == "state"
    assert "chunk" in kinds
    assert kinds[-1] == "result"
    properties = dict(result.user_properties)
    assert (properties["status"], properties["job_id"]) == ("completed", "j1")
    body = json.loads(result.payload)
    assert list(body) == RESULT_KEYS
    assert body["token_ids"] == await expected_ids(**BODY)
    assert (body["job_id"], body["status"], body["stop_reason"]) == ("j1", "completed", "budget")
    assert (body["usage"]["generated_tokens"], body["error"]) == (6, None)


async def test_a_job_of_mqtt_311_is_answered_on_the_default_topics(broker: EmbeddedBroker, topics: Topics):
    async with (
        serving(address(broker), topics),
        device(address(broker, 4), f"{topics.client('old')}/jobs/#", protocol=4) as this,
    ):
        await this.send(topics.submit("old"), BODY | {"id": "j", "logprobs": 2})
        assert await this.body("/state") == {"job_id": "j", "state": "accepted", "position": 0, "tokens": 0}
        body = await this.body("/result")
    chunks = [message for message in this.heard if message.topic == topics.job("old", "chunks", "j")]
    ids, logprobs = [], []
    for message in chunks:
        chunk = json.loads(message.payload)
        assert list(chunk) == ["choice", "first_token", "text_offset", "text", "token_ids", "logprobs"]
        assert (chunk["choice"], chunk["first_token"]) == (0, len(ids))
        ids += chunk["token_ids"]
        logprobs += chunk["logprobs"]
    assert {message.retain for message in chunks} == {False}
    if broker.kind == "mosquitto":  # iotcore delivers at the subscription's QoS, whatever that of the message
        assert {message.qos for message in chunks} == {0}
    assert ids == body["token_ids"] == await expected_ids(**BODY)
    assert logprobs == body["choices"][0]["logprobs"]
    assert [len(entry["top"]) for entry in logprobs] == [2] * 6


async def test_json_fields_stand_in_for_properties(broker: EmbeddedBroker, topics: Topics):
    reply_topic = f"{topics.client('old')}/answers"
    async with (
        serving(address(broker), topics),
        device(address(broker, 4), f"{topics.client('old')}/#", protocol=4) as this,
    ):
        body = BODY | {"id": "j", "response_topic": reply_topic, "correlation_data": 'ü"1'}
        await this.send(topics.submit("old"), body)
        answer = await this.next(lambda message: b'"status"' in message.payload)
    heard = [message for message in this.heard if message.topic != topics.submit("old")]
    assert {message.topic for message in heard} == {reply_topic}
    assert {json.loads(message.payload)["correlation_data"] for message in heard} == {'ü"1'}
    assert list(json.loads(answer.payload)) == [*RESULT_KEYS, "correlation_data"]


async def test_queued_and_running_jobs_can_be_cancelled(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "runs"})
        await gate.arrived()
        await this.send(topics.submit("a"), BODY | {"id": "first"})
        await this.send(topics.submit("a"), BODY | {"id": "second"})
        assert (await this.state("second/state", "queued"))["position"] == 1
        await this.send(topics.job("a", "cancel", "first"))
        await this.send(topics.job("a", "cancel", "runs"))
        await this.send(topics.job("a", "get", "second"))
        await this.state("second/state", "queued")  # the control connection keeps order: both cancels were seen
        gate.open()
        results = {body["job_id"]: body for body in [await this.body("/result") for _ in range(3)]}
    assert {name: body["status"] for name, body in results.items()} == {
        "runs": "cancelled",
        "first": "cancelled",
        "second": "completed",
    }
    assert (results["first"]["token_ids"], results["first"]["stop_reason"]) == ([], "cancelled")
    assert results["first"]["error"] is None
    assert len(results["runs"]["token_ids"]) < 6
    assert results["second"]["token_ids"] == await expected_ids(**BODY)


async def test_a_cancel_that_overtakes_its_job_still_stops_it(broker: EmbeddedBroker, topics: Topics):
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.job("a", "cancel", "j"))
        assert (await this.body("/state"))["state"] == "unknown"
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        assert (await this.body("/result"))["status"] == "cancelled"


async def test_get_answers_state_and_result(broker: EmbeddedBroker, topics: Topics):
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#", f"{topics.client('a')}/asked") as this,
    ):
        await this.send(topics.job("a", "get", "nobody"))
        assert await this.body("nobody/state") == {
            "job_id": "nobody",
            "state": "unknown",
            "position": None,
            "tokens": 0,
        }
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        first = await this.next(lambda message: message.topic.endswith("/result"))
        await this.send(topics.job("a", "get", "j"), response_topic=f"{topics.client('a')}/asked")
        state, again = await this.reply("state"), await this.reply("result")
    assert json.loads(state.payload) == {"job_id": "j", "state": "done", "position": None, "tokens": 6}
    assert again.payload == first.payload


async def test_the_same_job_again_joins_and_later_gets_the_same_bytes(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        await gate.arrived()
        await this.state("j/state", "accepted")
        await this.send(topics.submit("a"), dict(reversed((BODY | {"id": "j"}).items())))
        await this.state("j/state", "running")
        gate.open()
        first = await this.next(lambda message: message.topic.endswith("/result"))
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        again = await this.next(lambda message: message.topic.endswith("/result"))
        await this.send(topics.submit("b"), BODY | {"id": "j"})  # another client's j is another job
    assert again.payload == first.payload
    assert json.loads(first.payload)["token_ids"] == await expected_ids(**BODY)


async def test_the_earlier_of_deadline_and_message_expiry_counts(broker: EmbeddedBroker, topics: Topics):
    gate, now_s = Gate(), 0.0
    async with (
        serving(address(broker), topics, gate=gate, rows=1, clock=lambda: now_s),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"}, message_expiry_s=60)
        await gate.arrived()
        await this.send(topics.submit("a"), BODY | {"id": "k", "deadline_s": 600.0}, message_expiry_s=60)
        await this.send(topics.submit("a"), BODY | {"id": "l", "deadline_s": 60.0}, message_expiry_s=600)
        await this.send(topics.submit("a"), BODY | {"id": "m", "deadline_s": 600.0}, message_expiry_s=600)
        await this.state("m/state", "accepted")
        now_s = 100.0
        gate.open()
        results = {body["job_id"]: body for body in [await this.body("/result") for _ in range(4)]}
    assert (results["j"]["status"], results["j"]["stop_reason"]) == ("expired", "deadline")
    assert {name: body["status"] for name, body in results.items() if name != "j"} == {
        "k": "expired",
        "l": "expired",
        "m": "completed",
    }


async def test_an_answer_over_the_limit_comes_in_parts(broker: EmbeddedBroker, topics: Topics):
    options = GatewayOptions(refresh_s=0.02, limits=Limits(result_bytes=400))
    async with (
        serving(address(broker), topics, options=options),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        joined, whole = Joined(), None
        while whole is None:
            message = await this.next(lambda message: message.topic.endswith("/result"))
            assert message.size_bytes <= 400
            whole = joined.add(read_part(message.payload))
    body = json.loads(whole)
    assert list(body) == RESULT_KEYS
    assert (body["status"], body["token_ids"]) == ("completed", await expected_ids(**BODY))


async def test_the_worker_says_how_it_is(broker: EmbeddedBroker, topics: Topics):
    gate, counts = Gate(), Counts()
    async with device(address(broker), topics.worker_status("w")) as this:
        async with serving(address(broker), topics, gate=gate, rows=1, worker="w", observer=counts) as gateway:
            birth = json.loads((await this.next()).payload)
            async with device(address(broker), f"{topics.client('a')}/jobs/#", topics.worker_status("w")) as other:
                late = await other.next(lambda message: message.retain)
                assert json.loads(late.payload)["status"] == "online"
                await other.send(topics.submit("a"), BODY | {"id": "runs"})
                await gate.arrived()
                await other.send(topics.submit("a"), BODY | {"id": "waits"})
                busy = json.loads((await this.next(lambda m: b'"queue_depth":1,"rows_live":1' in m.payload)).payload)
                stopping = asyncio.create_task(gateway.stop())
                await this.next(lambda message: b'"draining"' in message.payload)
                await other.send(topics.submit("a"), BODY | {"id": "late"})
                gate.open()
                await stopping
                results = [await other.body("/result") for _ in range(2)]
        end = json.loads((await this.next(lambda message: b'"offline"' in message.payload)).payload)
    assert {result["job_id"] for result in results} == {"runs", "waits"}
    assert [result["status"] for result in results] == ["completed", "completed"]
    assert list(birth) == [
        "worker", "status", "queue_depth", "rows_live", "rows", "model", "version", "started_at",
        "tokens_per_s",
    ]  # fmt: skip
    assert (birth["worker"], birth["model"], birth["version"]) == ("w", MODEL.name, "test")
    assert birth["started_at"] == busy["started_at"] == end["started_at"]
    assert counts.up[0] is False
    assert True in counts.up
    assert counts.up[-1] is False
    assert ("in", "submit") in counts.messages
    assert {kind for direction, kind in counts.messages if direction == "out"} >= {"state", "result", "status"}


async def test_a_drain_that_runs_out_of_time_still_delivers(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        async with serving(address(broker), topics, gate=gate, rows=1) as gateway:
            await this.send(topics.submit("a"), BODY | {"id": "j"})
            await gate.arrived()
            stopping = asyncio.create_task(gateway.stop(drain_s=0))
            gate.open()
            await stopping
        assert (await this.body("/result"))["status"] in ("cancelled", "completed")


async def test_jobs_sent_while_the_worker_is_away_wait_at_the_broker(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), f"{topics.client('a')}/jobs/#") as this:
        async with serving(address(broker), topics, worker="back-soon"):
            pass
        await this.send(topics.submit("a"), BODY | {"id": "meanwhile"})
        async with serving(address(broker), topics, worker="back-soon"):
            assert (await this.body("/result"))["token_ids"] == await expected_ids(**BODY)


async def test_an_allowed_prefix_may_receive_answers(broker: EmbeddedBroker, topics: Topics):
    options = GatewayOptions(refresh_s=0.02, reply_prefixes=(f"{topics.prefix}/house",))
    async with (
        serving(address(broker), topics, options=options),
        device(address(broker), f"{topics.prefix}/house/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"}, response_topic=f"{topics.prefix}/house/lamp")
        assert json.loads((await this.reply("result")).payload)["status"] == "completed"


async def test_a_cancelled_worker_says_that_it_is_gone(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), topics.worker_status("w")) as this, Scheduler(MODEL) as scheduler:
        gateway = Gateway(scheduler, address(broker), worker="w", topics=topics)
        running = asyncio.create_task(gateway.run())
        await gateway.ready()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert json.loads((await this.next(lambda message: b'"offline"' in message.payload)).payload)["worker"] == "w"


async def test_an_error_in_the_host_ends_the_worker_at_once(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with device(address(broker), f"{topics.prefix}/#") as this:

        async def host() -> None:
            async with serving(address(broker), topics, gate=gate, rows=1, worker="w"):
                await this.send(topics.submit("a"), BODY | {"id": "j"})
                await gate.arrived()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await host()
        await this.next(lambda message: b'"offline"' in message.payload)


async def test_a_worker_name_is_checked_and_stop_before_run_is_harmless(topics: Topics):
    scheduler = Scheduler(MODEL)
    with pytest.raises(InvalidRequest) as wrong:
        Gateway(scheduler, BrokerAddress("127.0.0.1"), worker="a/b", topics=topics)
    assert wrong.value.field == "worker"
    await Gateway(scheduler, BrokerAddress("127.0.0.1"), topics=topics).stop()
    await scheduler.close()


async def test_a_gateway_that_died_tells_whoever_waits_for_its_end(broker: EmbeddedBroker, topics: Topics):
    def broken(_: float) -> None:
        raise ZeroDivisionError("a bug of ours")

    scheduler = Scheduler(MODEL)
    gateway = Gateway(scheduler, address(broker), topics=topics, sleep=broken)
    assert not gateway.connected
    with pytest.raises(ExceptionGroup):
        await gateway.run()
    with pytest.raises(ExceptionGroup) as told:
        await gateway.wait_ended()
    assert str(told.value.exceptions[0]) == "a bug of ours"
    await scheduler.close()


async def test_connected_is_true_while_both_connections_stand(broker: EmbeddedBroker, topics: Topics):
    async with serving(address(broker), topics) as gateway:
        assert gateway.connected
        await gateway.stop(drain_s=math.inf)
        await gateway.wait_ended()
        assert not gateway.connected
