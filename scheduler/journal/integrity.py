"""What must hold in every journal, looked at row by row."""

import sqlite3

from drumline.scheduler.journal.reader import Reader
from drumline.scheduler.journal.records import DIGEST_BYTES, STATES, STATUSES, Piece, joined

MAX_SEED = 2**64 - 1


def problems(journal: Reader) -> list[str]:
    """What is wrong with the file or the jobs in it, a sentence each; empty when all is well."""
    try:
        found = [text for (text,) in journal.connection.execute("PRAGMA integrity_check") if text != "ok"]
        return found or [*_jobs(journal), *_progress(journal)]
    except sqlite3.DatabaseError as error:
        return [str(error)]


def _jobs(journal: Reader) -> list[str]:
    found: list[str] = []
    for number, state, status, has_outcome, finished, published, digest_bytes, seed in journal.connection.execute(
        "SELECT number, state, status, outcome IS NOT NULL, finished_at IS NOT NULL, published_at IS NOT NULL,"
        " length(digest), seed FROM jobs ORDER BY number"
    ):
        done = state == "done"
        wrong = {
            f"its state is {state!r}": state not in STATES,
            f"it is {state}, {'with' if has_outcome else 'without'} an outcome": done != bool(has_outcome),
            f"it is {state}, its status is {status!r}": (status in STATUSES) if not done else status not in STATUSES,
            f"it is {state}, {'with' if finished else 'without'} a time of its end": done != bool(finished),
            f"it is {state}, but published": bool(published) and not done,
            f"its digest has {digest_bytes} bytes": digest_bytes != DIGEST_BYTES,
            f"its seed is {seed!r}": not (seed.isdigit() and int(seed) <= MAX_SEED),
        }
        found.extend(f"job number {number}: {what}" for what, holds in wrong.items() if holds)
    return found


def _progress(journal: Reader) -> list[str]:
    states = dict(journal.connection.execute("SELECT number, state FROM jobs"))
    pieces: dict[int, list[Piece]] = {}
    for number, *piece in journal.connection.execute(
        "SELECT number, choice, first_token, token_ids, logprobs FROM progress ORDER BY number, choice, first_token"
    ):
        pieces.setdefault(number, []).append(tuple(piece))
    found = []
    for number, stored in pieces.items():
        state = states.get(number)
        if state != "running":
            found.append(f"job number {number}: it has progress, but {f'is {state}' if state else 'is not there'}")
        try:
            joined(stored)
        except ValueError as error:
            found.append(f"job number {number}: {error}")
    return found
