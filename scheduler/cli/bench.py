"""`drumline bench`: how fast a workload runs when all of it is queued at once."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from drumline.model.errors import EngineFailed
from drumline.model.language_model import LanguageModel
from drumline.scheduler.cli import options
from drumline.scheduler.cli.loop import run_loop
from drumline.scheduler.cli.workload import SamplingName, make_scheduler, read_workload, run_all, with_sampling
from drumline.scheduler.config import DRAFT_TOKENS, EngineSettings
from drumline.scheduler.engine import Statistics
from drumline.scheduler.request import Request, Result

Report = dict[str, Any]


def bench(
    workload: Annotated[Path, typer.Argument(help="JSON lines: id, prompt | prompt_ids | messages, max_tokens.")],
    model: options.ModelPath = None,
    rows: options.Rows = 16,
    sampling: Annotated[SamplingName, typer.Option(help="chat: temperature 0.8, top-k 50, top-p 0.9.")] = "greedy",
    seed: Annotated[int, typer.Option(help="Seed of the first line; each further one counts one up.")] = 0,
    step_tokens: options.StepTokens = 256,
    draft_tokens: options.DraftTokens = DRAFT_TOKENS,
    reuse: options.Reuse = "on",
    window: options.Window = None,
    precision: options.PrecisionName = "auto",
    backend: options.BackendName = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
    trace: Annotated[Path | None, typer.Option(help="Record a timeline of the run, for ui.perfetto.dev.")] = None,
) -> None:
    """Measure tokens per second, time to first token and gaps between tokens. EOS is ignored."""
    options.use_threads(threads)
    requests = with_sampling(read_workload(workload), sampling, seed)
    loaded = options.open_model(model, precision, window)
    settings = EngineSettings(rows, step_tokens, options.chosen_backend(backend), draft_tokens, reuse == "on")
    report = run_loop(measure(loaded, requests, settings, trace))
    if as_json:
        print(json.dumps(report))
    else:
        _print_table(f"{workload.name}, {loaded.name}, {sampling}, {rows} rows", report)


async def measure(
    model: LanguageModel, requests: Sequence[Request], settings: EngineSettings, trace: Path | None = None
) -> Report:
    """Run the workload once, after a short warm-up, and report on it. Times in seconds."""
    async with make_scheduler(model, requests, settings) as scheduler:
        warm_up = Request(prompt_ids=(0,) * min(model.window, 64), max_tokens=4, ignore_eos=True, overflow="stop")
        await (await scheduler.submit(warm_up)).result()
    with options.progress() as progress:
        task = progress.add_task("jobs", total=len(requests))
        async with make_scheduler(model, requests, settings) as scheduler:
            if trace is not None:
                scheduler.trace.start(trace)
            started = time.perf_counter()
            results = await run_all(scheduler, requests, lambda: progress.advance(task))
            wall_s = time.perf_counter() - started
            statistics = scheduler.statistics()
            if (recorded := scheduler.trace.stop()) is not None:
                print(recorded, file=sys.stderr)
    if recorded is not None and not recorded.complete:
        raise EngineFailed(f"{recorded}: {recorded.error or 'it is full'}")
    return report_of(results, statistics, wall_s)


def report_of(results: Sequence[Result], statistics: Statistics, wall_s: float) -> Report:
    """The figures of one run."""
    for result in results:
        result.raise_for_status()
    first = [result.timings.first_token_s for result in results if result.timings.first_token_s is not None]
    gaps = [gap for result in results for choice in result.choices for gap in choice.gaps_s]
    model_s = statistics.forward_s + statistics.sample_s
    return {
        "jobs": len(results),
        "output_tokens": sum(result.usage.generated_tokens for result in results),
        "prompt_tokens": sum(result.usage.prompt_tokens for result in results),
        "output_tokens_per_s": sum(result.usage.generated_tokens for result in results) / wall_s,
        "prompt_tokens_per_s": sum(result.usage.prompt_tokens for result in results) / wall_s,
        "wall_s": wall_s,
        "ttft_s": _percentiles(first),
        "inter_token_s": _percentiles(gaps),
        "rows_live_mean": statistics.row_steps / statistics.steps if statistics.steps else 0.0,
        "padding_ratio": 1 - statistics.real_cells / statistics.padded_cells if statistics.padded_cells else 0.0,
        "outside_model_ratio": 1 - model_s / statistics.step_s if statistics.step_s else 0.0,
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _print_table(title: str, report: Report) -> None:
    table = Table(title=title, show_header=False)
    for key, value in report.items():
        if isinstance(value, dict):
            shown = "  ".join(f"{name} {'-' if v is None else f'{v * 1000:.1f} ms'}" for name, v in value.items())
        else:
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        table.add_row(key, shown)
    Console().print(table)
