"""What more rows, and larger steps, cost and bring: tokens a second, gaps between tokens, time to first token.

chrt -f 10 python -m benchmarks.rows        # benchmarks/results/rows.json, docs/images/rows.png, and tables
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.draw import draw_rows, figure_of
from benchmarks.machine import describe_machine
from drumline.model.registry import packaged_model

if TYPE_CHECKING:
    from drumline import Request
    from drumline.model.language_model import LanguageModel

Report = dict[str, Any]
"""What `drumline bench --json` prints."""
Runs = dict[str, dict[str, list[Report]]]
"""Reports by what is varied, `rows` or `step_tokens`, and its value."""
FOLDER = Path(__file__).parent
ROWS = (1, 2, 4, 8, 16, 32)
STEP_TOKENS, STEP_ROWS = (256, 128, 64, 32), 16
REQUESTS = 32
FIGURES = {
    "tokens/s": ("output_tokens_per_s", None, 1, "{:.0f}"),
    "between tokens, p50": ("inter_token_s", "p50", 1000, "{:.0f} ms"),
    "p99": ("inter_token_s", "p99", 1000, "{:.0f} ms"),
    "first token, p50": ("ttft_s", "p50", 1, "{:.1f} s"),
    "p99 of these": ("ttft_s", "p99", 1, "{:.1f} s"),
}
"""A column of the table: the keys of a report, a factor, how it is shown."""


def run_rounds(model: "LanguageModel", requests: "Sequence[Request]", rounds: int) -> Runs:
    """Each round goes through all settings, so that a slow minute hits one run of each and not all runs of one."""
    from drumline.scheduler.cli.bench import measure
    from drumline.scheduler.config import EngineSettings

    # Random ids have no common prefix; without reuse that needs no belief.
    by_rows = {rows: EngineSettings(rows=rows, reuse=False) for rows in ROWS}
    by_step = {tokens: EngineSettings(rows=STEP_ROWS, step_tokens=tokens, reuse=False) for tokens in STEP_TOKENS}
    sweeps: dict[str, dict[int, EngineSettings]] = {"rows": by_rows, "step_tokens": by_step}
    runs: Runs = {sweep: {str(value): [] for value in values} for sweep, values in sweeps.items()}
    for _ in range(rounds):
        for sweep, values in sweeps.items():
            for value, settings in values.items():
                runs[sweep][str(value)].append(asyncio.run(measure(model, requests, settings)))
    return runs


def median(runs: Sequence[Report], key: str, percentile: str | None) -> float:
    """Of one figure, over the runs of one setting."""
    return statistics.median(figure_of(run, key, percentile) for run in runs)


def table(swept: str, runs: Mapping[str, Sequence[Report]]) -> str:
    """The medians, in Markdown."""
    lines = [f"| {swept} | " + " | ".join(FIGURES) + " |", "|---" * (len(FIGURES) + 1) + "|"]
    for value, reports in runs.items():
        cells = [
            form.format(factor * median(reports, key, percentile)) for key, percentile, factor, form in FIGURES.values()
        ]
        lines.append(f"| {value} | " + " | ".join(cells) + " |")
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
    print(table("rows", runs["rows"]), table(f"step tokens ({STEP_ROWS} rows)", runs["step_tokens"]), sep="\n\n")


if __name__ == "__main__":
    main()
