"""How log records look on stderr, and which of them are shown. Only the command line decides that."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

from drumline.scheduler.log import Event, Plain, as_text

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

OURS = logging.getLogger("drumline")
AIOMQTT = logging.getLogger("drumline.mqtt.aiomqtt")


def _event(record: logging.LogRecord) -> tuple[str, dict[str, Plain]]:
    """The event of a record; what others log is an event `message`."""
    event = record.msg if isinstance(record.msg, Event) else Event("message", text=record.getMessage())
    return event.name, event.fields


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, str]:
    if record.exc_info is None or record.exc_info[0] is None:
        return {}
    return {"exception": formatter.formatException(record.exc_info)}


def _time(record: logging.LogRecord) -> str:
    """ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """`TIME level event key=value …`; a traceback is one more value."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        name, fields = _event(record)
        more = {} if isinstance(record.msg, Event) else {"logger": record.name}
        told = as_text(name, fields | more | _exception(self, record))
        return f"{_time(record)} {record.levelname.lower()} {told}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, then the event's fields, and exception."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        name, fields = _event(record)
        head = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name, "event": name}
        return json.dumps(head | fields | _exception(self, record))


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]  # generic only for type checkers
    """The one handler of a command: stderr as it is at that moment, which a spinner may have taken over."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self.setStream(sys.stderr)
        super().emit(record)


@contextmanager
def on_stderr() -> Iterator[None]:
    """Warnings and errors go to stderr as they are while the block runs; `configure` says otherwise."""
    handler = _Stderr()
    logging.getLogger().addHandler(handler)
    # What it warns of reaches us as an exception, too, and that is told.
    AIOMQTT.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        OURS.setLevel(logging.NOTSET)


def configure(level: Level, style: Format) -> None:
    """What a worker logs, and how.

    Other libraries are heard from warnings on.
    """
    OURS.setLevel(level.upper())
    formatter = JsonFormatter() if style == "json" else TextFormatter()
    for handler in _handlers():
        handler.setFormatter(formatter)


def writes_json() -> bool:
    """Whether all that goes to stderr is JSON."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in _handlers())


def _handlers() -> list[_Stderr]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _Stderr)]
