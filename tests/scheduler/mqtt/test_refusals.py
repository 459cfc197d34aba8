"""What the worker refuses, and what breaks: the sender hears why, and no other job notices."""

import json
from collections import Counter

import pytest

from drumline import Request, Scheduler
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.options import GatewayOptions, Limits
from drumline.scheduler.mqtt.topics import Topics
from tests.drive import Gate
from tests.scheduler.mqtt.support import BODY, RESULT_KEYS, Counts, address, counted, device, expected_ids, serving


@pytest.mark.parametrize("body", [BODY | {"max_tokens": 5}, BODY | {"max_tokens": -1}])
async def test_another_job_under_a_running_id_is_refused_beside_it(
    broker: EmbeddedBroker, topics: Topics, body: dict[str, object]
):
    gate = Gate()
    async with (
        serving(address(broker), topics, gate=gate, rows=1) as gateway,
        device(address(broker), f"{topics.client('a')}/#", topics.dead) as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        await gate.arrived()
        await this.send(topics.submit("a"), body | {"id": "j"}, user_properties=(("firmware", "7"),))
        # iotcore keeps no order between two subscriptions, so either may come first.
        marked = [await this.next(lambda message: ("code", "duplicate_id") in message.user_properties) for _ in "ab"]
        state, refusal = sorted(marked, key=lambda message: message.topic == topics.dead)
        gate.open()
        result = await this.body("/result")
        assert counted(gateway) == ({"completed": 1, "rejected": 1}, {"duplicate_id": 1})
    error = json.loads(state.payload)["error"]
    assert (error["code"], error["field"]) == ("duplicate_id", "max_tokens" if body["max_tokens"] == -1 else "id")
    letter = json.loads(refusal.payload)
    assert (letter["code"], letter["client"], letter["job_id"]) == ("duplicate_id", "a", "j")
    assert refusal.topic == topics.dead
    assert (state.topic, json.loads(state.payload)["state"]) == (topics.job("a", "state", "j"), "running")
    assert (result["status"], result["token_ids"]) == ("completed", await expected_ids(**BODY))


async def test_a_refused_id_is_told_in_the_body_and_where_the_second_sender_listens(
    broker: EmbeddedBroker, topics: Topics
):
    gate = Gate()
    own = f"{topics.client('a')}/mine"
    async with (
        serving(address(broker), topics, gate=gate, rows=1),
        device(address(broker, 4), f"{topics.client('a')}/jobs/#", own, protocol=4) as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        await gate.arrived()
        await this.state("j/state", "accepted")
        await this.send(topics.submit("a"), BODY | {"id": "j", "prompt": "other"})
        plain = json.loads((await this.next(lambda message: b'"error"' in message.payload)).payload)
        await this.send(topics.submit("a"), BODY | {"id": "j", "prompt": "other", "response_topic": own})
        state, refused = [json.loads((await this.next(lambda message: message.topic == own)).payload) for _ in "ab"]
        gate.open()
        end = await this.body("j/result")
    error = {"code": "duplicate_id", "field": "id", "message": "is in use by a different job"}
    assert plain == {"job_id": "j", "state": "running", "position": None, "tokens": plain["tokens"], "error": error}
    assert (state["state"], state["error"]) == ("running", error)
    assert (refused["status"], refused["job_id"], refused["error"]) == ("rejected", "j", error)
    assert (end["status"], end["token_ids"]) == ("completed", await expected_ids(**BODY))


async def test_a_refused_job_takes_its_early_cancel_with_it(broker: EmbeddedBroker, topics: Topics):
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.job("a", "cancel", "j"))
        assert (await this.body("/state"))["state"] == "unknown"
        await this.send(topics.submit("a"), BODY | {"id": "j", "max_tokens": -1})
        assert (await this.body("/result"))["status"] == "rejected"
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        assert (await this.body("/result"))["status"] == "completed"


async def test_answers_do_not_grow_with_what_was_sent(broker: EmbeddedBroker, topics: Topics):
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#", topics.dead) as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "j", "x" * 100_000: 1})
        body = await this.body("/result")
        await this.send(topics.submit("a"), {"y" * 100_000: 1})
        letter = await this.body("/dead")
    assert body["error"]["field"] == "x" * 999 + "…"
    assert letter["payload_bytes"] > 100_000
    assert len(json.dumps(letter)) < 3_000


async def test_a_job_of_a_client_without_a_proper_name_is_counted(broker: EmbeddedBroker, topics: Topics):
    counts = Counts()
    async with (
        serving(address(broker), topics, observer=counts) as gateway,
        device(address(broker), topics.dead) as this,
    ):
        await this.send(topics.submit("a").replace("/a/", "/no name/"), BODY | {"id": "j"})
        assert "client and job id must match" in (await this.next()).payload.decode()
        assert counted(gateway) == ({"rejected": 1}, {"invalid": 1})
    assert ("in", "submit") in counts.messages


async def test_a_retained_job_is_ignored(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), f"{topics.client('a')}/jobs/#", topics.dead) as this:
        await this.send(topics.submit("a"), BODY | {"id": "stale"}, retain=True)
        # A 3.1.1 worker cannot ask the broker to keep retained messages to itself, so it must ignore them.
        async with serving(address(broker, 4), topics, options=GatewayOptions(protocol=4, refresh_s=0.02)):
            await this.send(topics.submit("a"), BODY | {"id": "fresh"})
            assert (await this.body("/result"))["job_id"] == "fresh"
            await this.send(topics.job("a", "get", "stale"))
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


