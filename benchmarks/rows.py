"""What more rows cost and bring: tokens a second, gaps between tokens and time to first token of the same requests.

chrt -f 10 python -m benchmarks.rows        # writes benchmarks/results/rows.json and docs/images/rows.png, prints a table
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.draw import draw_rows
from benchmarks.machine import describe_machine
from drumline.model.registry import packaged_model

if TYPE_CHECKING:
    from drumline import Request
    from drumline.model.language_model import LanguageModel

Report = dict[str, Any]
FOLDER = Path(__file__).parent
ROWS = (1, 2, 4, 8, 16, 32)
REQUESTS = 32
FIGURES = {
    "tokens/s": ("output_tokens_per_s", None, 1, "{:.0f}"),
    "between tokens, p50": ("inter_token_s", "p50", 1000, "{:.0f} ms"),
    "p99": ("inter_token_s", "p99", 1000, "{:.0f} ms"),
    "first token, p50": ("ttft_s", "p50", 1, "{:.1f} s"),
    "p99 of these": ("ttft_s", "p99", 1, "{:.1f} s"),
}
"""A column of the table: the keys of `drumline bench --json`, a factor, how it is shown."""


def run_rounds(model: "LanguageModel", requests: "Sequence[Request]", rounds: int) -> dict[str, list[Report]]:
    """`drumline bench`'s reports by rows. Each round goes through all of them, so that a slow minute hits one run of
    each and not all runs of one."""
    from drumline.scheduler.cli.bench import measure
    from drumline.scheduler.config import EngineSettings

    runs: dict[str, list[Report]] = {str(rows): [] for rows in ROWS}
    for _ in range(rounds):
        for rows in ROWS:
            # Random ids have no common prefix; without reuse that needs no belief.
            runs[str(rows)].append(asyncio.run(measure(model, requests, EngineSettings(rows=rows, reuse=False))))
    return runs


def median(runs: Sequence[Report], key: str, percentile: str | None) -> float:
    """Of one figure, over the runs of as many rows."""
    return statistics.median(run[key][percentile] if percentile else run[key] for run in runs)


def table(runs: Mapping[str, Sequence[Report]]) -> str:
    """The medians, in Markdown."""
    lines = ["| rows | " + " | ".join(FIGURES) + " |", "|---" * (len(FIGURES) + 1) + "|"]
    for rows, reports in runs.items():
        cells = [
            form.format(factor * median(reports, key, percentile)) for key, percentile, factor, form in FIGURES.values()
        ]
        lines.append(f"| {rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the figures and the plot, print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.rows", description=__doc__)
    parser.add_argument("--model", type=Path, default=packaged_model())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "rows.json")
    parser.add_argument("--plot", type=Path, default=FOLDER.parent / "docs" / "images" / "rows.png")
    given = parser.parse_args()
    machine = describe_machine()  # before we make it busy ourselves
    from drumline import load_model
    from drumline.scheduler.cli.workload import read_workload, with_sampling

    requests = with_sampling(read_workload(FOLDER / "mixed64.jsonl")[:REQUESTS], "greedy", 0)
    model = load_model(given.model)
    runs = run_rounds(model, requests, given.rounds)
    settings = {"model": given.model.name, "precision": model.precision, "requests": REQUESTS, "rounds": given.rounds}
    report = {"machine": machine, "settings": settings, "runs": runs}
    given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw_rows(report, given.plot)
    print(table(runs))


if __name__ == "__main__":
    main()
