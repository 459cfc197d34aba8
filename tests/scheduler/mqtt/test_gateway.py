"""Jobs over a real broker, answered by the real scheduler over a tiny model."""

import asyncio
import json

import pytest

from drumline import Request
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.gateway import GatewayOptions
from drumline.scheduler.mqtt.jobs import Limits
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate, generate
from tests.scheduler.mqtt.support import MODEL, Counts, address, device, serving

BODY = {"prompt": "drum", "max_tokens": 6, "ignore_eos": True}
RESULT_KEYS = ["job_id", "status", "stop_reason", "choices", "text", "token_ids", "usage", "timings", "error"]


async def expected_ids(**body: object) -> list[int]:
    """What the scheduler says without MQTT."""
    [result] = await generate(MODEL, Request(**body), rows=1)
    return list(result.token_ids)


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
    chunks = [message for message in this.heard if message.topic == topics.chunks("old", "j")]
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
        await this.send(topics.cancel("a", "first"))
        await this.send(topics.cancel("a", "runs"))
        await this.send(topics.get("a", "second"))
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
        await this.send(topics.cancel("a", "j"))
        assert (await this.body("/state"))["state"] == "unknown"
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        assert (await this.body("/result"))["status"] == "cancelled"


async def test_get_answers_state_and_result(broker: EmbeddedBroker, topics: Topics):
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#", f"{topics.client('a')}/asked") as this,
    ):
        await this.send(topics.get("a", "nobody"))
        assert await this.body("nobody/state") == {
            "job_id": "nobody",
            "state": "unknown",
            "position": None,
            "tokens": 0,
        }
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        first = await this.next(lambda message: message.topic.endswith("/result"))
        await this.send(topics.get("a", "j"), response_topic=f"{topics.client('a')}/asked")
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


@pytest.mark.parametrize("body", [BODY | {"max_tokens": 5}, BODY | {"max_tokens": -1}])
async def test_another_job_under_a_running_id_is_refused_beside_it(
    broker: EmbeddedBroker, topics: Topics, body: dict[str, object]
):
    gate, counts = Gate(), Counts()
    async with (
        serving(address(broker), topics, gate=gate, rows=1, observer=counts),
        device(address(broker), f"{topics.client('a')}/#", topics.dead) as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        await gate.arrived()
        await this.send(topics.submit("a"), body | {"id": "j"}, user_properties=(("firmware", "7"),))
        refusal = await this.next(lambda message: message.topic == topics.dead)
        state = await this.next(lambda message: ("code", "duplicate_id") in message.user_properties)
        gate.open()
        result = await this.body("/result")
    letter = json.loads(refusal.payload)
    assert (letter["code"], letter["client"], letter["job_id"]) == ("duplicate_id", "a", "j")
    assert dict(refusal.user_properties)["code"] == "duplicate_id"
    assert (state.topic, json.loads(state.payload)["state"]) == (topics.state("a", "j"), "running")
    assert (result["status"], result["token_ids"]) == ("completed", await expected_ids(**BODY))
    assert "duplicate_id" in counts.rejections


async def test_a_retained_job_is_ignored(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), f"{topics.client('a')}/jobs/#", topics.dead) as this:
        await this.send(topics.submit("a"), BODY | {"id": "stale"}, retain=True)
        # A 3.1.1 worker cannot ask the broker to keep retained messages to itself, so it must ignore them.
        async with serving(address(broker, 4), topics, options=GatewayOptions(protocol=4, refresh_s=0.02)):
            await this.send(topics.submit("a"), BODY | {"id": "fresh"})
            assert (await this.body("/result"))["job_id"] == "fresh"
            await this.send(topics.get("a", "stale"))
            assert (await this.body("stale/state"))["state"] == "unknown"


POISON = {
    "not UTF-8": (b'{"id": "bad", "prompt": "\xff"}', "unparsable", "payload"),
    "not JSON": (b"hello", "unparsable", "payload"),
    "empty": (b"", "unparsable", "payload"),
    "no object": (b"[1]", "unparsable", "payload"),
    "no id": (b'{"prompt": "x"}', "unparsable", "id"),
    "nested 10,000 deep": (b'{"id":"bad","prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}", "unparsable", "payload"),
    "10 MB": (b'{"id":"bad","prompt":"' + b"x" * 10_000_000 + b'"}', "too_large", "payload"),
}


@pytest.mark.parametrize("name", POISON)
async def test_poison_between_two_jobs_changes_neither(broker: EmbeddedBroker, topics: Topics, name: str):
    payload, code, field = POISON[name]
    counts = Counts()
    async with (
        serving(address(broker), topics, observer=counts),
        device(address(broker), f"{topics.client('a')}/jobs/#", topics.dead) as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "before"})
        await this.send(topics.submit("a"), payload)
        await this.send(topics.submit("a"), BODY | {"id": "after"})
        bodies = []
        while len(bodies) < 3:
            message = await this.next(lambda message: message.topic == topics.dead or b'"status"' in message.payload)
            bodies.append(json.loads(message.payload))
    [letter] = [body for body in bodies if "reason" in body]
    assert (letter["code"], letter["field"], letter["payload_bytes"]) == (code, field, len(payload))
    assert (letter["topic"], letter["client"]) == (topics.submit("a"), "a")
    expected = await expected_ids(**BODY)
    assert {body["job_id"]: body["token_ids"] for body in bodies if "status" in body} == {
        "before": expected,
        "after": expected,
    }
    assert counts.rejections == [code]


