"""Prefix reuse through the scheduler: what is computed once, that no answer shows it, and prompts that are pinned."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from drumline import InvalidRequest, Request, Result, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from tests.compositions import answer
from tests.drive import metric, until
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SYSTEM = tuple(3 + place * 7 % 250 for place in range(60))


def asking(*own: int, **fields: object) -> Request:
    """A prompt that begins like all others."""
    fields = {"max_tokens": 6, "logprobs": 2, "sampling": SamplingParams(temperature=0.9, seed=sum(own)), **fields}
    return Request(prompt_ids=(*SYSTEM, *own), ignore_eos=True, **fields)


def tiny(family: str = "llama", **settings: object) -> LanguageModel:
    return tiny_model(family, window=128, precision="int8", **settings)


async def run(model: LanguageModel, requests: list[Request], together: bool = True, **settings: object) -> list[Result]:
    async with Scheduler(model, **settings) as scheduler:
        if together:
            jobs = [await scheduler.submit(request) for request in requests]
            results = [await job.result() for job in jobs]
        else:
            results = [await (await scheduler.submit(request)).result() for request in requests]
        scheduler.check_integrity()
        reused = sum(result.usage.reused_tokens for result in results)
        assert metric(scheduler, "prompt_tokens_total", source="reused") == reused
    return results


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
async def test_no_answer_shows_it(family: str, kv_dtype: torch.dtype):
    model = replace(tiny(family), kv_dtype=kv_dtype)
    requests = [asking(number, number + 1) for number in range(3, 11)]
    expected = list(map(answer, await run(model, requests, together=False, rows=1, reuse=False)))
    for together, rows, step_tokens in ((False, 1, 256), (False, 4, 256), (True, 3, 16), (True, 8, 64)):
        results = await run(model, requests, together, rows=rows, step_tokens=step_tokens)
        assert list(map(answer, results)) == expected
        assert [result.usage.reused_tokens for result in results[1:]] == [60] * 7
        assert results[0].usage.reused_tokens == 0


async def test_of_the_real_model(smollm2_int8: LanguageModel):
    system = "You are the assistant of a small workshop. You are polite, brief and exact, and never invent a number. "
    questions = ["What is a drum?", "How many legs has a spider?", "Name a colour."]
    requests = [Request(prompt=system + text, max_tokens=8, logprobs=1) for text in questions]
    expected = await run(smollm2_int8, requests, together=False, rows=1, reuse=False)
    for together, rows in ((False, 1), (True, 3)):
        results = await run(smollm2_int8, requests, together, rows=rows, step_tokens=16)
        assert list(map(answer, results)) == list(map(answer, expected))
        assert all(result.usage.reused_tokens > 15 for result in results[1:])


async def test_a_shared_prompt_is_computed_once_while_all_wait_for_it():
    model = tiny()
    results = await run(model, [asking(number) for number in range(3, 7)], rows=4, step_tokens=16)
    fed = sum(step.input_length for result in results for step in result.steps if step.cache_after <= 61)
    assert fed == 60 + 4
    assert [result.steps[0].cache_before for result in results] == [0, 60, 60, 60]


async def test_choices_of_a_request_share_its_prompt():
    (result,) = await run(tiny(), [asking(5, n=3)], rows=3)
    assert result.usage.reused_tokens == 2 * 60
    assert len({choice.token_ids for choice in result.choices}) == 3
    (alone,) = await run(tiny(), [asking(5)], rows=1)
    assert result.choices[0].token_ids == alone.token_ids


async def test_a_conversation_goes_on_where_it_ended():
    model = tiny()
    async with Scheduler(model, rows=1) as scheduler:
        first = await (await scheduler.submit(asking(9))).result()
        prompt = (*SYSTEM, 9, *first.token_ids, 30, 31)
        second = await (await scheduler.submit(Request(prompt_ids=prompt, max_tokens=4))).result()
    assert second.usage.reused_tokens == len(SYSTEM) + 1 + 5  # the last token was never fed


async def test_a_preempted_row_finds_what_it_had():
    model = tiny()
    (expected,) = await run(model, [asking(4, max_tokens=20)], rows=1, reuse=False)
    async with Scheduler(model, rows=2) as scheduler:
        job = await scheduler.submit(asking(4, max_tokens=20))
        async for chunk in job:
            if chunk.first_token < 10:
                scheduler.preempt(job)
        result = await job.result()
    assert answer(result) == answer(expected)
    assert result.usage.resumes >= 2
    assert result.usage.reused_tokens > 60 * result.usage.resumes
    assert result.usage.evaluated_positions - expected.usage.evaluated_positions < 10


async def test_leaders_that_are_cancelled_leave_what_they_have():
    model = tiny()
    (expected,) = await run(model, [asking(7)], rows=1, reuse=False)
    async with Scheduler(model, rows=3, step_tokens=16) as scheduler:
        leader = await scheduler.submit(asking(6))
        follower = await scheduler.submit(asking(7))
        count = scheduler.instruments.step

        def cancel_after_two(*step: Any) -> None:  # between two steps, of which a busy machine would let more pass
            count(*step)
            if scheduler.statistics().steps == 2:
                leader.cancel()

        scheduler.instruments.step = cancel_after_two
        result = await follower.result()
        scheduler.check_integrity()
    assert answer(result) == answer(expected)
    assert 0 < result.usage.reused_tokens < 60


async def test_off():
    results = await run(tiny(), [asking(3), asking(4)], rows=2, reuse=False)
    assert [result.usage.reused_tokens for result in results] == [0, 0]


class TestPins:
    async def test_a_pinned_prompt_outlives_all_others(self):
        async with Scheduler(tiny(), rows=2) as scheduler:
            pin = await scheduler.pin(Request(prompt_ids=SYSTEM))
            for start in range(100, 130, 10):  # others, that would have taken both rows
                others = Request(prompt_ids=[start + place for place in range(20)], max_tokens=2)
                assert (await (await scheduler.submit(others)).result()).usage.reused_tokens == 0
            assert (await (await scheduler.submit(asking(5))).result()).usage.reused_tokens == 60
            scheduler.check_integrity()
            pin.release()
            pin.release()
            results = [await scheduler.submit(asking(number)) for number in (6, 7)]
            await asyncio.gather(*(job.result() for job in results))
            scheduler.check_integrity()

    async def test_pins_of_one_prompt_share_a_row(self):
        async with Scheduler(tiny(), rows=3) as scheduler:
            pins = [await scheduler.pin(Request(prompt_ids=SYSTEM)) for _ in range(4)]
            other = await scheduler.pin(Request(prompt_ids=(9,) * 20))
            assert len({pin.row for pin in pins}) == 1
            for pin in pins:
                scheduler.check_integrity()
                assert (await (await scheduler.submit(asking(5))).result()).usage.reused_tokens == 60
                pin.release()
            other.release()
            results = [await scheduler.submit(asking(number)) for number in (6, 7, 8)]
            await asyncio.gather(*(job.result() for job in results))
            assert scheduler.statistics().live == 0
            scheduler.check_integrity()

    async def test_one_whose_row_is_taken_while_it_is_computed(self):
        """It goes on like any other, and is pinned in the row in which it ends."""
        async with Scheduler(tiny(), rows=2, step_tokens=16) as scheduler:
            pinning = asyncio.create_task(scheduler.pin(Request(prompt_ids=SYSTEM, id="pinned")))
            await until(lambda: scheduler.statistics().prompt_tokens > 0)
            scheduler.preempt(scheduler._intake.jobs["pinned"])
            pin = await pinning
            assert metric(scheduler, "preemptions_total") == 1
            results = [await (await scheduler.submit(asking(number))).result() for number in (5, 6)]
            assert [result.usage.reused_tokens for result in results] == [60, 60]
            pin.release()
            scheduler.check_integrity()

    async def test_one_row_must_remain(self):
        async with Scheduler(tiny(), rows=2) as scheduler:
            pin = await scheduler.pin(Request(prompt_ids=SYSTEM))
            with pytest.raises(InvalidRequest, match="rows: 2 leave none"):
                await scheduler.pin(Request(prompt_ids=(9,) * 20))
            pin.release()
            (await scheduler.pin(Request(prompt_ids=(9,) * 20))).release()

    async def test_nor_do_two_at_once_take_it(self):
        async with Scheduler(tiny(), rows=2) as scheduler:
            asked = [Request(prompt_ids=SYSTEM), Request(prompt_ids=(9,) * 20)]
            first, second = await asyncio.gather(*map(scheduler.pin, asked), return_exceptions=True)
            assert isinstance(second, InvalidRequest)
            assert (await (await scheduler.submit(asking(5))).result()).usage.reused_tokens == 60
            first.release()

    async def test_a_prompt_that_fails_holds_nothing(self):
        async with Scheduler(tiny(), rows=2) as scheduler:
            with pytest.raises(InvalidRequest, match="prompt_ids"):
                await scheduler.pin(Request(prompt_ids=(10**6,)))
            (await scheduler.pin(Request(prompt_ids=SYSTEM))).release()

    @pytest.mark.parametrize(
        ("request_", "field"), [("x", "request"), (Request(prompt_ids=(9,) * 15), "prompt")], ids=["text", "short"]
    )
    async def test_what_cannot_be_pinned(self, request_: object, field: str):
        async with Scheduler(tiny(), rows=2) as scheduler:
            with pytest.raises(InvalidRequest) as caught:
                await scheduler.pin(request_)
            assert caught.value.field == field
            (await scheduler.pin(Request(prompt_ids=SYSTEM))).release()
            scheduler.check_integrity()

    async def test_giving_up_while_it_is_computed(self):
        async with Scheduler(tiny(), rows=2, step_tokens=16) as scheduler:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scheduler.pin(Request(prompt_ids=SYSTEM)), 0)
            task = asyncio.create_task(scheduler.pin(Request(prompt_ids=SYSTEM)))
            await until(lambda: scheduler.statistics().live == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: scheduler.statistics().live == 0)
            (await scheduler.pin(Request(prompt_ids=SYSTEM))).release()

    async def test_without_reuse_there_is_nothing_to_pin(self):
        async with Scheduler(tiny(), rows=2, reuse=False) as scheduler:
            with pytest.raises(InvalidRequest, match="reuse"):
                await scheduler.pin(Request(prompt_ids=SYSTEM))
