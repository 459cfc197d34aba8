"""Reading the log of a process back, in both of its forms."""

import json
import re
from datetime import datetime
from typing import NamedTuple

LINE = re.compile(
    r'(?P<time>\S+) (?P<level>debug|info|warning|error|critical) (?P<name>[^="]+?)(?P<fields>( \w+=\S.*)?)'
)
FIELD = re.compile(r' (?P<key>\w+)=(?P<value>"(?:[^"\\]|\\.)*"|[^\s"=]+)')


class Logged(NamedTuple):
    """One line."""

    level: str
    event: str
    fields: dict[str, object]


def read_text(line: str) -> Logged:
    """A line of `--log-format text`; every character of it must be part of the format."""
    match = LINE.fullmatch(line)
    assert match, line
    assert datetime.fromisoformat(match["time"]).utcoffset().total_seconds() == 0
    fields = list(FIELD.finditer(match["fields"]))
    assert "".join(field[0] for field in fields) == match["fields"], line
    return Logged(match["level"], match["name"], {field["key"]: _value(field["value"]) for field in fields})


def read_json(line: str) -> Logged:
    """A line of `--log-format json`."""
    fields = json.loads(line)
    assert datetime.fromisoformat(fields.pop("time")).utcoffset().total_seconds() == 0
    assert fields.pop("logger")
    return Logged(fields.pop("level"), fields.pop("event"), fields)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