WRONG = {
    "unknown field": ({"colour": "red"}, "colour"),
    "wrong type": ({"max_tokens": "six"}, "max_tokens"),
    "negative budget": ({"max_tokens": -1}, "max_tokens"),
    "NaN": ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
    "top_p": ({"sampling": {"top_p": 1.5}}, "sampling.top_p"),
    "two prompts": ({"prompt_ids": [5]}, "prompt"),
    "id outside the vocabulary": ({"sampling": {"banned_ids": [10**6]}}, "sampling.banned_ids"),
    "prompt longer than the window": ({"prompt": "x" * 40}, "prompt"),
    "reply topic with a wildcard": ({"response_topic": "a/#"}, "response_topic"),
    "reply topic with NUL": ({"response_topic": "a\0b"}, "response_topic"),
    "reply topic of the broker": ({"response_topic": "$SYS/x"}, "response_topic"),
    "reply topic of somebody else": ({"response_topic": "elsewhere/x"}, "response_topic"),
    "reply topic of 70,000 characters": ({"response_topic": "x" * 70_000}, "response_topic"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_field_is_named_to_the_sender(broker: EmbeddedBroker, topics: Topics, name: str):
    fields, field = WRONG[name]
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"} | fields)
        body = await this.body("j/result")
        await this.send(topics.submit("a"), BODY | {"id": "j"})  # a refused id is free
        assert (await this.body("j/result"))["token_ids"] == await expected_ids(**BODY)
    assert list(body) == RESULT_KEYS
    assert (body["status"], body["stop_reason"], body["choices"]) == ("rejected", None, [])
    assert (body["error"]["code"], body["error"]["field"]) == ("invalid", field)
    assert body["error"]["message"]


async def test_a_reply_topic_that_we_would_hear_ourselves_is_refused(broker: EmbeddedBroker, topics: Topics):
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"}, response_topic=topics.submit("a"))
        body = await this.body("j/result")
    assert (body["status"], body["error"]["field"]) == ("rejected", "response_topic")


async def test_a_client_name_that_is_none_is_put_on_record(broker: EmbeddedBroker, topics: Topics):
    async with serving(address(broker), topics), device(address(broker), topics.dead) as this:
        await this.send(f"{topics.prefix}/clients/no name/submit", BODY | {"id": "j"})
        letter = json.loads((await this.next()).payload)
    assert (letter["code"], letter["field"], letter["client"]) == ("invalid", "topic", None)


async def test_a_full_queue_rejects_and_says_how_full(broker: EmbeddedBroker, topics: Topics):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1, queue_requests=1),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "runs"})
        await gate.arrived()
        await this.send(topics.submit("a"), BODY | {"id": "waits"})
        await this.send(topics.submit("a"), BODY | {"id": "over"})
        body = await this.body("over/result")
        gate.open()
        results = [await this.body("/result") for _ in range(2)]
    assert body["status"] == "rejected"
    assert {key: body["error"][key] for key in ("code", "field", "limit", "queued")} == {
        "code": "queue_full",
        "field": "requests",
        "limit": 1,
        "queued": 1,
    }
    assert [result["token_ids"] for result in results] == [await expected_ids(**BODY)] * 2


async def test_message_expiry_is_the_deadline_where_the_body_has_none(broker: EmbeddedBroker, topics: Topics):
    gate, now_s = Gate(), 0.0
    async with (
        serving(address(broker), topics, gate=gate, rows=1, clock=lambda: now_s),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"}, message_expiry_s=60)
        await gate.arrived()
        await this.send(topics.submit("a"), BODY | {"id": "k", "deadline_s": 600.0}, message_expiry_s=60)
        await this.state("k/state", "accepted")
        now_s = 100.0
        gate.open()
        results = {body["job_id"]: body for body in [await this.body("/result") for _ in range(2)]}
    assert (results["j"]["status"], results["j"]["stop_reason"]) == ("expired", "deadline")
    assert results["k"]["status"] == "completed"


async def test_an_answer_over_the_limit_fails_and_is_paid_for(broker: EmbeddedBroker, topics: Topics):
    options = GatewayOptions(refresh_s=0.02, limits=Limits(result_bytes=300))
    async with (
        serving(address(broker), topics, options=options),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        body = await this.body("/result")
    assert list(body) == RESULT_KEYS
    assert (body["status"], body["stop_reason"], body["text"]) == ("failed", "error", "")
    assert (body["error"]["code"], body["usage"]["generated_tokens"]) == ("too_large", 6)
    assert "the limit is 300" in body["error"]["message"]


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
                refused = await other.body("late/result")
                gate.open()
                await stopping
                results = [await other.body("/result") for _ in range(2)]
        end = json.loads((await this.next(lambda message: b'"offline"' in message.payload)).payload)
    assert (refused["status"], refused["error"]["code"]) == ("rejected", "draining")
    assert [result["status"] for result in results] == ["completed", "completed"]
    assert list(birth) == [
        "worker", "status", "queue_depth", "rows_live", "rows", "model", "version", "started_at",
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
