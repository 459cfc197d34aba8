"""Traces of a running worker: from its start, switched by a signal, or taken over HTTP for so many seconds."""

import asyncio
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

from drumline.metrics.pages import Asked, Page, Response, as_json
from drumline.model.errors import InvalidRequest
from drumline.scheduler.cli.loop import on_switch
from drumline.scheduler.log import Event
from drumline.scheduler.trace import Trace
from drumline.scheduler.trace_file import MAX_BYTES, TraceFile

_log = logging.getLogger("drumline")

DEFAULT_FOLDER = Path(tempfile.gettempdir())
COMPLETE_HEADER = "X-Trace-Complete"
"""`no` where the file was full, or somebody ended the recording, before its time."""
LONGEST_S = 60.0
ANSWER_S = 10.0
"""What an event loop that is busy has, beyond the seconds of a recording."""


@dataclass(frozen=True)
class TraceSettings:
    """Where recordings go, how large one may become, and whether there is one from the start."""

    folder: Path = DEFAULT_FOLDER
    max_bytes: int = MAX_BYTES
    from_start: bool = False


class Tracing:
    """Switches the trace of one worker. Its methods are called on the event loop, but for `answer`."""

    def __init__(self, trace: Trace, worker: str, settings: TraceSettings) -> None:
        self._trace, self._worker, self._settings = trace, worker, settings
        self._taken: TraceFile | None = None
        """The recording that somebody waits for over HTTP."""
        self._loop = asyncio.get_running_loop()

    @contextmanager
    def switched_by_signal(self) -> Iterator[None]:
        """SIGUSR2 begins and ends a recording while the block runs, and there may be one from its start.

        Raises `OSError` where that cannot be written: who asked for it is still looking.
        """
        if self._settings.from_start:
            self._trace.start(self._new_path(), self._settings.max_bytes)
        with on_switch(self.switch):
            try:
                yield
            finally:
                self._trace.end()

    def switch(self) -> None:
        """Begin a recording, or end the one that runs; what fails is logged, as nobody waits for it."""
        if self._taken is not None:
            _log.warning(Event("no trace", reason="one is being recorded for who asked over HTTP"))
            return
        if self._trace.recording:
            self._trace.end()
            return
        try:
            self._trace.start(self._new_path(), self._settings.max_bytes)
        except OSError as error:
            _log.error(Event("trace failed", path=error.filename, error=error.strerror))

    async def record(self, seconds: float) -> tuple[bytes, bool]:
        """The trace of the next seconds, and whether it is of all of them. Raises `InvalidRequest` while another
        recording runs, and `OSError`."""
        with tempfile.TemporaryDirectory(prefix="drumline-trace-", dir=self._settings.folder) as folder:
            recording = self._trace.start(Path(folder) / "trace.json", self._settings.max_bytes)
            self._taken = recording
            try:
                await asyncio.sleep(seconds)
            finally:
                self._taken = None
                whole = self._trace.end(recording) is not None
            return await asyncio.to_thread(_read, recording, whole)

    def answer(self, asked: Asked) -> Response:
        """`POST /trace?seconds=5`: the trace of these seconds. Called on a server's thread."""
        try:
            seconds = _seconds(asked)
            recording = asyncio.run_coroutine_threadsafe(self.record(seconds), self._loop)
            body, whole = recording.result(seconds + ANSWER_S)
            return Response(body, "application/json", headers=((COMPLETE_HEADER, "yes" if whole else "no"),))
        except InvalidRequest as error:
            busy = error.field == "trace"
            return as_json({"error": str(error)}, HTTPStatus.CONFLICT if busy else HTTPStatus.BAD_REQUEST)
        except CancelledError:
            return as_json({"error": "the worker ends"}, HTTPStatus.SERVICE_UNAVAILABLE)
        except TimeoutError:
            recording.cancel()
            return as_json({"error": "the event loop does not answer"}, HTTPStatus.SERVICE_UNAVAILABLE)
        except OSError as error:
            return as_json({"error": f"the trace cannot be written: {error.strerror}"}, HTTPStatus.INSUFFICIENT_STORAGE)

    def _new_path(self) -> Path:
        moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        return self._settings.folder / f"drumline-{self._worker}-{moment}.trace.json"


def trace_page(current: Callable[[], Tracing | None], starting: Callable[[], list[str]]) -> Page:
    """`/trace` of a worker; 503 with the reasons that `starting` has while there is no `current` tracing yet."""

    def answer(asked: Asked) -> Response:
        tracing = current()
        if tracing is None:
            return as_json({"error": "; ".join(starting())}, HTTPStatus.SERVICE_UNAVAILABLE)
        return tracing.answer(asked)

    return Page(answer, methods=("POST",))


def _read(recording: TraceFile, whole: bool) -> tuple[bytes, bool]:
    summary = recording.wait()
    if summary.error is not None:
        raise OSError(0, summary.error)
    return summary.path.read_bytes(), whole and summary.complete


def _seconds(asked: Asked) -> float:
    for name in asked.query:
        if name != "seconds":
            raise InvalidRequest(name, "is unknown; there is seconds alone")
    given = ", ".join(asked.query.get("seconds", ["5"]))
    seconds = float(given) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", given, re.ASCII) else 0.0
    if not 0 < seconds <= LONGEST_S:
        raise InvalidRequest("seconds", f"must be a number above 0, up to {LONGEST_S:.0f}, not {given!r}")
    return seconds
