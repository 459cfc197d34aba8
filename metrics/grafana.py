"""Grafana's JSON (schema of version 10 and later): panels of four kinds, laid out in rows of a grid."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Json = dict[str, Any]
Layout = Literal["lines", "stacked", "share"]

GRID_WIDTH = 24
SCHEMA_VERSION = 39
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """PromQL, and how its series are called in the legend."""

    expression: str
    legend: str = "__auto"
    exemplars: bool = False


@dataclass(frozen=True)
class Panel(ABC):
    """What all kinds have: queries, a unit of Grafana's (`s`, `percentunit`, `reqps`, …), and a sentence about it.

    `thresholds` are values from which a stat has another colour, or lines across a graph; `colours` belong to series by
    their names. Width and height are in cells of the grid.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 8
    height: int = 8
    thresholds: Mapping[float, str] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)

    def json(self, panel_id: int, x: int, y: int) -> Json:
        """The panel at a place of the grid."""
        kind, defaults, options = self.parts()
        return {
            "id": panel_id,
            "type": kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": {"unit": self.unit} | defaults, "overrides": self.overrides()},
            "options": options,
            "targets": [self.target(place, query) for place, query in enumerate(self.queries)],
        }

    @abstractmethod
    def parts(self) -> tuple[str, Json, Json]:
        """Type, defaults of its fields, options."""

    def target(self, place: int, query: Query) -> Json:
        """A query of the panel."""
        return {
            "refId": chr(ord("A") + place),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expression,
            "legendFormat": query.legend,
            "range": True,
            "exemplar": query.exemplars,
        }

    def overrides(self) -> list[Json]:
        """What single series have of their own."""
        return [
            _override(name, {"id": "color", "value": {"mode": "fixed", "fixedColor": colour}})
            for name, colour in self.colours.items()
        ]

    def steps(self, base: str) -> Json:
        """Thresholds over a base colour."""
        steps = [{"value": value, "color": colour} for value, colour in self.thresholds.items()]
        return {"mode": "absolute", "steps": [{"value": None, "color": base}, *steps]}


@dataclass(frozen=True)
class Stat(Panel):
    """One number, or with `names` the names of series. `words` say what values mean."""

    width: int = 3
    height: int = 4
    words: Mapping[int, str] = field(default_factory=dict)
    names: bool = False

    def parts(self) -> tuple[str, Json, Json]:
        """As `Panel.parts`."""
        mappings = [{"type": "value", "options": {str(value): {"text": word} for value, word in self.words.items()}}]
        defaults: Json = {"thresholds": self.steps("text"), "mappings": mappings if self.words else []}
        options = {
            "colorMode": "value",
            "graphMode": "none" if self.words or self.names else "area",
            "justifyMode": "auto",
            "textMode": "name" if self.names else "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
        return "stat", defaults, options


@dataclass(frozen=True)
class Graph(Panel):
    """Lines over time. `axis` says what the numbers are; series named in `right` have an axis of their own there."""

    axis: str = ""
    layout: Layout = "lines"
    highest: float | None = None
    right: Mapping[str, str] = field(default_factory=dict)

    def parts(self) -> tuple[str, Json, Json]:
        """As `Panel.parts`."""
        stacking = {"lines": "none", "stacked": "normal", "share": "percent"}[self.layout]
        custom = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 0 if self.layout == "lines" else 40,
            "showPoints": "never",
            "spanNulls": False,
            "axisLabel": self.axis,
            "stacking": {"mode": stacking, "group": "A"},
            "thresholdsStyle": {"mode": "line" if self.thresholds else "off"},
        }
        defaults: Json = {"min": 0, "custom": custom, "thresholds": self.steps("transparent")}
        if self.highest is not None:
            defaults["max"] = self.highest
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
        return "timeseries", defaults, options

    def overrides(self) -> list[Json]:
        """Colours, and series on the right."""
        axes = [
            _override(
                name, {"id": "custom.axisPlacement", "value": "right"}, {"id": "custom.axisLabel", "value": label}
            )
            for name, label in self.right.items()
        ]
        return super().overrides() + axes


@dataclass(frozen=True)
class Heatmap(Panel):
    """A histogram over time, from one query by `le`."""

    def parts(self) -> tuple[str, Json, Json]:
        """As `Panel.parts`."""
        options = {
            "calculate": False,
            "cellGap": 1,
            "cellValues": {"unit": "short"},
            "color": {"mode": "scheme", "scheme": "Viridis", "scale": "exponential", "exponent": 0.5, "steps": 64},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "yHistogram": True},
            "yAxis": {"axisPlacement": "left", "unit": self.unit},
        }
        return "heatmap", {"custom": {"scaleDistribution": {"type": "linear"}}}, options

    def target(self, place: int, query: Query) -> Json:
        """Buckets."""
        return super().target(place, query) | {"format": "heatmap", "legendFormat": "{{le}}"}


@dataclass(frozen=True)
class Section:
    """A row of the dashboard: a title that folds what is under it."""

    title: str
    panels: Sequence[Panel]


def _override(name: str, *properties: Json) -> Json:
    return {"matcher": {"id": "byName", "options": name}, "properties": list(properties)}


def variable(name: str, label: str, query: str) -> Json:
    """A variable of several values, or all, from `label_values(…)`."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"{name}-values"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def datasource_variable() -> Json:
    """Which Prometheus is asked."""
    return {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1}


def place(sections: Sequence[Section]) -> list[Json]:
    """All panels from left to right, each section under the one before it."""
    placed: list[Json] = []
    y = 0
    for section in sections:
        placed.append({
            "id": len(placed) + 1, "type": "row", "title": section.title, "collapsed": False, "panels": [],
            "gridPos": {"h": 1, "w": GRID_WIDTH, "x": 0, "y": y},
        })  # fmt: skip
        y, x, tallest = y + 1, 0, 0
        for panel in section.panels:
            if x + panel.width > GRID_WIDTH:
                x, y, tallest = 0, y + tallest, 0
            placed.append(panel.json(len(placed) + 1, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return placed
