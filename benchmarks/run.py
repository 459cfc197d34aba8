"""`make bench`: output tokens a second of mixed64 by number of rows, in one run, as JSON and a table.

Run it alone: another busy process slows two OpenMP threads far more than its share.
"""

import argparse
import asyncio
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drumline.scheduler.cli.bench import Report, measure
from drumline.scheduler.cli.options import open_model
from drumline.scheduler.cli.workload import read_workload, with_sampling

WORKLOAD = Path(__file__).with_name("mixed64.jsonl")


def main() -> None:
    """Measure each number of rows on the same model and the same requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the packaged SmolLM2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--sampling", choices=("greedy", "chat"), default="greedy")
    parser.add_argument("--step-tokens", type=int, default=256)
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    arguments = parser.parse_args()

    model = open_model(arguments.model)
    requests = with_sampling(read_workload(WORKLOAD), arguments.sampling, seed=0)
    reports: dict[int, Report] = {}
    for rows in arguments.rows:
        reports[rows] = asyncio.run(measure(model, requests, rows, arguments.step_tokens, "torch"))
        print(json.dumps({"rows": rows, "sampling": arguments.sampling, **reports[rows]}), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(reports, indent=1) + "\n")
    _print_table(f"mixed64, {model.name}, {model.precision}, {arguments.sampling}", reports)


def _print_table(title: str, reports: dict[int, Report]) -> None:
    baseline = next(iter(reports.values()))["output_tokens_per_s"]
    table = Table(title=title)
    for heading in ("rows", "tokens/s", "× first", "rows live", "padding", "outside model", "ttft p50", "gap p50"):
        table.add_column(heading, justify="right")
    for rows, report in reports.items():
        table.add_row(
            str(rows),
            f"{report['output_tokens_per_s']:.1f}",
            f"{report['output_tokens_per_s'] / baseline:.2f}",
            f"{report['rows_live_mean']:.1f}",
            f"{report['padding_ratio']:.2f}",
            f"{report['outside_model_ratio']:.3f}",
            f"{report['ttft_s']['p50']:.2f} s",
            f"{report['inter_token_s']['p50'] * 1000:.1f} ms",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
