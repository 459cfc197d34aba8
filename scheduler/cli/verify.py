"""`drumline verify`: whether an answer depends on what runs beside it. Each request alone, then all together."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli import options
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.cli.workload import SamplingName, make_scheduler, read_workload, with_sampling
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.request import Choice, Request, Result
from drumline.scheduler.scheduler import Scheduler


def verify(
    workload: Annotated[Path, typer.Argument(help="JSON lines, as for bench.")],
    model: options.ModelPath = None,
    rows: options.Rows = 16,
    sampling: Annotated[SamplingName, typer.Option(help="chat: temperature 0.8, top-k 50, top-p 0.9.")] = "greedy",
    seed: Annotated[int, typer.Option(help="Seed of the first line; each further one counts one up.")] = 0,
    preempt_every: Annotated[
        int, typer.Option(min=0, help="Preempt each job after every N of its tokens; 0: never.")
    ] = 0,
    step_tokens: options.StepTokens = 256,
    reuse: options.Reuse = "off",
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "torch",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare ids and log-probability bits of each request alone with those beside all others; exit 1 where any differ.

    The torch backend makes no promise here: its float products round differently for different batch sizes.
    """
    options.check_reuse(reuse)
    options.use_threads(threads)
    requests = with_sampling(read_workload(workload), sampling, seed)
    requests = [request.model_copy(update={"logprobs": request.logprobs or 0}) for request in requests]
    loaded = options.open_model(model, precision, window)
    alone, together = run_loop(run_both(loaded, requests, rows, step_tokens, backend, preempt_every))
    report = compare(alone, together)
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"{report['jobs']} jobs: {report['ids_differ']} with other ids, {report['bits_differ']} with other bits; "
            f"largest log-probability difference {report['max_logprob_difference']:.3g}"
        )
    if report["ids_differ"] or report["bits_differ"]:
        raise typer.Exit(1)


async def run_both(
    model: LanguageModel, requests: Sequence[Request], rows: int, step_tokens: int, backend: str, preempt_every: int
) -> tuple[list[Result], list[Result]]:
    """Results of each request alone, and of all at once (preempted as asked)."""
    with options.progress() as progress:
        task = progress.add_task("alone", total=len(requests))
        alone = []
        async with make_scheduler(model, requests, rows, step_tokens, backend) as scheduler:
            for request in requests:
                alone.append(await (await scheduler.submit(request)).result())
                progress.advance(task)
        task = progress.add_task("together", total=len(requests))
        async with make_scheduler(model, requests, rows, step_tokens, backend) as scheduler:
            jobs = [await scheduler.submit(request) for request in requests]

            async def finished(job: GenerationJob) -> Result:
                result = await _preempting(scheduler, job, preempt_every)
                progress.advance(task)
                return result

            together = await asyncio.gather(*map(finished, jobs))
    return alone, list(together)


async def _preempting(scheduler: Scheduler, job: GenerationJob, every: int) -> Result:
    next_at = every
    async for _ in job:
        if every and job.generated >= next_at:
            scheduler.preempt(job)
            next_at += every
    return await job.result()


def compare(alone: Sequence[Result], together: Sequence[Result]) -> dict[str, Any]:
    """How many jobs have other ids, and other ids or log-probability bits, and the largest difference where ids agree.

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
    }


def _bits(choice: Choice) -> bytes:
    return np.array([item.logprob for item in choice.logprobs or ()], dtype=np.float32).tobytes()


def _difference(first: Choice, second: Choice) -> float:
    """The largest, up to where the ids part: what follows answers another text."""
    largest = 0.0
    ids = zip(first.token_ids, second.token_ids, strict=False)
    for (a, b), p, q in zip(ids, first.logprobs or (), second.logprobs or (), strict=False):
        if a != b:
            break
        largest = max(largest, abs(p.logprob - q.logprob))
    return largest
