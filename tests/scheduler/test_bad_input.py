"""What a user may get wrong: a typed error at once, which names the field and the limit; the other rows go on."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from drumline import InvalidRequest, Request, SamplingParams, Scheduler, SchedulerClosed
from drumline.scheduler.request import Message
from tests.drive import Gate, generate
from tests.tiny import ByteTokenizer, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 32
NEIGHBOURS = [
    Request(prompt="a quiet neighbour", max_tokens=8, ignore_eos=True),
    Request(prompt="b", max_tokens=20, ignore_eos=True, sampling=SamplingParams(temperature=0.9, seed=3)),
]

# What is wrong, the field that the error names, and a piece of the limit it states.
BAD: dict[str, tuple[Callable[[], Request], str, str]] = {
    "prompt longer than the window": (lambda: Request(prompt="x" * 33), "prompt", "has 33 tokens, the window holds 32"),
    "id above the vocabulary": (lambda: Request(prompt_ids=[5, 259]), "prompt_ids", "259 is outside 0 … 258"),
    "negative id": (lambda: Request(prompt_ids=[-1]), "prompt_ids", "-1 is outside 0 … 258"),
    "stop id out of range": (lambda: Request(prompt="a", stop_ids=[900]), "stop_ids", "900 is outside 0 … 258"),
    "banned id out of range": (
        lambda: Request(prompt="a", sampling=SamplingParams(banned_ids=[900])),
        "sampling.banned_ids",
        "900 is outside 0 … 258",
    ),
    "biased id out of range": (
        lambda: Request(prompt="a", sampling=SamplingParams(logit_bias={-2: 1.0})),
        "sampling.logit_bias",
        "-2 is outside 0 … 258",
    ),
    "NaN temperature": (
        lambda: Request(prompt="a", sampling={"temperature": math.nan}), "sampling.temperature", "finite"
    ),
    "negative temperature": (
        lambda: Request(prompt="a", sampling={"temperature": -0.5}), "sampling.temperature", "greater than or equal"
    ),
    "negative top_k": (lambda: Request(prompt="a", sampling={"top_k": -1}), "sampling.top_k", "greater than or equal"),
    "top_p of zero": (lambda: Request(prompt="a", sampling={"top_p": 0.0}), "sampling.top_p", "greater than 0"),
    "top_p above one": (lambda: Request(prompt="a", sampling={"top_p": 1.5}), "sampling.top_p", "less than or equal"),
    "negative budget": (lambda: Request(prompt="a", max_tokens=-1), "max_tokens", "greater than or equal to 0"),
    "min_tokens above the budget": (
        lambda: Request(prompt="a", max_tokens=3, min_tokens=4), "min_tokens", "must not exceed max_tokens (3)"
    ),
    "unknown field": (lambda: Request(prompt="a", tokens=3), "tokens", "not permitted"),
    "unknown sampling field": (lambda: Request(prompt="a", sampling={"heat": 1}), "sampling.heat", "not permitted"),
    "no prompt": (lambda: Request(max_tokens=3), "prompt", "exactly one of prompt, prompt_ids, messages"),
    "two prompts": (lambda: Request(prompt="a", prompt_ids=[4]), "prompt", "exactly one"),
    "messages without a template": (
        lambda: Request(messages=[Message(role="user", content="a")]), "messages", "no chat template"
    ),
    "unknown role": (
        lambda: Request(messages=[{"role": "robot", "content": "a"}]), "messages.0.role", "'system', 'user'"
    ),
    "text for a number": (lambda: Request(prompt="a", max_tokens="3"), "max_tokens", "integer"),
    "fraction for a count": (lambda: Request(prompt="a", max_tokens=3.5), "max_tokens", "integer"),
    "truth for a count": (lambda: Request(prompt="a", max_tokens=True), "max_tokens", "integer"),
    "number for a text": (lambda: Request(prompt=5), "prompt", "string"),
    "text for ids": (lambda: Request(prompt_ids="56"), "prompt_ids", "tuple"),
    "text among ids": (lambda: Request(prompt_ids=[4, "5"]), "prompt_ids.1", "integer"),
    "empty stop string": (lambda: Request(prompt="a", stop=["x", ""]), "stop.1", "at least 1 character"),
    "too many stop strings": (lambda: Request(prompt="a", stop=["x"] * 17), "stop", "16"),
    "id with a wildcard": (lambda: Request(prompt="a", id="a/#"), "id", "pattern"),
    "long id": (lambda: Request(prompt="a", id="a" * 65), "id", "pattern"),
    "no choice": (lambda: Request(prompt="a", n=0), "n", "greater than or equal to 1"),
    "more choices than rows": (lambda: Request(prompt="a", n=5), "n", "rows (4)"),
    "deadline of zero": (lambda: Request(prompt="a", deadline_s=0), "deadline_s", "greater than 0"),
    "too many alternatives": (lambda: Request(prompt="a", logprobs=21), "logprobs", "20"),
    "unknown overflow": (lambda: Request(prompt="a", overflow="wrap"), "overflow", "'stop' or 'slide'"),
    "processor that cannot be called": (lambda: Request(prompt="a", processors=[3]), "processors.0", "callable"),
}  # fmt: skip

JSON: dict[str, tuple[str | bytes, str, str]] = {
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', "request", "JSON"),
    "not JSON": ("{prompt", "request", "JSON"),
    "cut off": ('{"prompt": "a"', "request", "JSON"),
    "a list": ('["a"]', "request", "object"),
    "nothing": ("", "request", "JSON"),
    "nested beyond all bounds": ("[" * 100_000, "request", "JSON"),
    "half a surrogate": (r'{"prompt": "\ud800"}', "request", "JSON"),
    "unknown field": ('{"prompt": "a", "promt": "b"}', "promt", "not permitted"),
    "field named self": ('{"prompt": "a", "self": 1}', "self", "not permitted"),
    "NaN": ('{"prompt": "a", "sampling": {"temperature": NaN}}', "sampling.temperature", "finite"),
    "endless number": ('{"prompt": "a", "sampling": {"temperature": 1e999}}', "sampling.temperature", "finite"),
    "seed beyond 64 bits": (
        '{"prompt": "a", "sampling": {"seed": 18446744073709551616}}', "sampling.seed", "18446744073709551615"
    ),
    "text for a number": ('{"prompt": "a", "max_tokens": "7"}', "max_tokens", "integer"),
    "null for a number": ('{"prompt": "a", "max_tokens": null}', "max_tokens", "integer"),
    "bias of no id": (
        '{"prompt": "a", "sampling": {"logit_bias": {"x": 1}}}', "sampling.logit_bias.x.[key]", "integer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_bad_request_is_refused_and_the_others_go_on(case: str):
    make, field, limit = BAD[case]
    expected = [result.token_ids for result in await generate(tiny_model(), *NEIGHBOURS)]
    async with Scheduler(tiny_model(), rows=4) as scheduler:
        gate = Gate()
        held = await scheduler.submit(NEIGHBOURS[0].model_copy(update={"processors": (gate,)}))
        await gate.arrived()
        for submit in (scheduler.submit, submit_at_once(scheduler)):
            with pytest.raises(InvalidRequest) as caught:
                await submit(make())
            assert caught.value.field == field
            assert limit in caught.value.limit
            assert str(caught.value) == f"{field}: {caught.value.limit}"
            assert isinstance(caught.value, ValueError)
        other = await scheduler.submit(NEIGHBOURS[1])
        gate.open()
        assert [(await job.result()).token_ids for job in (held, other)] == expected
        assert scheduler.statistics().finished == 2
        scheduler.check_integrity()


@pytest.mark.parametrize("case", JSON)
def test_bad_json_is_refused(case: str):
    payload, field, limit = JSON[case]
    with pytest.raises(InvalidRequest) as caught:
        Request.from_json(payload)
    assert caught.value.field == field
    assert limit in caught.value.limit
    assert len(str(caught.value)) < 300


def test_error_does_not_repeat_what_was_sent():
    with pytest.raises(InvalidRequest) as caught:
        Request.from_json('{"prompt": "a", "max_tokens": "a secret"}')
    assert "secret" not in str(caught.value)


def test_good_json_is_the_request():
    payload = """{"id": "j1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stop": ["."],
                  "stop_ids": [4], "n": 2, "logprobs": 0, "deadline_s": 3, "overflow": "slide",
                  "sampling": {"temperature": 1, "logit_bias": {"7": -1.5}, "allowed_ids": [7, 8], "seed": 9}}"""
    request = Request.from_json(payload)
    assert request == Request(
        id="j1",
        messages=[Message(role="user", content="hi")],
        max_tokens=5,
        stop=["."],
        stop_ids=[4],
        n=2,
        logprobs=0,
        deadline_s=3.0,
        overflow="slide",
        sampling=SamplingParams(temperature=1.0, logit_bias={7: -1.5}, allowed_ids=(7, 8), seed=9),
    )
    assert Request.from_json(request.model_dump_json()) == request


async def test_empty_prompt_is_bos_alone_where_there_is_one():
    model = tiny_model()
    empty, bos = await generate(model, Request(prompt="", max_tokens=4), Request(prompt_ids=[0], max_tokens=4))
    assert empty.usage.prompt_tokens == 1
    assert empty.token_ids == bos.token_ids
    without = ByteTokenizer()
    without.bos_id = None
    async with Scheduler(replace(model, tokenizer=without)) as scheduler:
        good = await scheduler.submit(NEIGHBOURS[0])
        with pytest.raises(InvalidRequest) as caught:
            await scheduler.submit(Request(prompt=""))
        assert caught.value.field == "prompt"
        assert "no BOS" in caught.value.limit
        (expected,) = await generate(model, NEIGHBOURS[0])
        assert (await good.result()).token_ids == expected.token_ids


async def test_long_prompt_slides_where_it_may():
    ids = [3 + place % 200 for place in range(70)]
    slid = Request(prompt_ids=ids, max_tokens=5, overflow="slide", ignore_eos=True)
    last = Request(prompt_ids=ids[-WINDOW:], max_tokens=5, overflow="slide", ignore_eos=True)
    expected = [result.token_ids for result in await generate(tiny_model(), *NEIGHBOURS)]
    results = await generate(tiny_model(), slid, last, *NEIGHBOURS)
    assert results[0].token_ids == results[1].token_ids
    assert results[0].usage.prompt_tokens == 70
    assert results[0].stop_reason == "budget"
    assert [result.token_ids for result in results[2:]] == expected


async def test_zero_budget_is_legal():
    async with Scheduler(tiny_model(), rows=4) as scheduler:
        job = await scheduler.submit(Request(prompt="abc", max_tokens=0, n=2))
        assert [chunk async for chunk in job] == []
        result = await job.result()
        assert [(choice.stop_reason, choice.token_ids) for choice in result.choices] == [("budget", ())] * 2
        assert (result.status, result.text) == ("completed", "")
        assert (result.usage.prompt_tokens, result.usage.evaluated_positions) == (3, 0)
        assert scheduler.statistics().steps == 0
        with pytest.raises(InvalidRequest):
            await scheduler.submit(Request(prompt="x" * 33, max_tokens=0))


async def test_duplicate_id_while_the_first_is_on_its_way():
    expected = [result.token_ids for result in await generate(tiny_model(), *NEIGHBOURS)]
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        gate = Gate()
        first = await scheduler.submit(NEIGHBOURS[0].model_copy(update={"id": "same", "processors": (gate,)}))
        await gate.arrived()
        queued = await scheduler.submit(NEIGHBOURS[1].model_copy(update={"id": "other"}))
        for taken in ("same", "other"):
            with pytest.raises(InvalidRequest) as caught:
                await scheduler.submit(Request(prompt="a", id=taken))
            assert caught.value.field == "id"
            assert taken in caught.value.limit
        gate.open()
        assert [(await job.result()).token_ids for job in (first, queued)] == expected
        assert (await (await scheduler.submit(Request(prompt="a", id="same"))).result()).id == "same"


async def test_job_after_drain():
    expected = [result.token_ids for result in await generate(tiny_model(), *NEIGHBOURS)]
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        gate = Gate()
        first = await scheduler.submit(NEIGHBOURS[0].model_copy(update={"processors": (gate,)}))
        second = await scheduler.submit(NEIGHBOURS[1])
        await gate.arrived()
        draining = asyncio.ensure_future(scheduler.drain())
        await asyncio.sleep(0)
        with pytest.raises(SchedulerClosed):
            await scheduler.submit(Request(prompt="late"))
        gate.open()
        await draining
        assert [(await job.result()).token_ids for job in (first, second)] == expected


def submit_at_once(scheduler: Scheduler):
    async def submit(request: Request):
        return scheduler.submit_nowait(request)

    return submit
