"""The names of the topics, in one place: built here, read back here, and checked here when a device brings its own."""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal, NamedTuple
from unicodedata import category

from drumline.model.errors import InvalidRequest

Kind = Literal["submit", "state", "chunks", "result", "cancel", "get"]

JOB_KINDS: tuple[Kind, ...] = ("state", "chunks", "result", "cancel", "get")
REQUEST_KINDS: tuple[Literal["submit", "cancel", "get"], ...] = ("submit", "cancel", "get")
"""What devices send us; the other kinds we send them."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TOPIC_BYTES = 1_024
MAX_LEVELS = 64
"""Every message to a device carries its reply topic, and a broker may hang up on one that has more than 200 levels."""
DEFAULT_PREFIX = "drumline/v1"
_REFUSED = ("Cc", "Cs")
"""Categories of Unicode that MQTT lets a broker hang up on: control characters, halves of surrogate pairs."""


class ParsedTopic(NamedTuple):
    """Whose topic it is and what for; `job_id` is None for `submit` alone."""

    client: str
    kind: Kind
    job_id: str | None


class Topics:
    """All topics under one prefix. Raises `InvalidRequest` for a prefix or a name that cannot be a topic level."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        _check_publishable(prefix, "topic_prefix")
        if prefix.startswith("/") or prefix.endswith("/"):
            raise InvalidRequest("topic_prefix", "must not begin or end with /")
        self.prefix = prefix
        self.digest = sha256(prefix.encode()).hexdigest()[:8]
        """In the names of sessions: those of two workers of one name and other topics are not the same."""

    def submit(self, client: str) -> str:
        """Where a device sends its jobs."""
        return f"{self.client(client)}/submit"

    def client(self, client: str) -> str:
        """The subtree of one client."""
        return f"{self.prefix}/clients/{_name(client, 'client')}"

    def job(self, client: str, kind: Kind, job_id: str) -> str:
        """One of a job's topics."""
        return f"{self.client(client)}/jobs/{_name(job_id, 'id')}/{kind}"

    def worker_status(self, worker: str) -> str:
        """Where a worker says whether it is there (retained, and its will)."""
        return f"{self.prefix}/workers/{_name(worker, 'worker')}/status"

    @property
    def dead(self) -> str:
        """Where a message goes that could not be parsed or answered."""
        return f"{self.prefix}/dead"

    @property
    def submit_filter(self) -> str:
        """Subscribes to the jobs of all clients."""
        return f"{self.prefix}/clients/+/submit"

    @property
    def control_filters(self) -> tuple[str, str]:
        """Subscribe to the cancels and gets of all clients."""
        return f"{self.prefix}/clients/+/jobs/+/cancel", f"{self.prefix}/clients/+/jobs/+/get"

    def parse(self, topic: str) -> ParsedTopic | None:
        """Whose topic it is and what for; None for a topic that is not a client's."""
        head = f"{self.prefix}/clients/"
        if not topic.startswith(head):
            return None
        match topic[len(head) :].split("/"):
            case [client, "submit"] if NAME.fullmatch(client):
                return ParsedTopic(client, "submit", None)
            case [client, "jobs", job_id, kind] if NAME.fullmatch(client) and NAME.fullmatch(job_id):
                return next((ParsedTopic(client, known, job_id) for known in JOB_KINDS if known == kind), None)
        return None

    def check_reply(self, topic: str, client: str, allowed_prefixes: Sequence[str] = ()) -> None:
        """Refuse a reply topic outside the client's subtree and `allowed_prefixes`, or where we would hear ourselves.

        Raises `InvalidRequest("response_topic")`.
        """
        check_reply_topic(topic, (self.client(client), *allowed_prefixes))
        parsed = self.parse(topic)
        if parsed is not None and parsed.kind in REQUEST_KINDS:
            raise InvalidRequest("response_topic", f"must not be a topic that devices send to ({parsed.kind})")


def check_reply_topic(topic: str, allowed_prefixes: Sequence[str]) -> None:
    """Refuse what a broker would disconnect us for, and what is outside `allowed_prefixes` (whole levels).

    Raises `InvalidRequest("response_topic")`.
    """
    _check_publishable(topic, "response_topic")
    if not any(topic == prefix or topic.startswith(prefix.rstrip("/") + "/") for prefix in allowed_prefixes):
        raise InvalidRequest("response_topic", f"must be under one of {', '.join(allowed_prefixes)}")


def _check_publishable(topic: str, field: str) -> None:
    if not topic:
        raise InvalidRequest(field, "must not be empty")
    if any(character in topic for character in "+#\0"):
        raise InvalidRequest(field, "must not contain +, # or NUL")
    if topic.startswith("$"):
        raise InvalidRequest(field, "must not begin with $")
    odd = next(
        (character for character in topic if category(character) in _REFUSED or _is_no_character(character)), None
    )
    if odd is not None:  # a broker hangs up on whoever publishes there
        raise InvalidRequest(field, f"must not contain U+{ord(odd):04X}")
    if topic.count("/") >= MAX_LEVELS:
        raise InvalidRequest(field, f"has {topic.count('/') + 1} levels, the limit is {MAX_LEVELS}")
    size = len(topic.encode())
    if size > MAX_TOPIC_BYTES:
        raise InvalidRequest(field, f"is {size} bytes long, the limit is {MAX_TOPIC_BYTES}")


def _is_no_character(character: str) -> bool:
    """Whether Unicode will never assign it: U+FDD0 … U+FDEF, and the last two of each plane."""
    code = ord(character)
    return 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE


def _name(name: str, field: str) -> str:
    if not NAME.fullmatch(name):
        raise InvalidRequest(field, f"must match {NAME.pattern}")
    return name
