"""The same requests in ever other company: other orders, arrivals, preemptions, and neighbours that are cancelled."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumline import Request, Result, SamplingParams, Scheduler
from drumline.model.language_model import LanguageModel

ROWS = (1, 2, 3, 5, 7, 8, 16, 31, 32)
STEP_TOKENS = (16, 17, 32, 37, 64, 100, 256, 1024)
DRAFT_TOKENS = (0, 1, 2, 5)
SAMPLING = (
    SamplingParams(),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    SamplingParams(temperature=1.0, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=1.5, min_p=0.02),
    SamplingParams(temperature=1.0),
)


@dataclass
class Arrival:
    """One request on its way: what it waits for, and what is done to it."""

    request: Request
    follows: int | None = None
    """The earlier arrival that it waits for; None comes at once."""
    after_tokens: int = 0
    """How many tokens of that one; its end will do as well."""
    preempt_at: int | None = None
    cancel_at: int | None = None
    """Tokens after which it is cancelled: a neighbour whose own answer nobody compares."""
    started: asyncio.Event = field(default_factory=asyncio.Event)


def random_requests(dice: random.Random, count: int, vocab_size: int, prompt: range, tokens: range) -> list[Request]:
    """Short requests of random ids, greedy and sampled; windows that fill up slide."""
    return [
        Request(
            prompt_ids=[dice.randrange(vocab_size) for _ in range(dice.choice(prompt))],
            max_tokens=dice.choice(tokens),
            sampling=dice.choice(SAMPLING).model_copy(update={"seed": dice.randrange(2**64)}),
            stop_ids=[dice.randrange(vocab_size) for _ in range(dice.choice((0, 0, 3)))],
            ignore_eos=dice.random() < 0.5,
            logprobs=dice.randrange(4),
            overflow="slide",
        )
        for _ in range(count)
    ]


def random_company(dice: random.Random, requests: Sequence[Request], strangers: Sequence[Request]) -> list[Arrival]:
    """The requests and the strangers in random order; half come at once, the others behind one of the ten before."""
    asked = [(request, False) for request in requests] + [(request, True) for request in strangers]
    dice.shuffle(asked)
    company = []
    for place, (request, strange) in enumerate(asked):
        arrival = Arrival(request)
        if place and dice.random() < 0.5:
            arrival.follows = dice.randrange(max(0, place - 10), place)
            arrival.after_tokens = dice.randrange(1, 8)
        if dice.random() < 0.2:
            arrival.preempt_at = dice.randrange(1, 8)
        if strange:
            arrival.cancel_at = dice.randrange(1, 6)
        company.append(arrival)
    return company


async def alone(model: LanguageModel, requests: Sequence[Request]) -> list[str]:
    """The answer of each request with no other beside it, token by token."""
    async with Scheduler(model, rows=1, draft_tokens=0) as scheduler:
        return [answer(await (await scheduler.submit(request)).result()) for request in requests]


async def in_company(
    model: LanguageModel, company: Sequence[Arrival], requests: Sequence[Request], **settings: object
) -> list[str]:
    """The answers of `requests`, all of them members of `company`, through one scheduler."""
    async with Scheduler(model, require_exact=True, **settings) as scheduler:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_follow(scheduler, company, place)) for place in range(len(company))]
        scheduler.check_integrity()
    results = {id(arrival.request): task.result() for arrival, task in zip(company, tasks, strict=True)}
    return [answer(results[id(request)]) for request in requests]


def answer(result: Result) -> str:
    """All that a request was told, to the last bit: no two float32 are written alike but a number and itself."""
    return repr([(c.token_ids, c.text, c.stop_reason, c.error, c.logprobs) for c in result.choices])


async def _follow(scheduler: Scheduler, company: Sequence[Arrival], place: int) -> Result:
    arrival = company[place]
    behind = [other for other in company if other.follows == place]
    if arrival.follows is not None:
        await arrival.started.wait()
    job = await scheduler.submit(arrival.request)
    async for _ in job:
        for other in behind:
            if job.generated >= other.after_tokens:
                other.started.set()
        if arrival.preempt_at is not None and job.generated >= arrival.preempt_at:
            scheduler.preempt(job)
            arrival.preempt_at = None
        if arrival.cancel_at is not None and job.generated >= arrival.cancel_at:
            job.cancel()
    for other in behind:
        other.started.set()
    return await job.result()
