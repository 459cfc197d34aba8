"""A Prometheus server: its HTTP API, and one of our own for as long as a block runs."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import free_port

START_TIMEOUT_S = 30.0
POLL_S = 0.05
REQUEST_TIMEOUT_S = 30.0


class PrometheusError(Exception):
    """The server did not start, or refused a query; the text is its own."""


@dataclass(frozen=True)
class Series:
    """One series of an answer: its labels, and its values at Unix seconds (one of each for an instant query)."""

    labels: dict[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The last value."""
        return self.values[-1]


class Prometheus:
    """The HTTP API of the server at `url`, such as `http://127.0.0.1:9090`. All methods raise `PrometheusError`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        """The series of an instant query (a scalar is one without labels), at Unix seconds `at` or now."""
        arguments = {"query": expression} | ({} if at is None else {"time": repr(at)})
        return _series(self.get("query", **arguments))

    def query_range(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        """The series of a query between two Unix times."""
        return _series(
            self.get("query_range", query=expression, start=repr(start), end=repr(end), step=f"{step_s:.3f}")
        )

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> list[Series]:
        """The answer of an instant query once it is not empty."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.query(expression)):
            if time.monotonic() > deadline:
                raise PrometheusError(f"nothing for {expression} in {timeout_s:g} s; targets: {self.get('targets')}")
            time.sleep(POLL_S)
        return found

    def get(self, endpoint: str, **arguments: str) -> Any:
        """`data` of `/api/v1/ENDPOINT`, such as `rules`, `alerts`, `targets`, `query_exemplars`."""
        address = f"{self.url}/api/v1/{endpoint}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(address, timeout=REQUEST_TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise PrometheusError(f"{arguments}: {error.read().decode(errors='replace')}") from error
        except OSError as error:
            raise PrometheusError(f"{self.url}: {error}") from error

    def is_ready(self) -> bool:
        """Whether it answers queries yet."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=REQUEST_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _series(data: Any) -> list[Series]:
    if data["resultType"] == "scalar":
        at, value = data["result"]
        return [Series({}, (float(at),), (float(value),))]
    found = []
    for entry in data["result"]:
        points = entry["values"] if data["resultType"] == "matrix" else [entry["value"]]
        times, values = zip(*((float(at), float(value)) for at, value in points), strict=True)
        found.append(Series(entry["metric"], times, values))
    return found


@contextmanager
def running_prometheus(
    folder: Path, targets: Sequence[str], *, rules: Sequence[Path] = (), interval: str = "500ms"
) -> Iterator[Prometheus]:
    """A server that scrapes `targets` (`HOST:PORT`, job `drumline`) every `interval` while the block runs.

    `folder` takes its configuration, log and data. It evaluates `rules` as often, and keeps exemplars.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        raise PrometheusError("prometheus is not installed (Debian package prometheus)")
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [{"job_name": "drumline", "static_configs": [{"targets": list(targets)}]}],
    }
    path, log_path, port = folder / "prometheus.yml", folder / "prometheus.log", free_port()
    path.write_text(json.dumps(config, indent=2))  # JSON is YAML
    arguments = (
        f"--config.file={path}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    )  # fmt: skip
    with log_path.open("wb") as log:
        process = subprocess.Popen([binary, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise PrometheusError(f"prometheus did not start:\n{log_path.read_text(errors='replace')}")
            time.sleep(POLL_S)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
