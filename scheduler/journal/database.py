"""The open file: its lock, its transactions, and whether it is still the file that its path names."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from drumline.scheduler.journal.errors import JournalError, JournalReplaced, typed
from drumline.scheduler.journal.lock import Lock
from drumline.scheduler.journal.schema import open_for_reading, open_for_writing, open_in_memory

_OF_THE_EVENT = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError, sqlite3.DataError)
"""What one event did wrong; every other error of SQLite is the journal's, and ends the transaction."""


class Database:
    """One connection, used by the thread that opened it; what SQLite raises comes as `JournalError`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: Lock | None) -> None:
        self.path = path
        self.connection = connection
        self._lock = lock
        files = [] if lock is None else [path, path.with_name(path.name + "-wal"), lock.path]
        self._opened = {file: _identity(file) for file in files}

    @classmethod
    def open(cls, path: Path | None) -> Self:
        """Open or create for writing, alone; raises `JournalHeld` while another does. None: in memory."""
        if path is None:
            return cls(Path(":memory:"), open_in_memory(), None)
        path = path.resolve()  # two links to one journal share its lock
        lock = Lock(path)
        try:
            return cls(path, open_for_writing(path), lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open_read_only(cls, path: Path) -> Self:
        """Open beside the worker that writes it."""
        path = path.resolve()
        return cls(path, open_for_reading(path), None)

    def close(self) -> None:
        """Close the file and let others write."""
        self.connection.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on the disk when the block is left; raises what `typed` says, and `JournalReplaced`."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield
            self._check_in_place()
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:  # SQLite may have ended it itself
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                self._check_in_place()
                raise typed(self.path, error) from None
            raise

    @contextmanager
    def event(self) -> Iterator[None]:
        """One event of a transaction: what it raises undoes it alone, unless SQLite gave up the whole."""
        self.connection.execute("SAVEPOINT event")
        try:
            yield
        except Exception as error:
            if isinstance(error, sqlite3.Error) and not isinstance(error, _OF_THE_EVENT):
                raise
            self.connection.execute("ROLLBACK TO event")
            self.connection.execute("RELEASE event")
            if isinstance(error, sqlite3.Error):
                raise JournalError(self.path, str(error)) from None
            raise
        self.connection.execute("RELEASE event")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Errors of SQLite as those of the tree."""
        try:
            yield
        except sqlite3.Error as error:
            raise typed(self.path, error) from None

    def _check_in_place(self) -> None:
        """Looked at behind the commit: who is told that a job is safe can find it by its path."""
        for file, identity in self._opened.items():
            if _identity(file) != identity:
                raise JournalReplaced(self.path, file)


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