async def test_poison_between_two_jobs_changes_neither(broker: EmbeddedBroker, topics: Topics):
    expected = await expected_ids(**BODY)
    async with (
        serving(address(broker), topics) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#", topics.dead) as this,
    ):
        for number, (payload, code, field) in enumerate(POISON.values()):
            await this.send(topics.submit("a"), BODY | {"id": f"before-{number}"})
            await this.send(topics.submit("a"), payload)
            await this.send(topics.submit("a"), BODY | {"id": f"after-{number}"})
            letters, answers = [], {}
            while not letters or len(answers) < 2:
                message = await this.next(
                    lambda message: message.topic == topics.dead or b'"status"' in message.payload
                )
                body = json.loads(message.payload)
                if message.topic == topics.dead:
                    letters.append(body)
                else:
                    answers[body["job_id"]] = body["token_ids"]
            assert [(letter["code"], letter["field"], letter["payload_bytes"]) for letter in letters] == [
                (code, field, len(payload))
            ]
            assert (letters[0]["topic"], letters[0]["client"]) == (topics.submit("a"), "a")
            assert answers == {f"before-{number}": expected, f"after-{number}": expected}
        outcomes, reasons = counted(gateway)
        assert reasons == Counter(code for _, code, _ in POISON.values())
        assert outcomes == {"completed": 2 * len(POISON), "rejected": len(POISON)}


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
    "reply topic of 300 levels": ({"response_topic": "a/" * 300}, "response_topic"),
    "reply topic with a control character": ({"response_topic": "a\x01b"}, "response_topic"),
    "correlation data of 70,000 characters": ({"correlation_data": "x" * 70_000}, "correlation_data"),
    "no message": ({"prompt": None, "messages": []}, "messages"),
    "reply topic of 70,000 characters": ({"response_topic": "x" * 70_000}, "response_topic"),
}


