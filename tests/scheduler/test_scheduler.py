import asyncio
import threading
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from drumline import InvalidRequest, QueueFull, Result, Scheduler, SchedulerClosed
from drumline.scheduler.engine import Engine
from tests.drive import asking, generate, held, metric, sampled, until
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


class TestBounds:
    async def test_queue_full_by_requests(self):
        async with Scheduler(tiny_model(), rows=1, queue_requests=2) as scheduler:
            gate, _ = await held(scheduler)
            waiting = [scheduler.submit_nowait(asking()) for _ in range(2)]
            with pytest.raises(QueueFull) as caught:
                scheduler.submit_nowait(asking())
            assert (caught.value.bound, caught.value.limit, caught.value.queued) == ("requests", 2, 2)
            gate.open()
            assert [(await job.result()).stop_reason for job in waiting] == ["budget", "budget"]
            assert metric(scheduler, "rejected_total", reason="queue_full") == 1

    async def test_queue_full_by_tokens(self):
        async with Scheduler(tiny_model(), rows=1, queue_tokens=40) as scheduler:
            gate, _ = await held(scheduler)
            scheduler.submit_nowait(asking("12345", tokens=25))
            assert scheduler.statistics().queued_tokens == 30
            with pytest.raises(QueueFull) as caught:
                scheduler.submit_nowait(asking("1234", tokens=7))
            assert (caught.value.bound, caught.value.limit) == ("tokens", 40)
            fits = scheduler.submit_nowait(asking("1234", tokens=6))
            gate.open()
            assert len((await fits.result()).token_ids) == 6

    async def test_submit_waits_for_room(self):
        async with Scheduler(tiny_model(), rows=1, queue_requests=1) as scheduler:
            gate, first = await held(scheduler)
            second = await scheduler.submit(asking())
            pending = asyncio.ensure_future(scheduler.submit(asking(id="patient")))
            await asyncio.sleep(0)
            assert not pending.done()
            gate.open()
            third = await pending
            ends = [(await job.result()).stop_reason for job in (first, second, third)]
            assert ends == ["budget"] * 3

    async def test_many_waiting_submitters_all_get_in(self):
        async with Scheduler(tiny_model(), rows=2, queue_requests=2) as scheduler:
            jobs = await asyncio.gather(*(scheduler.submit(asking(id=f"job-{i}", tokens=3)) for i in range(20)))
            results = [await job.result() for job in jobs]
        assert {result.id for result in results} == {f"job-{i}" for i in range(20)}
        assert len({result.token_ids for result in results}) == 1

    async def test_a_deadline_that_passes_while_there_is_no_room(self):
        """It ends at the next step, in whatever place it waits; the others wait on."""
        now = [0.0]
        async with Scheduler(tiny_model(), rows=1, queue_requests=1, clock=lambda: now[0]) as scheduler:
            gate, _ = await held(scheduler)
            await scheduler.submit(asking())
            patient = asyncio.ensure_future(scheduler.submit(asking()))
            hurried = asyncio.ensure_future(scheduler.submit(asking(deadline_s=5.0)))
            for _ in range(3):
                await asyncio.sleep(0)
            now[0] = 6.0
            gate.step()
            result = await (await hurried).result()
            assert (result.status, result.token_ids) == ("expired", ())
            assert not patient.done()
            gate.open()
            assert (await (await patient).result()).status == "completed"

    async def test_giving_up_while_there_is_no_room(self):
        async with Scheduler(tiny_model(), rows=1, queue_requests=1) as scheduler:
            gate, _ = await held(scheduler)
            await scheduler.submit(asking())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(scheduler.submit(asking(id="gone")), 0.01)
            patient = asyncio.ensure_future(scheduler.submit(asking(id="gone")))
            gate.open()
            assert (await (await patient).result()).status == "completed"
            assert metric(scheduler, "requests_total", outcome="cancelled") == 0

    async def test_giving_up_in_the_moment_of_acceptance(self):
        async with Scheduler(tiny_model(), rows=1, queue_requests=1) as scheduler:
            gate, _ = await held(scheduler)
            await scheduler.submit(asking())
            late = asyncio.ensure_future(scheduler.submit(asking(tokens=64)))
            await until(lambda: len(scheduler._intake.line._line) == 1)
            gate.open()
            await until(lambda: not scheduler._intake.line._line)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            await scheduler.drain(timeout=5)
            assert scheduler.statistics().queued == 0

    async def test_nobody_overtakes_those_who_wait(self):
        async with Scheduler(tiny_model(), rows=1, queue_requests=1) as scheduler:
            gate, _ = await held(scheduler)
            await scheduler.submit(asking())
            order: list[int] = []

            async def follow(number: int) -> None:
                await (await scheduler.submit(asking())).result()
                order.append(number)

            waiting = [asyncio.create_task(follow(number)) for number in range(6)]
            await asyncio.sleep(0)
            gate.open()
            await asyncio.gather(*waiting)
            assert order == list(range(6))

    async def test_submitting_many_lets_others_run(self):
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with Scheduler(tiny_model(), rows=1) as scheduler:
            task = asyncio.create_task(other())
            for _ in range(50):
                (await scheduler.submit(asking(tokens=1))).cancel()
            task.cancel()
        assert turns >= 50

    async def test_drain_wakes_waiting_submitters(self):
        async with Scheduler(tiny_model(), rows=1, queue_requests=1) as scheduler:
            gate, _ = await held(scheduler)
            await scheduler.submit(asking())
            pending = asyncio.ensure_future(scheduler.submit(asking()))
            await asyncio.sleep(0)
            draining = asyncio.ensure_future(scheduler.drain())
            with pytest.raises(SchedulerClosed):
                await pending
            gate.open()
            await draining

    @pytest.mark.parametrize(
        ("settings", "field"),
        [
            ({"rows": 0}, "rows"),
            ({"rows": 1025}, "rows"),
            ({"rows": "4"}, "rows"),
            ({"step_tokens": 15}, "step_tokens"),
            ({"queue_requests": 0}, "queue_requests"),
            ({"queue_tokens": 0}, "queue_tokens"),
            ({"name": ""}, "name"),
            ({"backend": "magic"}, "backend"),
            ({"backend": "cpu"}, "backend"),
            ({"backend": 1}, "backend"),
            ({"require_exact": True}, "require_exact"),
        ],
    )
    async def test_bad_settings_are_named(self, settings: dict, field: str):
        threads = threading.active_count()
        with pytest.raises(InvalidRequest) as caught:
            Scheduler(tiny_model(), **settings)
        assert caught.value.field == field
        assert threading.active_count() == threads

    async def test_pool_beyond_the_memory(self):
        model = tiny_model()
        huge = replace(model, config=replace(model.config, layers=10**9))
        with pytest.raises(InvalidRequest, match=r"rows: 16 rows of 32 tokens take 65536\.00 GB of keys and values"):
            Scheduler(huge)


