"""Going on behind tokens that another process chose: the answer is the one it would have had there."""

import pytest

from drumline import InvalidRequest, Request, Result, SamplingParams, Scheduler
from drumline.model.grammar import JsonSchema
from drumline.model.language_model import LanguageModel
from drumline.scheduler.progress import Progress
from tests.compositions import answer
from tests.drive import generate
from tests.structured import SCHEMAS, asking_for
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=7)
PENALISED = DRAWN.model_copy(update={"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5})


def asking(**fields: object) -> Request:
    fields = {"prompt": "the drum", "max_tokens": 20, "ignore_eos": True, "logprobs": 2, "sampling": DRAWN, **fields}
    return Request(**fields)


REQUESTS = {
    "plain": asking(),
    "greedy": asking(sampling=SamplingParams(seed=1)),
    "penalised": asking(sampling=PENALISED),
    "without log-probabilities": asking(logprobs=None),
    "prompt's log-probabilities": asking(prompt_logprobs=1),
    "stop string": asking(stop=("zq", "e", "x"), min_tokens=4, max_tokens=40),
    "eos": asking(ignore_eos=False, min_tokens=3, sampling=DRAWN.model_copy(update={"logit_bias": {1: 4.0}})),
    "window": asking(max_tokens=200),
    "slides": asking(max_tokens=80, overflow="slide"),
    "grammar": asking(structured=JsonSchema(json_schema=SCHEMAS["person"]), max_tokens=60, ignore_eos=False),
}


def cut(result: Result, *lengths: int) -> list[Progress]:
    """The first so many tokens of each choice."""
    return [
        Progress(
            choice.choice, choice.token_ids[:length], None if choice.logprobs is None else choice.logprobs[:length]
        )
        for choice, length in zip(result.choices, lengths, strict=True)
    ]


async def resumed(model: LanguageModel, request: Request, progress: list[Progress], **settings: object) -> Result:
    async with Scheduler(model, rows=2, **settings) as scheduler:
        job = await scheduler.submit(request, progress=progress)
        chunks = [chunk async for chunk in job]
        result = await job.result()
        scheduler.check_integrity()
    for choice in result.choices:
        own = [chunk for chunk in chunks if chunk.choice == choice.choice]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert [token_id for chunk in own for token_id in chunk.token_ids] == list(choice.token_ids)
    return result


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_answer_is_the_same_wherever_it_was_cut(name: str):
    model = tiny_model(window=64, precision="int8")
    request = REQUESTS[name]
    (whole,) = await generate(model, request)
    length = len(whole.token_ids)
    for place in sorted({0, 1, 2, length // 2, length - 1, length}):
        result = await resumed(model, request, cut(whole, place), step_tokens=16)
        assert answer(result) == answer(whole)
        assert result.prompt_logprobs == whole.prompt_logprobs
        assert result.seed == whole.seed


async def test_each_choice_goes_on_from_its_own():
    model = tiny_model(window=64, precision="int8")
    request = asking(n=2)
    (whole,) = await generate(model, request)
    for lengths in ((3, 9), (20, 0), (20, 20)):
        assert answer(await resumed(model, request, cut(whole, *lengths))) == answer(whole)
    assert answer(await resumed(model, request, cut(whole, 5, 8)[1:])) == answer(whole)


async def test_of_the_real_model(smollm2_int8: LanguageModel):
    requests = [
        asking(prompt="Once upon a time", max_tokens=24),
        asking_for("person", "Describe a drum as JSON.", 3).model_copy(update={"logprobs": 1}),
        asking(prompt="1, 2, 3,", sampling=SamplingParams(seed=3), stop=("9",)),
    ]
    for request in requests:
        (whole,) = await generate(smollm2_int8, request)
        for place in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
            assert answer(await resumed(smollm2_int8, request, cut(whole, place))) == answer(whole)


async def test_a_check_draws_the_seed():
    model = tiny_model(window=64)
    async with Scheduler(model, rows=2) as scheduler:
        checked = await scheduler.check(asking(sampling=SamplingParams(temperature=1.0)))
        assert checked.sampling.seed is not None
        assert checked.prompt == "the drum"
        assert (await scheduler.check(asking())).sampling.seed == 7
        with pytest.raises(InvalidRequest, match="n: must not exceed"):
            await scheduler.check(asking(n=3))
        assert scheduler.statistics().queued == 0


async def test_settled_without_a_row():
    model = tiny_model(window=64, precision="int8")
    (whole,) = await generate(model, asking())
    async with Scheduler(model, rows=1) as scheduler:
        result = await scheduler.settle(asking(id="x"), "cancelled", cut(whole, 5))
        assert (result.stop_reason, result.status) == ("cancelled", "cancelled")
        assert result.token_ids == whole.token_ids[:5]
        assert whole.text.startswith(result.text)
        assert (await scheduler.settle(asking(), "deadline", cut(whole, 20))).stop_reason == "budget"
        assert scheduler.statistics().finished == 2
        scheduler.check_integrity()
        await scheduler.submit(asking(id="runs"))
        with pytest.raises(InvalidRequest, match="id: a job runs is queued or running"):
            await scheduler.settle(asking(id="runs"), "cancelled")
        assert scheduler.healthy


@pytest.mark.parametrize(
    ("progress", "limit"),
    [
        ([Progress(1, ())], "must name different choices"),
        ([Progress(0, ()), Progress(0, ())], "must name different choices"),
        ([Progress(0, (5,) * 21)], "holds 21 tokens, max_tokens is 20"),
        ([Progress(0, (10**6,))], "holds ids outside"),
        ([Progress(0, (5,))], "must have a log-probability"),
    ],
)
async def test_what_it_cannot_have_generated(progress: list[Progress], limit: str):
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        with pytest.raises(InvalidRequest, match=limit) as caught:
            await scheduler.submit(asking(), progress=progress)
        assert caught.value.field == "progress"
        assert scheduler.statistics().queued == 0


@pytest.mark.parametrize(
    ("request_", "ids", "limit"),
    [
        (asking(sampling=SamplingParams(), logprobs=None), (5,), "needs the seed"),
        (asking(stop_ids=(5,), logprobs=None), (5, 5), "behind the end"),
        (asking(structured=JsonSchema(json_schema=SCHEMAS["person"]), logprobs=None), (5, 5), "grammar"),
    ],
)
async def test_what_it_cannot_have_led_to(request_: Request, ids: tuple[int, ...], limit: str):
    async with Scheduler(tiny_model(), rows=1) as scheduler:
        with pytest.raises(InvalidRequest, match=limit):
            await scheduler.submit(request_, progress=[Progress(0, ids)])
