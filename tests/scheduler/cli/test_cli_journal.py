"""`drumline journal`: what it tells and mends, and that it keeps its hands off a journal in use."""

import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from drumline.scheduler.journal.records import AcceptedJob, Progress, Terminal
from drumline.scheduler.journal.store import Store

DAY_S = 86_400


def accepted(job_id: str) -> AcceptedJob:
    body = json.dumps({"id": job_id, "prompt": "ä"}, ensure_ascii=False).encode()
    return AcceptedJob(
        "alice", job_id, bytes(32), body, b'{"topic":"t"}', 2**64 - 1, "cpu", deadline_at=1_900_000_000.0
    )


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """One job that is done and published, one that runs, one that waits."""
    path = tmp_path / "jobs.journal"
    ended_at = time.time() - 2 * DAY_S
    with Store.open(path) as store, store.transaction():
        done, running, _ = [store.accept(accepted(job_id), ended_at - 10, 9) for job_id in ("old", "long", "new")]
        store.progress(running, Progress(0, (1, 2, 3)))
        store.finish(done, Terminal(b'{"text":"\xc3\xb6"}', "completed", {"status": "completed"}, 7), ended_at)
        store.published(done, ended_at)
    return path


def test_list(cli, journal: Path):
    run = cli("journal", "list", journal)
    assert (run.code, run.err) == (0, "")
    new, long, old = run.out.splitlines()
    assert new.split()[2:] == ["accepted", "alice", "new"]
    assert long.split()[2:] == ["running", "alice", "long"]
    assert old.split()[2:] == ["done", "completed", "published", "alice", "old"]
    jobs = json.loads(cli("journal", "list", journal, "--state", "done", "--json").out)["jobs"]
    assert [(job["job_id"], job["status"], job["generated_tokens"]) for job in jobs] == [("old", "completed", 7)]
    assert len(cli("journal", "list", journal, "--limit", 2).out.splitlines()) == 2


def test_show(cli, journal: Path):
    run = cli("journal", "show", journal, "alice", "old")
    assert (run.code, run.err) == (0, "")
    shown = json.loads(run.out)
    assert (shown["state"], shown["seed"], shown["digest"]) == ("done", 2**64 - 1, "00" * 32)
    assert json.loads(shown["body"]) == {"id": "old", "prompt": "ä"}
    assert (shown["outcome"], shown["outcome_properties"]) == ('{"text":"ö"}', {"status": "completed"})
    running = json.loads(cli("journal", "show", journal, "alice", "long").out)
    assert running["progress"] == [{"choice": 0, "token_ids": [1, 2, 3], "logprobs": None, "first_token": 0}]


def test_export_is_all_that_show_tells_in_order(cli, journal: Path, tmp_path: Path):
    lines = cli("journal", "export", journal).out.splitlines()
    shown = [cli("journal", "show", journal, "alice", job_id).out for job_id in ("old", "long", "new")]
    assert [json.loads(line) for line in lines] == [json.loads(text) for text in shown]
    run = cli("journal", "export", journal, "--output", tmp_path / "jobs.jsonl")
    assert (run.code, run.out, run.err) == (0, "", "")
    assert (tmp_path / "jobs.jsonl").read_text(encoding="utf-8").splitlines() == lines


def test_requeue(cli, journal: Path):
    run = cli("journal", "requeue", journal, "alice", "old")
    assert (run.code, run.out) == (0, "job old of client alice is accepted again, as number 1\n")
    assert run.err == "drumline: its outcome may have been delivered already; the client may get another\n"
    shown = json.loads(cli("journal", "show", journal, "alice", "old").out)
    left = ("state", "outcome", "status", "finished_at", "published_at", "deadline_at")
    assert [shown[name] for name in left] == ["accepted", None, None, None, None, None]
    assert cli("journal", "check", journal).code == 0


def test_prune(cli, journal: Path):
    assert cli("journal", "prune", journal).out == "0 jobs pruned\n"
    assert cli("journal", "prune", journal, "--older-than", 1).out == "1 jobs pruned\n"
    assert [line.split()[-1] for line in cli("journal", "list", journal).out.splitlines()] == ["new", "long"]


def test_check(cli, journal: Path):
    run = cli("journal", "check", journal)
    assert (run.code, run.out, run.err) == (0, "3 jobs, no problems\n", "")
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("UPDATE jobs SET digest = x'00' WHERE job_id = 'old'")
        connection.execute("UPDATE progress SET first_token = 1")
    run = cli("journal", "check", journal)
    problems = (
        "job number 1: its digest has 1 bytes",
        "job number 2: choice 0: 0 tokens, then one that is number 1",
    )
    assert (run.code, run.out, run.err) == (1, "\n".join(problems) + "\n", "")


def test_check_of_a_damaged_file(cli, journal: Path):
    content = journal.read_bytes()
    journal.write_bytes(content[: len(content) // 2])
    run = cli("journal", "check", journal)
    assert (run.code, run.err) == (1, "")
    assert "malformed" in run.out


def test_beside_a_worker(cli, journal: Path):
    """Reading goes on beside it; writing says who is in the way."""
    with Store.open(journal) as worker, worker.transaction():
        worker.accept(accepted("late"), time.time(), 9)
        for command in (("list",), ("show", "alice", "old"), ("export",), ("check",)):
            name, *names = command
            run = cli("journal", name, journal, *names)
            assert (run.code, run.err) == (0, "")
        for command in (("requeue", "alice", "old"), ("prune",)):
            name, *names = command
            run = cli("journal", name, journal, *names)
            assert (run.code, run.out) == (2, "")
            assert run.err == f"drumline: journal {journal}: is in use by process {os.getpid()}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "alice", "nothing"), "holds no job nothing of client alice"),
        (("requeue", "alice", "nothing"), "holds no job nothing of client alice"),
        (("requeue", "alice", "long"), "job long of client alice is running, not done"),
        (("requeue", "alice", "new"), "job new of client alice is accepted, not done"),
        (("list", "--state", "lost"), "Invalid value for '--state'"),
        (("prune", "--older-than", "-1"), "Invalid value for '--older-than'"),
    ],
)
def test_refusals(cli, journal: Path, arguments, message):
    name, *rest = arguments
    run = cli("journal", name, journal, *rest)
    assert (run.code, run.out) == (2, "")
    assert message in run.err
    assert run.err.count("\n") == 1


@pytest.mark.parametrize("command", [("list",), ("export",), ("check",), ("prune",), ("requeue", "a", "b")])
def test_no_journal_is_made(cli, tmp_path: Path, command):
    name, *rest = command
    missing, foreign = tmp_path / "missing", tmp_path / "foreign"
    run = cli("journal", name, missing, *rest)
    assert (run.code, run.out, run.err) == (2, "", f"drumline: journal {missing}: no such file\n")
    foreign.write_bytes(b"a diary " * 1000)
    run = cli("journal", name, foreign, *rest)
    reason = "is damaged: file is not a database\n"
    told = (1, reason, "") if name == "check" else (2, "", f"drumline: journal {foreign}: {reason}")
    assert run == told
    assert sorted(tmp_path.iterdir()) == [foreign]
