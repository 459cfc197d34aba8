import json
import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline import InvalidRequest, QueueFull, Request, SamplingParams
from drumline.model.errors import EngineFailed, SchedulerClosed
from drumline.scheduler.mqtt.codec import (
    MAX_SUBMIT_BYTES,
    ErrorMessage,
    ResultMessage,
    StateMessage,
    SubmitMessage,
    encode_chunk,
    failed_message,
    parse_chunk,
    parse_result,
    parse_state,
    parse_submit,
    read_id,
    rejected_message,
    result_message,
    to_result,
    with_correlation,
)
from drumline.scheduler.request import Choice, Chunk, Result, Timings, TokenLogprob, Usage

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ids = st.lists(st.integers(0, 2**31), max_size=5).map(tuple)
floats = st.floats(-1e6, 0, width=32)
seconds = st.floats(0, 1e6)
logprobs = st.none() | st.lists(
    st.builds(TokenLogprob, st.integers(0, 99), floats, st.lists(st.tuples(st.integers(0, 99), floats)).map(tuple)),
    max_size=3,
).map(tuple)
chunks = st.builds(
    Chunk, st.integers(0, 9), st.integers(0, 2**31), st.integers(0, 2**31), texts, ids, logprobs
)  # fmt: skip
reasons = st.sampled_from(["eos", "stop", "budget", "window", "cancelled", "deadline", "error"])


@st.composite
def results(draw: st.DrawFn) -> Result:
    choices = tuple(
        Choice(
            choice=index,
            text=draw(texts),
            token_ids=draw(ids),
            stop_reason=(reason := draw(reasons)),
            logprobs=draw(logprobs),
            error="broke" if reason == "error" else None,
        )
        for index in range(draw(st.integers(1, 3)))
    )
    counts = [draw(st.integers(0, 2**40)) for _ in range(7)]
    usage = Usage(*counts, draw(st.none() | st.integers(0, 9)))
    timings = Timings(draw(seconds), draw(seconds), draw(seconds), draw(st.none() | seconds), draw(seconds))
    return Result("j", choices, usage, timings, draw(st.integers(0, 2**64 - 1)))


@given(results())
def test_results_survive_the_wire(result: Result):
    message = result_message("j", result)
    payload = message.encode()
    assert parse_result(payload) == message
    assert to_result(parse_result(payload)) == result
    assert payload == result_message("j", result).encode()
    assert message.status == result.status
    document = json.loads(payload)
    assert list(document) == [
        "job_id", "status", "stop_reason", "choices", "text", "token_ids", "usage", "timings", "error",
    ]  # fmt: skip
    assert (document["text"], tuple(document["token_ids"])) == (result.text, result.token_ids)


@given(chunks)
def test_chunks_survive_the_wire(chunk: Chunk):
    payload = encode_chunk(chunk)
    assert parse_chunk(payload) == chunk
    assert ("logprobs" in json.loads(payload)) == (chunk.logprobs is not None)


@given(chunks, st.none() | texts)
def test_correlation_is_added_and_nothing_else_changed(chunk: Chunk, correlation: str | None):
    document = json.loads(with_correlation(encode_chunk(chunk), correlation))
    assert document.pop("correlation_data", None) == correlation
    assert document == json.loads(encode_chunk(chunk))


def test_the_one_form():
    assert StateMessage(job_id="j", state="queued", position=2).encode() == (
        b'{"job_id":"j","state":"queued","position":2,"tokens":0}'
    )
    assert encode_chunk(Chunk(0, 1, 2, "é🥁", (7, 8))) == (
        '{"choice":0,"first_token":1,"text_offset":2,"text":"é🥁","token_ids":[7,8]}'.encode()
    )
    scored = Chunk(0, 0, 0, "a", (7,), (TokenLogprob(7, -0.5, ((7, -0.5), (1, -1.25))),))
    assert encode_chunk(scored).endswith(b'"logprobs":[{"id":7,"logprob":-0.5,"top":[[7,-0.5],[1,-1.25]]}]}')


def test_the_status_and_the_stop_reason_belong_together():
    usage, timings = Usage(1, 2, 3, 4, 0, 0, 0, None), Timings(0.0, 0.0, 0.0, None, 0.0)
    choices = (Choice(0, "a", (1,), "eos"), Choice(1, "", (), "error", error="NaN in the logits"))
    message = result_message("j", Result("x", choices, usage, timings, 1))
    assert (message.status, message.stop_reason) == ("failed", "error")
    assert message.error == ErrorMessage(code="failed", field=None, message="NaN in the logits")
    with pytest.raises(EngineFailed, match="NaN in the logits"):
        to_result(message).raise_for_status()


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("sampling.top_p", "must be ≤ 1"), QueueFull("tokens", 100, 7), SchedulerClosed("drains")],
)
def test_refusals_come_back_as_what_they_were(error: Exception):
    payload = rejected_message("j", error).encode()
    with pytest.raises(type(error)) as again:
        to_result(parse_result(payload))
    assert str(again.value) == str(error)
    assert vars(again.value) == vars(error)
    assert json.loads(payload) | {"error": None} == {
        "job_id": "j",
        "status": "rejected",
        "stop_reason": None,
        "choices": [],
        "text": "",
        "token_ids": [],
        "usage": None,
        "timings": None,
        "error": None,
    }


def test_an_engine_that_broke_refuses_and_fails_with_a_reason():
    with pytest.raises(EngineFailed, match="out of memory"):
        to_result(parse_result(rejected_message("j", EngineFailed("out of memory")).encode()))
    failed = to_result(parse_result(failed_message("j", "failed", "it broke").encode()))
    assert (failed.status, failed.stop_reason, failed.error, failed.token_ids) == ("failed", "error", "it broke", ())


