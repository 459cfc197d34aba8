"""The dashboard's panels as images: queries, units and colours are read from its JSON, the data come from Prometheus.

python -m benchmarks.panels --prometheus http://127.0.0.1:9090 --output docs/images --range 300
python -m benchmarks.panels --demo --output docs/images     (starts a Prometheus and a worker, and gives it work)
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from benchmarks.prometheus import Prometheus, Series

DASHBOARD = Path(__file__).parents[1] / "metrics" / "dashboards" / "drumline.json"
FIGURES = {
    "dashboard": (
        "Requests by outcome", "Queue depth by priority", "Time to first token",
        "Tokens out", "Time between tokens: distribution", "Step time by phase",
    ),
    "engine": (
        "Rows", "Tokens in", "Reuse and drafts",
        "Queue wait", "Journal: time of a commit", "Messages out",
    ),
}  # fmt: skip
"""Titles of the panels of each image, three in a line."""
COLUMNS = 3
POINTS = 240
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#999999", "#000000")
UNDER_TITLE: dict[str, Any] = {
    "loc": "lower left", "bbox_to_anchor": (-0.02, 0.975), "frameon": False, "fontsize": 8.5,
    "handlelength": 1.0, "handletextpad": 0.4, "columnspacing": 1.0,
}  # fmt: skip
"""Where a legend hides no data."""
TITLE_PAD = 19
Panel = dict[str, Any]


def read_panels(dashboard: Path = DASHBOARD) -> dict[str, Panel]:
    """The panels of a dashboard by their titles, without rows."""
    panels = json.loads(dashboard.read_text("utf-8"))["panels"]
    return {panel["title"]: panel for panel in panels if panel["type"] != "row"}


def filled(expression: str, rate_interval: str) -> str:
    """A query as Grafana would send it, with all models and instances chosen."""
    chosen = {"$__rate_interval": rate_interval, "$model": ".+", "$instance": ".+"}
    for variable, value in chosen.items():
        expression = expression.replace(variable, value)
    return expression


def draw_figure(server: Prometheus, panels: Sequence[Panel], span: tuple[float, float], rate_interval: str) -> Figure:
    """Panels side by side, over these Unix seconds."""
    lines = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(5.2 * COLUMNS, 3.3 * lines), layout="constrained")
    step = max((span[1] - span[0]) / POINTS, 1.0)
    for axes, panel in zip(figure.subplots(lines, COLUMNS, squeeze=False).flat, panels, strict=False):
        found = [
            (target["legendFormat"], server.query_range(filled(target["expr"], rate_interval), *span, step))
            for target in panel["targets"]
        ]
        axes.set_title(panel["title"], loc="left", fontsize=11, fontweight="bold", pad=TITLE_PAD)
        (draw_heatmap if panel["type"] == "heatmap" else draw_lines)(axes, panel, found, span)
        axes.set_xlim(0, span[1] - span[0])
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{int(seconds // 60)}:{int(seconds % 60):02}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure


def draw_lines(axes: Axes, panel: Panel, found: Sequence[tuple[str, list[Series]]], span: tuple[float, float]) -> None:
    """One line a series, or areas on one another."""
    defaults = panel["fieldConfig"]["defaults"]
    fixed = {
        override["matcher"]["options"]: entry["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        for entry in override["properties"]
        if entry["id"] == "color"
    }
    named = [(legend(form, series.labels), series) for form, all_series in found for series in all_series]
    named.sort(key=lambda item: list(fixed).index(item[0]) if item[0] in fixed else len(fixed))
    colours = [fixed.get(name, COLOURS[place % len(COLOURS)]) for place, (name, _) in enumerate(named)]
    if defaults["custom"]["stacking"]["mode"] == "normal" and named:
        times = sorted({at for _, series in named for at in series.times})
        layers = [np.interp(times, series.times, series.values) for _, series in named]
        axes.stackplot([at - span[0] for at in times], layers, labels=[n for n, _ in named], colors=colours, alpha=0.85)
    else:
        for (name, series), colour in zip(named, colours, strict=True):
            axes.plot([at - span[0] for at in series.times], series.values, color=colour, label=name, linewidth=1.6)
    axes.set_ylim(0, defaults.get("max"))
    top = axes.get_ylim()[1]
    for limit in defaults["thresholds"]["steps"][1:]:
        if limit["value"] <= top:
            axes.axhline(limit["value"], color=limit["color"], linewidth=1, linestyle=":")
    axes.yaxis.set_major_formatter(formatter(defaults["unit"]))
    axes.set_ylabel(defaults["custom"]["axisLabel"], fontsize=9)
    axes.grid(alpha=0.25)
    if len(named) > 1:
        axes.legend(**UNDER_TITLE, ncols=len(named))


def draw_heatmap(
    axes: Axes, panel: Panel, found: Sequence[tuple[str, list[Series]]], span: tuple[float, float]
) -> None:
    """Observations a second in each bucket; a histogram's series hold all that is less than their bound, too."""
    [(_, series)] = found
    ordered = sorted(series, key=lambda one: float(one.labels["le"]))
    times = sorted({at for one in ordered for at in one.times})
    cumulative = np.array([np.interp(times, one.times, one.values) for one in ordered])
    counts = np.diff(cumulative, axis=0, prepend=0.0)
    seen = np.flatnonzero(counts.max(axis=1) > 0)
    low, high = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, len(ordered))
    shown = np.ma.masked_less_equal(counts[low:high], 0)
    mesh = axes.pcolormesh(
        np.array(times) - span[0], np.arange(high - low), shown, cmap="viridis", norm=PowerNorm(0.5), shading="nearest"
    )
    show = formatter(panel["fieldConfig"]["defaults"]["unit"])
    bounds = [float(one.labels["le"]) for one in ordered[low:high]]
    axes.set_yticks(range(high - low), [f"≤ {show(bound, 0)}" if bound < math.inf else "more" for bound in bounds])
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.01)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("a second", fontsize=8.5)


