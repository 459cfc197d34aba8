"""What deciding costs and what it is worth: queue, fair share, prefix reuse, stalls. Prints JSON, times in seconds.

python -m benchmarks.scheduling --model FILE > scheduling.json
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drumline.model.registry import packaged_model

if TYPE_CHECKING:
    from drumline import Request, Result
    from drumline.model.language_model import LanguageModel

Report = dict[str, Any]
LONG_WINDOW = 4_608


@dataclass(eq=False)
class Waiting:
    """A queue entry without a job."""

    priority: str
    tenant: str
    cost_tokens: int = 100
    deadline_at: float = float("inf")


def queue_cost(queued: int, rounds: int = 2_000) -> float:
    """Seconds of one submit and one pick while so many others wait, of three classes and twenty tenants."""
    from drumline.scheduler.policy import PRIORITIES, default_policy
    from drumline.scheduler.queue import RequestQueue

    queue: Any = RequestQueue(10**9, 10**12, default_policy())

    def entry(number: int) -> Waiting:
        return Waiting(PRIORITIES[number % 3], f"tenant-{number % 20}")

    for number in range(queued):
        queue.push([entry(number)], number * 1e-6)
    started = time.perf_counter()
    for number in range(rounds):
        queue.push([entry(number)], 1.0)
        queue.served(queue.pop(1.0), 50, 50)
    return (time.perf_counter() - started) / rounds


async def fair_share(model: "LanguageModel") -> Report:
    """Tokens that each of two tenants gets while both wait: one with ten jobs, and one with a thousand like them that
    came first."""
    from drumline import Request, Scheduler

    async with Scheduler(model, rows=8, queue_requests=2_000) as scheduler:

        async def put(tenant: str, count: int) -> list[Any]:
            request = Request(prompt="The drum", max_tokens=24, ignore_eos=True, tenant=tenant)
            return [await scheduler.submit(request) for _ in range(count)]

        many, few = await put("many", 1_000), await put("few", 10)
        ends = await asyncio.gather(*(job.result() for job in few))
        for job in many:
            job.cancel()
        await asyncio.gather(*(job.result() for job in many))
        begin = few[0].submitted_at
        end = max(job.submitted_at + result.timings.queued_s for job, result in zip(few, ends, strict=True))
        tokens = {"many": await _tokens_between(begin, end, many), "few": await _tokens_between(begin, end, few)}
    return tokens | {"seconds": end - begin, "ratio": tokens["many"] / tokens["few"]}


async def _tokens_between(begin: float, end: float, jobs: "Sequence[Any]") -> int:
    """Tokens that ended jobs were given in this time, on the scheduler's clock."""
    times = [job.submitted_at + seconds for job in jobs for seconds in (await job.result()).choices[0].token_times_s]
    return sum(begin < at <= end for at in times)


async def prefix_reuse(model: "LanguageModel", requests: int = 64, shared: int = 512) -> Report:
    """Time to the first token of requests that share a system prompt: one at a time, and all at once."""
    from drumline import Request

    system = tuple(100 + place * 37 % 40_000 for place in range(shared))
    asked = [Request(prompt_ids=(*system, *range(number, number + 8)), max_tokens=1) for number in range(requests)]
    report: Report = {}
    for name, together in (("one at a time", False), ("all at once", True)):
        times = {}
        for reuse in (False, True):
            results = await _run(model, asked, together, reuse)
            times[reuse] = statistics.median(result.timings.first_token_s or 0.0 for result in results)
        report[name] = {"p50_without": times[False], "p50_with": times[True], "ratio": times[False] / times[True]}
    return report


async def _run(model: "LanguageModel", asked: "Sequence[Request]", together: bool, reuse: bool) -> "list[Result]":
    from drumline import Scheduler

    async with Scheduler(model, rows=16, reuse=reuse) as scheduler:
        if together:
            return [await job.result() for job in [await scheduler.submit(request) for request in asked]]
        return [await (await scheduler.submit(request)).result() for request in asked]


async def longest_stall(model: "LanguageModel", rows: int = 16, prompt: int = 4_000) -> Report:
    """Gaps between tokens of rows that decode while a long prompt enters, beside ordinary steps of before: one in which
    all rows decode, and one that is full of prompt."""
    from drumline import Request, Scheduler

    ids = tuple(100 + place * 31 % 40_000 for place in range(prompt))
    async with Scheduler(model, rows=rows, draft_tokens=0) as scheduler:
        speaking = [
            await scheduler.submit(Request(prompt_ids=(5, number), max_tokens=400, ignore_eos=True))
            for number in range(rows - 1)
        ]
        await (await scheduler.submit(Request(prompt_ids=(5,), max_tokens=20, ignore_eos=True))).result()
        filled = await (await scheduler.submit(Request(prompt_ids=ids[-1_200:], max_tokens=1))).result()
        entering = await scheduler.submit(Request(prompt_ids=ids, max_tokens=1))
        result = await entering.result()
        for job in speaking:
            job.cancel()
        others = [(job.submitted_at, (await job.result()).choices[0].token_times_s) for job in speaking]
    begin, end = entering.submitted_at, entering.submitted_at + result.timings.total_s
    before, gaps = [], []
    for submitted_at, times in others:
        at = [submitted_at + seconds for seconds in dict.fromkeys(times)]
        for earlier, later in pairwise(at):
            if begin <= later <= end:
                gaps.append(later - earlier)
            elif later < begin - filled.timings.total_s:
                before.append(later - earlier)
    decoding, full = statistics.median(before), filled.timings.prefill_s / len(filled.steps)
    return {
        "rows": rows,
        "prompt": prompt,
        "prompt_steps": len(result.steps),
        "decoding_step_s": decoding,
        "full_step_s": full,
        "gap_s": dict(
            zip(("p50", "p90", "p99", "longest"), np.percentile(gaps, (50, 90, 99, 100)).tolist(), strict=True)
        ),
        "longest_over_decoding_step": max(gaps) / decoding,
        "longest_over_full_step": max(gaps) / full,
    }


async def outside_model(model: "LanguageModel", rows: int = 16) -> float:
    """Share of a step's wall time that is neither forward pass nor sampling."""
    from drumline import Request, Scheduler

    async with Scheduler(model, rows=rows) as scheduler:
        request = Request(prompt="The drum", max_tokens=100, ignore_eos=True)
        await asyncio.gather(*[(await scheduler.submit(request)).result() for _ in range(rows)])
        sums = scheduler.statistics()
    return 1 - (sums.forward_s + sums.sample_s) / sums.step_s


def main() -> None:
    """Measure all and print one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks.scheduling", description=__doc__)
    parser.add_argument("--model", type=Path, default=packaged_model())
    path = parser.parse_args().model
    from drumline import load_model

    model, wide = load_model(path), load_model(path, window=LONG_WINDOW)
    few, many = (statistics.median(queue_cost(queued) for _ in range(5)) for queued in (10, 100_000))
    report: Report = {"submit_and_pick_s": {"10": few, "100000": many, "ratio": many / few}}
    report["fair_share"] = asyncio.run(fair_share(model))
    report["prefix_reuse"] = asyncio.run(prefix_reuse(model))
    report["stall"] = asyncio.run(longest_stall(wide))
    report["outside_model_ratio"] = asyncio.run(outside_model(model))
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
