"""What a scrape costs: milliseconds over HTTP after a thousandth of many finished jobs, and after all of them.

chrt -f 10 python -m benchmarks.scrape > scrape.json
"""

import argparse
import json
import time
from http.client import HTTPConnection
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.open_loop import percentiles
from drumline.metrics.definitions import MESSAGES
from drumline.metrics.exporter import Exporter
from drumline.metrics.instruments import Instruments
from drumline.metrics.pages import Pages
from drumline.metrics.process import register_process

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
FORMATS = {
    "text": {"Accept": "text/plain"},
    "openmetrics": {"Accept": OPENMETRICS},
    "openmetrics_gzip": {"Accept": OPENMETRICS, "Accept-Encoding": "gzip"},  # what Prometheus asks for
}


def finish_jobs(instruments: Instruments, jobs: range) -> None:
    """Tell of so many jobs, their steps and their messages."""
    for number in jobs:
        seconds = (number % 97) / 9.7
        instruments.step(8, 40, 0.1, {"plan": 0.001, "forward": 0.02, "sample": 0.002, "commit": 0.001})
        instruments.token_gaps(seconds / 100, 8, f"job-{number}")
        instruments.request_done("completed", seconds, seconds, seconds, 11, 32, job_id=f"job-{number}")
        for direction, kinds in MESSAGES.items():
            for kind in kinds:
                instruments.mqtt_message(direction, kind)
        instruments.journal_commit(4, 0.003)


def scrape(exporter: Exporter, headers: dict[str, str]) -> tuple[float, int]:
    """Milliseconds of one scrape on a new connection, and the bytes of the page."""
    started = time.perf_counter()
    connection = HTTPConnection(exporter.host, exporter.port)
    connection.request("GET", "/metrics", headers=headers)
    body = connection.getresponse().read()
    elapsed_ms = (time.perf_counter() - started) * 1e3
    connection.close()
    return elapsed_ms, len(body)


def measure(exporter: Exporter, times: int) -> dict[str, Any]:
    """Each format so many times."""
    report = {}
    for name, headers in FORMATS.items():
        scrape(exporter, headers)
        taken = [scrape(exporter, headers) for _ in range(times)]
        report[name] = {"scrape_ms": percentiles([ms for ms, _ in taken]), "page_bytes": taken[-1][1]}
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--scrapes", type=int, default=300)
    given = parser.parse_args()
    registry = CollectorRegistry()
    instruments = Instruments(registry, "main")
    instruments.identify(version="0.1.0", model="SmolLM2-135M-Instruct", precision="int8", backend="cpu")
    register_process(registry)
    report: dict[str, Any] = {}
    with Exporter(Pages(registry, health=list, ready=list), port=0) as exporter:
        for jobs in (given.jobs // 1000, given.jobs):
            finish_jobs(instruments, range(jobs))
            report[f"after {jobs} jobs"] = measure(exporter, given.scrapes)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
