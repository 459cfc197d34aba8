"""Opening the file: pragmas, schema versions, and what to do with one that cannot be used."""

import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from drumline.scheduler.journal.errors import JournalCorrupt, JournalError, JournalTooNew, typed

# Small columns first: a scan over states and times then never reads the pages that long bodies overflow to.
MIGRATIONS = [
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        client TEXT NOT NULL,
        job_id TEXT NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('accepted', 'running', 'done')),
        status TEXT CHECK (status IN ('completed', 'cancelled', 'expired', 'failed')),
        accepted_at REAL NOT NULL,
        deadline_at REAL,
        finished_at REAL,
        published_at REAL,
        generated_tokens INTEGER NOT NULL DEFAULT 0,
        seed TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        digest BLOB NOT NULL,
        reply BLOB NOT NULL,
        outcome_properties TEXT,
        body BLOB NOT NULL,
        outcome BLOB,
        UNIQUE (client, job_id),
        CHECK ((state = 'done') = (outcome IS NOT NULL))
    );
    CREATE INDEX unfinished ON jobs (number) WHERE state != 'done';
    CREATE INDEX unpublished ON jobs (number) WHERE state = 'done' AND published_at IS NULL;
    CREATE TABLE progress (
        number INTEGER NOT NULL REFERENCES jobs (number),
        choice INTEGER NOT NULL,
        first_token INTEGER NOT NULL,
        token_ids BLOB NOT NULL,
        logprobs BLOB,
        PRIMARY KEY (number, choice, first_token)
    ) WITHOUT ROWID;
    CREATE TABLE clock (latest REAL NOT NULL);
    INSERT INTO clock VALUES (0.0);
    """,
]
"""Each brings the schema from version `index` to `index` + 1; what is released here is never edited, only added to."""

TABLES = {"jobs", "progress", "clock"}
BESIDE = ("", "-wal", "-shm")
"""The files of a database, by what is added to its name."""
WAL_BYTES = 64 * 2**20


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or create the journal; the caller holds its lock.

    A file that cannot be used is left as it is and a copy kept beside it: `JournalCorrupt`, `JournalTooNew`.
    Other reasons are `JournalError`. An empty file is a new journal.
    """
    _check_usable(path)
    connection = _connect(path, "rwc")
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        migrate(connection)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(
            f"PRAGMA user_version = {len(MIGRATIONS)}"
        )  # SQLite opens what it may not write, and is mute
        connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        connection.close()
        raise typed(path, error) from None
    return connection


def open_in_memory() -> sqlite3.Connection:
    """A journal that ends with its process."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a journal beside the worker that writes it. Raises `JournalError`; makes no copies and changes nothing."""
    if not path.is_file():
        raise JournalError(path, "is a folder" if path.is_dir() else "no such file")
    connection = _connect(path, "ro")
    try:
        version = _version(connection)
    except sqlite3.Error as error:
        connection.close()
        raise typed(path, error) from None
    if version != len(MIGRATIONS):
        connection.close()
        if version == 0:
            raise JournalError(path, "is no journal")
        if version > len(MIGRATIONS):
            raise JournalTooNew(path, version, len(MIGRATIONS))
        raise JournalError(path, f"has schema version {version}; a worker that opens it brings it to {len(MIGRATIONS)}")
    return connection


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema to the newest version, one step a transaction; raises `sqlite3.Error`, with that step undone."""
    for version in range(_version(connection), len(MIGRATIONS)):
        try:
            connection.executescript(
                f"BEGIN IMMEDIATE; {MIGRATIONS[version]} PRAGMA user_version = {version + 1}; COMMIT;"
            )
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _check_usable(path: Path) -> None:
    """Look at the file without changing it: a connection that could write would mend and tidy what we must keep."""
    if path.is_dir():
        raise JournalError(path, "is a folder")
    try:
        written = path.stat().st_size
    except FileNotFoundError:
        written = 0
    wal = path.with_name(path.name + "-wal")
    if not written:
        if wal.exists() and wal.stat().st_size:  # SQLite would delete it
            raise JournalCorrupt(path, f"is empty, but {wal.name} is not", _keep_copy(path))
        return
    try:
        with closing(_connect(path, "ro")) as connection:
            version = _version(connection)
            reason = _damage(connection, version)
    except sqlite3.Error as error:
        problem = typed(path, error)
        if isinstance(problem, JournalCorrupt):
            raise JournalCorrupt(path, problem.reason, _keep_copy(path)) from None
        raise problem from None
    if version > len(MIGRATIONS):
        raise JournalTooNew(path, version, len(MIGRATIONS), _keep_copy(path))
    if reason is not None:
        raise JournalCorrupt(path, reason, _keep_copy(path))


def _damage(connection: sqlite3.Connection, version: int) -> str | None:
    first, *others = connection.execute("PRAGMA quick_check(1)").fetchone()
    if first != "ok" or others:
        return f"is damaged: {first}"
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == 0:  # a start that was killed before its first migration leaves no table
        return "is a database, but no journal" if tables else None
    missing = sorted(TABLES - tables)
    return f"has no table {' and no table '.join(missing)}" if missing else None


def _keep_copy(path: Path) -> Path | None:
    """Copy what there is, named by when it was last changed: a worker that starts again and again adds no more copies.

    None where it cannot be copied, as on a full disk: the file itself is still there.
    """
    files = {suffix: path.with_name(path.name + suffix) for suffix in BESIDE}
    wal = files["-wal"]
    try:
        if not (wal.exists() and wal.stat().st_size):  # to look at the file makes an empty one, and its index
            files = {"": path}
        changed = max(file.stat().st_mtime for suffix, file in files.items() if suffix != "-shm")
        stamp = datetime.fromtimestamp(changed, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        copy = path.with_name(f"{path.name}.corrupt-{stamp}")
        for suffix, file in files.items():
            target = copy.with_name(copy.name + suffix)
            if file.exists() and not (target.exists() and target.stat().st_size == file.stat().st_size):
                shutil.copy2(file, target)
    except OSError:
        return None
    return copy


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise typed(path, error) from None
