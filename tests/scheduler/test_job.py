import asyncio

import pytest

from drumline import (
    Chunk,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    JobCancelled,
    Request,
    Result,
    SamplingParams,
    Scheduler,
)
from drumline.model.batch import StepRecord
from tests.drive import Gate, generate
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def overlay(chunks: list[Chunk], choice: int) -> tuple[str, list[int]]:
    """What a reader that lays chunks over one another holds in the end."""
    text, ids = "", []
    for chunk in chunks:
        if chunk.choice == choice:
            text = text[: chunk.text_offset] + chunk.text
            ids[chunk.first_token :] = chunk.token_ids
    return text, ids


def asking(prompt: str = "the drum", tokens: int = 12, **fields: object) -> Request:
    return Request(prompt=prompt, max_tokens=tokens, ignore_eos=True, **fields)


class TestStreaming:
    @pytest.mark.parametrize("n", [1, 3])
    async def test_chunks_overlay_to_the_result(self, n: int):
        async with Scheduler(tiny_model(), rows=4) as scheduler:
            request = asking(n=n, logprobs=2, sampling=SamplingParams(temperature=1.0, seed=4))
            job = await scheduler.submit(request)
            chunks = [chunk async for chunk in job]
            result = await job.result()
        assert len(chunks) > n
        for choice in result.choices:
            assert overlay(chunks, choice.choice) == (choice.text, list(choice.token_ids))
            mine = [chunk for chunk in chunks if chunk.choice == choice.choice]
            assert sum((chunk.logprobs for chunk in mine), ()) == choice.logprobs
            ends = [chunk.text_offset + len(chunk.text) for chunk in mine]
            assert [chunk.text_offset for chunk in mine] == [0, *ends[:-1]]
            assert ends[-1] == len(choice.text)

    async def test_slow_consumer_coalesces_and_loses_nothing(self):
        async with Scheduler(tiny_model(), rows=4) as scheduler:
            job = await scheduler.submit(asking(n=2, sampling=SamplingParams(temperature=1.0, seed=4)))
            result = await job.result()  # read nothing until the end
            chunks = [chunk async for chunk in job]
        assert [chunk.choice for chunk in chunks] == [0, 1]
        for choice in result.choices:
            assert overlay(chunks, choice.choice) == (choice.text, list(choice.token_ids))

    async def test_stop_string_never_leaves_in_a_chunk(self):
        (free,) = await generate(tiny_model(), asking(tokens=20))
        stop = free.text[8:10]
        async with Scheduler(tiny_model()) as scheduler:
            job = await scheduler.submit(asking(tokens=20, stop=[stop]))
            chunks = [chunk async for chunk in job]
            result = await job.result()
        cut = free.text[: free.text.index(stop)]
        assert result.stop_reason == "stop"
        assert result.text == cut
        assert result.token_ids == free.token_ids[: len(result.token_ids)]
        assert overlay(chunks, 0) == (cut, list(result.token_ids))

    async def test_kept_stop_string(self):
        (free,) = await generate(tiny_model(), asking(tokens=20))
        stop = free.text[8:10]
        (kept,) = await generate(tiny_model(), asking(tokens=20, stop=[stop], keep_stop=True))
        assert kept.text == free.text[: free.text.index(stop) + len(stop)]
        assert kept.stop_reason == "stop"

    async def test_second_iterator_raises(self):
        async with Scheduler(tiny_model()) as scheduler:
            job = await scheduler.submit(asking(id="once"))
            assert [chunk async for chunk in job]
            with pytest.raises(InvalidRequest, match="once already has a reader"):
                aiter(job)
            with pytest.raises(InvalidRequest, match="once already has a reader"):
                async with job.stream():
                    pass

    async def test_leaving_early_cancels_once_finalised(self):
        async with Scheduler(tiny_model(window=256)) as scheduler:
            job = await scheduler.submit(asking(tokens=200))
            reader = aiter(job)
            await anext(reader)
            await reader.aclose()
            result = await job.result()
            assert result.stop_reason == "cancelled"
            assert 0 < len(result.token_ids) < 200

    async def test_breaking_out_of_the_loop_cancels(self):
        async with Scheduler(tiny_model(window=256)) as scheduler:
            job = await scheduler.submit(asking(tokens=200))
            async for _ in job:
                break
            assert (await job.result()).stop_reason == "cancelled"

    async def test_stream_cancels_when_the_block_is_left(self):
        async with Scheduler(tiny_model(window=256)) as scheduler:
            job = await scheduler.submit(asking(tokens=200))
            async with job.stream() as chunks:
                async for _ in chunks:
                    break
            assert (await job.result()).stop_reason == "cancelled"
            unread = await scheduler.submit(asking(tokens=200))
            async with unread.stream():
                pass
            assert (await unread.result()).stop_reason == "cancelled"

    async def test_stream_read_to_the_end_does_not_cancel(self):
        async with Scheduler(tiny_model()) as scheduler:
            job = await scheduler.submit(asking())
            async with job.stream() as chunks:
                received = [chunk async for chunk in chunks]
            result = await job.result()
        assert result.stop_reason == "budget"
        assert overlay(received, 0) == (result.text, list(result.token_ids))


