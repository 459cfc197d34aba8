"""A step that raises: by default everything ends and health turns red; with restarts, everything goes on."""

import pytest

from drumline import EngineFailed, Regex, Request, Scheduler
from drumline.scheduler.policy import FirstCome
from tests.compositions import answer
from tests.drive import asking, generate, metric, sampled
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


class FailsAt:
    """A backend whose forward pass raises at the given steps."""

    def __init__(self, backend: object, steps: set[int]) -> None:
        self._backend, self._steps, self._count = backend, steps, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def forward(self, *arguments: object) -> object:
        self._count += 1
        if self._count in self._steps:
            raise MemoryError(f"step {self._count}")
        return self._backend.forward(*arguments)


def failing(scheduler: Scheduler, *steps: int) -> None:
    scheduler.backend = scheduler._runner._backend = FailsAt(scheduler.backend, set(steps))


@pytest.mark.parametrize("precision", ["int8", "float32"])
async def test_all_goes_on_from_its_tokens(precision: str):
    model = tiny_model(window=128, precision=precision)
    requests = [sampled(1, tokens=20), asking(tokens=12, prompt="one two"), sampled(2, tokens=9, n=2), asking(tokens=5)]
    expected = [(await generate(model, request))[0] for request in requests]
    async with Scheduler(model, rows=3, restarts=2) as scheduler:
        failing(scheduler, 3, 8)
        jobs = [await scheduler.submit(request) for request in requests]
        results = [await job.result() for job in jobs]
        assert scheduler.healthy
        assert metric(scheduler, "restarts_total") == 2
        scheduler.check_integrity()
        after = await (await scheduler.submit(asking(tokens=3))).result()
        assert after.stop_reason == "budget"
    assert list(map(answer, results)) == list(map(answer, expected))
    assert sum(result.usage.resumes for result in results) >= 3


async def test_what_was_pinned_is_lost_and_can_be_pinned_again():
    model = tiny_model(window=128, precision="int8")
    async with Scheduler(model, rows=2, restarts=1) as scheduler:
        pin = await scheduler.pin(Request(prompt_ids=(9,) * 40))
        failing(scheduler, 1)
        await (await scheduler.submit(asking())).result()
        pin.release()
        again = await scheduler.pin(Request(prompt_ids=(9,) * 40))
        after = await (await scheduler.submit(Request(prompt_ids=(*((9,) * 40), 5), max_tokens=2))).result()
        assert after.usage.reused_tokens == 40
        again.release()
        scheduler.check_integrity()


async def test_only_a_step_is_answered_so():
    """What fails between steps may have counted a token already: nothing is drawn twice, everything ends."""

    class Failing(FirstCome):
        def served(self, entry: object, prompt_tokens: int, generated_tokens: int) -> None:
            if generated_tokens:
                raise RuntimeError("of a policy")

    async with Scheduler(tiny_model(), rows=1, restarts=5, policy=Failing()) as scheduler:
        result = await (await scheduler.submit(asking())).result()
        assert (result.stop_reason, result.error) == ("error", "RuntimeError: of a policy")
        assert not scheduler.healthy
        assert metric(scheduler, "restarts_total") == 0


async def test_a_restart_that_fails_ends_everything():
    async with Scheduler(tiny_model(), rows=1, restarts=5) as scheduler:
        failing(scheduler, 2)

        def broken() -> None:
            raise MemoryError("again")

        scheduler._rows.restart = broken
        result = await (await scheduler.submit(asking())).result()
        assert (result.stop_reason, result.error) == ("error", "MemoryError: again")
        assert not scheduler.healthy


async def test_grammars_and_prompts_go_on_too():
    model = tiny_model(window=128, precision="int8")
    requests = [
        Request(prompt="x", max_tokens=30, structured=Regex(regex="[a-f]{20}"), logprobs=0),
        Request(prompt="the drum and the other drum", max_tokens=8, prompt_logprobs=1, ignore_eos=True),
    ]
    expected = [(await generate(model, request))[0] for request in requests]
    async with Scheduler(model, rows=2, step_tokens=16, restarts=3) as scheduler:
        failing(scheduler, 2, 5, 9)
        results = [await job.result() for job in [await scheduler.submit(request) for request in requests]]
    assert list(map(answer, results)) == list(map(answer, expected))
    assert results[1].prompt_logprobs == expected[1].prompt_logprobs


async def test_not_for_ever():
    async with Scheduler(tiny_model(), rows=1, restarts=2) as scheduler:
        failing(scheduler, *range(1, 100))
        job = await scheduler.submit(asking())
        result = await job.result()
        assert (result.stop_reason, result.error) == ("error", "MemoryError: step 3")
        assert not scheduler.healthy
        with pytest.raises(EngineFailed):
            await scheduler.submit(asking())


async def test_off_by_default():
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        failing(scheduler, 2)
        result = await (await scheduler.submit(asking())).result()
        assert result.error == "MemoryError: step 2"
        assert not scheduler.healthy
        assert metric(scheduler, "restarts_total") == 0
