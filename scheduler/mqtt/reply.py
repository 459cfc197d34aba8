"""Where the answers to a message go."""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

from drumline.model.errors import InvalidRequest
from drumline.scheduler.mqtt.codec import MAX_CORRELATION, with_correlation
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.topics import Kind, Topics

NO_PROPERTIES: Mapping[str, str] = {}


@dataclass(frozen=True)
class Reply:
    """Where a job's messages go, and what its sender wants to see on them.

    `with_properties`: the sender speaks MQTT 5, so the reply carries user properties. A plain job gets plain replies,
    which any 3.1.1 reader can take from any broker.
    """

    topics: Topics
    client: str
    job_id: str
    response_topic: str | None = None
    correlation_data: bytes | None = None
    correlation_text: str | None = None
    with_properties: bool = False

    def encode(self) -> bytes:
        """JSON, for the journal; `decode` reads it."""
        data = self.correlation_data
        document = {
            "response_topic": self.response_topic,
            "correlation_data": None if data is None else b64encode(data).decode(),
            "correlation_text": self.correlation_text,
            "with_properties": self.with_properties,
        }
        return json.dumps(document).encode()

    @classmethod
    def decode(cls, topics: Topics, client: str, job_id: str, payload: bytes) -> Self:
        """The reply of a job in the journal."""
        document = json.loads(payload)
        data = document.pop("correlation_data")
        return cls(topics, client, job_id, correlation_data=None if data is None else b64decode(data), **document)

    def message(
        self, kind: str, payload: bytes, qos: int = 1, properties: Mapping[str, str] = NO_PROPERTIES
    ) -> Message:
        """A message to whoever sent the job; `kind` is `state`, `chunk` or `result`."""
        level = cast(Kind, "chunks" if kind == "chunk" else kind)
        named = {"kind": kind, "job_id": self.job_id} | dict(properties)
        return Message(
            topic=self.response_topic or self.topics.job(self.client, level, self.job_id),
            payload=with_correlation(payload, self.correlation_text),
            qos=qos,
            correlation_data=self.correlation_data,
            user_properties=tuple(named.items()) if self.with_properties else (),
        )


def reply_to(
    message: Message,
    topics: Topics,
    client: str,
    job_id: str,
    allowed_prefixes: Sequence[str],
    topic: str | None = None,
    text: str | None = None,
) -> Reply:
    """The reply to `message`; its MQTT 5 properties come before the JSON fields `topic` and `text` (correlation data).

    Raises `InvalidRequest` for `response_topic` and `correlation_data`.
    """
    response_topic = message.response_topic if message.response_topic is not None else topic
    if response_topic is not None:
        topics.check_reply(response_topic, client, allowed_prefixes)
    data = message.correlation_data
    if data is not None and len(data) > MAX_CORRELATION:
        raise InvalidRequest("correlation_data", f"is {len(data)} bytes long, the limit is {MAX_CORRELATION}")
    return Reply(
        topics=topics,
        client=client,
        job_id=job_id,
        response_topic=response_topic,
        correlation_data=message.correlation_data,
        correlation_text=text,
        with_properties=message.uses_v5,
    )