requests = st.fixed_dictionaries(
    {"id": st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=64), "prompt": texts},
    optional={
        "max_tokens": st.integers(0, 10**6),
        "stop": st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), max_size=3),
        "n": st.integers(1, 4),
        "logprobs": st.integers(0, 20),
        "deadline_s": st.floats(0.001, 1e6),
        "overflow": st.sampled_from(["stop", "slide"]),
        "sampling": st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.floats(0, 5),
                "top_k": st.integers(0, 99),
                "seed": st.integers(0, 2**64 - 1),
                "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.floats(-9, 9), max_size=3),
            },
        ),
        "response_topic": texts,
        "correlation_data": texts,
    },
)


@given(requests)
def test_jobs_survive_the_wire(body: dict[str, object]):
    message = parse_submit(json.dumps(body).encode())
    request = message.request("kitchen")
    assert request.id is None
    assert (request.prompt, request.max_tokens) == (body["prompt"], body.get("max_tokens", 128))
    again = parse_submit(message.model_dump_json(exclude_none=True, exclude_defaults=True).encode())
    assert again == message
    elsewhere = parse_submit(json.dumps(body | {"response_topic": "x", "correlation_data": "y"}).encode())
    assert again.digest == elsewhere.digest == message.digest
    assert parse_submit(json.dumps(body | {"prompt": str(body["prompt"]) + "!"}).encode()).digest != message.digest


def test_a_job_becomes_the_request_it_describes():
    body = (
        b'{"id":"j","messages":[{"role":"user","content":"hi"}],"stop_ids":[3],'
        b'"sampling":{"logit_bias":{"5":1.5},"seed":18446744073709551615}}'
    )
    request = parse_submit(body).request("kitchen")
    assert request == Request(
        messages=({"role": "user", "content": "hi"},),
        stop_ids=(3,),
        sampling=SamplingParams(logit_bias={5: 1.5}, seed=2**64 - 1),
        tenant="kitchen",
    )
    assert parse_submit(body).request("kitchen", deadline_s=4).deadline_s == 4.0
    assert SubmitMessage(id="j", prompt="x", deadline_s=2.0).request("kitchen", deadline_s=4).deadline_s == 2.0
    assert SubmitMessage(id="j", prompt="x", deadline_s=8.0).request("kitchen", deadline_s=4).deadline_s == 4.0
    assert SubmitMessage(id="j", prompt="x").request("kitchen").deadline_s is None


WRONG = {
    b"": "payload",
    b"\xff": "payload",
    b"null": "payload",
    b"[" * 10_000: "payload",
    b'{"id":"j","prompt":"a"} x': "payload",
    b'{"id":"j","prompt":"\\ud800"}': "payload",
    b'{"prompt":"a"}': "id",
    b'{"id":"a/b","prompt":"a"}': "id",
    b'{"id":7,"prompt":"a"}': "id",
    b'{"id":"j"}': "prompt",
    b'{"id":"j","prompt":"a","max_tokens":1.5}': "max_tokens",
    b'{"id":"j","prompt":"a","max_tokens":NaN}': "max_tokens",
    b'{"id":"j","prompt":"a","max_tokens":true}': "max_tokens",
    b'{"id":"j","prompt":"a","deadline_s":Infinity}': "deadline_s",
    b'{"id":"j","prompt":"a","sampling":{"top_k":-1}}': "sampling.top_k",
    b'{"id":"j","prompt":"a","sampling":{"colour":1}}': "sampling.colour",
    b'{"id":"j","prompt":"a","processors":["os.system"]}': "processors.0",
    b'{"id":"j","prompt":"a","colour":1}': "colour",
    b'{"id":"j","prompt":"a","tenant":"other"}': "tenant",
    b'{"id":"j","prompt":"a","priority":"urgent"}': "priority",
}


@pytest.mark.parametrize("payload", WRONG, ids=range(len(WRONG)))
def test_wrong_jobs_name_their_field(payload: bytes):
    with pytest.raises(InvalidRequest) as wrong:
        parse_submit(payload)
    assert wrong.value.field == WRONG[payload]


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_raise_the_typed_error(payload: bytes):
    with suppress(InvalidRequest):
        assert parse_submit(payload).id.encode() in payload
    assert read_id(payload) is None or read_id(payload).encode() in payload


def test_size_is_checked_before_anything_else():
    fits = json.dumps({"id": "j", "prompt": ""}).encode()
    fits = fits.replace(b'""', b'"' + b"x" * (MAX_SUBMIT_BYTES - len(fits)) + b'"')
    assert len(fits) == MAX_SUBMIT_BYTES
    assert parse_submit(fits).id == "j"
    with pytest.raises(InvalidRequest, match=f"is {MAX_SUBMIT_BYTES + 1} bytes long, the limit is {MAX_SUBMIT_BYTES}"):
        parse_submit(fits + b" ")
    assert read_id(fits) == "j"
    assert read_id(fits + b" ") is None


@pytest.mark.parametrize("payload", [b"", b"{}", b"\xff", b'{"job_id":"j","state":"asleep"}'])
def test_a_worker_that_says_nonsense_is_a_typed_error(payload: bytes):
    for parse in (parse_state, parse_chunk, parse_result):
        with pytest.raises(EngineFailed, match="cannot read"):
            parse(payload)


def test_readers_take_what_a_newer_worker_adds():
    assert parse_state(b'{"job_id":"j","state":"done","position":null,"tokens":4,"eta_s":1}').tokens == 4
    assert isinstance(parse_result(rejected_message("j", SchedulerClosed("x")).encode()), ResultMessage)
