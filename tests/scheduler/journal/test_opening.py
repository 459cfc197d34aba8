"""Files that are no journal, or not ours to write: each is refused by name, and nothing is lost."""

import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from drumline.scheduler.journal import schema
from drumline.scheduler.journal.errors import (
    JournalCorrupt,
    JournalError,
    JournalHeld,
    JournalReplaced,
    JournalTooNew,
)
from drumline.scheduler.journal.reader import Reader
from drumline.scheduler.journal.store import Store
from tests.processes import read_until, running_python
from tests.scheduler.journal.support import NOW, job

NOBODY = 65534
HOLD = """
import sys
from pathlib import Path
from drumline.scheduler.journal.store import Store
store = Store.open(Path(sys.argv[1]))
print("open", flush=True)
__import__("time").sleep(60)
"""


def fill(path: Path, jobs: int = 200) -> None:
    with Store.open(path) as store, store.transaction():
        for number in range(jobs):
            store.accept(job(f"job-{number}", body=bytes(200)), NOW, jobs)


def copies(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.corrupt-*Z"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"no database at all, but a diary\n" * 100, "file is not a database"),
        (lambda content: content[: len(content) // 2], "malformed|is damaged"),
        (lambda content: content[:50], "file is not a database|malformed|is damaged"),
        (lambda content: content[:8192] + b"\xff" * 4096 + content[12288:], "malformed|is damaged"),
    ],
    ids=["text", "half of it", "fifty bytes", "a page overwritten"],
)
def test_a_damaged_file_is_refused_left_and_copied_once(path, damage, reason):
    fill(path)
    content = damage(path.read_bytes())
    path.write_bytes(content)
    for _ in range(2):  # a worker that is started again and again must not fill the disk with copies
        with pytest.raises(JournalCorrupt, match=reason) as refused:
            Store.open(path)
        assert str(path) in str(refused.value)
        assert path.read_bytes() == content
        (copy,) = copies(path)
        assert copy.name in str(refused.value)
        assert re.fullmatch(r"jobs\.journal\.corrupt-\d{8}T\d{6}\.\d{6}Z", copy.name)
        assert copy.read_bytes() == content


def test_the_log_beside_a_damaged_file_is_kept_and_copied(path):
    fill(path)
    path.write_bytes(path.read_bytes()[:5000])
    wal = path.with_name(path.name + "-wal")
    wal.write_bytes(b"what was committed last")
    with pytest.raises(JournalCorrupt):
        Store.open(path)
    assert wal.read_bytes() == b"what was committed last"
    assert [copy.read_bytes() for copy in path.parent.glob("*.corrupt-*Z-wal")] == [wal.read_bytes()]


def test_an_empty_file_is_a_new_journal(path):
    path.touch()
    fill(path, 1)
    with Reader.open_read_only(path) as journal:
        assert journal.count() == 1


def test_an_empty_file_with_a_log_is_a_damaged_one(path):
    path.touch()
    path.with_name(path.name + "-wal").write_bytes(bytes(4096))
    with pytest.raises(JournalCorrupt, match=r"is empty, but jobs\.journal-wal is not"):
        Store.open(path)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("PRAGMA user_version = 1", "has no table clock and no table jobs and no table progress"),
        ("SELECT 1", "but no journal"),
    ],
)
def test_another_database_is_no_journal(path, statement, reason):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name)")
        connection.execute(statement)
    with pytest.raises(JournalCorrupt, match=reason):
        Store.open(path)


def test_a_newer_schema_names_both_versions(path):
    fill(path, 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(JournalTooNew, match="has schema version 9, this drumline knows versions up to 1") as refused:
        Store.open(path)
    assert copies(path) == [refused.value.copy]
    with pytest.raises(JournalTooNew):
        Reader.open_read_only(path)


def test_migrations_run_in_order_from_an_older_file(path, monkeypatch):
    fill(path, 3)
    later = ["ALTER TABLE jobs ADD COLUMN note TEXT DEFAULT 'old';", "UPDATE jobs SET note = note || ' and new';"]
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS + later)
    with pytest.raises(JournalError, match="has schema version 1; a worker that opens it brings it to 3"):
        Reader.open_read_only(path)
    for _ in range(2):
        with Store.open(path) as store:
            assert store.connection.execute("PRAGMA user_version").fetchone() == (3,)
            assert store.connection.execute("SELECT DISTINCT note FROM jobs").fetchall() == [("old and new",)]
            assert store.unfinished_jobs == 3


