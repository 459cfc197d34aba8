"""Random submits, cancels, deadlines, preemptions and steps, against a plain account of what must come of them.

The scheduler's loop is driven by hand, one turn at a time, so that everything between two steps is reproducible.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline import QueueFull, Request, SamplingParams, Scheduler
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.policy import PRIORITIES
from tests.drive import generate
from tests.tiny import tiny_model

MODEL = tiny_model(window=96, precision="int8")
ANSWERS: dict[tuple[object, ...], tuple[int, ...]] = {}
PROMPTS = [tuple(3 + place for place in range(length)) for length in (1, 5, 20, 45)]


@dataclass
class Asked:
    """What was submitted, and what was done to it."""

    job: GenerationJob
    request: Request
    deadline_at: float
    cancelled: bool = False


class Life(RuleBasedStateMachine):
    """Every accepted job ends once, for a reason that its own story gives; rows and counts add up after every turn."""

    @initialize(
        rows=st.integers(1, 3),
        step_tokens=st.sampled_from([16, 40]),
        reuse=st.booleans(),
        drafts=st.sampled_from([0, 5]),
    )
    def start(self, rows: int, step_tokens: int, reuse: bool, drafts: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 0.0
        self.asked: list[Asked] = []
        self.refused = 0
        self.scheduler = self.wait(self._make(rows, step_tokens, reuse, drafts))

    async def _make(self, rows: int, step_tokens: int, reuse: bool, drafts: int) -> Scheduler:
        scheduler = Scheduler(
            MODEL, rows=rows, step_tokens=step_tokens, queue_requests=6, reuse=reuse, draft_tokens=drafts,
            clock=lambda: self.now,
        )  # fmt: skip
        await scheduler.__aenter__()
        scheduler._tasks[0].cancel()  # its turns are taken here
        await asyncio.gather(scheduler._tasks[0], return_exceptions=True)
        scheduler._failure = None
        return scheduler

    def wait(self, what: Coroutine[object, object, object]) -> object:
        return self.loop.run_until_complete(what)

    @rule(
        prompt=st.sampled_from(PROMPTS), tokens=st.integers(1, 30), priority=st.sampled_from(PRIORITIES),
        tenant=st.sampled_from("ab"), seconds=st.sampled_from([None, 3.0, 50.0]), seed=st.integers(0, 2),
        n=st.integers(1, 2),
    )  # fmt: skip
    def submit(
        self, prompt: tuple[int, ...], tokens: int, priority: str, tenant: str, seconds: float | None, seed: int, n: int
    ) -> None:
        n = min(n, self.scheduler.config.rows)
        sampling = SamplingParams(temperature=1.0, top_k=4, seed=seed) if seed else SamplingParams()
        request = Request(
            prompt_ids=prompt, max_tokens=tokens, priority=priority, tenant=tenant, deadline_s=seconds, ignore_eos=True,
            sampling=sampling, n=n,
        )  # fmt: skip

        async def put() -> GenerationJob:
            return self.scheduler.submit_nowait(request)

        queued = self.scheduler.statistics().queued
        try:
            job = self.wait(put())
        except QueueFull:
            assert queued + n > 6
            self.refused += 1
            return
        deadline = float("inf") if seconds is None else self.now + seconds
        self.asked.append(Asked(job, request, deadline))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked))
        asked.cancelled = asked.cancelled or asked.job.state != "done"
        asked.job.cancel()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.scheduler.preempt(data.draw(st.sampled_from(self.asked)).job)

    @rule(turns=st.integers(1, 12))
    def step(self, turns: int) -> None:
        for _ in range(turns):
            due = [asked for asked in self.asked if asked.cancelled or self.now >= asked.deadline_at]
            self.wait(self.scheduler._turn())
            assert all(asked.job.state == "done" for asked in due)

    @rule(seconds=st.sampled_from([0.5, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_integrity()
        statistics = self.scheduler.statistics()
        open_jobs = [asked for asked in self.asked if asked.job.state != "done"]
        waiting = sum(s.stop_reason is None for asked in open_jobs for s in asked.job.sequences)
        assert statistics.live + statistics.queued == waiting
        assert statistics.finished == len(self.asked) - len(open_jobs)
        assert statistics.live <= self.scheduler.config.rows

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(2_000):
            if all(asked.job.state == "done" for asked in self.asked):
                break
            self.wait(self.scheduler._turn())
        for asked in self.asked:
            self._ended_as_it_should(asked)
        self.scheduler.check_integrity()
        self.scheduler._closed = True
        self.scheduler._torch.shutdown()
        self.wait(self._stop())
        self.loop.close()

    async def _stop(self) -> None:
        for task in self.scheduler._tasks:
            task.cancel()
        await asyncio.gather(*self.scheduler._tasks, return_exceptions=True)

    def _ended_as_it_should(self, asked: Asked) -> None:
        result = self.wait(asked.job.result())
        for choice in result.choices:
            if choice.stop_reason == "cancelled":
                assert asked.cancelled
            elif choice.stop_reason == "deadline":
                assert self.now >= asked.deadline_at
                assert not asked.cancelled
            else:
                assert choice.stop_reason == "budget"
                assert len(choice.token_ids) == asked.request.max_tokens
            assert choice.token_ids == self._alone(asked.request, choice.choice)[: len(choice.token_ids)]

    def _alone(self, request: Request, choice: int) -> tuple[int, ...]:
        """What the request's choice says with nothing beside it."""
        key = (request.prompt_ids, request.sampling.seed, choice)
        if key not in ANSWERS:
            whole = request.model_copy(update={"n": choice + 1, "max_tokens": 30, "deadline_s": None})
            result, *_ = self.wait(generate(MODEL, whole, rows=2, draft_tokens=0, reuse=False))
            ANSWERS[key] = result.choices[choice].token_ids
        return ANSWERS[key]


TestLife = Life.TestCase
TestLife.settings = settings(deadline=None, max_examples=25, stateful_step_count=40)
