"""What one connection does, event by event."""

import sqlite3

import pytest

from drumline import QueueFull
from drumline.scheduler.journal.errors import (
    DuplicateJob,
    JobFinished,
    JournalCorrupt,
    JournalError,
    JournalFull,
    UnknownJob,
)
from drumline.scheduler.journal.integrity import problems
from drumline.scheduler.journal.store import Store
from tests.scheduler.journal.support import NOW, job, outcome, tokens


@pytest.fixture
def store(path):
    with Store.open(path) as opened:
        yield opened


def accept(store: Store, *ids: str) -> list[int]:
    with store.transaction():
        return [store.accept(job(each), NOW, 100) for each in ids]


def test_a_job_comes_back_as_it_was_accepted(store):
    given = job("a", body=b'{"id":"a","prompt":"\xc3\xa4"}', deadline_at=NOW + 5, reply=b'{"topic":"t"}')
    with store.transaction():
        number = store.accept(given, NOW, 10)
        store.progress(number, tokens(1, 2, logprobs=True))
        store.progress(number, tokens(7, choice=1))
        store.progress(number, tokens(-3, first=2, logprobs=True))
    found = store.find("alice", "a")
    assert (found.number, found.job, found.state, found.accepted_at) == (number, given, "running", NOW)
    first, second = found.progress
    assert (first.choice, first.token_ids, first.first_token) == (0, (1, 2, -3), 0)
    assert [item["id"] for item in first.logprobs] == [1, 2, -3]
    assert (second.choice, second.token_ids, second.logprobs) == (1, (7,), None)
    assert store.find("bob", "a") is None


def test_a_finished_job_has_its_outcome_and_no_progress(store):
    (number,) = accept(store, "a")
    with store.transaction():
        store.progress(number, tokens(1, 2))
        store.finish(number, outcome(), NOW + 1)
        store.published(number, NOW + 2)
        store.published(number, NOW + 3)
    found = store.find("alice", "a")
    assert (found.state, found.terminal, found.progress) == ("done", outcome(), ())
    assert (found.finished_at, found.published_at) == (NOW + 1, NOW + 2)
    assert store.connection.execute("SELECT count(*) FROM progress").fetchone() == (0,)


def test_one_outcome_a_job(store):
    (number,) = accept(store, "a")
    with store.transaction():
        store.finish(number, outcome(), NOW)
        store.finish(number, outcome(), NOW + 9)
        with pytest.raises(JobFinished, match=f"job number {number} is done already"):
            store.finish(number, outcome("another"), NOW)
        with pytest.raises(JobFinished):
            store.progress(number, tokens(1))
        with pytest.raises(JobFinished):
            store.restart(number, "gpu")
    assert store.find("alice", "a").finished_at == NOW
    assert store.unfinished_jobs == 0


def test_refusals_name_what_is_wrong(store):
    (number,) = accept(store, "a")
    with store.transaction():
        with pytest.raises(DuplicateJob, match="job a of client alice is in it already"):
            store.accept(job("a"), NOW, 100)
        with pytest.raises(QueueFull) as full:
            store.accept(job("b"), NOW, 1)
        with pytest.raises(UnknownJob, match="holds no job number 77"):
            store.finish(77, outcome(), NOW)
        with pytest.raises(JournalError, match="is not done"):
            store.published(number, NOW)
        with pytest.raises(ValueError, match="token_ids: "):
            store.progress(number, tokens(2**31))
    assert (full.value.bound, full.value.limit, full.value.queued) == ("journal", 1, 1)


@pytest.mark.parametrize("first", [1, 3])
def test_progress_goes_on_where_it_ended(store, first):
    (number,) = accept(store, "a")
    with store.transaction():
        store.progress(number, tokens(5, 6))
        with pytest.raises(JournalError, match=f"choice 0 goes on at 2, not at {first}"):
            store.progress(number, tokens(7, first=first))


@pytest.mark.parametrize(("first", "what"), [(1, "2 tokens, then one that is number 1"), (3, "number 3")])
def test_pieces_that_overlap_or_leave_a_gap_are_an_integrity_error(store, first, what):
    (number,) = accept(store, "a")
    with store.transaction():
        store.progress(number, tokens(5, 6))
        store.connection.execute("INSERT INTO progress VALUES (?, 0, ?, ?, NULL)", (number, first, bytes(4)))
    with pytest.raises(JournalCorrupt, match=what):
        store.unfinished(0, 10)
    (problem,) = problems(store)
    assert what in problem


def test_a_job_that_restarts_has_another_fingerprint_and_no_tokens(store):
    (number,) = accept(store, "a")
    with store.transaction():
        store.progress(number, tokens(5, 6))
        store.restart(number, "another cpu")
        store.progress(number, tokens(8))
    found = store.find("alice", "a")
    assert (found.job.fingerprint, found.progress[0].token_ids) == ("another cpu", (8,))


