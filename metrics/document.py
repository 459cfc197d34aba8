"""The tables of docs/metrics.md, made from the definitions; what stands around them is written by hand.

python -m drumline.metrics.document --output docs
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from drumline.metrics.definitions import COUNTERS, GAUGES, HISTOGRAMS, INFOS, PREFIX, Definition
from drumline.metrics.families import EXEMPLAR_LABEL
from drumline.metrics.process import register_process

NAME = "metrics.md"
BEGIN = "<!-- Made by `python -m drumline.metrics.document --output docs`; do not edit. -->"
END = "<!-- As far as here. -->"


class Entry(NamedTuple):
    """A family as the text page tells it."""

    name: str
    type: str
    labels: Mapping[str, tuple[str, ...]]
    help: str
    buckets: tuple[float, ...] = ()
    exemplars: bool = False


def own() -> Iterable[Entry]:
    """The families of a scheduler."""
    for kind, table in (("gauge", GAUGES), ("counter", COUNTERS)):
        for name, of in table.items():
            yield _entry(PREFIX + name, kind, of)
    for name, of in INFOS.items():
        yield _entry(f"{PREFIX}{name}_info", "gauge", of)
    for name, timed in HISTOGRAMS.items():
        yield _entry(PREFIX + name, "histogram", timed)._replace(buckets=timed.buckets, exemplars=timed.exemplars)


def _entry(name: str, kind: str, of: Definition) -> Entry:
    return Entry(name, kind, {"scheduler": ()} | dict(of.labels), of.help)


def of_process() -> Iterable[Entry]:
    """Those of the process, as its collectors describe them here; some are there only on Linux."""
    registry = CollectorRegistry()
    register_process(registry)
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label: () for sample in family.samples for label in sample.labels}
        yield Entry(name, family.type, labels, family.documentation.rstrip(".") + ".")


def _labels(entry: Entry) -> str:
    told = [f"`{name}`" + (f" ({', '.join(values)})" if values else "") for name, values in entry.labels.items()]
    return ", ".join(told)


def _table(entries: Iterable[Entry]) -> list[str]:
    rows = [f"| `{entry.name}` | {entry.type} | {_labels(entry)} | {entry.help} |" for entry in entries]
    return ["| name | type | labels | what |", "|---|---|---|---|", *rows]


def _buckets(entries: Iterable[Entry]) -> list[str]:
    """Which histograms share which upper bounds."""
    sharing: dict[tuple[float, ...], list[Entry]] = {}
    for entry in entries:
        if entry.buckets:
            sharing.setdefault(entry.buckets, []).append(entry)
    rows = [
        f"| {', '.join(f'`{entry.name}`' for entry in alike)} | {' '.join(f'{bound:g}' for bound in bounds)} |"
        for bounds, alike in sharing.items()
    ]
    return ["| histograms | upper bounds, before +Inf |", "|---|---|", *rows]


def tables() -> str:
    """What stands between `BEGIN` and `END`."""
    entries = list(own())
    shown = ", ".join(f"`{entry.name}`" for entry in entries if entry.exemplars)
    parts = (
        ["### Of a scheduler"],
        _table(entries),
        ["### Buckets"],
        _buckets(entries),
        [f"Their buckets show a `{EXEMPLAR_LABEL}` as exemplar: {shown}."],
        ["### Of the process"],
        _table(of_process()),
    )
    return "\n\n".join("\n".join(part) for part in parts)


def renewed(page: str) -> str:
    """The page with the tables of now. Raises `ValueError` for one that lacks their place."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{NAME}: the tables' place, {BEGIN} … {END}, is missing")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    """Renew the page."""
    parser = argparse.ArgumentParser(description="Write the tables of the metrics into docs/metrics.md.")
    parser.add_argument("--output", type=Path, required=True, help="the folder that holds metrics.md")
    path = parser.parse_args(arguments).output / NAME
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
