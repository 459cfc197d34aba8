"""JSON Schema (draft 2020-12) of every message, made from the pydantic models that read and write them."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from drumline.scheduler.mqtt.codec import (
    ChoiceMessage,
    DeadMessage,
    ErrorMessage,
    Outgoing,
    ResultMessage,
    StateMessage,
    SubmitMessage,
    WorkerStatus,
)
from drumline.scheduler.mqtt.parts import PartMessage
from drumline.scheduler.request import Chunk

Schema = dict[str, Any]

NOT_SENT = ("processors", "tenant")
"""Fields of a request that are refused over MQTT."""
PROMPTS: Mapping[str, Schema] = {
    "prompt": {"type": "string"},
    "prompt_ids": {"type": "array"},
    "messages": {"type": "array"},
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_OUTGOING: tuple[type[Outgoing], ...] = (
    StateMessage, ResultMessage, PartMessage, ChoiceMessage, ErrorMessage, WorkerStatus, DeadMessage,
)  # fmt: skip


class _WithoutCode(GenerateJsonSchema):
    """Fields that hold functions have no schema; those that do are left out afterwards."""

    def handle_invalid_for_json_schema(self, schema: CoreSchema, error_info: str) -> JsonSchemaValue:
        return {}


def message_schemas() -> dict[str, Schema]:
    """The schema of each message by its file name."""
    return {
        "submit": _submit(),
        "state": _answer("state", StateMessage),
        "chunk": _answer("chunk", Chunk),
        "result": _answer("result", ResultMessage),
        "part": _answer("part", PartMessage),
        "worker_status": _sent("worker_status", WorkerStatus),
        "dead": _sent("dead", DeadMessage),
    }


def _submit() -> Schema:
    """What a device may send: strict, for a field that we do not know is an error."""
    schema = _schema("submit", SubmitMessage)
    for name in NOT_SENT:
        del schema["properties"][name]
    schema["oneOf"] = [{"required": [name], "properties": {name: kind}} for name, kind in PROMPTS.items()]
    return schema


def _answer(name: str, kind: type) -> Schema:
    """What goes to whoever sent a job, who may have asked for the echo of MQTT 3.1.1."""
    schema = _sent(name, kind)
    echo = {"type": "string", "description": "What the job's own field of this name said, where it had one."}
    schema["properties"]["correlation_data"] = echo
    return schema


def _sent(name: str, kind: type) -> Schema:
    """What we send: every field is there, but for those that are left out where there is nothing to say.

    Unknown keys are allowed, as a newer worker may say more.
    """
    schema = _schema(name, kind)
    parts = schema.get("$defs", {})
    for sent in _OUTGOING:
        for part in (schema, *parts.values()):
            if part.get("title") == sent.__name__:
                part["required"] = [field for field in sent.model_fields if field not in sent.only_when_given]
    return schema


def _schema(name: str, kind: type) -> Schema:
    schema = TypeAdapter(kind).json_schema(schema_generator=_WithoutCode)
    return {"$schema": DIALECT, "$id": f"{name}.json"} | schema