class TestChoicesAndSeeds:
    async def test_same_seed_same_answer_and_other_seed_another(self):
        one, again, other = await generate(tiny_model(), sampled(5), sampled(5), sampled(6))
        assert one.token_ids == again.token_ids
        assert one.text == again.text
        assert one.token_ids != other.token_ids
        assert (one.seed, other.seed) == (5, 6)

    async def test_drawn_seed_is_echoed_and_reproduces(self):
        (drawn,) = await generate(tiny_model(), sampled())
        (repeated,) = await generate(tiny_model(), sampled(drawn.seed))
        assert repeated.token_ids == drawn.token_ids

    async def test_choice_zero_equals_n_one(self):
        (single,) = await generate(tiny_model(), sampled(5))
        (several,) = await generate(tiny_model(), sampled(5, n=3), rows=4)
        assert several.choices[0].token_ids == single.choices[0].token_ids
        assert several.text == single.text
        assert [choice.choice for choice in several.choices] == [0, 1, 2]
        assert len({choice.token_ids for choice in several.choices}) == 3
        assert several.usage.generated_tokens == 24

    async def test_more_choices_than_free_rows_wait_their_turn(self):
        (wide,) = await generate(tiny_model(), sampled(5, n=3), rows=3)
        async with Scheduler(tiny_model(), rows=3) as scheduler:
            gate, _ = await held(scheduler)
            job = await scheduler.submit(sampled(5, n=3))
            gate.open()
            narrow = await job.result()
        assert [choice.token_ids for choice in narrow.choices] == [choice.token_ids for choice in wide.choices]

    async def test_greedy_tokens_consume_their_index(self):
        """Forcing the first tokens does not shift the draws behind them."""

        class Force:
            def __init__(self, forced: list[int]) -> None:
                self.forced = list(forced)

            def __call__(self, ids, scores):
                if self.forced:
                    chosen = self.forced.pop(0)
                    scores = scores * 0 - 1e6
                    scores[chosen] = 0.0
                return scores

        (free,) = await generate(tiny_model(), sampled(9))
        (forced,) = await generate(tiny_model(), sampled(9, processors=[Force(list(free.token_ids[:3]))]))
        assert forced.token_ids == free.token_ids


