"""What can be wrong with a journal, or with what it is asked to write.

JournalError
├── JournalCorrupt   it cannot be read, or contradicts itself; `copy` is what was kept of it
├── JournalTooNew    a later drumline wrote it; `copy` likewise
├── JournalHeld      another process writes it: `pid`, where that is known
├── JournalFull      no room on the disk, or the disk failed; later writes may succeed
├── JournalReplaced  its files were deleted or replaced while in use
├── DuplicateJob     a job of this client and id is in it already
├── JobFinished      the job has an outcome, and it is another one
└── UnknownJob       there is no such job
"""

import sqlite3
from pathlib import Path

from drumline.model.errors import DrumlineError

_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_CORRUPT = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class JournalError(DrumlineError):
    """The journal at `path` cannot do what it was asked; the message names both."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"journal {path}: {reason}")
        self.path = path
        self.reason = reason


class JournalCorrupt(JournalError):
    """It is damaged, or no journal at all. The file is left as it is; `copy` is where a copy of it lies."""

    def __init__(self, path: Path, reason: str, copy: Path | None = None) -> None:
        super().__init__(path, reason if copy is None else f"{reason}; a copy is kept as {copy.name}")
        self.copy = copy


class JournalTooNew(JournalError):
    """Its schema is `found`, this drumline knows those up to `known`."""

    def __init__(self, path: Path, found: int, known: int, copy: Path | None = None) -> None:
        kept = "" if copy is None else f"; a copy is kept as {copy.name}"
        super().__init__(path, f"has schema version {found}, this drumline knows versions up to {known}{kept}")
        self.found, self.known, self.copy = found, known, copy


class JournalHeld(JournalError):
    """Another process has it open for writing: `pid`, or None where it did not say."""

    def __init__(self, path: Path, pid: int | None) -> None:
        super().__init__(path, f"is in use by {'another process' if pid is None else f'process {pid}'}")
        self.pid = pid


class JournalFull(JournalError):
    """Nothing could be written: the disk is full or failed. What was written before stays readable."""


class JournalReplaced(JournalError):
    """Its files are no longer those that were opened: what was written since is lost with them."""

    def __init__(self, path: Path, changed: Path) -> None:
        super().__init__(path, f"{changed.name} was deleted or replaced while in use")
        self.changed = changed


class DuplicateJob(JournalError):
    """The journal holds a job of this client and id."""

    def __init__(self, path: Path, client: str, job_id: str) -> None:
        super().__init__(path, f"job {job_id} of client {client} is in it already")
        self.client, self.job_id = client, job_id


class JobFinished(JournalError):
    """Job `number` is done: an outcome is never replaced, and nothing is added to it."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(path, f"job number {number} is done already")
        self.number = number


class UnknownJob(JournalError):
    """No job is known by this name or number."""

    def __init__(self, path: Path, job: str) -> None:
        super().__init__(path, f"holds no {job}")


def typed(path: Path, error: sqlite3.Error) -> JournalError:
    """The error of the tree that tells what SQLite says."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if primary in _FULL:
        return JournalFull(path, f"cannot be written: {error}")
    if primary in _CORRUPT:
        return JournalCorrupt(path, f"is damaged: {error}")
    return JournalError(path, str(error))
