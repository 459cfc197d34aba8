"""Jobs and outcomes to journal."""

from drumline.scheduler.journal.records import AcceptedJob, Progress, Terminal

DIGEST = bytes(range(32))
NOW = 1_800_000_000.0


def job(job_id: str, client: str = "alice", **fields: object) -> AcceptedJob:
    """A job that differs from others in its id alone."""
    given = {"digest": DIGEST, "body": b'{"id":"x"}', "reply": b"{}", "seed": 2**64 - 1, "fingerprint": "cpu"}
    return AcceptedJob(client, job_id, **given | fields)


def tokens(*ids: int, choice: int = 0, first: int = 0, logprobs: bool = False) -> Progress:
    """A piece of progress."""
    scores = tuple({"id": token, "logprob": -0.5, "top": [[token, -0.5]]} for token in ids) if logprobs else None
    return Progress(choice, ids, scores, first)


def outcome(text: str = "done", status: str = "completed") -> Terminal:
    """How a job ended."""
    return Terminal(text.encode(), status, {"status": status}, 3)
