"""Log-probabilities of a prompt's own ids, each given those before it, against the uncached reference."""

import pytest
import torch

from drumline import InvalidRequest, Request, Result, Scheduler
from drumline.model.language_model import LanguageModel
from drumline.model.reference import uncached_logits
from tests.compositions import answer
from tests.drive import generate, until
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple(3 + place * 11 % 240 for place in range(40))


def asking(**fields: object) -> Request:
    return Request(**{"prompt_ids": PROMPT, "max_tokens": 3, "logprobs": 2, "prompt_logprobs": 2, **fields})


def told(result: Result) -> list[tuple[int, float]]:
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    return [(entry.id, entry.logprob) for entry in result.prompt_logprobs[1:]]


@pytest.mark.parametrize("family", FAMILIES)
async def test_they_are_those_of_the_plain_pass(family: str):
    model = tiny_model(family, window=64)
    (result,) = await generate(model, asking(), step_tokens=16)
    logits = uncached_logits(model, PROMPT)
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert [token_id for token_id, _ in told(result)] == list(PROMPT[1:])
    torch.testing.assert_close(torch.tensor([value for _, value in told(result)]), expected, atol=2e-4, rtol=0)
    for entry in result.prompt_logprobs[1:]:
        assert len(entry.top) == 2
        assert entry.top[0][1] >= entry.top[1][1] >= entry.logprob or entry.id in dict(entry.top)


async def test_bits_do_not_depend_on_chunks_neighbours_or_reuse(smollm2_int8: LanguageModel):
    for model in (tiny_model(window=64, precision="int8"), smollm2_int8):
        (alone,) = await generate(model, asking(), rows=1)
        async with Scheduler(model, rows=3, step_tokens=16) as scheduler:
            await (await scheduler.submit(asking(prompt_logprobs=None))).result()  # its prompt is there now
            jobs = [await scheduler.submit(asking()), await scheduler.submit(asking(n=2))]
            async for _ in jobs[0]:
                scheduler.preempt(jobs[0])
            results = [await job.result() for job in jobs]
        for result in results:
            assert told(result) == told(alone)
            assert result.choices[0].token_ids == alone.token_ids
        assert answer(results[0]) == answer(alone)


async def test_a_prompt_that_is_cancelled_on_its_way_tells_what_it_has():
    prompt = PROMPT * 20  # so many steps that the cancellation meets one of them
    (whole,) = await generate(tiny_model(window=1024), asking(prompt_ids=prompt), step_tokens=16)
    async with Scheduler(tiny_model(window=1024), rows=1, step_tokens=16) as scheduler:
        job = await scheduler.submit(asking(prompt_ids=prompt))
        await until(lambda: scheduler.statistics().prompt_tokens > 0)
        job.cancel()
        result = await job.result()
    assert result.stop_reason == "cancelled"
    known = [entry for entry in result.prompt_logprobs if entry is not None]
    assert 15 <= len(known) < len(prompt) - 1
    unknown = len(prompt) - 1 - len(known)
    assert result.prompt_logprobs == (None, *whole.prompt_logprobs[1 : len(known) + 1], *[None] * unknown)


async def test_what_is_not_asked_is_not_told():
    (result,) = await generate(tiny_model(window=64), asking(prompt_logprobs=None))
    assert result.prompt_logprobs is None


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 0}, "needs max_tokens of at least 1"),
        ({"prompt_logprobs": -1}, "greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "less than or equal to 20"),
    ],
)
def test_bad_values(fields: dict[str, object], limit: str):
    with pytest.raises(InvalidRequest, match=limit) as caught:
        asking(**fields)
    assert caught.value.field == "prompt_logprobs"


async def test_a_prompt_beyond_the_window_is_refused():
    async with Scheduler(tiny_model(window=32), rows=1) as scheduler:
        with pytest.raises(InvalidRequest, match="prompt_logprobs: needs a prompt within the window"):
            await scheduler.submit(asking(overflow="slide"))