def test_a_migration_that_fails_leaves_the_version_before(path, monkeypatch):
    fill(path, 3)
    broken = ["CREATE TABLE notes (text);", "CREATE TABLE others (text); CREATE TABLE jobs (text);"]
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS + broken)
    with pytest.raises(JournalError, match="table jobs already exists"):
        Store.open(path)
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)
        assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'others'").fetchone() == (0,)


def test_a_start_killed_before_the_first_migration_is_a_new_journal(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    assert path.stat().st_size
    fill(path, 1)


def test_paths_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere" / "x", "cannot be opened for writing: No such file or directory"),
        (tmp_path / "file" / "x", "cannot be opened for writing: Not a directory"),
    ):
        with pytest.raises(JournalError, match=reason):
            Store.open(path)
        with pytest.raises(JournalError, match=r"no such file|is a folder"):
            Reader.open_read_only(path)


@pytest.mark.skipif(os.name != "posix", reason="users are those of POSIX")
def test_what_may_not_be_written(path):
    fill(path, 1)
    path.chmod(0o444)
    path.parent.chmod(0o777)
    path.with_name(path.name + ".lock").chmod(0o666)
    root = os.geteuid() == 0
    closed = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
    modes = {folder: folder.stat().st_mode for folder in closed}  # of pytest's, who lets nobody else in
    try:
        if root:
            for folder in modes:
                folder.chmod(0o755)
            os.seteuid(NOBODY)
        with pytest.raises(JournalError, match="readonly"):
            Store.open(path)
    finally:
        if root:
            os.seteuid(0)
            for folder, mode in modes.items():
                folder.chmod(mode)


def test_two_processes(path):
    with running_python("-c", HOLD, path) as other:
        read_until(other, "open")
        with pytest.raises(JournalHeld, match=f"is in use by process {other.pid}") as refused:
            Store.open(path)
        assert refused.value.pid == other.pid
        link = path.with_name("link")
        link.symlink_to(path)
        with pytest.raises(JournalHeld):
            Store.open(link)
        with Reader.open_read_only(path) as journal:
            assert journal.jobs(0, 9) == []
        other.kill()
        other.wait()
        fill(path, 1)  # the lock goes with its process


def test_twice_in_one_process(path):
    with Store.open(path), pytest.raises(JournalHeld, match=f"process {os.getpid()}"):
        Store.open(path)
    Store.open(path).close()


@pytest.mark.parametrize("suffix", ["", "-wal", ".lock"])
@pytest.mark.parametrize("replaced", [False, True])
def test_files_deleted_or_replaced_in_use(path, suffix, replaced):
    file = path.with_name(path.name + suffix)
    with Store.open(path) as store:
        with store.transaction():
            store.accept(job("a"), NOW, 9)
        if replaced:
            file.with_name("other").write_bytes(file.read_bytes())
            file.with_name("other").rename(file)
        else:
            file.unlink()
        with (
            pytest.raises(JournalReplaced, match=f"{file.name} was deleted or replaced while in use"),
            store.transaction(),
        ):
            store.accept(job("b"), NOW, 9)


def test_readers_see_what_is_committed_beside_the_writer(path):
    with Store.open(path) as store, Reader.open_read_only(path) as journal:
        with store.transaction():
            store.accept(job("a"), NOW, 9)
            assert journal.jobs(0, 9) == []
        assert [found.job.job_id for found in journal.jobs(0, 9)] == ["a"]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            journal.connection.execute("DELETE FROM jobs")
