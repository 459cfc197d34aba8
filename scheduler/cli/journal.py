"""`drumline journal`: look into a journal, also beside the worker that writes it; requeue, prune and check."""

import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer

from drumline.scheduler.cli import options
from drumline.scheduler.journal.errors import JournalCorrupt, UnknownJob
from drumline.scheduler.journal.integrity import problems
from drumline.scheduler.journal.reader import Reader
from drumline.scheduler.journal.records import JournaledJob
from drumline.scheduler.journal.store import Store

File = Annotated[Path, typer.Argument(help="The journal, as given to serve --journal.")]
Client = Annotated[str, typer.Argument(help="The client that sent the job.")]
JobId = Annotated[str, typer.Argument(help="The id that the client gave it.")]

DAY_S = 86_400
PAGE = 1_000

app = typer.Typer(help="Accepted jobs and their outcomes, as a worker keeps them.", no_args_is_help=True)


@app.command("list")
def list_jobs(
    file: File,
    state: Annotated[
        Literal["accepted", "running", "done"] | None, typer.Option(help="Only jobs in this state.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    as_json: options.AsJson = False,
) -> None:
    """List jobs, those accepted last first."""
    with Reader.open_read_only(file) as journal:
        jobs = journal.latest(state, limit)
    if as_json:
        print(json.dumps({"jobs": [_summary(job) for job in jobs]}))
        return
    for job in jobs:
        ended = job.terminal.status if job.terminal else ""
        delivered = "published" if job.published_at is not None else ""
        print(
            f"{job.number:>8}  {_text_time(job.accepted_at)}  {job.state:<8}  {ended:<9}  {delivered:<9}  "
            f"{job.job.client} {job.job.job_id}"
        )


@app.command("show")
def show(file: File, client: Client, job_id: JobId) -> None:
    """Print all that is known of a job, as JSON; bodies and outcomes are texts in it."""
    with Reader.open_read_only(file) as journal:
        job = journal.find(client, job_id)
        if job is None:
            raise UnknownJob(journal.path, f"job {job_id} of client {client}")
    print(json.dumps(_document(job), ensure_ascii=False, indent=2))


@app.command("requeue")
def requeue(file: File, client: Client, job_id: JobId) -> None:
    """Accept a finished job again, without its outcome and deadline; the next worker runs it. No worker may run."""
    with Store.open(_existing(file)) as journal, journal.transaction():
        number = journal.requeue(client, job_id)
    print(f"job {job_id} of client {client} is accepted again, as number {number}")
    print("drumline: its outcome may have been delivered already; the client may get another", file=sys.stderr)


@app.command("export")
def export(
    file: File,
    output: Annotated[Path | None, typer.Option(help="Where the lines go. Default: stdout.")] = None,
) -> None:
    """Write every job as a line of JSON, in the order of acceptance."""
    with Reader.open_read_only(file) as journal:
        if output is None:
            _write_lines(journal, sys.stdout)
            return
        with output.open("w", encoding="utf-8") as lines:
            _write_lines(journal, lines)


@app.command("prune")
def prune(
    file: File,
    older_than: Annotated[float, typer.Option(min=0, help="Days since the job ended.")] = 7.0,
) -> None:
    """Delete old jobs whose outcome was published, and print how many. No worker may run."""
    with Store.open(_existing(file)) as journal, journal.transaction():
        pruned = journal.prune(time.time() - older_than * DAY_S, float("inf"))
    print(f"{pruned} jobs pruned")


@app.command("check")
def check(file: File) -> None:
    """Look for damage and contradictions; exit 1 where there are any."""
    jobs = 0
    try:
        with Reader.open_read_only(file) as journal:
            found = problems(journal)
            jobs = 0 if found else journal.count()
    except JournalCorrupt as error:  # so damaged that it does not open
        found = [error.reason]
    for problem in found:
        print(problem)
    if found:
        raise typer.Exit(1)
    print(f"{jobs} jobs, no problems")


def _existing(file: Path) -> Path:
    """To mend a journal must not make one; raises `JournalError`, also for another schema than ours."""
    Reader.open_read_only(file).close()
    return file


def _write_lines(journal: Reader, lines: TextIO) -> None:
    after = 0
    while page := journal.jobs(after, PAGE):
        lines.writelines(json.dumps(_document(job), ensure_ascii=False) + "\n" for job in page)
        after = page[-1].number


def _summary(job: JournaledJob) -> dict[str, Any]:
    """What `list` tells; times in Unix seconds."""
    return {
        "number": job.number,
        "client": job.job.client,
        "job_id": job.job.job_id,
        "state": job.state,
        "status": job.terminal.status if job.terminal else None,
        "generated_tokens": job.terminal.generated_tokens if job.terminal else None,
        "accepted_at": job.accepted_at,
        "deadline_at": job.job.deadline_at,
        "finished_at": job.finished_at,
        "published_at": job.published_at,
    }


def _document(job: JournaledJob) -> dict[str, Any]:
    """All of a job."""
    return _summary(job) | {
        "seed": job.job.seed,
        "fingerprint": job.job.fingerprint,
        "digest": job.job.digest.hex(),
        "body": _text(job.job.body),
        "reply": _text(job.job.reply),
        "outcome": _text(job.terminal.payload) if job.terminal else None,
        "outcome_properties": dict(job.terminal.properties) if job.terminal else None,
        "progress": [asdict(progress) for progress in job.progress],
    }


def _text(payload: bytes) -> str:
    return payload.decode("utf-8", "backslashreplace")


def _text_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