class TestDeadlines:
    async def test_queued_and_live(self):
        now = 0.0
        async with Scheduler(tiny_model(), rows=1, clock=lambda: now) as scheduler:
            gate, live = await held(scheduler, deadline_s=10.0)
            queued = await scheduler.submit(asking(deadline_s=5.0))
            patient = await scheduler.submit(asking(deadline_s=1000.0))
            now = 5.0
            gate.step()
            early = await queued.result()
            assert (early.stop_reason, early.token_ids) == ("deadline", ())
            assert early.timings.total_s == 5.0
            await gate.arrived()
            assert live.state == "running"
            now = 10.0
            gate.step()
            late = await live.result()
            assert (late.stop_reason, len(late.token_ids)) == ("deadline", 2)
            assert late.status == "expired"
            assert (await patient.result()).stop_reason == "budget"
            scheduler.check_integrity()

    async def test_cancel_wins_over_the_deadline(self):
        now = 0.0
        async with Scheduler(tiny_model(), rows=1, clock=lambda: now) as scheduler:
            gate, job = await held(scheduler, deadline_s=1.0)
            now = 2.0
            job.cancel()
            gate.open()
            assert (await job.result()).stop_reason == "cancelled"


class TestLifecycle:
    async def test_drain_finishes_what_was_accepted(self):
        async with Scheduler(tiny_model(), rows=2) as scheduler:
            jobs = [await scheduler.submit(asking()) for _ in range(5)]
            assert scheduler.ready
            await scheduler.drain()
            assert [job.state for job in jobs] == ["done"] * 5
            assert [(await job.result()).stop_reason for job in jobs] == ["budget"] * 5
            assert not scheduler.ready
            assert scheduler.statistics().draining
            with pytest.raises(SchedulerClosed):
                await scheduler.submit(asking())
            with pytest.raises(SchedulerClosed):
                scheduler.submit_nowait(asking())
            assert metric(scheduler, "rejected_total", reason="draining") == 2

    async def test_drain_cancels_at_the_timeout(self):
        async with Scheduler(tiny_model(window=2048), rows=1) as scheduler:
            running = await scheduler.submit(asking(tokens=2000))
            waiting = await scheduler.submit(asking())
            await scheduler.drain(timeout=0.01)
            assert (await running.result()).stop_reason == "cancelled"
            assert (await waiting.result()).stop_reason == "cancelled"
            assert scheduler.statistics().live == 0

    async def test_leaving_the_block_cancels(self):
        async with Scheduler(tiny_model(window=2048), rows=1) as scheduler:
            jobs = [await scheduler.submit(asking(tokens=2000)) for _ in range(2)]
        assert [(await job.result()).stop_reason for job in jobs] == ["cancelled", "cancelled"]
        with pytest.raises(SchedulerClosed):
            await scheduler.submit(asking())

    async def test_submit_before_entering(self):
        scheduler = Scheduler(tiny_model())
        with pytest.raises(SchedulerClosed, match="enter the scheduler first"):
            await scheduler.submit(asking())
        assert not scheduler.ready
        await scheduler.close()

    async def test_closing_twice(self):
        scheduler = Scheduler(tiny_model())
        async with scheduler:
            await generate_one(scheduler)
            await scheduler.close()
            await scheduler.close()
        await scheduler.close()
        assert not scheduler.ready

    async def test_closing_an_idle_scheduler_ends_nothing_early(self):
        async with Scheduler(tiny_model()) as scheduler:
            result = await generate_one(scheduler)
        assert result.stop_reason == "budget"

    async def test_twenty_cycles_leave_no_thread_and_no_task(self):
        registry, model = CollectorRegistry(), tiny_model()
        threads, tasks = threading.active_count(), len(asyncio.all_tasks())
        for _ in range(20):
            async with Scheduler(model, rows=2, registry=registry) as scheduler:
                result = await generate_one(scheduler)
                assert result.stop_reason == "budget"
        assert threading.active_count() == threads
        assert len(asyncio.all_tasks()) == tasks
        assert registry.get_sample_value("drumline_rows_capacity", {"scheduler": "main"}) is None

    async def test_two_schedulers_in_one_registry(self):
        registry = CollectorRegistry()
        async with (
            Scheduler(tiny_model(), registry=registry, name="one") as one,
            Scheduler(tiny_model("gpt2"), registry=registry, name="two") as two,
        ):
            jobs = [await one.submit(asking()), await two.submit(asking()), await two.submit(asking())]
            results = [await job.result() for job in jobs]
            counted = [metric(each, "requests_total", outcome="completed") for each in (one, two)]
            with pytest.raises(InvalidRequest) as caught:
                Scheduler(tiny_model(), registry=registry, name="two")
        assert caught.value.field == "name"
        assert counted == [1, 2]
        assert results[0].token_ids != results[1].token_ids
        assert results[1].token_ids == results[2].token_ids

    async def test_engine_protocol_is_implemented(self):
        async with Scheduler(tiny_model()) as scheduler:
            engine: Engine = scheduler
            job = await engine.submit(asking(id="mine"))
            assert (job.id, (await job.result()).id) == ("mine", "mine")

    async def test_ids_are_made_up_and_free_again_after_the_end(self):
        async with Scheduler(tiny_model()) as scheduler:
            one, two = await scheduler.submit(asking()), await scheduler.submit(asking())
            assert one.id != two.id
            for _ in range(2):
                await (await scheduler.submit(asking(id="again"))).result()


