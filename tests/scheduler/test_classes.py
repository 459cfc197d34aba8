"""Priorities and shares through the scheduler: who gets a row, whose row is taken, and what refuses what is late."""

import asyncio
from collections import Counter

import pytest

from drumline import InvalidRequest, Request, SamplingParams, Scheduler
from drumline.scheduler.live_rows import MIN_TOKENS_IN_ROW
from drumline.scheduler.policy import FairShare, FirstCome
from tests.compositions import answer
from tests.drive import generate, held, metric, until
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def asking(tokens: int = 6, **fields: object) -> Request:
    return Request(prompt="the drum", max_tokens=tokens, ignore_eos=True, logprobs=0, **fields)


async def finished_in_order(scheduler: Scheduler, requests: list[Request]) -> list[str]:
    """Names (seeds) in the order in which the jobs ended."""
    order: list[str] = []

    async def follow(request: Request) -> None:
        job = await scheduler.submit(request)
        await job.result()
        order.append(f"{request.tenant}-{request.priority}")

    await asyncio.gather(*map(follow, requests))
    return order


async def test_the_order_of_the_classes():
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        blocker = await scheduler.submit(asking(2))
        await asyncio.sleep(0)
        order = await finished_in_order(
            scheduler, [asking(2, priority=priority) for priority in ("low", "normal", "high", "normal", "high")]
        )
        await blocker.result()
    assert [name.split("-")[1] for name in order] == ["high", "high", "normal", "normal", "low"]


async def test_the_queue_is_counted_by_class():
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        jobs = [await scheduler.submit(asking(priority=p)) for p in ("normal", "low", "low", "high")]
        counts = {p: metric(scheduler, "requests_queued", priority=p) for p in ("low", "normal", "high")}
        assert sum(counts.values()) in (3, 4)
        assert (counts["low"], counts["high"]) == (2, 1)
        for job in jobs:
            job.cancel()


class TestTakingRows:
    async def test_an_urgent_one_takes_the_row_of_the_least(self):
        """Rows full, then an urgent one: the low row gives way, and answers as if it had not."""
        sampling = SamplingParams(temperature=1.0, seed=5)
        model = tiny_model(window=128, precision="int8")
        low = asking(60, priority="low", sampling=sampling)
        (expected,) = await generate(model, low)
        async with Scheduler(model, rows=2, draft_tokens=0) as scheduler:
            normal = await scheduler.submit(asking(80))
            slow = await scheduler.submit(low)
            async for chunk in slow:
                if chunk.first_token == MIN_TOKENS_IN_ROW + 2:
                    break_in = await scheduler.submit(asking(3, priority="high"))
                    urgent = await break_in.result()
                    assert slow.state == "running"
                    assert normal.generated < 80
            result = await slow.result()
            assert (await normal.result()).usage.resumes == 0
            assert metric(scheduler, "preemptions_total") == 1
        assert urgent.timings.queued_s < urgent.timings.total_s
        assert answer(result) == answer(expected)
        assert result.usage.resumes == 1

    @pytest.mark.parametrize("policy", [FirstCome, FairShare])
    async def test_a_policy_without_classes_takes_none(self, policy: type):
        async with Scheduler(tiny_model(window=128), rows=1, draft_tokens=0, policy=policy()) as scheduler:
            low = await scheduler.submit(asking(60, priority="low"))
            await until(lambda: low.generated > MIN_TOKENS_IN_ROW)
            await (await scheduler.submit(asking(3, priority="high"))).result()
            assert (await low.result()).usage.resumes == 0

    async def test_some_of_several_choices_are_taken(self):
        """One row of a request for three; its answer is the same, and so is each choice's."""
        model = tiny_model(window=128, precision="int8")
        three = asking(60, priority="low", n=3, sampling=SamplingParams(temperature=1.0, seed=5))
        (expected,) = await generate(model, three, rows=3)
        async with Scheduler(model, rows=3, draft_tokens=0) as scheduler:
            low = await scheduler.submit(three)
            for step in (1, 2):
                await until(lambda step=step: low.generated > step * 3 * (MIN_TOKENS_IN_ROW + 1))
                await (await scheduler.submit(asking(3, priority="high"))).result()
                scheduler.check_integrity()
            result = await low.result()
            assert metric(scheduler, "preemptions_total") == 2
        assert answer(result) == answer(expected)
        assert result.usage.resumes == 2

    async def test_not_before_it_has_run_a_while(self):
        async with Scheduler(tiny_model(window=128), rows=1) as scheduler:
            low = await scheduler.submit(asking(60, priority="low"))
            await until(lambda: low.generated >= 1)
            urgent = await scheduler.submit(asking(1, priority="high"))
            await urgent.result()
            result = low.sequences[0]
            assert result.resumes == 1
            assert len(result.token_ids) >= MIN_TOKENS_IN_ROW - 1
            await low.result()

    async def test_a_long_prompt_comes_on_too(self):
        """Each time it holds a row it generates its tokens, however many steps its prompt takes again."""
        async with Scheduler(
            tiny_model(window=256, precision="int8"), rows=1, step_tokens=16, draft_tokens=0
        ) as scheduler:
            low = await scheduler.submit(asking(40, priority="low").model_copy(update={"prompt": "x" * 200}))
            ended = asyncio.ensure_future(low.result())
            while not ended.done():
                await (await scheduler.submit(asking(1, priority="high"))).result()
            result = await ended
        assert result.stop_reason == "budget"
        assert result.usage.resumes <= 40 // MIN_TOKENS_IN_ROW

    async def test_equals_wait(self):
        async with Scheduler(tiny_model(window=128), rows=1) as scheduler:
            first = await scheduler.submit(asking(40))
            await until(lambda: first.generated >= MIN_TOKENS_IN_ROW + 3)
            second = await scheduler.submit(asking(2))
            await second.result()
            assert (await first.result()).usage.resumes == 0

    async def test_no_thrashing(self):
        """A low row that is taken again and again still comes on: each time it runs its steps."""
        async with Scheduler(tiny_model(window=128, precision="int8"), rows=1, draft_tokens=0) as scheduler:
            low = await scheduler.submit(asking(64, priority="low"))
            ended = asyncio.ensure_future(low.result())
            urgent = 0
            while not ended.done():
                await (await scheduler.submit(asking(1, priority="high"))).result()
                urgent += 1
            result = await ended
        assert result.usage.resumes <= 64 // MIN_TOKENS_IN_ROW
        assert urgent >= result.usage.resumes


