"""Open-loop load: requests arrive at random at a given rate, whether or not earlier ones are done.

Arrivals are Poisson: gaps are exponential, seeded. Times count from the moment at which a request was due, not from
when it was sent, so a scheduler that falls behind cannot hide it (no coordinated omission). The search finds the
highest rate at which the 99th percentile of time to first token stays under a limit.
"""

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.base import CHAT, SamplingName, Work
from benchmarks.peers.specs import OurSettings
from benchmarks.peers.worker import ROOT
from drumline.model.openmp import share_pool
from drumline.scheduler.cli import SPIN_COUNT

if TYPE_CHECKING:
    from drumline import Scheduler
    from drumline.model.language_model import LanguageModel
    from drumline.scheduler.job import GenerationJob

LIMIT_S = 1.0
GRACE_S = 3.0
"""How long after the last arrival a trial waits for first tokens; what has none by then counts as never."""


@dataclass(frozen=True)
class Arrival:
    """A request and when it is due, in seconds from the start."""

    due_s: float
    work: Work


@dataclass(frozen=True)
class Served:
    """What became of an arrival: time to first token from its due time (infinite where none came), gaps after it."""

    ttft_s: float
    gaps_s: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """One rate, offered for a while. `late` is the share of requests whose first token took longer than the limit."""

    rate: float
    requests: int
    late: float
    ttft_s: dict[str, float]
    inter_token_s: dict[str, float]
    passed: bool


def mixed_work(count: int, seed: int, vocabulary: int, longest: int) -> list[Work]:
    """Requests like mixed64's: log-normal lengths (prompts 8–768 tokens, answers 8–256), ids at random.

    `longest` bounds prompt and answer together, in tokens.
    """
    generator = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = max(8, min(768, longest - 16, int(generator.lognormvariate(4.6, 0.9))))
        answer = max(8, min(256, longest - prompt, int(generator.lognormvariate(4.3, 0.7))))
        found.append(Work(tuple(generator.randrange(20, vocabulary) for _ in range(prompt)), answer))
    return found


def schedule(work: Sequence[Work], rate: float, seed: int) -> list[Arrival]:
    """Poisson arrivals at `rate` requests a second: independent exponential gaps."""
    generator = random.Random(seed)
    due_s, arrivals = 0.0, []
    for request in work:
        due_s += generator.expovariate(rate)
        arrivals.append(Arrival(due_s, request))
    return arrivals


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 by nearest rank, so that an infinite value stays one; nothing of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    return {f"p{part}": ordered[math.ceil(part / 100 * len(ordered)) - 1] for part in (50, 90, 99)}


def judge(rate: float, served: Sequence[Served], limit_s: float) -> Trial:
    """The figures of a trial, and whether its p99 time to first token stays under the limit."""
    first = percentiles([one.ttft_s for one in served])
    late = sum(one.ttft_s > limit_s for one in served) / len(served)
    gaps = percentiles([gap for one in served for gap in one.gaps_s])
    return Trial(rate, len(served), late, first, gaps, first["p99"] <= limit_s)


def search(trial: Callable[[float], Trial], first: float, trials: int) -> tuple[float, list[Trial]]:
    """The highest rate that passed, in at most `trials` trials: doubled or halved to a bracket, then bisected.

    The bisection is of logarithms, so the error is a share of the rate. 0 where no rate passed.
    """
    done: list[Trial] = []
    low, high, rate = 0.0, math.inf, first
    while len(done) < trials:
        done.append(trial(rate))
        low, high = (rate, high) if done[-1].passed else (low, rate)
        if high == math.inf:
            rate = 2 * low
        elif low == 0.0:
            rate = high / 2
        else:
            rate = math.sqrt(low * high)
    return low, done


async def offer(scheduler: "Scheduler", arrivals: Sequence[Arrival], sampling: SamplingName) -> list[Served]:
    """Submit each request when it is due, then wait for the first tokens, at most `GRACE_S`; cancel what is left."""
    from drumline import Request, SamplingParams

    chosen = {} if sampling == "greedy" else CHAT
    loop = asyncio.get_running_loop()
    started = loop.time()
    jobs: list[tuple[float, GenerationJob]] = []
    readers: list[asyncio.Task[None]] = []
    firsts: list[asyncio.Future[None]] = []
    for number, arrival in enumerate(arrivals):
        await asyncio.sleep(started + arrival.due_s - loop.time())
        request = Request(
            prompt_ids=arrival.work.prompt_ids,
            max_tokens=arrival.work.max_tokens,
            ignore_eos=True,
            sampling=SamplingParams.model_validate({**chosen, "seed": number}),
        )
        lateness = loop.time() - started - arrival.due_s
        jobs.append((lateness, scheduler.submit_nowait(request)))
        firsts.append(loop.create_future())
        readers.append(asyncio.create_task(_read(jobs[-1][1], firsts[-1])))
    await asyncio.wait(firsts, timeout=GRACE_S)
    for _, job in jobs:
        job.cancel()
    await asyncio.gather(*readers)
    return [_served(lateness, await job.result()) for lateness, job in jobs]


