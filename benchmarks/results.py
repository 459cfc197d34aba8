"""The results file: saved after each run, so that a measurement that was interrupted goes on where it was."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measures import Measure
from benchmarks.peers.base import About, Timing

SCHEMA = 1


@dataclass(frozen=True)
class Spread:
    """The median of several runs, the lowest and the highest."""

    median: float
    low: float
    high: float
    runs: int


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


class Results:
    """What has been measured so far, by engine and measure."""

    def __init__(self, path: Path, settings: dict[str, Any], machine: dict[str, Any], fresh: bool = False) -> None:
        """Go on with the file at `path`, or begin one. A file with other settings is an error: name another one."""
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "settings": settings,
            "machine": machine,
            "measures": {},
            "engines": {},
            "runs": {},
            "start": {},
            "open_loop": None,
        }
        if path.exists() and not fresh:
            found = json.loads(path.read_text())
            if found.get("schema") != SCHEMA or found["settings"] != settings:
                raise ValueError(f"{path} holds figures of other settings; give another --name, or --fresh")
            self.data = found

    def engine(self, name: str) -> dict[str, Any]:
        """What is known of an engine; it may be added to."""
        found: dict[str, Any] = self.data["engines"].setdefault(name, {})
        return found

    def met(self, name: str, about: About, ready_s: float) -> None:
        """Note what an engine said of itself."""
        self.engine(name).update(asdict(about), ready_s=ready_s)
        self.engine(name).pop("error", None)
        self.save()

    def add(self, engine: str, measure: Measure, timing: Timing) -> None:
        """Note one run."""
        self.data["measures"][measure.name] = {
            "title": measure.title,
            "unit": measure.unit,
            "rows": measure.rows,
            "requests": len(measure.work),
            "sampling": measure.sampling,
        }
        run = {"tokens_per_s": measure.rate(timing), **asdict(timing)}
        self.data["runs"].setdefault(engine, {}).setdefault(measure.name, []).append(run)
        self.save()

    def runs(self, engine: str, measure: str) -> list[dict[str, Any]]:
        """The runs of one measure."""
        found: list[dict[str, Any]] = self.data["runs"].get(engine, {}).get(measure, [])
        return found

    def rate(self, engine: str, measure: str) -> Spread | None:
        """Tokens a second, or None where nothing was measured."""
        found = self.runs(engine, measure)
        return spread([run["tokens_per_s"] for run in found]) if found else None

    def started(self, kind: str, seconds: float) -> None:
        """Note one start of ours, by the state of its caches."""
        self.data["start"].setdefault(kind, []).append(seconds)
        self.save()

    def starts(self, kind: str) -> list[float]:
        """Seconds of all starts of that kind."""
        found: list[float] = self.data["start"].get(kind, [])
        return found

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)
