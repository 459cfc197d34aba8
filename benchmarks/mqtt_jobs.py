"""What jobs over MQTT cost: acceptance with a journal, generation with and without one, gaps between chunks, a restart.

python -m benchmarks.mqtt_jobs --workload mixed64.jsonl > mqtt_jobs.json     (needs mosquitto and its clients)

Worker, broker and devices are processes of their own; times are those at which messages reach a subscriber.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import free_port

TOPIC = "drumline/v1/clients/bench"
READY_TIMEOUT_S = 180.0
Said = list[tuple[float, str, dict[str, Any]]]
"""(Unix seconds, topic, JSON) of each message."""


class Bench:
    """A broker, and what is started beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.metrics = folder, free_port(), free_port()
        config = folder / "mosquitto.conf"
        config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\nmax_queued_messages 1000000\n"
            "max_inflight_messages 64\n"
        )
        self.broker = subprocess.Popen(["mosquitto", "-c", str(config)], stderr=subprocess.DEVNULL)
        time.sleep(0.5)

    @contextmanager
    def worker(self, journal: Path | None, rows: int = 16) -> Iterator[float]:
        """`drumline serve` until the block is left; yields seconds from its start to ready."""
        command = [sys.executable, "-m", "drumline.scheduler.cli", "serve", "--rows", str(rows), "--drain", "0"]
        command += ["--broker", f"mqtt://127.0.0.1:{self.port}", "--metrics", f"127.0.0.1:{self.metrics}"]
        command += [] if journal is None else ["--journal", str(journal)]
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not self._ready():
                if process.poll() is not None or time.perf_counter() - started > READY_TIMEOUT_S:
                    raise SystemExit("the worker did not become ready")
                time.sleep(0.02)
            yield time.perf_counter() - started
        finally:
            process.terminate()
            process.wait()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/readyz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def run(self, jobs: list[dict[str, Any]], kind: str, count: int | None = None) -> tuple[float, Said]:
        """Publish the jobs at once; Unix seconds of that, and the messages of this kind (until so many have come)."""
        listen = ["mosquitto_sub", "-p", str(self.port), "-q", "1", "-F", "%U %t %p", "-t", f"{TOPIC}/jobs/+/+"]
        listener = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True)
        time.sleep(0.3)
        lines = "".join(json.dumps(job) + "\n" for job in jobs)
        started = time.time()
        sender = subprocess.Popen(
            ["mosquitto_pub", "-p", str(self.port), "-q", "1", "-l", "-t", f"{TOPIC}/submit"],
            stdin=subprocess.PIPE,
            text=True,
        )
        said: Said = []
        if sender.stdin is not None:
            sender.stdin.write(lines)
            sender.stdin.close()
        ended = 0
        for line in listener.stdout or ():
            at, topic, payload = line.split(" ", 2)
            ending = topic.rsplit("/", 1)[1]
            body = json.loads(payload)
            if ending == kind and (kind != "state" or body["state"] == "accepted"):
                said.append((float(at), topic, body))
            ended += ending == "result"
            if ended == len(jobs) or len(said) == count:
                break
        listener.terminate()
        sender.wait()
        return started, said


def accepted_per_s(bench: Bench, folder: Path, jobs: int = 3_000) -> dict[str, float]:
    """A burst of ordinary jobs while all rows run: from the first to the last `accepted`."""
    asked = [{"id": f"a{number}", "prompt": "The drum", "max_tokens": 128} for number in range(jobs)]
    with bench.worker(folder / "accepted"):
        started, said = bench.run(asked, "state", jobs)
    return {"jobs": jobs, "per_s": jobs / (said[-1][0] - started)}


def journal_cost(bench: Bench, folder: Path, workload: Path, repeats: int) -> dict[str, Any]:
    """Generated tokens a second of a workload, in turn with and without a journal."""
    lines = [json.loads(line) for line in workload.read_text().splitlines()]
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for repeat in range(repeats):
        for name, values in rates.items():
            journal = folder / f"cost-{repeat}" if name == "with" else None
            with bench.worker(journal):
                jobs = [
                    line | {"id": f"{name}{repeat}-{place}", "ignore_eos": True} for place, line in enumerate(lines)
                ]
                started, said = bench.run(jobs, "result")
            tokens = sum(body["usage"]["generated_tokens"] for _, _, body in said)
            values.append(tokens / (said[-1][0] - started))
    ratios = [after / before for before, after in zip(rates["without"], rates["with"], strict=True)]
    return rates | {"median_ratio": statistics.median(ratios)}


def chunk_gaps(bench: Bench, folder: Path, rows: int = 16, tokens: int = 200) -> dict[str, float]:
    """Gaps between the chunks of each job at the device while all rows decode, against the time of a step."""
    jobs = [
        {"id": f"g{row}", "prompt": f"Story {row}:", "max_tokens": tokens, "ignore_eos": True} for row in range(rows)
    ]
    with bench.worker(folder / "gaps"):
        bench.run([jobs[0] | {"id": "warm"}], "result")
        _, said = bench.run(jobs, "chunks")
    times: dict[str, list[float]] = defaultdict(list)
    per_token = []
    for at, topic, _ in said:
        times[topic].append(at)
    gaps = [later - earlier for at in times.values() for earlier, later in pairwise(at[2:])]
    for topic, moments in times.items():
        chunks = [body for _, other, body in said if other == topic]
        span = sum(len(body["token_ids"]) for body in chunks[1:])
        per_token.append((moments[-1] - moments[0]) / span)
    step = statistics.median(per_token)
    p50, p99 = np.percentile(gaps, (50, 99)).tolist()
    return {"step_s": step, "gap_p50_s": p50, "gap_p99_s": p99, "p99_over_step": p99 / step}


def restart(bench: Bench, folder: Path, jobs: int = 10_000) -> dict[str, float]:
    """Start to ready with so many unfinished jobs in the journal, and with an empty one."""
    path = folder / "restart"
    asyncio.run(_fill(path, jobs))
    with bench.worker(folder / "empty") as empty:
        pass
    with bench.worker(path) as full:
        pass
    return {"jobs": jobs, "ready_s": full, "ready_empty_s": empty}


async def _fill(path: Path, jobs: int) -> None:
    from drumline.scheduler.journal.journal import Journal
    from drumline.scheduler.journal.records import AcceptedJob, Progress
    from drumline.scheduler.mqtt.reply import Reply
    from drumline.scheduler.mqtt.topics import Topics

    async with Journal(path, max_unfinished=jobs) as journal:

        async def accept(number: int) -> None:
            body = json.dumps({"id": f"r{number}", "prompt": "Once upon a time", "max_tokens": 64}).encode()
            reply = Reply(Topics(), "bench", f"r{number}").encode()
            accepted = await journal.accept(AcceptedJob("bench", f"r{number}", b"\0" * 32, body, reply, number))
            journal.progress(accepted, Progress(0, tuple(range(20))))

        for start in range(0, jobs, 500):
            await asyncio.gather(*(accept(number) for number in range(start, start + 500)))


def main() -> None:
    """Measure all and print one JSON object."""
    parser = argparse.ArgumentParser(prog="benchmarks.mqtt_jobs", description=__doc__)
    parser.add_argument("--workload", type=Path, required=True, help="JSON lines of requests")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drumline-bench-") as name:
        folder = Path(name)
        bench = Bench(folder)
        try:
            report = {
                "accepted": accepted_per_s(bench, folder),
                "chunks": chunk_gaps(bench, folder),
                "restart": restart(bench, folder),
                "journal": journal_cost(bench, folder, arguments.workload, arguments.repeats),
            }
        finally:
            bench.broker.terminate()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
