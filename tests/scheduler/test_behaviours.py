"""Behaviours that broke other systems, each a test; the number is that of the list that they come from.

Elsewhere: 13 `test_bad_input`, 14 and 16 `test_classes`, 18 `test_restart` and `test_isolation`, 19 `test_exactness`,
21 `test_structured`.
"""

import asyncio
import gc
import json
import os
import random
import sys
import threading
from collections import Counter

import psutil
import pytest

from drumline import InvalidRequest, QueueFull, Request, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel
from tests.drive import generate, metric, until
from tests.processes import run_python
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = 1


def asking(prompt: str = "the drum", tokens: int = 8, **fields: object) -> Request:
    return Request(prompt=prompt, max_tokens=tokens, **{"ignore_eos": True, **fields})


def drawn(seed: int | None = None, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, **fields)


def exact(window: int = 64) -> LanguageModel:
    return tiny_model(window=window, precision="int8")


async def test_01_a_greedy_prompt_alone_and_with_fillers(smollm2_int8: LanguageModel):
    """Seven others, staggered, twenty runs."""
    for model, runs in ((exact(), 20), (smollm2_int8, 2)):
        (alone,) = await generate(model, asking(tokens=12, logprobs=0), rows=1)
        dice = random.Random(1)
        async with Scheduler(model, rows=8) as scheduler:
            for _ in range(runs):
                fillers = [asking("x" * dice.randrange(1, 40), dice.randrange(8, 20)) for _ in range(7)]
                first = [await scheduler.submit(filler) for filler in fillers[:4]]
                staggered = scheduler.statistics().steps + dice.randrange(1, 6)
                await until(lambda staggered=staggered: scheduler.statistics().steps >= staggered)
                job = await scheduler.submit(asking(tokens=12, logprobs=0))
                rest = [await scheduler.submit(filler) for filler in fillers[4:]]
                result = await job.result()
                assert (result.token_ids, result.choices[0].logprobs) == (alone.token_ids, alone.choices[0].logprobs)
                await asyncio.gather(*(other.result() for other in first + rest))


async def test_02_a_seeded_request_beside_an_unseeded_one():
    (alone,) = await generate(exact(), asking(sampling=drawn(42)))
    results = await generate(exact(), asking(sampling=drawn()), asking(sampling=drawn(42)), asking(sampling=drawn()))
    assert results[1].token_ids == alone.token_ids
    assert len({result.seed for result in results}) == 3


async def test_03_a_seed_twice_then_another():
    async with Scheduler(exact(), rows=2) as scheduler:
        answers = [
            (await (await scheduler.submit(asking(sampling=drawn(seed)))).result()).token_ids for seed in (42, 42, 43)
        ]
    assert answers[0] == answers[1] != answers[2]


