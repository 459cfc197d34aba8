"""What a PromQL expression asks for: metrics, matchers and labels, found by its tokens. It judges no syntax."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<range>\[[^\]]*\])
      | (?P<number>\d[\w.]*)
      | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<operator>=~|!~|!=|==|>=|<=|\S)""",
    re.VERBOSE,
)
_LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_AFTER_FUNCTION = {"(", "by", "without"}
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


@dataclass(frozen=True)
class Matcher:
    """`label operator "value"` of a metric's selector."""

    metric: str
    label: str
    operator: str
    value: str


@dataclass
class Asked:
    """Of one expression."""

    metrics: set[str] = field(default_factory=set)
    matchers: list[Matcher] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)
    """Those by which it groups and joins."""


def asked(expression: str) -> Asked:
    """Everything that has to be there for the expression to have an answer."""
    found = Asked()
    tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(expression)]
    walk = iter(range(len(tokens)))
    metric = ""
    for place in walk:
        kind, text = tokens[place]
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        if text in _LABEL_LISTS:
            if following == "(":
                found.labels |= {name for kind, name in _until(tokens, walk, ")") if kind == "name"}
        elif text == "{":
            inside = [name for _, name in _until(tokens, walk, "}") if name != ","]
            for label, operator, value in zip(inside[::3], inside[1::3], inside[2::3], strict=True):
                found.matchers.append(Matcher(metric, label, operator, value[1:-1]))
        elif kind == "name" and following not in _AFTER_FUNCTION and text not in _WORDS:
            metric = text
            found.metrics.add(text)
    return found


def _until(tokens: list[tuple[str, str]], walk: Iterator[int], end: str) -> Iterator[tuple[str, str]]:
    """The tokens up to `end`, taken from the walk over their places."""
    for place in walk:
        if tokens[place][1] == end:
            return
        yield tokens[place]