class TestCancel:
    async def test_queued(self):
        async with Scheduler(tiny_model(), rows=1) as scheduler:
            gate = Gate()
            running = await scheduler.submit(asking(processors=[gate]))
            await gate.arrived()
            waiting = await scheduler.submit(asking())
            assert (running.state, waiting.state) == ("running", "queued")
            assert scheduler.queue_position(waiting.id) == 0
            waiting.cancel()
            gate.open()
            result = await waiting.result()
            assert (result.stop_reason, result.token_ids, result.text) == ("cancelled", (), "")
            assert result.timings.first_token_s is None
            assert result.usage.evaluated_positions == 0
            assert (await running.result()).stop_reason == "budget"

    async def test_in_prefill(self):
        async with Scheduler(tiny_model(window=64), rows=2, step_tokens=17) as scheduler:
            gate = Gate()
            held = await scheduler.submit(asking("h", processors=[gate]))
            await gate.arrived()
            long = await scheduler.submit(asking("p" * 60))
            gate.step()
            await gate.arrived()  # the first chunk of the long prompt stands in the step that is held now
            long.cancel()
            gate.open()
            result = await long.result()
            assert (result.stop_reason, result.token_ids) == ("cancelled", ())
            assert result.steps == (StepRecord(16, 0, 16),)
            assert (await held.result()).stop_reason == "budget"
            scheduler.check_integrity()

    async def test_in_decode_and_twice_and_after_the_end(self):
        (alone,) = await generate(tiny_model(), asking())
        async with Scheduler(tiny_model()) as scheduler:
            gate = Gate()
            job = await scheduler.submit(asking(processors=[gate]))
            for _ in range(3):
                await gate.arrived()
                gate.step()
            await gate.arrived()
            assert job.generated == 3
            job.cancel()
            job.cancel()
            gate.open()
            result = await job.result()
            assert result.stop_reason == "cancelled"
            assert result.token_ids == alone.token_ids[:4]  # the step that ran ends; then the row is free
            job.cancel()
            assert await job.result() is result
            assert job.state == "done"

    async def test_abandoning_the_wait_leaves_the_job_alone(self):
        async with Scheduler(tiny_model()) as scheduler:
            gate = Gate()
            job = await scheduler.submit(asking(processors=[gate]))
            await gate.arrived()
            waiter = asyncio.ensure_future(job.result())
            await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            gate.open()
            assert (await job.result()).stop_reason == "budget"

    async def test_all_choices_end(self):
        async with Scheduler(tiny_model(window=256), rows=2) as scheduler:
            gate = Gate()
            blocker = await scheduler.submit(asking(processors=[gate]))
            await gate.arrived()
            job = await scheduler.submit(asking(tokens=200, n=2))  # one choice gets the free row, the other waits
            gate.step()
            await gate.arrived()
            assert scheduler.statistics().live == 2
            assert scheduler.statistics().queued == 1
            job.cancel()
            gate.open()
            result = await job.result()
            assert [choice.stop_reason for choice in result.choices] == ["cancelled", "cancelled"]
            assert (await blocker.result()).stop_reason == "budget"