async def _read(job: "GenerationJob", first: asyncio.Future[None]) -> None:
    """Take the job's chunks as a client would; `first` is done with the first of them."""
    async for _ in job:
        if not first.done():
            first.set_result(None)


def _served(lateness: float, result: Any) -> Served:
    (choice,) = result.choices
    times = choice.token_times_s
    return Served(lateness + times[0] if times else math.inf, tuple(choice.gaps_s))


async def _serve(model: "LanguageModel", rate: float, count: int, options: argparse.Namespace) -> Trial:
    from drumline import Scheduler

    work = mixed_work(count, options.seed, min(49_000, model.config.vocab_size), model.window)
    async with Scheduler(
        model,
        rows=options.rows,
        step_tokens=options.step_tokens,
        backend=None if options.backend == "auto" else options.backend,
        queue_requests=count + 1,
        queue_tokens=2 * count * model.window,
    ) as scheduler:
        served = await offer(scheduler, schedule(work, rate, options.seed + 1), options.sampling)
    return judge(rate, served, options.limit_s)


def _report(options: argparse.Namespace) -> dict[str, Any]:
    from drumline import load_model

    model = load_model(options.model, precision=options.precision)

    def run(rate: float) -> Trial:
        trial = asyncio.run(_serve(model, rate, max(20, round(rate * options.seconds)), options))
        first, gaps = trial.ttft_s, trial.inter_token_s
        shown = f"first token p50 {first['p50']:.3f} p99 {first['p99']:.3f} s"
        between = f", gaps p50 {gaps['p50'] * 1000:.0f} p99 {gaps['p99'] * 1000:.0f} ms" if gaps else ""
        print(f"{rate:.2f}/s, {trial.requests} requests: {shown}{between}", file=sys.stderr, flush=True)
        return trial

    asyncio.run(_serve(model, 100.0, 4, options))  # what is compiled or allocated at its first use, is so now
    if options.search:
        best, trials = search(run, options.rate, options.trials)
    else:
        trials = [run(options.rate)]
        best = options.rate if trials[0].passed else 0.0
    settings = {name: getattr(options, name) for name in ("rows", "limit_s", "seconds", "sampling", "seed")}
    return {**settings, "best_rate": best, "trials": [_finite(asdict(trial)) for trial in trials]}


def _finite(trial: dict[str, Any]) -> dict[str, Any]:
    """JSON knows no infinity: a first token that never came is null."""
    trial["ttft_s"] = {name: value if math.isfinite(value) else None for name, value in trial["ttft_s"].items()}
    return trial


def search_in_subprocess(ours: OurSettings, quick: bool, scratch: Path) -> dict[str, Any]:
    """Run the search in a process of its own, as every measure is; its progress goes to stderr."""
    output = scratch / "open-loop.json"
    bounds = ["--trials", "3", "--seconds", "10"] if quick else []
    command = [sys.executable, "-m", "benchmarks.open_loop", *ours.arguments(), "--search", "--output", str(output)]
    subprocess.run([*command, *bounds], cwd=ROOT, check=True)
    report: dict[str, Any] = json.loads(output.read_text())
    return report


def main() -> None:
    """Offer one rate, or search for the highest; prints JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.open_loop", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="a GGUF file or a model folder")
    add("--precision", default="auto")
    add("--backend", default="auto")
    add("--step-tokens", type=int, default=256)
    add("--rows", type=int, default=32)
    add("--rate", type=float, default=1.0, help="requests a second; where the search begins")
    add("--seconds", type=float, default=20.0, help="how long a rate is offered (at least 20 requests)")
    add("--search", action="store_true", help="look for the highest rate under the limit")
    add("--trials", type=int, default=6, help="of the search")
    add("--limit-s", type=float, default=LIMIT_S, help="of the 99th percentile of time to first token")
    add("--sampling", choices=("greedy", "chat"), default="chat")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    share_pool()
    report = json.dumps(_report(options), indent=1)
    print(report)
    if options.output is not None:
        options.output.write_text(report + "\n")


if __name__ == "__main__":
    main()
