"""What is logged: events, each a name and fields, on one line whatever the fields hold."""

import json
import re
from collections.abc import Mapping

Plain = str | int | float | bool

BARE = re.compile(r"[A-Za-z0-9_.:/@+-]+")
"""What a value is made of that needs no quotes."""
SECONDS_DIGITS = 4
LONGEST_TEXT = 2_000
"""Characters of a value: whoever sends us something decides how long it is."""


class Event:
    """The message of a log record: `logger.info(Event("job ended", job=job_id, outcome="completed"))`.

    Fields that are None are left out. Nothing is formatted before a handler asks for it. As text it reads
    `job ended job=a outcome=completed`; values that are more than a word are quoted as in JSON, and what is not
    printable in them, line ends first of all, is escaped: nobody who chooses a value can write a line of his own.
    """

    __slots__ = ("_fields", "name")

    def __init__(self, name: str, /, **fields: object) -> None:
        self.name = name
        self._fields = fields

    @property
    def fields(self) -> dict[str, Plain]:
        """Fields that have a value, as JSON can hold them."""
        return {name: _plain(value) for name, value in self._fields.items() if value is not None}

    def __str__(self) -> str:
        return as_text(self.name, self.fields)


def as_text(name: str, fields: Mapping[str, Plain]) -> str:
    """`name key=value key="two words"`."""
    return " ".join([name, *(f"{key}={_quoted(value)}" for key, value in fields.items())])


def _plain(value: object) -> Plain:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, SECONDS_DIGITS)
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def _quoted(value: Plain) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if BARE.fullmatch(value):
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    if quoted.isprintable():
        return quoted
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in quoted)
