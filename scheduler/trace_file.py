"""The file of a trace: events come in groups, and a thread of its own writes them."""

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from drumline.model.errors import InvalidRequest
from drumline.scheduler.log import Event

_log = logging.getLogger("drumline")

MAX_BYTES = 64 * 2**20
"""Some 400,000 events: 16 rows for about five minutes."""
LEAST_BYTES = 4096
MOST_WAITING = 4096
"""Groups of events that wait for a slow disk; with more the recording ends."""


@dataclass(frozen=True)
class TraceSummary:
    """What a recording came to."""

    path: Path
    events: int
    size_bytes: int
    complete: bool
    """False where the file was full, or could not be written, before the end."""
    error: str | None = None
    """Why it could not be written."""

    def __str__(self) -> str:
        cut = "" if self.complete else ", cut off"
        size = f"{self.events} events, {self.size_bytes / 2**20:.1f} MiB{cut}"
        return f"trace {self.path} ({size}): open it at ui.perfetto.dev"


class TraceFile:
    """A JSON array that is a whole one from its end on. Cut off by a kill it still opens: readers of the format do
    without the closing bracket. Raises `InvalidRequest` for a bound below 4 KiB, and `OSError`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        if max_bytes < LEAST_BYTES:
            raise InvalidRequest("max_bytes", f"must be at least {LEAST_BYTES}, not {max_bytes}")
        self.path, self._max_bytes = path, max_bytes
        self.open = True
        """Whether it takes events: False once it is full."""
        self._events = self._bytes = 0
        self._complete = True
        self._error: str | None = None
        self._groups: SimpleQueue[list[dict[str, Any]] | None] = SimpleQueue()
        self._file = path.open("w", encoding="utf-8")
        self._thread = threading.Thread(target=self._work, name="drumline-trace", daemon=True)
        self._thread.start()

    def put(self, events: list[dict[str, Any]]) -> None:
        """Hand events over; never waits."""
        if self.open and self._groups.qsize() > MOST_WAITING:
            self._end_early("the disk is too slow")
        self._groups.put(events)

    def end(self) -> None:
        """Nothing more comes: what was put before is written, then the file is closed. Does not wait for that."""
        self._groups.put(None)

    def wait(self) -> TraceSummary:
        """Wait until the file is closed, and say what came of it. Not on an event loop: the disk decides how long."""
        self._thread.join()
        return self._summary()

    def _summary(self) -> TraceSummary:
        return TraceSummary(self.path, self._events, self._bytes, self._complete, self._error)

    def _end_early(self, reason: str) -> None:
        self.open = self._complete = False
        self._error = reason
        _log.error(Event("trace failed", path=self.path, error=reason))

    def _work(self) -> None:
        try:
            with self._file:
                self._write("[")
                while (events := self._groups.get()) is not None:
                    if self.open:
                        self._append(events)
                self._write("\n]\n")
        except OSError as error:
            self._end_early(error.strerror or type(error).__name__)
        except Exception as error:  # an event that JSON cannot hold: a thread that died would leave the queue growing
            self._end_early(f"{type(error).__name__}: {error}")
        _log.info(Event("trace stopped", **vars(self._summary())))

    def _append(self, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            line = ("," if self._events else "") + "\n" + json.dumps(event, separators=(",", ":"))
            if self._bytes + len(line) > self._max_bytes:
                self.open = self._complete = False
                _log.warning(Event("trace full", path=self.path, bytes=self._bytes))
                return
            self._write(line)
            self._events += 1

    def _write(self, text: str) -> None:
        self._bytes += self._file.write(text)
