"""What a journal tells: jobs with their progress, in order of acceptance. Changes nothing."""

import json
from typing import Any

from drumline.scheduler.journal.database import Database
from drumline.scheduler.journal.errors import JournalCorrupt
from drumline.scheduler.journal.records import AcceptedJob, JournaledJob, Piece, Progress, State, Terminal, joined

COLUMNS = (
    "number, client, job_id, digest, body, reply, seed, fingerprint, deadline_at, state, accepted_at, "
    "outcome, status, outcome_properties, generated_tokens, finished_at, published_at"
)


class Reader(Database):
    """Reads jobs; all methods raise `JournalError`."""

    def find(self, client: str, job_id: str) -> JournaledJob | None:
        """The job of this name, with its progress; None where there is none."""
        found = self._jobs("client = ? AND job_id = ?", (client, job_id), limit=1)
        return found[0] if found else None

    def unfinished(self, after: int, limit: int) -> list[JournaledJob]:
        """Jobs without an outcome, with their progress, in order of acceptance, from the one behind number `after`."""
        return self._jobs("state != 'done' AND number > ?", (after,), limit)

    def unpublished(self, after: int, limit: int) -> list[JournaledJob]:
        """Jobs whose outcome the broker has not confirmed, in order of acceptance."""
        return self._jobs("state = 'done' AND published_at IS NULL AND number > ?", (after,), limit)

    def jobs(self, after: int, limit: int) -> list[JournaledJob]:
        """All jobs, in order of acceptance."""
        return self._jobs("number > ?", (after,), limit)

    def latest(self, state: State | None, limit: int) -> list[JournaledJob]:
        """The jobs accepted last, the very last first; of one state where it is given."""
        return self._jobs("? IN (state, '')", (state or "",), limit, "DESC")

    def count(self) -> int:
        """How many jobs there are."""
        with self.reading():
            counted: int = self.connection.execute("SELECT count(*) FROM jobs").fetchone()[0]
        return counted

    def _jobs(self, condition: str, values: tuple[Any, ...], limit: int, order: str = "ASC") -> list[JournaledJob]:
        with self.reading():
            rows = self.connection.execute(
                f"SELECT {COLUMNS} FROM jobs WHERE {condition} ORDER BY number {order} LIMIT ?", (*values, limit)
            ).fetchall()
            unfinished = [row[0] for row in rows if row[9] != "done"]
            progress = self._progress(min(unfinished), max(unfinished)) if unfinished else {}
        return [_job(row, progress.get(row[0], ())) for row in rows]

    def _progress(self, first: int, last: int) -> dict[int, tuple[Progress, ...]]:
        """By job number, of a page at once: a query a job would take most of the time that a start has."""
        pieces: dict[int, list[Piece]] = {}
        for number, *piece in self.connection.execute(
            "SELECT number, choice, first_token, token_ids, logprobs FROM progress WHERE number BETWEEN ? AND ?"
            " ORDER BY number, choice, first_token",
            (first, last),
        ):
            pieces.setdefault(number, []).append(tuple(piece))
        read = {}
        for number, stored in pieces.items():
            try:
                read[number] = joined(stored)
            except ValueError as error:
                raise JournalCorrupt(self.path, f"job number {number}: {error}") from None
        return read


def _job(row: tuple[Any, ...], progress: tuple[Progress, ...]) -> JournaledJob:
    (number, client, job_id, digest, body, reply, seed, fingerprint, deadline_at, state, accepted_at, *end) = row
    outcome, status, properties, generated_tokens, finished_at, published_at = end
    return JournaledJob(
        number=number,
        job=AcceptedJob(client, job_id, digest, body, reply, int(seed), fingerprint, deadline_at),
        state=state,
        accepted_at=accepted_at,
        terminal=None if outcome is None else Terminal(outcome, status, json.loads(properties), generated_tokens),
        finished_at=finished_at,
        published_at=published_at,
        progress=progress,
    )