def legend(form: str, labels: dict[str, str]) -> str:
    """A legend with its `{{label}}`s filled."""
    for label, value in labels.items():
        form = form.replace(f"{{{{{label}}}}}", value)
    return form


def formatter(unit: str) -> Callable[[float, Any], str]:
    """How values of a unit of Grafana's are written."""

    def seconds(value: float, _: Any) -> str:
        if value >= 60:
            return f"{value / 60:g} min"
        return f"{value:g} s" if value >= 1 or value == 0 else f"{value * 1000:g} ms"

    def plain(value: float, _: Any) -> str:
        return f"{value:g}"

    def percent(value: float, _: Any) -> str:
        return f"{value:.0%}"

    return {"s": seconds, "percentunit": percent}.get(unit, plain)


def draw_all(server: Prometheus, output: Path, span: tuple[float, float], rate_interval: str) -> list[Path]:
    """Every image of `FIGURES`, as PNG; returns the files."""
    output.mkdir(parents=True, exist_ok=True)
    panels = read_panels()
    drawn = []
    for name, titles in FIGURES.items():
        drawn.append(output / f"{name}.png")
        draw_figure(server, [panels[title] for title in titles], span, rate_interval).savefig(drawn[-1], dpi=100)
    return drawn


def main() -> None:
    """Draw, and print the files."""
    parser = argparse.ArgumentParser(prog="benchmarks.panels", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prometheus", help="URL of a server that scrapes drumline")
    source.add_argument("--demo", action="store_true", help="start a server, a worker and devices of our own")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    parser.add_argument("--range", type=float, help="seconds up to now (default 300; the demo: all of it)")
    parser.add_argument("--rate-interval", help="at least four scrapes (default 60s; the demo: 10s)")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        started = time.time()
        if arguments.demo:
            from benchmarks.varied_load import watched_worker

            server, started = stack.enter_context(watched_worker())
        else:
            server = Prometheus(arguments.prometheus)
            started -= 300.0
        end = time.time()
        span = (end - arguments.range if arguments.range else started, end)
        interval = arguments.rate_interval or ("10s" if arguments.demo else "60s")
        for path in draw_all(server, arguments.output, span, interval):
            print(path)


if __name__ == "__main__":
    main()
