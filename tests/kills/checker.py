"""Judges what devices heard: a job that was accepted ends once, with the answer that it has when nothing is killed.

It knows the terminal message's JSON and nothing else of ours: parts are put together here, too, and not by the reader
that devices have.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

JobKey = tuple[str, str]
"""(client, job id)"""


@dataclass(frozen=True)
class Heard:
    """A state (`accepted`) or terminal message, or a part of one, in the order of arrival."""

    job: JobKey
    kind: str
    payload: bytes


@dataclass(frozen=True)
class Answer:
    """A choice as the engine gives it when nothing disturbs it; `logprobs` as (id, log-probability, alternatives)."""

    token_ids: tuple[int, ...]
    text: str
    stop_reason: str
    logprobs: tuple[Any, ...] | None = None


@dataclass
class Verdict:
    """Jobs that were lost, doubled or changed, and what there was to see."""

    accepted: int = 0
    lost: list[JobKey] = field(default_factory=list)
    doubled: list[JobKey] = field(default_factory=list)
    changed: list[JobKey] = field(default_factory=list)
    repeated: int = 0
    """Terminal messages that came again, with the same bytes: allowed, and counted."""
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> dict[str, list[JobKey]]:
        """The three that must be empty."""
        return {"lost": self.lost, "doubled": self.doubled, "changed": self.changed}


class _Text:
    """A terminal message that comes in parts: each says which characters stand where, and none may contradict."""

    def __init__(self) -> None:
        self._characters: dict[int, str] = {}
        self.total: int | None = None
        self.contradicts = False

    def add(self, offset: int, total: int, body: str) -> None:
        self.contradicts |= self.total not in (None, total)
        self.total = total
        for place, character in enumerate(body, offset):
            self.contradicts |= self._characters.setdefault(place, character) != character

    @property
    def whole(self) -> str | None:
        if self.total is None or len(self._characters) < self.total:
            return None
        return "".join(self._characters[place] for place in range(self.total))


def terminals(heard: Iterable[Heard]) -> tuple[dict[JobKey, list[str]], set[JobKey]]:
    """The terminal messages of each job, and the jobs whose parts contradict one another.

    A refusal before the job was accepted is no end of it: its device sends it again.
    """
    whole: dict[JobKey, list[str]] = {}
    texts: dict[JobKey, _Text] = {}
    accepted: set[JobKey] = set()
    for message in heard:
        document = json.loads(message.payload)
        if message.kind == "state":
            if document["state"] == "accepted":
                accepted.add(message.job)
        elif "offset" in document:
            text = texts.setdefault(message.job, _Text())
            text.add(document["offset"], document["total"], document["body"])
        elif document["status"] != "rejected" or message.job in accepted:
            whole.setdefault(message.job, []).append(message.payload.decode())
    for job, text in texts.items():
        if text.whole is not None:
            whole.setdefault(job, []).append(text.whole)
    return whole, {job for job, text in texts.items() if text.contradicts}


def check(
    accepted: Iterable[JobKey], heard: Iterable[Heard], undisturbed: Mapping[JobKey, tuple[Answer, ...]]
) -> Verdict:
    """Compare what was heard with what there would be to hear if nothing had been killed.

    A job that was stopped (`cancelled`, `expired`) has the beginning of the undisturbed answer.
    """
    ends, contradictory = terminals(heard)
    verdict = Verdict()
    for job in sorted(accepted):
        verdict.accepted += 1
        told = ends.get(job, [])
        verdict.repeated += max(0, len(told) - 1)
        if not told:
            verdict.lost.append(job)
        if len(set(told)) > 1 or job in contradictory:
            verdict.doubled.append(job)
        documents = [json.loads(text) for text in dict.fromkeys(told)]
        for document in documents[:1]:
            verdict.statuses[document["status"]] = verdict.statuses.get(document["status"], 0) + 1
        if not all(_is_undisturbed(document, undisturbed[job]) for document in documents):
            verdict.changed.append(job)
    return verdict


def _is_undisturbed(document: dict[str, Any], answers: tuple[Answer, ...]) -> bool:
    stopped = document["status"] in ("cancelled", "expired")
    if not stopped and document["status"] != "completed":
        return False
    if sorted(choice["choice"] for choice in document["choices"]) != list(range(len(answers))):
        return False
    return all(_same(choice, answers[choice["choice"]], stopped) for choice in document["choices"])


def _same(choice: dict[str, Any], answer: Answer, may_be_short: bool) -> bool:
    ids = tuple(choice["token_ids"])
    known = choice.get("logprobs")
    logprobs = None if known is None else tuple(_plain(entry) for entry in known)
    expected = None if answer.logprobs is None else tuple(_plain(entry) for entry in answer.logprobs)
    if may_be_short and choice["stop_reason"] in ("cancelled", "deadline"):
        text = choice["text"].rstrip("\ufffd")
        if expected is not None:
            expected = expected[: len(ids)]
        return (
            ids == answer.token_ids[: len(ids)]
            # Half a character at the end reads as U+FFFD; a stop string that had begun comes out.
            and (answer.text.startswith(text) or text.startswith(answer.text))
            and logprobs == expected
        )
    whole = (ids, choice["text"], choice["stop_reason"], logprobs)
    return whole == (answer.token_ids, answer.text, answer.stop_reason, expected)


def _plain(entry: Any) -> tuple[int, str, tuple[tuple[int, str], ...]]:
    """Log-probabilities as their bits: −0.0 is not 0.0."""
    if isinstance(entry, Mapping):
        entry = (entry["id"], entry["logprob"], entry["top"])
    token_id, logprob, top = entry
    return token_id, float(logprob).hex(), tuple((other, float(value).hex()) for other, value in top)
