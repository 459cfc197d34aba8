"""The picture behind the live views, at moments that a test holds still."""

import pytest

from drumline import Request, Scheduler
from drumline.scheduler.live_view import LiveView
from drumline.scheduler.recent import ANSWERS, MOST_SHOWN, SECONDS, Recent
from tests.drive import Gate, asking, held, until
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


async def test_rows_and_queue_as_they_stand():
    now = 100.0
    async with Scheduler(tiny_model(window=64), rows=1, name="press", clock=lambda: now) as scheduler:
        now = 101.0
        gate = Gate()
        asked = Request(
            prompt="h" * 9, max_tokens=5, ignore_eos=True, tenant="boiler", priority="high", processors=(gate,)
        )
        running = await scheduler.submit(asked, label="boiler/job-1")
        await gate.arrived()
        gate.step()
        await gate.arrived()
        now = 103.5
        others = [scheduler.submit_nowait(asking(tokens=2, priority=name)) for name in ("low", "low", "normal")]
        now = 104.0
        view = scheduler.live()
        gate.open()
        for job in (running, *others):
            await job.result()
    (row,) = view.rows
    assert (row.row, row.job, row.choice, row.tenant, row.priority) == (0, "boiler/job-1", 0, "boiler", "high")
    assert (row.phase, row.generated_tokens, row.budget_tokens) == ("decode", 1, 5)
    assert row.cached_tokens == row.prompt_tokens
    assert row.age_s == 3.0
    assert (view.queued, view.oldest_queued_s) == ({"low": 2, "normal": 1, "high": 0}, 0.5)
    assert (view.name, view.capacity, view.state, view.troubles) == ("press", 1, "ready", ())
    assert view.uptime_s == 4.0
    assert (view.finished, view.answers, view.first_token_s) == (0, (), None)
    assert LiveView.from_json(view.model_dump_json()) == view


async def test_a_prompt_on_its_way_and_one_that_waits_for_it():
    prompt = tuple(range(3, 200))
    model = tiny_model(window=256, precision="int8")
    async with Scheduler(model, rows=2, step_tokens=16) as scheduler:
        jobs = [scheduler.submit_nowait(Request(prompt_ids=prompt, max_tokens=1)) for _ in range(2)]
        await until(lambda: scheduler.statistics().prompt_tokens > 0)
        first, second = scheduler.live().rows
        for job in jobs:
            await job.result()
    assert (first.phase, second.phase) == ("prefill", "shares a prefix")
    assert 0 < first.cached_tokens < len(prompt)
    assert (second.cached_tokens, second.tokens_per_s) == (0, 0.0)


async def test_answers_the_newest_first_with_text_where_it_is_asked_for():
    async with Scheduler(tiny_model(window=64), rows=2) as scheduler:
        results = [await (await scheduler.submit(asking(tokens=1 + place % 3))).result() for place in range(30)]
        cancelled = scheduler.submit_nowait(asking())
        cancelled.cancel()
        await cancelled.result()
        view, shown = scheduler.live(), scheduler.live(show_text=True)
    assert [answer.job for answer in view.answers] == [cancelled.id, *(r.id for r in results[:-MOST_SHOWN:-1])]
    assert (view.answers[0].status, view.answers[0].first_token_s) == ("cancelled", None)
    newest = view.answers[1]
    assert (newest.status, newest.stop_reason) == ("completed", "budget")
    assert newest.generated_tokens == results[-1].usage.generated_tokens
    assert newest.total_s == results[-1].timings.total_s
    assert {answer.text for answer in view.answers} == {None}
    assert [answer.text for answer in shown.answers[1:]] == [r.text for r in results[:-MOST_SHOWN:-1]]
    assert view.finished == 31
    firsts = [result.timings.first_token_s for result in results]
    assert min(firsts) <= view.first_token_s.p50 <= view.first_token_s.p90 <= view.first_token_s.p99 <= max(firsts)
    gaps = [answer.inter_token_s for answer in view.answers]
    assert all((gap is None) == (answer.generated_tokens < 2) for gap, answer in zip(gaps, view.answers, strict=True))


async def test_what_is_wrong_is_in_the_picture():
    now = 0.0
    async with Scheduler(tiny_model(window=64), rows=1, clock=lambda: now, stall_s=7.0) as scheduler:
        gate, job = await held(scheduler)
        now = 7.5
        view = scheduler.live()
        gate.open()
        await job.result()
        assert "a step has been running for 8 s" in view.troubles
        assert view.state == "failed"
        await scheduler.drain()
        assert scheduler.live().state == "draining"


def test_tokens_second_by_second():
    now = 1_000.0
    recent = Recent(lambda: now)

    def told(tokens: str) -> tuple[int, ...]:
        return recent.as_dict(show_text=False)[f"{tokens}_by_second"]

    for at, prompt, generated in ((1_000.0, 64, 1), (1_000.9, 0, 2), (1_001.1, 5, 4), (1_003.0, 0, 8)):
        now = at
        recent.tokens(prompt, generated)
    now = 1_004.5
    assert told("generated") == (*[0] * (SECONDS - 4), 3, 4, 0, 8)
    assert told("prompt") == (*[0] * (SECONDS - 4), 64, 5, 0, 0)
    now = 1_004.0 + SECONDS
    assert sum(told("generated")) == 0
    for second in range(500):
        now = 2_000.0 + second
        recent.tokens(1, 1)
    assert told("generated") == (1,) * SECONDS  # the second that is not over yet does not count


async def test_what_is_remembered_is_bounded():
    async with Scheduler(tiny_model(window=64), rows=2) as scheduler:
        for _ in range(ANSWERS + 10):
            await (await scheduler.submit(asking(tokens=0))).result()
        view = scheduler.live()
        assert (len(scheduler._reporting.recent.answers), len(view.answers)) == (ANSWERS, MOST_SHOWN)
        assert view.finished == ANSWERS + 10
        assert view.inter_token_s is None