class TestShares:
    async def test_a_flood_does_not_drown_the_other(self):
        async with Scheduler(tiny_model(), rows=2) as scheduler:
            flood = [asking(4, tenant="flood") for _ in range(40)]
            few = [asking(4, tenant="few") for _ in range(8)]
            order = await finished_in_order(scheduler, flood + few)
        served = Counter(name.split("-")[0] for name in order[:16])
        assert abs(served["flood"] - served["few"]) <= 2

    async def test_equal_tokens_while_both_wait(self):
        """A thousand jobs against ten of the same size: the same tokens, within a tenth."""
        async with Scheduler(tiny_model(), rows=2, queue_requests=2_000) as scheduler:
            gate, _ = await held(scheduler)  # nobody is served before all have come
            many = [await scheduler.submit(asking(4, tenant="many")) for _ in range(1_000)]
            few = [await scheduler.submit(asking(4, tenant="few")) for _ in range(10)]
            gate.open()
            await asyncio.gather(*(job.result() for job in few))
            done = sum(job.generated for job in many)
            for job in many:
                job.cancel()
            await asyncio.gather(*(job.result() for job in many))
        assert done == pytest.approx(sum(4 for _ in few), abs=8)  # two rows of four tokens are on their way

    async def test_what_is_reused_is_not_charged(self):
        class Charges(FirstCome):
            total = 0.0

            def served(self, entry: object, prompt_tokens: int, generated_tokens: int) -> None:
                self.total += prompt_tokens

        policy = Charges()
        shared = tuple(3 + place % 200 for place in range(60))
        async with Scheduler(tiny_model(window=128, precision="int8"), rows=4, policy=policy) as scheduler:
            jobs = [await scheduler.submit(Request(prompt_ids=(*shared, place), max_tokens=2)) for place in range(4)]
            results = [await job.result() for job in jobs]
        assert policy.total == 4 * 61 - sum(result.usage.reused_tokens for result in results) == 61 + 3


class TestDeadlines:
    async def test_low_work_does_not_count_against_high(self):
        async with Scheduler(tiny_model(window=128), rows=1, refuse_late=True) as scheduler:
            await (await scheduler.submit(asking(40))).result()
            low = [await scheduler.submit(asking(100, priority="low")) for _ in range(500)]
            urgent = await scheduler.submit(asking(2, priority="high", deadline_s=20.0))
            with pytest.raises(InvalidRequest, match="deadline_s"):
                await scheduler.submit(asking(2, priority="low", deadline_s=0.01))
            assert (await urgent.result()).stop_reason == "budget"
            for job in low:
                job.cancel()

    async def test_what_cannot_end_in_time_is_refused(self):
        async with Scheduler(tiny_model(window=128), rows=1, refuse_late=True) as scheduler:
            await (await scheduler.submit(asking(40, deadline_s=1000.0))).result()
            with pytest.raises(InvalidRequest, match="deadline_s: cannot be met: this takes about"):
                await scheduler.submit(asking(100, deadline_s=1e-6))
            assert metric(scheduler, "rejected_total", reason="invalid") == 1
            late = asking(100, deadline_s=1e-6)
            with pytest.raises(InvalidRequest, match="deadline_s: cannot be met"):
                await scheduler.submit(late, accepted=True)  # its caller counts how it ends
            result = await scheduler.settle(late, "deadline")
            assert metric(scheduler, "rejected_total", reason="invalid") == 1
            assert metric(scheduler, "requests_total", outcome="expired") == 0
            scheduler.outcomes.ended("a/late", "expired", result, seated=False)
            assert metric(scheduler, "requests_total", outcome="expired") == 1
            await (await scheduler.submit(asking(2, deadline_s=1000.0))).result()

    async def test_nobody_is_refused_on_a_guess(self):
        async with Scheduler(tiny_model(), rows=1, refuse_late=True) as scheduler:
            result = await (await scheduler.submit(asking(100, deadline_s=1e-6))).result()
        assert result.stop_reason == "deadline"

    async def test_behind_a_full_batch(self):
        """A deadline of 1 s behind a full batch: it never gets a row."""
        now = 0.0
        async with Scheduler(tiny_model(window=128), rows=1, clock=lambda: now) as scheduler:
            running = await scheduler.submit(asking(100))
            waiting = await scheduler.submit(asking(5, deadline_s=1.0))
            await until(lambda: running.generated >= 3)
            now = 1.0
            result = await waiting.result()
            assert (result.stop_reason, result.token_ids, result.steps) == ("deadline", (), ())
            assert running.state == "running"
            running.cancel()
