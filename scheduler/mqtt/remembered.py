"""The terminal messages that may be asked for again."""

from collections import OrderedDict
from dataclasses import dataclass

from drumline.scheduler.mqtt.codec import ResultMessage

Key = tuple[str, str]
"""(client, job id)"""


@dataclass(frozen=True)
class Finished:
    """A terminal message as it was first sent; `response_topic` is where to."""

    digest: bytes
    payload: bytes
    properties: dict[str, str]
    tokens: int
    response_topic: str | None


def finished(digest: bytes, outcome: ResultMessage, tokens: int, response_topic: str | None) -> Finished:
    """Encode an outcome, once for all who will ask."""
    return Finished(digest, outcome.encode(), result_properties(outcome), tokens, response_topic)


def result_properties(outcome: ResultMessage) -> dict[str, str]:
    """What the user properties of a terminal message say."""
    code = {} if outcome.error is None else {"code": outcome.error.code}
    return {"status": outcome.status, **code}


class Remembered:
    """The latest finished jobs, bounded in number and bytes."""

    def __init__(self, jobs: int, payload_bytes: int) -> None:
        self._jobs = jobs
        self._payload_bytes = payload_bytes
        self._by_key: OrderedDict[Key, Finished] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Finished | None:
        """The finished job of this key, if it is still known."""
        return self._by_key.get(key)

    def put(self, key: Key, job: Finished) -> None:
        """Remember a job, in the place of what was known of it, and forget the oldest beyond the bounds."""
        replaced = self._by_key.pop(key, None)
        self._bytes -= 0 if replaced is None else len(replaced.payload)
        self._by_key[key] = job
        self._bytes += len(job.payload)
        while self._by_key and (len(self._by_key) > self._jobs or self._bytes > self._payload_bytes):
            _, oldest = self._by_key.popitem(last=False)
            self._bytes -= len(oldest.payload)
