"""The table: every measure, ours beside the others, with the ratio to each."""

from rich.table import Table

from benchmarks.peers.specs import NO_DRAFTS, OURS
from benchmarks.results import Results, Spread, spread


def make_table(results: Results) -> Table:
    """One line a measure: median, lowest and highest of the runs; beside each other engine, ours as a multiple."""
    machine = results.data["machine"]
    table = Table(
        title=f"{results.data['settings']['model']}, tokens a second (median, lowest–highest, runs)",
        caption=f"{machine['cpu']}, {machine['cores']} cores, {' '.join(machine['features'])}",
    )
    others = [name for name in results.data["engines"] if name != OURS]
    table.add_column("measure")
    table.add_column(OURS, justify="right")
    for name in others:
        table.add_column(name, justify="right")
    for name, measure in results.data["measures"].items():
        ours = results.rate(OURS, name)
        cells = [_cell(results.rate(other, name), ours) for other in others]
        table.add_row(measure["title"], _cell(ours, None), *cells)
    for kind in results.data["start"]:
        seconds = spread(results.starts(kind))
        shown = f"{seconds.median:.1f} s ({seconds.low:.1f}–{seconds.high:.1f}, {seconds.runs})"
        warm = kind == "warm"
        ready = [f"{results.engine(o)['ready_s']:.1f} s" if warm and o != NO_DRAFTS else "" for o in others]
        table.add_row(f"start to ready, {kind} cache", shown, *ready)
    load = results.data["open_loop"]
    if load is not None:
        table.add_row(f"requests a second with p99 first token under {load['limit_s']:g} s", f"{load['best_rate']:.2f}")
    return table


def engine_lines(results: Results) -> list[str]:
    """One line an engine: versions, precision, and what went wrong."""
    lines = []
    for name, about in results.data["engines"].items():
        versions = ", ".join(f"{package} {version}" for package, version in about.get("versions", {}).items())
        parts = [versions, about.get("note", ""), about.get("dtype_choice", ""), about.get("error", "")]
        lines.append(f"{name}: " + "; ".join(part for part in parts if part))
    return lines


def _cell(rate: Spread | None, ours: Spread | None) -> str:
    if rate is None:
        return "–"
    shown = f"{rate.median:.1f} ({rate.low:.1f}–{rate.high:.1f}, {rate.runs})"
    return shown if ours is None else f"{shown}  ours {ours.median / rate.median:.2f} ×"