async def test_04_two_processes_without_a_seed_differ():
    """This one, and another."""
    program = (
        "import asyncio; from tests.tiny import tiny_model; from tests.drive import generate; from drumline import *\n"
        "request = Request(prompt='a', max_tokens=12, sampling=SamplingParams(temperature=1.0), ignore_eos=True)\n"
        "[result] = asyncio.run(generate(tiny_model(), request))\n"
        "print(*result.token_ids)"
    )
    theirs = run_python("-c", program, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    assert theirs.returncode == 0, theirs.stderr
    request = Request(prompt="a", max_tokens=12, sampling=SamplingParams(temperature=1.0), ignore_eos=True)
    [ours] = await generate(tiny_model(), request)
    said = [int(token_id) for token_id in theirs.stdout.split()]
    assert len(said) == len(ours.token_ids) == 12
    assert said != list(ours.token_ids)


async def test_05_the_next_tenant_of_a_constrained_row_is_free():
    async with Scheduler(exact(), rows=1) as scheduler:
        free = await (await scheduler.submit(asking(sampling=drawn(7)))).result()
        bound = await (await scheduler.submit(asking(sampling=drawn(7, allowed_ids=(9,))))).result()
        again = await (await scheduler.submit(asking(sampling=drawn(7)))).result()
    assert set(bound.token_ids) == {9}
    assert again.token_ids == free.token_ids


async def test_06_eos_waits_for_min_tokens():
    eager = SamplingParams(logit_bias={EOS: 100.0})
    (result,) = await generate(exact(), asking(ignore_eos=False, min_tokens=4, sampling=eager, tokens=20))
    assert len(result.token_ids) == 5
    assert EOS not in result.token_ids[:4]
    assert (result.token_ids[4], result.stop_reason) == (EOS, "eos")


async def test_07_no_start_of_a_stop_string_leaves():
    """The model is made to say the alphabet, letter by letter."""
    alphabet = "ABCDEFGHIJKLM"

    def spelled(ids: tuple[int, ...], logits: object) -> object:
        logits[:] = -1e9
        logits[3 + ord(alphabet[len(ids) - 8])] = 0.0
        return logits

    async with Scheduler(exact(), rows=1) as scheduler:
        job = await scheduler.submit(asking("the drum", 13, stop=["DEFGHIJ"], processors=(spelled,)))
        chunks = [chunk async for chunk in job]
        result = await job.result()
    assert [chunk.text for chunk in chunks[:-1]] == ["A", "B", "C"]
    assert "".join(chunk.text for chunk in chunks) == result.text == "ABC"
    assert all(chunk.text or chunk is chunks[-1] for chunk in chunks)
    assert result.stop_reason == "stop"


@pytest.mark.parametrize("token_id", [259, 260, -1])
@pytest.mark.parametrize("field", ["sampling.logit_bias", "stop_ids"])
async def test_08_ids_beyond_the_vocabulary(field: str, token_id: int):
    bad = {"stop_ids": [token_id]} if field == "stop_ids" else {"sampling": SamplingParams(logit_bias={token_id: 1.0})}
    async with Scheduler(exact(), rows=1) as scheduler:
        with pytest.raises(InvalidRequest, match="outside 0 … 258") as caught:
            await scheduler.submit(asking(**bad))
        assert caught.value.field == field
        assert (await (await scheduler.submit(asking())).result()).stop_reason == "budget"


async def test_09_the_same_id_twice_while_running():
    async with Scheduler(exact(), rows=2) as scheduler:
        first = await scheduler.submit(asking(tokens=30, id="a"))
        with pytest.raises(InvalidRequest, match="id: a job a is queued or running"):
            await scheduler.submit(asking(id="a"))
        assert len((await first.result()).token_ids) == 30
        await (await scheduler.submit(asking(id="a"))).result()


async def test_10_cancel_at_every_step_boundary():
    """Of a prompt's life: queued, five chunks, and every token."""
    async with Scheduler(exact(), rows=2, step_tokens=16, draft_tokens=0, reuse=False) as scheduler:
        for steps in range(14):
            before = scheduler.statistics().steps
            job = await scheduler.submit(asking("p" * 50, 10))
            await until(lambda before=before, steps=steps: scheduler.statistics().steps >= before + steps)
            job.cancel()
            result = await job.result()
            assert result.stop_reason in ("cancelled", "budget")
            assert scheduler.statistics().live == 0
            scheduler.check_integrity()
        assert metric(scheduler, "rows_live") == 0


async def test_11_cancelling_one_of_four():
    requests = [asking("abcd"[place:], 20, sampling=drawn(place)) for place in range(4)]
    expected = [(await generate(exact(), request))[0].token_ids for request in requests]
    async with Scheduler(exact(), rows=4) as scheduler:
        jobs = [await scheduler.submit(request) for request in requests]
        await until(lambda: jobs[1].generated >= 5)
        jobs[1].cancel()
        results = [await job.result() for job in jobs]
    assert results[1].stop_reason == "cancelled"
    assert [results[place].token_ids for place in (0, 2, 3)] == [expected[place] for place in (0, 2, 3)]


async def test_12_five_cancels_are_five():
    async with Scheduler(exact(), rows=2) as scheduler:
        jobs = [await scheduler.submit(asking(tokens=50)) for _ in range(6)]
        await until(lambda: jobs[0].generated >= 2)
        for job in jobs[:5]:
            job.cancel()
            job.cancel()
        results = [await job.result() for job in jobs]
        jobs[0].cancel()
        counts = {
            outcome: metric(scheduler, "requests_total", outcome=outcome) for outcome in ("cancelled", "completed")
        }
    assert Counter(result.stop_reason for result in results) == {"cancelled": 5, "budget": 1}
    assert counts == {"cancelled": 5, "completed": 1}


async def test_15_ten_thousand_submits():
    """Rejections are counted, and memory stays flat."""
    process = psutil.Process()
    async with Scheduler(exact(), rows=2, queue_requests=50) as scheduler:
        sizes = []
        for _ in range(4):
            refused = 0
            for _ in range(2_500):
                try:
                    scheduler.submit_nowait(asking(tokens=1))
                except QueueFull:
                    refused += 1
            assert refused >= 2_400
            await until(lambda: scheduler.statistics().queued == 0 and scheduler.statistics().live == 0)
            gc.collect()
            sizes.append(process.memory_info().rss)
        total = metric(scheduler, "rejected_total", reason="queue_full") + metric(
            scheduler, "requests_total", outcome="completed"
        )
    assert total == 10_000
    assert sizes[-1] - sizes[1] < 5 * 2**20


async def test_17_a_drain_in_the_middle():
    async with Scheduler(exact(128), rows=1) as scheduler:
        jobs = [await scheduler.submit(asking(tokens=100)) for _ in range(3)]
        await until(lambda: jobs[0].generated >= 2)
        await scheduler.drain(timeout=0)
        results = [await job.result() for job in jobs]
    assert [result.stop_reason for result in results] == ["cancelled"] * 3
    assert len(results[0].token_ids) >= 2
    assert results[2].token_ids == ()


async def test_20_a_closed_generator_leaves_nothing_behind():
    async with Scheduler(exact(), rows=1) as scheduler:
        job = await scheduler.submit(asking(tokens=50))
        chunks = aiter(job)
        await anext(chunks)
        await chunks.aclose()
        assert (await job.result()).stop_reason == "cancelled"
        assert scheduler.statistics().live == 0
        assert len(asyncio.all_tasks()) == 3  # this one, the loop, the lag watch
        await (await scheduler.submit(asking())).result()


async def test_22_fifty_schedulers():
    """Threads, memory and files flat."""
    process, model = psutil.Process(), exact()
    marks = []
    for number in range(50):
        async with Scheduler(model, rows=2) as scheduler:
            await (await scheduler.submit(asking())).result()
        del scheduler
        if number in (9, 49):
            gc.collect()
            marks.append((threading.active_count(), process.num_fds(), process.memory_info().rss))
    assert marks[1][0] <= marks[0][0]
    assert marks[1][1] <= marks[0][1]
    assert marks[1][2] - marks[0][2] < 5 * 2**20


def test_21_a_schema_that_is_none():
    with pytest.raises(InvalidRequest, match="structured"):
        Request.from_json(json.dumps({"prompt": "x", "structured": {"json_object": False}}))
