"""Statistics and metrics say what happened, each thing once."""

import pytest

from drumline import InvalidRequest, Scheduler
from tests.drive import asking, held, metric, until
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


class TestNumbers:
    async def test_statistics(self):
        async with Scheduler(tiny_model(), rows=3) as scheduler:
            empty = scheduler.statistics()
            assert (empty.rows, empty.live, empty.queued, empty.steps) == (3, 0, 0, 0)
            assert empty.kv_capacity_tokens == 3 * 32
            jobs = [scheduler.submit_nowait(asking("12345", tokens=4)) for _ in range(4)]
            for job in jobs:
                await job.result()
            end = scheduler.statistics()
        assert (end.finished, end.live, end.queued, end.queued_tokens, end.kv_tokens) == (4, 0, 0, 0, 0)
        assert end.prompt_tokens == 20
        assert end.generated_tokens == 16
        assert end.row_steps == 16
        assert end.steps == 8  # three rows for four steps, then the fourth job
        # Rows of one length step together: the only padding is the upper triangle of each prompt.
        prompt_cells, decode_cells = 1 + 2 + 3 + 4 + 5, 6 + 7 + 8
        assert end.real_cells == 4 * (prompt_cells + decode_cells)
        assert end.padded_cells == 4 * (25 + decode_cells)
        assert end.forward_s > 0
        assert end.sample_s > 0
        assert end.step_s >= end.forward_s + end.sample_s
        assert end.healthy
        assert end.model == "tiny-llama"

    async def test_metrics_count_each_outcome_once(self):
        now = 0.0
        async with Scheduler(tiny_model(), rows=1, clock=lambda: now) as scheduler:
            gate, first = await held(scheduler)
            expiring = await scheduler.submit(asking(deadline_s=1.0))
            leaving = await scheduler.submit(asking())
            failing = await scheduler.submit(asking(processors=[lambda ids, scores: None]))
            nothing = await scheduler.submit(asking(tokens=0))
            several = asking(n=2)
            with pytest.raises(InvalidRequest):
                await scheduler.submit(several)
            assert metric(scheduler, "requests_queued", priority="normal") == 3
            assert metric(scheduler, "rows_live") == 1
            now = 2.0
            leaving.cancel()
            gate.open()
            for job in (first, expiring, leaving, failing, nothing):
                await job.result()
            outcomes = ("completed", "cancelled", "expired", "failed", "rejected")
            counted = [metric(scheduler, "requests_total", outcome=outcome) for outcome in outcomes]
            assert counted == [2, 1, 1, 1, 1]
            assert metric(scheduler, "rejected_total", reason="invalid") == 1
            assert metric(scheduler, "generated_tokens_total") == 8
            assert metric(scheduler, "prompt_tokens_total", source="computed") == 1 + 8
            assert metric(scheduler, "prompt_tokens_total", source="reused") == 0
            assert metric(scheduler, "steps_total") == scheduler.statistics().steps == 9
            assert metric(scheduler, "rows_capacity") == 1
            assert metric(scheduler, "request_seconds_count") == 5
            assert metric(scheduler, "queue_seconds_count") == 2
            assert metric(scheduler, "time_to_first_token_seconds_count") == 1
            assert metric(scheduler, "inter_token_seconds_count") == 7
            assert metric(scheduler, "step_rows_count") == 9
            assert metric(scheduler, "generated_tokens_sum") == 8

    async def test_levels_are_back_to_zero_when_all_is_done(self):
        async with Scheduler(tiny_model(), rows=2) as scheduler:
            for job in [await scheduler.submit(asking()) for _ in range(4)]:
                await job.result()
            await scheduler.drain()
            assert metric(scheduler, "rows_live") == 0
            assert metric(scheduler, "requests_queued", priority="normal") == 0
            assert metric(scheduler, "kv_tokens") == 0
            assert metric(scheduler, "oldest_queued_seconds") == 0

    async def test_the_oldest_waits_on_while_a_step_takes_long(self):
        now = 100.0
        async with Scheduler(tiny_model(), rows=1, clock=lambda: now) as scheduler:
            gate, _ = await held(scheduler)
            waiting = scheduler.submit_nowait(asking())
            assert metric(scheduler, "oldest_queued_seconds") == 0
            now = 107.0
            await until(lambda: metric(scheduler, "oldest_queued_seconds") == 7)  # and no step has ended meanwhile
            gate.open()
            await waiting.result()

    async def test_window_recomputes_are_counted(self):
        async with Scheduler(tiny_model()) as scheduler:
            job = await scheduler.submit(asking("x" * 32, tokens=4, overflow="slide"))
            assert (await job.result()).usage.window_recomputes == 3
            assert metric(scheduler, "window_recomputes_total") == 3
            assert metric(scheduler, "prompt_tokens_total", source="computed") == 4 * 32
