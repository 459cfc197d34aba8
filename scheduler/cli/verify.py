"""`drumline verify`: whether an answer depends on what runs beside it. Each request alone, then all together."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli import options
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.cli.workload import SamplingName, make_scheduler, read_workload, with_sampling
from drumline.scheduler.config import DRAFT_TOKENS, EngineSettings, SchedulerConfig
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.request import Choice, Request, Result
from drumline.scheduler.scheduler import Scheduler

Report = dict[str, Any]

ALONE_STEP_TOKENS = 256


@dataclass(frozen=True)
class Condition:
    """How all requests run together; after every `preempt_every` tokens a job is taken from its row (0: never)."""

    rows: int
    step_tokens: int
    preempt_every: int = 0
    draft_tokens: int = DRAFT_TOKENS
    reuse: bool = True

    @property
    def title(self) -> str:
        """The condition in words."""
        return f"{self.rows} rows, steps of {self.step_tokens} tokens, {self.draft_tokens or 'no'} drafts"


def verify(
    workload: Annotated[Path, typer.Argument(help="JSON lines, as for bench.")],
    model: options.ModelPath = None,
    rows: Annotated[
        list[str] | None, typer.Option("--rows", help="Rows to try, with commas or repeated. Default: 16.")
    ] = None,
    sampling: Annotated[SamplingName, typer.Option(help="chat: temperature 0.8, top-k 50, top-p 0.9.")] = "greedy",
    seed: Annotated[int, typer.Option(help="Seed of the first line; each further one counts one up.")] = 0,
    preempt_every: Annotated[
        int, typer.Option(min=0, help="Preempt each job after every N of its tokens; 0: never.")
    ] = 0,
    draft_tokens: options.DraftTokens = DRAFT_TOKENS,
    step_tokens: Annotated[
        list[str] | None,
        typer.Option("--step-tokens", help="Step budgets to try, with commas or repeated. Default: 256."),
    ] = None,
    reuse: options.Reuse = "on",
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare ids and log-probability bits of each request alone with those beside all others; exit 1 where any differ.

    Each number of rows is tried with each step budget. Requests alone run without drafts and reuse. The torch
    backend makes no promise here: its float products round differently for different batch sizes.
    """
    options.use_threads(threads)
    requests = with_sampling(read_workload(workload), sampling, seed)
    requests = [request.model_copy(update={"logprobs": request.logprobs or 0}) for request in requests]
    conditions = [
        Condition(*pair, preempt_every, draft_tokens, reuse == "on")
        for pair in product(_numbers("--rows", rows, 16), _numbers("--step-tokens", step_tokens, 256))
    ]
    _check(requests, conditions)
    loaded = options.open_model(model, precision, window)
    reports = run_loop(_run(loaded, requests, conditions, options.chosen_backend(backend)))
    totals = added(reports)
    if as_json:
        listed = [asdict(condition) | report for condition, report in zip(conditions, reports, strict=True)]
        print(json.dumps(totals | ({"conditions": listed} if len(listed) > 1 else {})))
    else:
        if len(reports) > 1:
            for condition, report in zip(conditions, reports, strict=True):
                print(f"{condition.title}: {_sentence(report)}")
        print(_sentence(totals))
    if totals["ids_differ"] or totals["bits_differ"]:
        raise typer.Exit(1)


async def _run(
    model: LanguageModel, requests: Sequence[Request], conditions: Sequence[Condition], backend: str | None
) -> list[Report]:
    """A report on each condition, against one run of each request alone."""
    reports = []
    with options.progress() as progress:
        task = progress.add_task("alone", total=len(requests))
        alone = await run_alone(model, requests, backend, lambda: progress.advance(task))
        for condition in conditions:
            progress.reset(task, description=condition.title)
            together = await run_together(model, requests, condition, backend, lambda: progress.advance(task))
            reports.append(compare(alone, together))
    return reports


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
    backend: str | None,
    on_done: Callable[[], None],
) -> list[Result]:
    """Results of all requests, queued at once and preempted as asked."""
    settings = EngineSettings(condition.rows, condition.step_tokens, backend, condition.draft_tokens, condition.reuse)
    async with make_scheduler(model, requests, settings) as scheduler:
        jobs = [await scheduler.submit(request) for request in requests]

        async def finished(job: GenerationJob) -> Result:
            result = await _preempting(scheduler, job, condition.preempt_every)
            on_done()
            return result

        return list(await asyncio.gather(*map(finished, jobs)))


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


def _sentence(report: Report) -> str:
    return (
        f"{report['jobs']} jobs: {report['ids_differ']} with other ids, {report['bits_differ']} with other bits; "
        f"largest log-probability difference {report['max_logprob_difference']:.3g}; "
        f"rows resumed {report['resumes']} times, {report['reused_tokens']} tokens reused"
    )


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


def _numbers(option: str, texts: Sequence[str] | None, default: int) -> list[int]:
    """The whole numbers of a repeatable option whose values may be lists with commas; raises `InvalidRequest`."""
    try:
        return [int(part) for text in texts or [str(default)] for part in text.split(",")]
    except ValueError:
        raise InvalidRequest(option, "must be whole numbers with commas between them") from None


def _check(requests: Sequence[Request], conditions: Sequence[Condition]) -> None:
    """Raise `InvalidRequest`, before anything runs, for a condition out of range or too narrow for a request."""
    for condition in conditions:
        SchedulerConfig(
            rows=condition.rows,
            step_tokens=condition.step_tokens,
            queue_requests=1,
            queue_tokens=1,
            backend=None,
            require_exact=False,
            draft_tokens=condition.draft_tokens,
            reuse=condition.reuse,
            refuse_late=False,
            restarts=0,
            name="verify",
        )
        for request in requests:
            if request.n > condition.rows:
                raise InvalidRequest("--rows", f"{condition.rows} cannot hold the {request.n} choices of {request.id}")
