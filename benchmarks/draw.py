"""The plots: throughput and latency against rows, gaps between tokens against load, quality against precision."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers.specs import NO_DRAFTS, OURS
from benchmarks.results import spread

_COLOURS = {
    OURS: "#c2185b",
    NO_DRAFTS: "#f48fb1",
    "vllm": "#1976d2",
    "llama-server": "#388e3c",
    "transformers": "#f57c00",
}


def draw_all(results: Mapping[str, Any], quality: Path, folder: Path) -> list[Path]:
    """Draw what there are figures for, as PNG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if results["runs"]:
        drawn.append(draw_throughput(results, folder / "throughput.png"))
    if results["open_loop"]:
        drawn.append(draw_open_loop(results["open_loop"], folder / "open-loop.png"))
    if quality.exists():
        drawn.append(draw_quality(json.loads(quality.read_text()), folder / "quality.png"))
    return drawn


def draw_throughput(results: Mapping[str, Any], file: Path) -> Path:
    """Output tokens a second against rows, a line an engine; the bars go from the lowest run to the highest."""
    figure, axes = _axes("rows", "output tokens a second")
    for engine, runs in results["runs"].items():
        for sampling, style in (("greedy", "-o"), ("chat", "--s")):
            points = _points(results["measures"], runs, sampling)
            if points:
                rows, rates = zip(*points, strict=True)
                below = [rate.median - rate.low for rate in rates]
                above = [rate.high - rate.median for rate in rates]
                label = engine if sampling == "greedy" else f"{engine}, chat sampling"
                medians = [rate.median for rate in rates]
                axes.errorbar(rows, medians, (below, above), fmt=style, color=_COLOURS.get(engine), label=label)
    ticks = sorted({measure["rows"] for measure in results["measures"].values()})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_title(f"{results['settings']['workload']}, {results['machine']['cores']} cores")
    axes.legend()
    return _save(figure, file)


def draw_open_loop(load: Mapping[str, Any], file: Path) -> Path:
    """Gaps between tokens and p99 time to first token against the offered rate of requests."""
    figure, axes = _axes("requests offered a second (Poisson)", "milliseconds")
    trials = sorted((trial for trial in load["trials"] if trial["inter_token_s"]), key=lambda trial: trial["rate"])
    rates = [trial["rate"] for trial in trials]
    for name, style in (("p50", "-o"), ("p99", "--s")):
        gaps = [trial["inter_token_s"][name] * 1000 for trial in trials]
        axes.plot(rates, gaps, style, color=_COLOURS[OURS], label=f"gap between tokens, {name}")
    # None: the percentile falls on requests that had no first token when the trial ended. A line has a gap there.
    first = [math.nan if trial["ttft_s"]["p99"] is None else trial["ttft_s"]["p99"] * 1000 for trial in trials]
    axes.plot(rates, first, ":^", color=_COLOURS["vllm"], label="time to first token, p99")
    axes.axhline(load["limit_s"] * 1000, color="grey", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_title(f"{load['rows']} rows: p99 first token under {load['limit_s']:g} s up to {load['best_rate']:.2f}/s")
    axes.legend()
    return _save(figure, file)


def draw_quality(quality: Sequence[Mapping[str, Any]], file: Path) -> Path:
    """Divergence from float32 and change of perplexity by precision, a bar a text; benchmarks/quality.py's JSON."""
    texts = list(dict.fromkeys(entry["text"] for entry in quality))
    precisions = list(dict.fromkeys(entry["precision"] for entry in quality))
    width = 0.8 / len(texts)
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = (("divergence", 1, "%.4f", "KL to float32, nats a token"),
              ("perplexity_change", 100, "%.2f", "perplexity against float32, %"))  # fmt: skip
    for axes, (key, factor, shown, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for place, text in enumerate(texts):
            values = {entry["precision"]: factor * entry[key] for entry in quality if entry["text"] == text}
            positions = [precisions.index(precision) + place * width for precision in values]
            bars = axes.bar(positions, list(values.values()), width, label=text)
            axes.bar_label(bars, fmt=shown, fontsize=8)
        axes.set_xticks([index + (len(texts) - 1) * width / 2 for index in range(len(precisions))], precisions)
        axes.set_title(title)
        axes.legend()
    return _save(figure, file)


def figure_of(report: Mapping[str, Any], key: str, percentile: str | None) -> float:
    """One figure of a run, as `drumline bench --json` prints it."""
    return float(report[key][percentile] if percentile else report[key])


def draw_rows(report: Mapping[str, Any], file: Path) -> Path:
    """Throughput, gaps and time to first token against rows, a panel each; benchmarks/rows.py's JSON. Lines go through
    medians, dots are single runs."""
    panels = (("output tokens a second", "output_tokens_per_s", (None,), 1), ("between tokens, ms", "inter_token_s",
              ("p50", "p99"), 1000), ("time to first token, s", "ttft_s", ("p50", "p99"), 1))  # fmt: skip
    counts = [int(rows) for rows in report["runs"]["rows"]]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for axes, (title, key, percentiles, factor) in zip(figure.subplots(1, 3), panels, strict=True):
        for percentile, colour in zip(percentiles, (_COLOURS[OURS], _COLOURS["vllm"]), strict=False):
            values = [
                [factor * figure_of(run, key, percentile) for run in runs] for runs in report["runs"]["rows"].values()
            ]
            for taken in zip(*values, strict=True):
                axes.plot(counts, taken, ".", color=colour, alpha=0.4)
            axes.plot(counts, [spread(each).median for each in values], "-o", color=colour, label=percentile)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(rows) for rows in counts])
        axes.set_xlabel("rows")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_title(title)
        if len(percentiles) > 1:
            axes.legend()
    figure.suptitle(f"the same {report['settings']['requests']} requests, queued at once")
    return _save(figure, file)


def _points(measures: Mapping[str, Any], runs: Mapping[str, Any], sampling: str) -> list[tuple[int, Any]]:
    found = [
        (measures[name]["rows"], spread([run["tokens_per_s"] for run in taken]))
        for name, taken in runs.items()
        if measures[name]["unit"] == "output" and measures[name]["sampling"] == sampling
    ]
    return sorted(found, key=lambda point: point[0])


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, dpi=120)
    return file
