"""A timeline of rows, steps and the event loop for Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is the Trace Event Format's array of JSON events, times in microseconds: `X` is a slice of a track, `i` an
instant, `C` a counter, `b` and `e` begin and end a slice that overlaps others, `M` names a track.
"""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.model.errors import InvalidRequest
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.log import Event
from drumline.scheduler.request import Result
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.step import RowOutcome, StepReport, StepTimes
from drumline.scheduler.trace_file import MAX_BYTES, TraceFile, TraceSummary

_log = logging.getLogger("drumline")

PROCESS = 1
PHASES, EVENT_LOOP, ENDS, FIRST_ROW = 1, 2, 3, 100
"""Numbers of the tracks; row r is FIRST_ROW + r."""
LEAST_LAG_S = 0.001
"""An event loop that is late by less than this is not worth a slice."""


class Trace:
    """Records from `start` to `stop`, or until the file is full. While it does not, each hook costs one comparison.

    Hooks are called on the event loop. `start` and `stop` may be called while requests run, on the loop as well.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._file: TraceFile | None = None
        self._events: list[dict[str, Any]] = []
        self._named: set[int] = set()
        self._seated: dict[int, tuple[float, Sequence]] = {}
        self._waiting_since: dict[Sequence, float] = {}

    @property
    def recording(self) -> bool:
        """Whether events are taken."""
        return self._file is not None and self._file.open

    def start(self, path: Path, max_bytes: int = MAX_BYTES) -> TraceFile:
        """Record into a file, which is made anew; one that is full gives way.

        Raises `InvalidRequest` where a recording runs already or the bound is too small, `OSError` for a path that
        cannot be written.
        """
        if self._file is not None and self._file.open:
            raise InvalidRequest("trace", f"is being recorded already, into {self._file.path}")
        self.end()
        self._file = TraceFile(path, max_bytes)
        _log.info(Event("trace started", path=path, max_bytes=max_bytes))
        self._named.clear()
        self._events = [_named("process_name", PROCESS, 0, f"drumline {self._worker}")]
        for track, name in ((PHASES, "step phases"), (EVENT_LOOP, "event loop"), (ENDS, "requests ended")):
            self._name(track, name)
        return self._file

    def end(self, recording: TraceFile | None = None) -> TraceFile | None:
        """End the recording, or only that one, without waiting for the disk; its file, None where there was none."""
        if self._file is None or recording not in (None, self._file):
            return None
        for row in list(self._seated):
            self._occupied(row, time.perf_counter(), "still running")
        self._flush()
        file, self._file = self._file, None
        self._seated.clear()
        self._waiting_since.clear()
        file.end()
        return file

    def stop(self) -> TraceSummary | None:
        """End the recording, and say what came of it; None where there was none. Waits until all is written."""
        file = self.end()
        return None if file is None else file.wait()

    def seated(self, row: int, sequence: Sequence, waited_s: float) -> None:
        """A sequence that waited for so long, if it has not waited before, got a row."""
        if not self.recording:
            return
        now = time.perf_counter()
        began = self._waiting_since.pop(sequence, now - waited_s)
        self._seated[row] = now, sequence
        span = {"cat": "request", "id": _span_id(sequence.job), "pid": PROCESS, "tid": ENDS, "name": "queued"}
        self._add({**span, "ph": "b", "ts": _us(began), "args": {"row": row}}, {**span, "ph": "e", "ts": _us(now)})

    def left(self, row: int, sequence: Sequence, reason: str) -> None:
        """A sequence lost its row: to a stop reason, or it goes on later (`preempted`, `restart`)."""
        if not self.recording:
            return
        now = time.perf_counter()
        if reason in ("preempted", "restart"):
            self._waiting_since[sequence] = now
        self._occupied(row, now, reason)
        self._instant(FIRST_ROW + row, reason, now, {"job": sequence.job.label})

    def computed(self, report: StepReport, sequences: Mapping[int, Sequence], began: float, ended: float) -> None:
        """The model is done with a step, and nothing is committed yet. Times are those of `time.perf_counter`."""
        if not self.recording:
            return
        for outcome in report.outcomes:
            self._row_slice(outcome, sequences[outcome.segment.row], began, ended)
        self._counter("rows in the step", began, {"rows": len(report.outcomes)})
        self._counter("tokens fed", began, {"tokens": report.tokens})

    def stepped(self, report: StepReport, times: StepTimes) -> None:
        """A step is committed."""
        if not self.recording:
            return
        at = times.planned
        self._slice(PHASES, "plan", times.started, at)
        for phase, seconds in (("forward", report.forward_s), ("sample", report.sample_s)):
            self._slice(PHASES, phase, at, at + seconds)
            at += seconds
        self._slice(PHASES, "commit", times.computed, times.committed)
        self._flush()

    def loop_lag(self, seconds: float) -> None:
        """The event loop has just come back, so much later than planned."""
        if self.recording and seconds >= LEAST_LAG_S:
            now = time.perf_counter()
            self._slice(EVENT_LOOP, "late", now - seconds, now)

    def ended(self, job: GenerationJob, result: Result) -> None:
        """A job has its result: the one terminal event that it has."""
        if not self.recording:
            return
        now = time.perf_counter()
        told = {
            "job": job.label,
            "status": result.status,
            "stop_reason": result.stop_reason,
            "generated_tokens": result.usage.generated_tokens,
        }
        span = {"cat": "request", "id": _span_id(job), "pid": PROCESS, "tid": ENDS, "name": job.label}
        began = now - result.timings.total_s
        self._add({**span, "ph": "b", "ts": _us(began), "args": told}, {**span, "ph": "e", "ts": _us(now)})
        self._instant(ENDS, result.status, now, told, category="terminal")
        for sequence in job.sequences:
            self._waiting_since.pop(sequence, None)

    def refused(self, reason: str, job_id: str | None) -> None:
        """A request was not taken."""
        if self.recording:
            self._instant(EVENT_LOOP, f"rejected: {reason}", time.perf_counter(), {"job": job_id})

    def _occupied(self, row: int, now: float, ended: str) -> None:
        """The slice around all that a row did for one request; none where it was seated before the recording."""
        if row not in self._seated:
            return
        began, sequence = self._seated.pop(row)
        request = {"tenant": sequence.tenant, "priority": sequence.priority, "choice": sequence.choice}
        tokens = {"prompt_tokens": sequence.prompt_length, "generated_tokens": len(sequence.token_ids)}
        self._slice(FIRST_ROW + row, sequence.job.label, began, now, {**request, **tokens, "ended": ended})

    def _row_slice(self, outcome: RowOutcome, sequence: Sequence, began: float, ended: float) -> None:
        segment = outcome.segment
        told = {"job": sequence.job.label, "position": segment.position, "fed": segment.length}
        if outcome.choices:
            told["chosen"] = len(outcome.choices)
        phase = "prefill" if sequence.prefilling else "decode"
        self._slice(FIRST_ROW + segment.row, phase, began, ended, told)

    def _slice(
        self, track: int, name: str, began: float, ended: float, told: Mapping[str, object] | None = None
    ) -> None:
        if track >= FIRST_ROW and track not in self._named:
            self._name(track, f"row {track - FIRST_ROW}")
        event: dict[str, Any] = {"ph": "X", "pid": PROCESS, "tid": track, "name": name, "ts": _us(began)}
        event["dur"] = max(0.0, round((ended - began) * 1e6, 1))
        if told:
            event["args"] = told
        self._add(event)

    def _instant(
        self, track: int, name: str, at: float, told: Mapping[str, object], category: str = "drumline"
    ) -> None:
        where = {"ph": "i", "s": "t", "pid": PROCESS, "tid": track}
        self._add({**where, "name": name, "cat": category, "ts": _us(at), "args": told})

    def _counter(self, name: str, at: float, values: Mapping[str, int]) -> None:
        self._add({"ph": "C", "pid": PROCESS, "tid": 0, "name": name, "ts": _us(at), "args": values})

    def _name(self, track: int, name: str) -> None:
        self._named.add(track)
        self._add(_named("thread_name", PROCESS, track, name))
        self._add({**_named("thread_sort_index", PROCESS, track, ""), "args": {"sort_index": track}})

    def _add(self, *events: dict[str, Any]) -> None:
        self._events.extend(events)

    def _flush(self) -> None:
        if self._file is not None:
            self._file.put(self._events)
            self._events = []


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _span_id(job: GenerationJob) -> str:
    """An id may be used again once its job has ended: the time tells two of them apart."""
    return f"{job.id}@{job.submitted_at:.6f}"


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "ts": 0, "args": {"name": name}}