class TestResult:
    async def test_status_and_raise_for_status(self):
        async with Scheduler(tiny_model()) as scheduler:
            done = await (await scheduler.submit(asking())).result()
            job = await scheduler.submit(asking(id="gone"))
            job.cancel()
            cancelled = await job.result()
            broken = await (await scheduler.submit(asking(processors=[lambda ids, scores: None]))).result()
        assert done.status == "completed"
        done.raise_for_status()
        assert cancelled.status == "cancelled"
        with pytest.raises(JobCancelled, match="gone was cancelled after 0 tokens"):
            cancelled.raise_for_status()
        assert broken.status == "failed"
        assert "logits processor" in (broken.error or "")
        with pytest.raises(EngineFailed, match="logits processor"):
            broken.raise_for_status()

    async def test_deadline_raises_its_own_error(self):
        now = 100.0
        async with Scheduler(tiny_model(), clock=lambda: now) as scheduler:
            job = await scheduler.submit(asking(deadline_s=5.0))
            now = 105.0
            result = await job.result()
        assert result.status == "expired"
        with pytest.raises(DeadlineExceeded):
            result.raise_for_status()

    async def test_steps_name_what_was_fed(self):
        prompt = "a prompt of 24 tokens ..."[:24]
        (result,) = await generate(tiny_model(window=64), asking(prompt, tokens=4), step_tokens=16)
        assert result.steps == (
            StepRecord(16, 0, 16),
            StepRecord(8, 16, 24),
            StepRecord(1, 24, 25),
            StepRecord(1, 25, 26),
            StepRecord(1, 26, 27),
        )
        assert result.usage.evaluated_positions == 27

    async def test_evaluated_positions_of_the_design(self):
        """11 prompt tokens and 500 generated: 510 with the cache, 130,250 without."""
        (result,) = await generate(tiny_model(window=512), asking("eleven char", tokens=500))
        usage = result.usage
        assert (usage.prompt_tokens, usage.generated_tokens) == (11, 500)
        assert (usage.evaluated_positions, usage.uncached_positions) == (510, 130_250)
        assert (usage.window_recomputes, usage.window_filled_step) == (0, None)

    async def test_window_that_fills_and_slides(self):
        request = asking("x" * 28, tokens=10, overflow="slide")
        (result,) = await generate(tiny_model(window=32), request)
        usage = result.usage
        assert result.stop_reason == "budget"
        assert usage.window_filled_step == 4  # 28 + 4 = 32 stand in the cache when the fifth token is chosen
        assert usage.window_recomputes == 5
        assert result.steps[-5:] == (StepRecord(32, 0, 32),) * 5
        assert usage.evaluated_positions == 28 + 4 + 5 * 32
        assert usage.uncached_positions == 28 + 29 + 30 + 31 + 32 * 6

    async def test_window_that_fills_and_stops(self):
        (result,) = await generate(tiny_model(window=32), asking("x" * 28, tokens=10))
        assert result.stop_reason == "window"
        assert len(result.token_ids) == 5
        assert result.usage.window_filled_step == 4
        assert result.usage.window_recomputes == 0

    async def test_timings_follow_the_clock(self):
        now = 10.0

        def advance(ids, scores):
            nonlocal now
            now += 1.0
            return scores

        async with Scheduler(tiny_model(), rows=1, clock=lambda: now) as scheduler:
            first = scheduler.submit_nowait(asking(tokens=3, processors=[advance]))
            second = scheduler.submit_nowait(asking(tokens=4, processors=[advance]))
            done, later = await first.result(), await second.result()
        assert done.timings.queued_s == 0.0
        assert (done.timings.first_token_s, done.timings.prefill_s) == (1.0, 1.0)
        assert (done.timings.decode_s, done.timings.total_s) == (2.0, 3.0)
        assert (later.timings.queued_s, later.timings.first_token_s) == (3.0, 4.0)
        assert (later.timings.prefill_s, later.timings.decode_s, later.timings.total_s) == (1.0, 3.0, 7.0)

    async def test_logprobs_are_of_the_raw_logits(self):
        plain = asking(logprobs=3, tokens=1)
        changed = asking(logprobs=3, tokens=1, sampling=SamplingParams(logit_bias={40: 100.0}))
        first, second = await generate(tiny_model(), plain, changed)
        (one,), (other,) = first.choices[0].logprobs, second.choices[0].logprobs
        assert first.token_ids == (one.id,) == (one.top[0][0],)
        assert second.token_ids == (other.id,) == (40,)
        assert [pair[0] for pair in other.top] == [pair[0] for pair in one.top]
        assert other.logprob < one.logprob == one.top[0][1]

    async def test_result_is_a_snapshot(self):
        (result,) = await generate(tiny_model(), asking())
        assert isinstance(result, Result)
        with pytest.raises(AttributeError):
            result.seed = 3
        assert result.text == result.choices[0].text
        assert result.token_ids == result.choices[0].token_ids
        assert result.steps == result.choices[0].steps
