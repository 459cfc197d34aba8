"""Whether answers depend on company: the same requests alone and together, compared to the last bit."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli.workload import make_scheduler
from drumline.scheduler.config import EngineSettings
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.policy import PRIORITIES, FairShare, FirstCome, Policy, PriorityClasses, default_policy
from drumline.scheduler.request import Choice, Request, Result
from drumline.scheduler.scheduler import Scheduler

Report = dict[str, Any]

ALONE_STEP_TOKENS = 256
POLICIES: tuple[Callable[[], Policy], ...] = (FirstCome, FairShare, PriorityClasses, default_policy)


@dataclass(frozen=True)
class Condition:
    """How all requests run together."""

    engine: EngineSettings
    preempt_every: int = 0
    """Tokens of a job after which it is taken from its row, again and again; 0: never."""
    shuffle: int | None = None
    """The seed from which the policy, each job's class and tenant, and the order of arrival are drawn; None: as they
    come."""

    @property
    def title(self) -> str:
        """The condition in words."""
        engine = self.engine
        return (
            f"{engine.rows} rows, steps of {engine.step_tokens} tokens, {engine.draft_tokens or 'no'} drafts, "
            f"reuse {'on' if engine.reuse else 'off'}"
        )

    def as_dict(self) -> Report:
        """The settings that `verify` chose."""
        engine = {name: value for name, value in asdict(self.engine).items() if name != "backend"}
        return engine | {"preempt_every": self.preempt_every, "shuffle": self.shuffle}


async def run_alone(
    model: LanguageModel, requests: Sequence[Request], backend: str | None, on_done: Callable[[], None]
) -> list[Result]:
    """Results of each request with no other beside it."""
    choices = max(request.n for request in requests)
    results = []
    async with make_scheduler(
        model, requests, EngineSettings(choices, ALONE_STEP_TOKENS, backend, draft_tokens=0, reuse=False)
    ) as scheduler:
        for request in requests:
            results.append(await (await scheduler.submit(request)).result())
            on_done()
    return results


async def run_together(
    model: LanguageModel,
    requests: Sequence[Request],
    condition: Condition,
    on_done: Callable[[], None],
) -> list[Result]:
    """Results of all requests, queued at once, mixed and preempted as asked; in the order of `requests`."""
    arrivals, policy = mixed(requests, condition.shuffle)
    async with make_scheduler(model, requests, condition.engine, policy) as scheduler:
        jobs = {place: scheduler.submit_nowait(request) for place, request in arrivals}

        async def finished(place: int) -> Result:
            result = await _preempting(scheduler, jobs[place], condition.preempt_every)
            on_done()
            return result

        return list(await asyncio.gather(*map(finished, range(len(requests)))))


def mixed(requests: Sequence[Request], seed: int | None) -> tuple[list[tuple[int, Request]], Policy | None]:
    """The requests as they arrive, with their places, and who orders them: all that decides who runs beside whom."""
    arrivals = list(enumerate(requests))
    if seed is None:
        return arrivals, None
    dice = random.Random(seed)
    policy = dice.choice(POLICIES)()
    for place, request in arrivals:
        company = {"priority": dice.choice(PRIORITIES), "tenant": f"tenant-{dice.randrange(4)}"}
        arrivals[place] = (place, request.model_copy(update=company))
    dice.shuffle(arrivals)
    return arrivals, policy


async def _preempting(scheduler: Scheduler, job: GenerationJob, every: int) -> Result:
    next_at = every
    async for _ in job:
        if every and job.generated >= next_at:
            scheduler.preempt(job)
            next_at = job.generated + every
    return await job.result()


def compare(alone: Sequence[Result], together: Sequence[Result]) -> Report:
    """How many jobs have other ids, and other ids or log-probability bits, and the largest difference where ids agree;
    and how often a row of the second run was taken away to go on later, and how many tokens were reused.

    Raises `EngineFailed` for a job that failed.
    """
    ids_differ = bits_differ = 0
    largest = 0.0
    for one, other in zip(alone, together, strict=True):
        one.raise_for_status()
        other.raise_for_status()
        pairs = list(zip(one.choices, other.choices, strict=True))
        same_ids = all(first.token_ids == second.token_ids for first, second in pairs)
        ids_differ += not same_ids
        bits_differ += not (same_ids and all(_bits(first) == _bits(second) for first, second in pairs))
        largest = max(largest, *(_difference(first, second) for first, second in pairs))
    return {
        "jobs": len(alone),
        "ids_differ": ids_differ,
        "bits_differ": bits_differ,
        "max_logprob_difference": largest,
        "resumes": sum(result.usage.resumes for result in together),
        "reused_tokens": sum(result.usage.reused_tokens for result in together),
    }


def added(reports: Sequence[Report]) -> Report:
    """The reports as one: counts added up, and the largest of the differences."""
    totals = {
        name: sum(report[name] for report in reports)
        for name in ("jobs", "ids_differ", "bits_differ", "resumes", "reused_tokens")
    }
    return totals | {"max_logprob_difference": max(report["max_logprob_difference"] for report in reports)}


def _bits(choice: Choice) -> bytes:
    """Float32 log-probabilities of the chosen ids and of those reported beside them."""
    given = choice.logprobs or ()
    values = [value for item in given for value in (item.logprob, *(top for _, top in item.top))]
    return np.array(values, dtype=np.float32).tobytes()


def _difference(first: Choice, second: Choice) -> float:
    """The largest, up to where the ids part: what follows answers another text."""
    largest = 0.0
    ids = zip(first.token_ids, second.token_ids, strict=False)
    for (a, b), p, q in zip(ids, first.logprobs or (), second.logprobs or (), strict=False):
        if a != b:
            break
        largest = max(largest, abs(p.logprob - q.logprob))
    return largest
