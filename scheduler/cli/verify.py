"""`drumline verify`: whether an answer depends on what runs beside it. Each request alone, then all together."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli import options
from drumline.scheduler.cli.comparison import Condition, Report, added, compare, run_alone, run_together
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.cli.workload import SamplingName, read_workload, with_sampling
from drumline.scheduler.config import DRAFT_TOKENS, EngineSettings, SchedulerConfig
from drumline.scheduler.request import Request


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
    shuffle: Annotated[
        int | None,
        typer.Option(help="Draw policy, classes, tenants and order of arrival from this seed, counted up each time."),
    ] = None,
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
    settings = product(_numbers("--rows", rows, 16), _numbers("--step-tokens", step_tokens, 256))
    conditions = [
        Condition(
            EngineSettings(*pair, options.chosen_backend(backend), draft_tokens, reuse == "on"),
            preempt_every,
            None if shuffle is None else shuffle + place,
        )
        for place, pair in enumerate(settings)
    ]
    _check(requests, conditions)
    loaded = options.open_model(model, precision, window)
    reports = run_loop(_run(loaded, requests, conditions))
    totals = added(reports)
    if as_json:
        listed = [condition.as_dict() | report for condition, report in zip(conditions, reports, strict=True)]
        print(json.dumps(totals | ({"conditions": listed} if len(listed) > 1 else {})))
    else:
        if len(reports) > 1:
            for condition, report in zip(conditions, reports, strict=True):
                print(f"{condition.title}: {_sentence(report)}")
        print(_sentence(totals))
    if totals["ids_differ"] or totals["bits_differ"]:
        raise typer.Exit(1)


async def _run(model: LanguageModel, requests: Sequence[Request], conditions: Sequence[Condition]) -> list[Report]:
    """A report on each condition, against one run of each request alone."""
    reports = []
    with options.progress() as progress:
        task = progress.add_task("alone", total=len(requests))
        alone = await run_alone(model, requests, conditions[0].engine.backend, lambda: progress.advance(task))
        for condition in conditions:
            progress.reset(task, description=condition.title)
            together = await run_together(model, requests, condition, lambda: progress.advance(task))
            reports.append(compare(alone, together))
    return reports


def _sentence(report: Report) -> str:
    return (
        f"{report['jobs']} jobs: {report['ids_differ']} with other ids, {report['bits_differ']} with other bits; "
        f"largest log-probability difference {report['max_logprob_difference']:.3g}; "
        f"rows resumed {report['resumes']} times, {report['reused_tokens']} tokens reused"
    )


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
            **asdict(condition.engine) | {"backend": None},
            queue_requests=1,
            queue_tokens=1,
            require_exact=False,
            refuse_late=False,
            restarts=0,
            name="verify",
        )
        for request in requests:
            if request.n > condition.engine.rows:
                limit = f"{condition.engine.rows} cannot hold the {request.n} choices of {request.id}"
                raise InvalidRequest("--rows", limit)
