"""Ways in which one request once could have taken the others, or the engine, with it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from drumline import InvalidRequest, QueueFull, Request, SamplingParams, Scheduler, SchedulerClosed
from drumline.model.sampling import log_probabilities
from tests.drive import generate, metric
from tests.tiny import ByteTokenizer, tiny_model

NEIGHBOUR = Request(prompt="neighbour", max_tokens=6, ignore_eos=True)


async def beside_neighbour(request: Request, **changes: object):
    """The request's result; the neighbour's answer must be the one it gives alone."""
    model = replace(tiny_model(), **changes)
    (alone,) = await generate(tiny_model(), NEIGHBOUR)
    result, neighbour = await generate(model, request, NEIGHBOUR, rows=2)
    assert neighbour.token_ids == alone.token_ids
    return result


class Nameless(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no words for it")

    __str__ = __repr__


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1), GeneratorExit(), Nameless()])
async def test_whatever_a_processor_raises_is_its_rows_trouble(error: BaseException):
    def fails(ids: Sequence[int], scores: NDArray) -> NDArray:
        raise error

    result = await beside_neighbour(Request(prompt="abc", processors=(fails,)))
    assert result.stop_reason == "error"
    assert type(error).__name__ in (result.error or "")


async def test_masks_do_not_reach_into_a_processors_array():
    favourite = np.zeros(259)
    favourite[1] = 5.0  # EOS
    favourite.flags.writeable = False
    request = Request(prompt="abc", max_tokens=8, min_tokens=2, processors=(lambda ids, scores: favourite,))
    result = await beside_neighbour(request)
    assert (result.stop_reason, len(result.token_ids)) == ("eos", 3)
    assert favourite[1] == 5.0


async def test_a_processor_cannot_change_the_rows_ids():
    def meddles(ids: Sequence[int], scores: NDArray) -> NDArray:
        ids.clear()
        return scores

    result = await beside_neighbour(Request(prompt="abc", processors=(meddles,)))
    assert result.stop_reason == "error"
    assert "clear" in (result.error or "")


class NarrowTokenizer(ByteTokenizer):
    def token_bytes(self, token_id: int) -> bytes:
        if token_id == 258:
            raise KeyError(token_id)
        return super().token_bytes(token_id)


async def test_an_id_that_the_tokenizer_fails_on_ends_its_row_alone():
    request = Request(prompt="abc", sampling=SamplingParams(allowed_ids=(258,)))
    result = await beside_neighbour(request, tokenizer=NarrowTokenizer())
    assert result.stop_reason == "error"
    assert "token 258" in (result.error or "")


def test_log_probabilities_are_numbers_for_json_too():
    logits = np.array([3e38, -3e38], dtype=np.float32)
    logprob, top = log_probabilities(logits, 1, 2)
    assert np.isfinite(logprob)
    assert top == ((0, 0.0), (1, float(np.finfo(np.float32).min)))


async def test_cancelling_the_schedulers_loop_leaves_nobody_waiting():
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        running = await scheduler.submit(Request(prompt="abc", max_tokens=20, ignore_eos=True))
        waiting = await scheduler.submit(Request(prompt="abc"))
        (loop_task,) = (task for task in asyncio.all_tasks() if task.get_name() == "drumline-main-loop")
        await asyncio.sleep(0)
        loop_task.cancel()
        results = [await running.result(), await waiting.result()]
        assert {result.stop_reason for result in results} == {"error"}
        assert not scheduler.healthy
        assert not scheduler.ready


async def test_a_scheduler_is_entered_once():
    scheduler = Scheduler(tiny_model())
    async with scheduler:
        with pytest.raises(SchedulerClosed, match="once"):
            await scheduler.__aenter__()
    with pytest.raises(SchedulerClosed, match="once"):
        await scheduler.__aenter__()


async def test_a_budget_beyond_the_window_costs_the_queue_only_what_fits():
    async with Scheduler(tiny_model(), rows=1, queue_tokens=100) as scheduler:
        jobs = [scheduler.submit_nowait(Request(prompt="abc", max_tokens=1_000_000)) for _ in range(3)]
        # Each counts 3 + 30, since 3 tokens in a window of 32 leave room for 30.
        assert scheduler.statistics().queued_tokens == 99
        with pytest.raises(QueueFull, match="tokens"):
            scheduler.submit_nowait(Request(prompt="abc"))
        for job in jobs:
            job.cancel()


def test_a_budget_without_bound_is_refused():
    with pytest.raises(InvalidRequest, match="max_tokens"):
        Request(prompt="abc", max_tokens=1_000_001)


async def test_every_pass_over_a_slid_window_is_prefill():
    model = tiny_model("course", window=17)
    request = Request(prompt_ids=range(3, 20), max_tokens=4, ignore_eos=True, overflow="slide")
    async with Scheduler(model, rows=1, step_tokens=16) as scheduler:
        result = await (await scheduler.submit(request)).result()
        assert [record.input_length for record in result.steps] == [16, 1] * 4
        assert scheduler.statistics().prompt_tokens == 4 * 17
    assert result.usage.window_recomputes == 3
    assert result.timings.decode_s == 0.0


async def test_a_stop_string_ends_nothing_before_min_tokens():
    request = Request(prompt="abc", max_tokens=12, ignore_eos=True)
    (free,) = await generate(tiny_model(), request)
    first = next(character for character in free.text if character.isprintable())
    early = request.model_copy(update={"stop": (first,)})
    (stopped,) = await generate(tiny_model(), early)
    assert stopped.stop_reason == "stop"
    (held,) = await generate(tiny_model(), early.model_copy(update={"min_tokens": 12}))
    assert (held.stop_reason, held.text) == ("budget", free.text)


async def test_queue_position_counts_jobs():
    async with Scheduler(tiny_model(), rows=4) as scheduler:
        jobs = [scheduler.submit_nowait(Request(prompt="abc", n=n, id=f"n{n}")) for n in (4, 3, 1)]
        assert [scheduler.queue_position(job.id) for job in jobs] == [0, 1, 2]
        assert scheduler.queue_position("unknown") is None
        for job in jobs:
            await job.result()
        assert scheduler.queue_position("n1") is None


async def test_a_refused_duplicate_counts_as_one():
    async with Scheduler(tiny_model()) as scheduler:
        job = scheduler.submit_nowait(Request(prompt="abc", id="twin"))
        with pytest.raises(InvalidRequest, match="twin"):
            scheduler.submit_nowait(Request(prompt="abc", id="twin"))
        await job.result()
        assert metric(scheduler, "rejected_total", reason="duplicate_id") == 1
        assert metric(scheduler, "requests_total", outcome="rejected") == 1


async def test_waiting_submits_get_in_by_arrival():
    async with Scheduler(tiny_model(), rows=1, queue_requests=1) as scheduler:
        order: list[int] = []

        async def send(number: int) -> None:
            job = await scheduler.submit(Request(prompt="abc", max_tokens=2, ignore_eos=True))
            order.append(number)
            await job.result()

        await asyncio.gather(*(send(number) for number in range(12)))
    assert order == sorted(order)
