"""What the journal costs: jobs accepted a second by many callers at once, and how long a full one takes to load.

python -m benchmarks.journal [--folder FOLDER] > journal.json
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from drumline.scheduler.journal.journal import Journal
from drumline.scheduler.journal.records import AcceptedJob, Progress
from drumline.scheduler.journal.store import Store

TOKENS = 50
PAGE = 1_000


def job(number: int) -> AcceptedJob:
    """A job with a body of a usual length."""
    body = json.dumps({"id": f"job-{number}", "prompt": "What is it that " * 20, "max_tokens": 128}).encode()
    return AcceptedJob("bench", f"job-{number}", bytes(32), body, b"{}", number, "fingerprint")


async def accepted_per_s(path: Path, callers: int, jobs: int) -> dict[str, Any]:
    """Each caller waits for one job's commit before it brings the next."""
    numbers = iter(range(jobs))
    waits: list[float] = []

    async def call() -> None:
        for number in numbers:
            started = time.perf_counter()
            await journal.accept(job(number))
            waits.append(time.perf_counter() - started)

    async with Journal(path) as journal:
        started = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(callers)))
        wall_s = time.perf_counter() - started
    waits.sort()
    return {
        "callers": callers,
        "jobs": jobs,
        "accepted_per_s": jobs / wall_s,
        "commits_per_s": journal.commits / wall_s,
        "wait_s": {"p50": waits[len(waits) // 2], "p99": waits[len(waits) * 99 // 100]},
    }


async def load_s(path: Path, jobs: int) -> dict[str, Any]:
    """Open a journal of unfinished jobs that have tokens, and read them page by page."""
    store = Store.open(path)
    with store.transaction():
        for number in range(jobs):
            place = store.accept(job(number), 0.0, jobs)
            for first in range(0, TOKENS, 10):
                store.progress(place, Progress(0, tuple(range(first, first + 10)), None, first))
    store.close()
    started = time.perf_counter()
    async with Journal(path) as journal:
        opened_s = time.perf_counter() - started
        loaded, after = 0, 0
        while page := await journal.unfinished(after, PAGE):
            loaded, after = loaded + len(page), page[-1].number
        wall_s = time.perf_counter() - started
    return {
        "jobs": loaded,
        "tokens_each": TOKENS,
        "open_s": opened_s,
        "load_s": wall_s,
        "file_bytes": path.stat().st_size,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--callers", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=10_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        report = {
            "accept": asyncio.run(accepted_per_s(Path(folder, "accept.journal"), given.callers, given.jobs)),
            "accept_alone": asyncio.run(accepted_per_s(Path(folder, "alone.journal"), 1, 50)),
            "load": asyncio.run(load_s(Path(folder, "load.journal"), given.jobs)),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
