"""The judge can find a fault of each kind; otherwise its zeros would mean nothing."""

import json
import math
from typing import Any

import pytest

from tests.kills.checker import Answer, Heard, check

JOB = ("desk", "a")
LOGPROBS = ((5, -0.25, ((5, -0.25), (6, -2.5))), (7, -1e-300, ((7, -1e-300), (8, -700.0))))
ANSWER = Answer((5, 7), "ab", "budget", LOGPROBS)
ACCEPTED = Heard(JOB, "state", b'{"job_id":"a","state":"accepted"}')


def body(status: str = "completed", **changes: Any) -> bytes:
    logprobs = [{"id": token_id, "logprob": value, "top": top} for token_id, value, top in LOGPROBS]
    choice = {"choice": 0, "text": "ab", "token_ids": [5, 7], "stop_reason": "budget", "logprobs": logprobs}
    return json.dumps({"status": status, "choices": [choice | changes]}).encode()


def result(payload: bytes) -> Heard:
    return Heard(JOB, "result", payload)


def part(payload: bytes, start: int, end: int) -> Heard:
    text = payload.decode()
    document = {"offset": start, "total": len(text), "body": text[start:end]}
    return result(json.dumps(document).encode())


def faults(*heard: Heard, answer: Answer = ANSWER) -> list[str]:
    verdict = check([JOB], heard, {JOB: (answer,)})
    return [name for name, jobs in verdict.faults.items() if jobs]


def test_one_end_is_no_fault_nor_is_the_same_again():
    assert faults(ACCEPTED, result(body())) == []
    verdict = check([JOB], [result(body())] * 3, {JOB: (ANSWER,)})
    assert (verdict.repeated, verdict.accepted, verdict.statuses) == (2, 1, {"completed": 1})


def test_lost():
    assert faults(ACCEPTED) == ["lost"]
    assert faults(ACCEPTED, Heard(("desk", "b"), "result", body())) == ["lost"]
    assert faults(part(body(), 0, 20)) == ["lost"]


def test_doubled():
    assert faults(result(body()), result(body() + b" ")) == ["doubled"]
    assert faults(result(body()), result(body("cancelled"))) == ["doubled"]


def test_a_refusal_ends_a_job_only_after_it_was_accepted():
    refused = result(b'{"status":"rejected","choices":[]}')
    assert faults(refused, ACCEPTED, result(body())) == []
    assert "doubled" in faults(ACCEPTED, refused, result(body()))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5, 8]},
        {"token_ids": [5]},
        {"text": "aB"},
        {"stop_reason": "stop"},
        {"logprobs": None},
        {"logprobs": [{"id": 5, "logprob": math.nextafter(-0.25, 0), "top": LOGPROBS[0][2]}]},
        {"choice": 1},
    ],
)
def test_changed(change: dict[str, Any]):
    assert faults(result(body(**change))) == ["changed"]


def test_changed_by_one_bit_of_one_alternative():
    (first, second) = json.loads(body())["choices"][0]["logprobs"]
    first["top"][1][1] = math.nextafter(-2.5, 0)
    assert faults(result(body(logprobs=[first, second]))) == ["changed"]


def test_failed_is_changed():
    assert faults(result(body("failed", stop_reason="error"))) == ["changed"]


def test_a_stopped_job_has_the_beginning():
    logprobs = json.loads(body())["choices"][0]["logprobs"][:1]
    stopped = {"token_ids": [5], "text": "a", "stop_reason": "cancelled", "logprobs": logprobs}
    assert faults(result(body("cancelled", **stopped))) == []
    assert faults(result(body("cancelled", **stopped | {"text": "a\ufffd"}))) == []
    assert faults(result(body("cancelled", **stopped | {"token_ids": [7]}))) == ["changed"]
    assert faults(result(body("cancelled", **stopped | {"text": "b"}))) == ["changed"]


def test_parts_are_joined_in_any_order_and_may_overlap():
    assert faults(part(body(), 30, 10_000), part(body(), 0, 40)) == []
    assert faults(part(body(), 30, 10_000), part(body(), 0, 40), result(body())) == []


def test_parts_that_contradict_are_two_ends():
    other = body().replace(b"budget", b"bidget")
    assert faults(part(body(), 0, 10_000), part(other, 20, 10_000)) == ["doubled"]
    assert faults(part(body(), 0, 10_000), result(body(text="xy"))) == ["doubled", "changed"]