def test_pages_are_in_the_order_of_acceptance(store):
    numbers = accept(store, *"edcba")
    with store.transaction():
        store.finish(numbers[1], outcome(), NOW)
        store.finish(numbers[3], outcome(), NOW)
        store.published(numbers[1], NOW)
        store.progress(numbers[4], tokens(9))
    assert [found.job.job_id for found in store.unfinished(0, 2)] == ["e", "c"]
    (last,) = store.unfinished(numbers[2], 2)
    assert (last.job.job_id, last.progress[0].token_ids) == ("a", (9,))
    assert [found.job.job_id for found in store.unpublished(0, 9)] == ["b"]
    assert [found.job.job_id for found in store.jobs(numbers[0], 2)] == ["d", "c"]
    assert [found.job.job_id for found in store.latest("done", 9)] == ["b", "d"]


def test_prune_keeps_what_is_unfinished_unpublished_or_new(store):
    numbers = accept(store, *"abcde")
    with store.transaction():
        for number in numbers[:4]:
            store.finish(number, outcome(), NOW + number)
        for number in (numbers[0], numbers[2], numbers[3]):
            store.published(number, NOW)
        assert store.prune(NOW + numbers[3], float("inf")) == 2
    assert [found.job.job_id for found in store.jobs(0, 9)] == ["b", "d", "e"]


def test_prune_keeps_the_newest_within_the_bytes(store):
    numbers = accept(store, *"abcd")
    with store.transaction():
        for number in numbers:
            store.finish(number, outcome("x" * 90), NOW + number)  # and 10 bytes of body
            store.published(number, NOW)
        assert store.prune(0.0, 250) == 2
    assert [found.job.job_id for found in store.jobs(0, 9)] == ["c", "d"]


def test_what_a_transaction_did_is_undone_with_it(store):
    def fail() -> None:
        with store.transaction():
            store.accept(job("a"), NOW, 9)
            store.connection.execute("SELECT * FROM nowhere")

    with pytest.raises(JournalError, match="no such table"):
        fail()
    assert (store.find("alice", "a"), store.unfinished_jobs) == (None, 0)


def test_a_full_disk_refuses_and_goes_on_when_there_is_room(store):
    accept(store, "a")
    pages = store.connection.execute("PRAGMA page_count").fetchone()[0]
    store.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalFull, match="database or disk is full"), store.transaction():
        store.accept(job("b", body=bytes(100_000)), NOW, 9)
    assert [found.job.job_id for found in store.unfinished(0, 9)] == ["a"]
    assert store.unfinished_jobs == 1
    store.connection.execute("PRAGMA max_page_count = 100000")
    with store.transaction():
        store.accept(job("b", body=bytes(100_000)), NOW, 9)
    assert problems(store) == []


def test_problems_are_found(store):
    numbers = accept(store, *"abcd")
    with store.transaction():
        store.finish(numbers[0], outcome(), NOW)
        store.connection.execute("PRAGMA ignore_check_constraints = ON")
        store.connection.execute("UPDATE jobs SET digest = x'00' WHERE number = ?", (numbers[1],))
        store.connection.execute("UPDATE jobs SET published_at = 1, seed = '-1' WHERE number = ?", (numbers[2],))
        store.connection.execute("INSERT INTO progress VALUES (?, 0, 0, ?, NULL)", (numbers[0], bytes(4)))
    assert problems(store) == [
        "job number 2: its digest has 1 bytes",
        "job number 3: it is accepted, but published",
        "job number 3: its seed is '-1'",
        "job number 1: it has progress, but is done",
    ]
    store.connection.execute("UPDATE jobs SET state = 'lost' WHERE number = ?", (numbers[3],))
    store.connection.execute("UPDATE jobs SET outcome = NULL WHERE number = ?", (numbers[0],))
    assert "CHECK constraint failed in jobs" in problems(store)[0] or any("'lost'" in each for each in problems(store))


def test_ids_do_not_come_back(store):
    """A number names one job for ever, also when the last one was pruned."""
    (number,) = accept(store, "a")
    with store.transaction():
        store.finish(number, outcome(), NOW)
        store.published(number, NOW)
        store.prune(NOW + 1, 0)
    assert accept(store, "a") == [number + 1]


def test_synchronous_is_full_and_the_log_is_a_wal(store):
    pragmas = {
        name: store.connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("synchronous", "journal_mode")
    }
    assert pragmas == {"synchronous": 2, "journal_mode": "wal"}
    with pytest.raises(sqlite3.IntegrityError):
        store.connection.execute("INSERT INTO progress VALUES (999, 0, 0, x'00', NULL)")
