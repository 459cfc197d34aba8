"""One process at a time writes a journal: a file beside it is locked, and says by whom."""

import os
import sys
from contextlib import suppress
from pathlib import Path

from drumline.scheduler.journal.errors import JournalError, JournalHeld

MAX_PID_DIGITS = 20


class Lock:
    """Held from creation to `release`, or to the end of the process, however that comes.

    The lock stands on a file of its own: SQLite's own locks on the database would be lost when anything else in this
    process opened and closed it. That file stays; to delete it would let two others hold "the" lock.
    """

    def __init__(self, journal: Path) -> None:
        """Raises `JournalHeld`, and `JournalError` where the file beside the journal cannot be written."""
        if sys.platform == "win32":
            raise JournalError(journal, "needs file locks that this system does not have")
        import fcntl

        self.path = journal.with_name(journal.name + ".lock")
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise JournalError(journal, f"cannot be opened for writing: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, MAX_PID_DIGITS)
            os.close(self._file)
            if isinstance(error, BlockingIOError):
                raise JournalHeld(journal, int(holder) if holder.strip().isdigit() else None) from None
            raise JournalError(journal, f"cannot be locked: {error.strerror}") from None
        with suppress(OSError):  # on a full disk the lock holds, only its owner's name is missing
            os.ftruncate(self._file, 0)
            os.write(self._file, str(os.getpid()).encode())

    def release(self) -> None:
        """Let others write."""
        os.close(self._file)