class TestQueueing:
    async def test_first_come_first_served(self):
        order = []

        def note(name: str):
            def processor(ids, scores):
                order.append(name)
                return scores

            return processor

        async with Scheduler(tiny_model(), rows=1) as scheduler:
            gate, _ = await held(scheduler, id="held")
            jobs = [await scheduler.submit(asking(id=n, tokens=1, processors=[note(n)])) for n in ("a", "b", "c")]
            assert [scheduler.queue_position(name) for name in ("a", "b", "c")] == [0, 1, 2]
            assert scheduler.queue_position("held") is None
            assert scheduler.queue_position("unknown") is None
            gate.open()
            for job in jobs:
                await job.result()
        assert order == ["a", "b", "c"]

    async def test_rows_join_at_any_step(self):
        async with Scheduler(tiny_model(), rows=4) as scheduler:
            gate, first = await held(scheduler)
            late = []
            for name in ("a", "b", "c"):
                late.append(await scheduler.submit(asking(name)))
                gate.step()
                await gate.arrived()
            assert scheduler.statistics().live == 4
            gate.open()
            for job in (first, *late):
                assert (await job.result()).stop_reason == "budget"

    async def test_sliding_row_does_not_starve_a_prompt(self):
        """Its recomputes take two whole steps each, and it was there first: the prompt has its turn between them."""
        async with Scheduler(tiny_model(window=32), rows=2, step_tokens=16) as scheduler:
            sliding = await scheduler.submit(asking("x" * 32, tokens=30, overflow="slide"))
            prompt = await scheduler.submit(asking("y" * 30, tokens=2))
            result = await prompt.result()
            assert sliding.state == "running"
            assert sliding.generated < 10
            assert (await sliding.result()).stop_reason == "budget"
        assert result.stop_reason == "budget"


async def generate_one(scheduler: Scheduler) -> Result:
    return await (await scheduler.submit(asking(tokens=3))).result()
