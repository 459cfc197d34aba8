"""How the ends of requests are counted by who accepts them in the scheduler's stead."""

from drumline import Scheduler
from tests.drive import metric
from tests.tiny import tiny_model


async def test_a_job_that_the_scheduler_never_had_is_an_outcome_without_times():
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        scheduler.outcomes.ended("a/j", "failed", None, seated=False)
        assert metric(scheduler, "requests_total", outcome="failed") == 1
        assert metric(scheduler, "request_seconds_count") == 0
