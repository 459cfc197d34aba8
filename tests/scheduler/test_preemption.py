import itertools

import pytest

from drumline import Scheduler
from tests.drive import Gate, asking, generate, held, metric, sampled
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


class TestPreemption:
    @pytest.mark.parametrize("boundary", range(7))
    async def test_at_every_boundary_changes_nothing(self, boundary: int):
        (alone,) = await generate(tiny_model(), sampled(3, logprobs=0))
        async with Scheduler(tiny_model(), rows=2) as scheduler:
            gate = Gate()
            job = await scheduler.submit(sampled(3, logprobs=0, processors=[gate]))
            for _ in range(boundary):
                await gate.arrived()
                gate.step()
            await gate.arrived()
            scheduler.preempt(job)
            gate.open()
            result = await job.result()
            scheduler.check_integrity()
            assert metric(scheduler, "preemptions_total") == 1
        assert result.token_ids == alone.token_ids
        assert result.text == alone.text
        assert result.stop_reason == alone.stop_reason
        given, expected = ([entry.logprob for entry in r.choices[0].logprobs] for r in (result, alone))
        assert given == pytest.approx(expected, abs=1e-4)
        again = 8 + boundary  # the prompt and all that was generated but the newest, which was to be fed anyway
        assert result.usage.evaluated_positions == alone.usage.evaluated_positions + again

    async def test_within_a_chunked_prompt(self):
        request = asking("p" * 60)
        model = tiny_model(window=96)
        (alone,) = await generate(model, request)
        async with Scheduler(model, rows=2, step_tokens=17, reuse=False) as scheduler:
            gate, _ = await held(scheduler)
            job = await scheduler.submit(request)
            gate.step()
            await gate.arrived()
            scheduler.preempt(job)
            gate.open()
            result = await job.result()
        assert result.token_ids == alone.token_ids
        assert [step.cache_before for step in result.steps[:3]] == [0, 0, 16]

    async def test_sliding_row(self):
        request = asking("x" * 30, tokens=8, overflow="slide")
        (alone,) = await generate(tiny_model(), request)
        async with Scheduler(tiny_model()) as scheduler:
            gate = Gate()
            job = await scheduler.submit(request.model_copy(update={"processors": (gate,)}))
            for _ in range(5):
                await gate.arrived()
                scheduler.preempt(job)
                gate.step()
            gate.open()
            result = await job.result()
        assert result.token_ids == alone.token_ids

    async def test_waiting_and_ended_jobs_are_left_alone(self):
        async with Scheduler(tiny_model(), rows=1) as scheduler:
            gate, running = await held(scheduler)
            waiting = await scheduler.submit(asking())
            scheduler.preempt(waiting)
            gate.open()
            results = [await running.result(), await waiting.result()]
            scheduler.preempt(running)
            last_gate, last = await held(scheduler, tokens=1)
            scheduler.preempt(last)  # too late: this step's token ends it
            last_gate.open()
            results.append(await last.result())
            assert metric(scheduler, "preemptions_total") == 0
        assert [result.stop_reason for result in results] == ["budget", "budget", "budget"]

    async def test_preempted_job_goes_before_those_that_wait(self):
        async with Scheduler(tiny_model(), rows=1) as scheduler:
            gate, running = await held(scheduler)
            waiting = await scheduler.submit(asking())
            scheduler.preempt(running)
            gate.step()
            await gate.arrived()
            assert (running.state, waiting.state) == ("running", "queued")
            gate.open()
            await waiting.result()

    async def test_choices_come_back_in_their_order(self):
        ticks = itertools.count()
        settings = {"rows": 3, "step_tokens": 17, "reuse": False}
        async with Scheduler(tiny_model(window=64), clock=lambda: next(ticks), **settings) as scheduler:
            gate, _ = await held(scheduler, tokens=30)
            job = await scheduler.submit(asking("p" * 30, n=2))
            while not all(sequence.token_ids for sequence in job.sequences):
                gate.step()
                await gate.arrived()
            before = [len(sequence.token_ids) + 1 for sequence in job.sequences]  # the held step has one more of each
            scheduler.preempt(job)
            gate.open()
            first, second = (await job.result()).choices
        # Both are computed again, sixteen tokens a step: the first choice has its next token before the second.
        assert first.token_times_s[before[0]] < second.token_times_s[before[1]]