async def test_a_wrong_field_is_named_to_the_sender(broker: EmbeddedBroker, topics: Topics):
    expected = await expected_ids(**BODY)
    async with (
        serving(address(broker), topics),
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        for number, (fields, field) in enumerate(WRONG.values()):
            job = {"id": f"j{number}"}
            await this.send(topics.submit("a"), BODY | job | fields)
            body = await this.body(f"j{number}/result")
            assert list(body) == RESULT_KEYS
            assert (body["status"], body["stop_reason"], body["choices"]) == ("rejected", None, [])
            assert (body["error"]["code"], body["error"]["field"]) == ("invalid", field)
            assert body["error"]["message"]
            await this.send(topics.submit("a"), BODY | job)  # a refused id is free
            assert (await this.body(f"j{number}/result"))["token_ids"] == expected


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
    options = GatewayOptions(refresh_s=0.02, limits=Limits(unfinished_jobs=2))
    async with (
        serving(address(broker), topics, gate=gate, rows=1, options=options) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "runs"})
        await gate.arrived()
        await this.send(topics.submit("a"), BODY | {"id": "waits"})
        await this.send(topics.submit("a"), BODY | {"id": "over"})
        body = await this.body("over/result")
        gate.open()
        results = [await this.body("/result") for _ in range(2)]
        assert counted(gateway) == ({"completed": 2, "rejected": 1}, {"queue_full": 1})
    assert body["status"] == "rejected"
    assert {key: body["error"][key] for key in ("code", "field", "limit", "queued")} == {
        "code": "queue_full",
        "field": "journal",
        "limit": 2,
        "queued": 2,
    }
    assert [result["token_ids"] for result in results] == [await expected_ids(**BODY)] * 2


class Faulty:
    """The real scheduler, but for one prompt: it breaks where `fault` says."""

    def __init__(self, scheduler: Scheduler, fault: str) -> None:
        self._scheduler = scheduler
        self._fault = fault

    async def check(self, request: Request) -> Request:
        if request.prompt == "break" and self._fault == "check":
            raise RuntimeError("the engine has a bug")
        return await self._scheduler.check(request)

    async def submit(self, request: Request, **options: object) -> object:
        job = await self._scheduler.submit(request, **options)
        return BrokenJob(job) if request.prompt == "break" and self._fault == "stream" else job

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)


class BrokenJob:
    def __init__(self, job: GenerationJob) -> None:
        self._job = job

    def __aiter__(self) -> object:
        raise RuntimeError("the stream has a bug")

    def __getattr__(self, name: str) -> object:
        return getattr(self._job, name)


async def test_what_breaks_in_one_job_ends_that_job_alone(
    broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    async with (
        serving(address(broker), topics, wrap=lambda scheduler: Faulty(scheduler, "stream")) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#") as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "bad", "prompt": "break"})
        bad = await this.body("bad/result")
        await this.send(topics.submit("a"), BODY | {"id": "good"})
        good = await this.body("good/result")
        assert counted(gateway) == ({"completed": 1, "failed": 1}, {})
    assert (bad["status"], bad["error"]["code"], bad["error"]["message"]) == (
        "failed",
        "failed",
        "the stream has a bug",
    )
    assert good["token_ids"] == await expected_ids(**BODY)
    assert "job broke job=bad client=a" in caplog.text


async def test_a_bug_in_handling_a_message_does_not_end_the_reader(
    broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    async with (
        serving(address(broker), topics, wrap=lambda scheduler: Faulty(scheduler, "check")) as gateway,
        device(address(broker), f"{topics.client('a')}/jobs/#", topics.dead) as this,
    ):
        await this.send(topics.submit("a"), BODY | {"id": "bad", "prompt": "break"})
        told = {message.topic: json.loads(message.payload) for message in [await this.next(), await this.next()]}
        await this.send(topics.submit("a"), BODY | {"id": "good"})
        good = await this.body("good/result")
        assert counted(gateway) == ({"completed": 1, "rejected": 1}, {"failed": 1})
    letter, refusal = told[topics.dead], told[topics.job("a", "result", "bad")]
    assert (refusal["status"], refusal["error"]["code"]) == ("rejected", "failed")
    assert (letter["code"], letter["reason"]) == ("internal", "the engine has a bug")
    assert good["token_ids"] == await expected_ids(**BODY)
    assert "message not handled" in caplog.text
