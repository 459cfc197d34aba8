"""A real Prometheus for tests: it scrapes their pages, loads their rules, and is asked over its HTTP API."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.prometheus import Prometheus, PrometheusError, Series, running_prometheus
from tests.processes import program

__all__ = ["Prometheus", "PrometheusError", "Series", "prometheus_server", "promtool"]


@contextmanager
def prometheus_server(
    folder: Path, *targets: str, rules: Sequence[Path] = (), interval: str = "500ms"
) -> Iterator[Prometheus]:
    """Scrapes `targets` (`HOST:PORT`) every `interval` and evaluates `rules` as often, while the block runs.

    Skips the test where Prometheus is not installed, unless CI says that it must be.
    """
    program("prometheus")
    with running_prometheus(folder, targets, rules=rules, interval=interval) as server:
        yield server


def promtool(
    *arguments: str | Path, cwd: Path | None = None, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `promtool ARGUMENTS` to its end, with `text` as its input; skips like the above."""
    command = [program("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, encoding="utf-8", timeout=60, cwd=cwd)
