"""What is done to a journal, event by event."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from drumline.model.errors import QueueFull
from drumline.scheduler.journal.errors import DuplicateJob, JobFinished, JournalError, UnknownJob
from drumline.scheduler.journal.lock import Lock
from drumline.scheduler.journal.reader import Reader
from drumline.scheduler.journal.records import TOKEN_BYTES, AcceptedJob, Progress, State, Terminal


class Store(Reader):
    """Writes jobs, inside a `transaction`; all methods raise `JournalError`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: Lock | None) -> None:
        super().__init__(path, connection, lock)
        self.unfinished_jobs = self._count()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """As of `Database`; the count of unfinished jobs goes back with it."""
        try:
            with super().transaction():
                yield
        except BaseException:
            self.unfinished_jobs = self._count()
            raise

    def accept(self, job: AcceptedJob, at: float, max_unfinished: int) -> int:
        """Add a job; its number. Raises `DuplicateJob`, and `QueueFull` where so many are unfinished already."""
        key = (job.client, job.job_id)
        if self.connection.execute("SELECT 1 FROM jobs WHERE client = ? AND job_id = ?", key).fetchone():
            raise DuplicateJob(self.path, *key)
        if self.unfinished_jobs >= max_unfinished:
            raise QueueFull("journal", max_unfinished, self.unfinished_jobs)
        added = self.connection.execute(
            "INSERT INTO jobs (client, job_id, digest, body, reply, seed, fingerprint, deadline_at, state, accepted_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, 'accepted', ?)",
            (*key, job.digest, job.body, job.reply, str(job.seed), job.fingerprint, job.deadline_at, at),
        )
        self.unfinished_jobs += 1
        return cast(int, added.lastrowid)

    def progress(self, number: int, progress: Progress) -> None:
        """Add tokens that go on where those before them ended; a job that has some is running."""
        ids, logprobs = progress.encode()
        state = self._state(number)
        if state == "done":
            raise JobFinished(self.path, number)
        last = self.connection.execute(
            "SELECT first_token, length(token_ids) FROM progress WHERE number = ? AND choice = ?"
            " ORDER BY first_token DESC LIMIT 1",
            (number, progress.choice),
        ).fetchone()
        expected = 0 if last is None else last[0] + last[1] // TOKEN_BYTES
        choice, first = progress.choice, progress.first_token
        if first != expected:
            raise JournalError(self.path, f"job number {number}: choice {choice} goes on at {expected}, not at {first}")
        row = (number, choice, first, ids, logprobs)
        self.connection.execute("INSERT INTO progress VALUES (?, ?, ?, ?, ?)", row)
        if state == "accepted":
            self.connection.execute("UPDATE jobs SET state = 'running' WHERE number = ?", (number,))

    def restart(self, number: int, fingerprint: str) -> None:
        """Forget the tokens of an unfinished job: it begins again, and its bits now depend on `fingerprint`."""
        if self._state(number) == "done":
            raise JobFinished(self.path, number)
        self.connection.execute("DELETE FROM progress WHERE number = ?", (number,))
        self.connection.execute(
            "UPDATE jobs SET state = 'accepted', fingerprint = ? WHERE number = ?", (fingerprint, number)
        )

    def redirect(self, number: int, reply: bytes) -> None:
        """The answers of a job go elsewhere."""
        self.connection.execute("UPDATE jobs SET reply = ? WHERE number = ?", (reply, number))

    def finish(self, number: int, terminal: Terminal, at: float) -> None:
        """Give a job its one outcome; the same again changes nothing, another one raises `JobFinished`."""
        if self._state(number) == "done":
            (payload,) = self.connection.execute("SELECT outcome FROM jobs WHERE number = ?", (number,)).fetchone()
            if payload != terminal.payload:
                raise JobFinished(self.path, number)
            return
        self.connection.execute(
            "UPDATE jobs SET state = 'done', outcome = ?, status = ?, outcome_properties = ?, generated_tokens = ?,"
            " finished_at = ? WHERE number = ?",
            (
                terminal.payload,
                terminal.status,
                json.dumps(dict(terminal.properties)),
                terminal.generated_tokens,
                at,
                number,
            ),
        )
        self.connection.execute("DELETE FROM progress WHERE number = ?", (number,))
        self.unfinished_jobs -= 1

    def published(self, number: int, at: float) -> None:
        """The broker has the terminal message of a job; the first time counts."""
        if self._state(number) != "done":
            raise JournalError(self.path, f"job number {number} is not done, so nothing of it was published")
        self.connection.execute(
            "UPDATE jobs SET published_at = ? WHERE number = ? AND published_at IS NULL", (at, number)
        )

    def requeue(self, client: str, job_id: str) -> int:
        """A job that is done is accepted again, in its old place and without its deadline; its number."""
        job = self.find(client, job_id)
        if job is None:
            raise UnknownJob(self.path, f"job {job_id} of client {client}")
        if job.state != "done":
            raise JournalError(self.path, f"job {job_id} of client {client} is {job.state}, not done")
        self.connection.execute(
            "UPDATE jobs SET state = 'accepted', outcome = NULL, status = NULL, outcome_properties = NULL,"
            " generated_tokens = 0, deadline_at = NULL, finished_at = NULL, published_at = NULL WHERE number = ?",
            (job.number,),
        )
        self.unfinished_jobs += 1
        return job.number

    def prune(self, finished_before: float, keep_bytes: float) -> int:
        """Delete published jobs that ended before a time, and the oldest beyond so many bytes of bodies and outcomes.

        Returns how many. The pages are used again; the file itself does not shrink.
        """
        return self.connection.execute(
            "DELETE FROM jobs WHERE number IN (SELECT number FROM (SELECT number, finished_at, published_at,"
            " SUM(length(body) + length(outcome)) OVER (ORDER BY finished_at DESC, number DESC"
            " ROWS UNBOUNDED PRECEDING) AS kept FROM jobs WHERE state = 'done')"
            " WHERE published_at IS NOT NULL AND (finished_at < ? OR kept > ?))",
            (finished_before, keep_bytes),
        ).rowcount

    def note(self, at: float) -> None:
        """It was this late, Unix seconds: a clock that is set back later does not undo it."""
        self.connection.execute("UPDATE clock SET latest = max(latest, ?)", (at,))

    def last_noted(self) -> float:
        """The latest time that was noted; 0 for a new journal."""
        with self.reading():
            latest: float = self.connection.execute("SELECT latest FROM clock").fetchone()[0]
        return latest

    def _state(self, number: int) -> State:
        row = self.connection.execute("SELECT state FROM jobs WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise UnknownJob(self.path, f"job number {number}")
        return cast(State, row[0])

    def _count(self) -> int:
        with self.reading():
            counted: int = self.connection.execute("SELECT count(*) FROM jobs WHERE state != 'done'").fetchone()[0]
        return counted
