"""`drumline trace`: a timeline of a running worker, for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer

from drumline.scheduler.cli import options
from drumline.scheduler.cli.ask import ask
from drumline.scheduler.cli.tracing import ANSWER_S, COMPLETE_HEADER, LONGEST_S

TRANSFER_S = 30.0


def trace(
    url: options.MetricsUrl = options.DEFAULT_URL,
    seconds: Annotated[float, typer.Option(min=0.1, max=LONGEST_S, help="How long to record.")] = 5.0,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("drumline.trace.json"),
) -> None:
    """Record the steps of a running worker, one track a row; open the file at ui.perfetto.dev or chrome://tracing.

    `drumline serve --trace` records from the start, SIGUSR2 to a worker begins and ends a recording, and `drumline
    bench --trace FILE` records a workload.
    """
    page = f"{options.worker_url(url)}/trace?seconds={seconds:g}"
    with options.progress_console.status(f"recording {seconds:g} s"):
        recorded, headers = ask(page, seconds + ANSWER_S + TRANSFER_S, method="POST")
    output.write_bytes(recorded)
    cut = ", cut off" if headers.get(COMPLETE_HEADER) == "no" else ""
    print(f"{output}: {len(recorded) / 1024:.0f} KiB{cut}; open it at ui.perfetto.dev")
