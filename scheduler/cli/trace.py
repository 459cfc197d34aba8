"""`drumline trace`: a timeline of a running worker, for Perfetto."""

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Annotated

import typer

from drumline.model.errors import EngineFailed
from drumline.scheduler.cli import options
from drumline.scheduler.cli.tracing import ANSWER_S, COMPLETE_HEADER, LONGEST_S

TRANSFER_S = 30.0


def trace(
    url: options.WorkerUrl = options.DEFAULT_URL,
    seconds: Annotated[float, typer.Option(min=0.1, max=LONGEST_S, help="How long to record.")] = 5.0,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("drumline.trace.json"),
) -> None:
    """Record the steps of a running worker, one track a row; open the file at ui.perfetto.dev or chrome://tracing.

    `drumline serve --trace` records from the start, SIGUSR2 to a worker begins and ends a recording, and `drumline
    bench --trace FILE` records a workload.
    """
    page = f"{options.worker_url(url)}/trace?seconds={seconds:g}"
    with options.progress_console.status(f"recording {seconds:g} s"):
        recorded, complete = _post(page, seconds + ANSWER_S + TRANSFER_S)
    output.write_bytes(recorded)
    cut = "" if complete else ", cut off"
    print(f"{output}: {len(recorded) / 1024:.0f} KiB{cut}; open it at ui.perfetto.dev")


def _post(url: str, timeout_s: float) -> tuple[bytes, bool]:
    """The body of the answer, and whether it is a whole recording.

    Raises `EngineFailed` with what the worker said, or why it said nothing.
    """
    request = urllib.request.Request(url, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.read(), response.headers.get(COMPLETE_HEADER) != "no"
    except urllib.error.HTTPError as error:
        raise EngineFailed(f"{url}: {_told(error)}") from None
    except (OSError, HTTPException) as error:  # no worker, or one that goes away meanwhile
        raise EngineFailed(f"{url}: {getattr(error, 'reason', error)}") from None


def _told(error: urllib.error.HTTPError) -> str:
    with error:
        try:
            return str(json.loads(error.read())["error"])
        except (ValueError, KeyError, TypeError):
            return f"{error.code} {error.reason}"
