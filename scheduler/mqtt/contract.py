"""The MQTT contract on paper: AsyncAPI 3.0 and JSON Schemas, made from the models and topics that the worker uses.

    python -m drumline.scheduler.mqtt.contract --output docs

AsyncAPI: https://www.asyncapi.com/docs/reference/specification/v3.0.0; bindings for MQTT, version 0.2.0:
https://github.com/asyncapi/bindings/tree/master/mqtt. Operations are from the worker's view.
"""

import argparse
import json
import re
from pathlib import Path

from drumline.scheduler.mqtt.address import DEFAULT_PORT, DEFAULT_TLS_PORT
from drumline.scheduler.mqtt.codec import MAX_SUBMIT_BYTES
from drumline.scheduler.mqtt.outbox import MAX_MESSAGE_BYTES
from drumline.scheduler.mqtt.schemas import Schema, message_schemas
from drumline.scheduler.mqtt.topics import JOB_KINDS, NAME, Topics
from drumline.scheduler.mqtt.yaml_text import to_yaml

VERSION = "1.0.0"
"""Of the contract, not of the package: its first number is the one in the topics' prefix."""
BINDING = "0.2.0"
SCHEMA_FORMAT = "application/schema+json;version=draft-2020-12"
_PARAMETERS = {
    "client": f"A device's name ({NAME.pattern}); a broker's ACL can hold it to its user name.",
    "job_id": f"The job's id, chosen by the device ({NAME.pattern}).",
    "worker": f"A worker's name ({NAME.pattern}).",
}
_CORRELATION = {
    "description": "Echoed on every answer. MQTT 3.1.1: the field correlation_data, in both directions.",
    "location": "$message.header#/correlationData",
}


def asyncapi() -> Schema:
    """The whole document; `$ref`s to payloads lead to `schemas/` beside it."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "drumline",
            "version": VERSION,
            "license": {"name": "Apache-2.0"},
            "description": (
                "Text generation over MQTT. A device submits a job and hears of its state, its text as it comes, and "
                "one terminal result. Every topic starts with a prefix (drumline/v1 unless the worker was given "
                "another). Submits with the same client, id and content are one job."
            ),
        },
        "defaultContentType": "application/json",
        "servers": _servers(),
        "channels": _channels(),
        "operations": _operations(),
        "components": {
            "messages": _messages(),
            "parameters": {name: {"description": text} for name, text in _PARAMETERS.items()},
            "securitySchemes": {
                "password": {"type": "userPassword", "description": "The user name is the client's name."},
                "certificate": {"type": "X509", "description": "The common name is the client's name."},
            },
        },
    }


def addresses(topics: Topics) -> dict[str, str]:
    """The address of each channel, with its parameters in braces."""
    stands_for = {"CLIENT": "{client}", "JOB": "{job_id}", "WORKER": "{worker}"}
    built: dict[str, str] = {
        "submit": topics.submit("CLIENT"),
        "workerStatus": topics.worker_status("WORKER"),
        "dead": topics.dead,
    }
    built |= {kind: topics.job("CLIENT", kind, "JOB") for kind in JOB_KINDS}
    return {name: re.sub("CLIENT|JOB|WORKER", lambda m: stands_for[m[0]], topic) for name, topic in built.items()}


def _servers() -> Schema:
    will = {"topic": addresses(Topics())["workerStatus"], "qos": 1, "retain": True, "message": '{"status":"offline",…}'}
    bindings = {"mqtt": {"lastWill": will, "keepAlive": 30, "sessionExpiryInterval": 3600, "bindingVersion": BINDING}}
    version = {"protocolVersion": "5.0", "description": "Your broker. MQTT 3.1.1 is served as well."}
    return {
        "plain": {"host": f"localhost:{DEFAULT_PORT}", "protocol": "mqtt", **version, "bindings": bindings},
        "encrypted": {
            "host": f"localhost:{DEFAULT_TLS_PORT}",
            "protocol": "secure-mqtt",
            **version,
            "security": [{"$ref": f"#/components/securitySchemes/{way}"} for way in ("password", "certificate")],
            "bindings": bindings,
        },
    }


def _channels() -> Schema:
    holds = {
        "submit": ("submit",), "state": ("state",), "chunks": ("chunk",), "result": ("result", "part"),
        "cancel": ("cancel",), "get": ("get",), "workerStatus": ("workerStatus",), "dead": ("dead",),
    }  # fmt: skip
    channels: Schema = {name: _channel(address, holds[name]) for name, address in addresses(Topics()).items()}
    channels["replies"] = {
        "address": None,
        "description": (
            "The response topic of the job (an MQTT 5 property; for 3.1.1 the field response_topic), if it named one. "
            "Everything about the job goes there instead, told apart by the user property `kind`. It must lie in the "
            "client's own subtree, or under a prefix that the worker allows."
        ),
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in ("state", "chunk", "result", "part")},
    }
    return channels


def _channel(address: str, messages: tuple[str, ...]) -> Schema:
    parameters = {name: {"$ref": f"#/components/parameters/{name}"} for name in re.findall(r"\{(\w+)\}", address)}
    channel: Schema = {"address": address, "parameters": parameters} if parameters else {"address": address}
    return channel | {"messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages}}


def _operations() -> Schema:
    def operation(action: str, channel: str, summary: str, qos: int, retain: bool = False) -> Schema:
        mqtt: Schema = {"qos": qos, "bindingVersion": BINDING}
        if action == "send":
            mqtt["retain"] = retain
        return {
            "action": action,
            "channel": {"$ref": f"#/channels/{channel}"},
            "summary": summary,
            "bindings": {"mqtt": mqtt},
        }

    answered = {"address": {"location": "$message.header#/responseTopic"}, "channel": {"$ref": "#/channels/replies"}}
    return {
        "receiveSubmit": operation("receive", "submit", "Take a job. Retained ones are ignored.", 1)
        | {"reply": answered},
        "receiveCancel": operation("receive", "cancel", "Stop a job, queued or running.", 1) | {"reply": answered},
        "receiveGet": operation("receive", "get", "Send the state, and the result if the job has ended.", 1)
        | {"reply": answered},
        "sendState": operation("send", "state", "A job was accepted, or its state was asked for.", 1),
        "sendProgress": operation("send", "state", "A job moved up the queue, started, or is done.", 0),
        "sendChunk": operation("send", "chunks", "Text as it comes; the result alone is authoritative.", 0),
        "sendResult": operation("send", "result", "How a job ended; once for every job, refused ones too.", 1),
        "sendStatus": operation("send", "workerStatus", "Birth, life and will of the worker.", 1, retain=True),
        "sendDead": operation("send", "dead", "What could not be parsed or answered.", 1),
    }


def _messages() -> Schema:
    refusals = "A refusal's or failure's code, as in the payload's error."
    incoming = {
        "responseTopic": {"type": "string", "description": "Where every answer goes; checked."},
        "correlationData": {"type": "string", "description": "Binary; echoed."},
    }
    expiry = {
        "type": "integer",
        "description": "Seconds: a deadline, as deadline_s is; the earlier one holds.",
    }
    answer = {"correlationData": incoming["correlationData"], "job_id": {"type": "string"}}
    status = {"type": "string", "enum": message_schemas()["result"]["properties"]["status"]["enum"]}
    code = {"type": "string", "description": refusals}
    return {
        "submit": _message(
            f"A job, at most {MAX_SUBMIT_BYTES} bytes.", "submit", incoming | {"messageExpiryInterval": expiry}
        ),
        "cancel": _message("Its payload is not read.", None, incoming),
        "get": _message("Its payload is not read.", None, incoming),
        "state": _message("Where a job stands.", "state", answer | {"kind": {"const": "state"}, "code": code}),
        "chunk": _message("New text and tokens of one choice.", "chunk", answer | {"kind": {"const": "chunk"}}),
        "result": _message(
            f"The terminal message, where it has at most {MAX_MESSAGE_BYTES} bytes.",
            "result",
            answer | {"kind": {"const": "result"}, "status": status, "code": code},
        ),
        "part": _message(
            "A piece of a larger terminal message.",
            "part",
            answer | {"kind": {"const": "result"}, "part": {"const": "true"}, "status": status, "code": code},
        ),
        "workerStatus": _message("Whether a worker is there, and how busy it is.", "worker_status", {}),
        "dead": _message("A letter about a message that went nowhere.", "dead", {"code": code}),
    }


def _message(summary: str, schema: str | None, headers: Schema) -> Schema:
    """A message; MQTT 5 properties, user properties among them, are its headers (sent to those who use any)."""
    message: Schema = {"summary": summary}
    if schema is not None:
        message["payload"] = {"schemaFormat": SCHEMA_FORMAT, "schema": {"$ref": f"./schemas/{schema}.json"}}
    if headers:
        message["headers"] = {"type": "object", "properties": headers}
    if "correlationData" in headers:
        message["correlationId"] = _CORRELATION
    return message


def files() -> dict[str, str]:
    """The text of every file, by its path under the output folder."""
    made = {f"schemas/{name}.json": json.dumps(schema, indent=2) + "\n" for name, schema in message_schemas().items()}
    heading = "# Made by `python -m drumline.scheduler.mqtt.contract --output docs`; do not edit.\n"
    return {"asyncapi.yaml": heading + to_yaml(asyncapi()) + "\n"} | made


def main(arguments: list[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Write the MQTT contract: AsyncAPI 3.0 and JSON Schemas.")
    parser.add_argument("--output", type=Path, required=True, help="the folder to write to")
    output = parser.parse_args(arguments).output
    for name, text in files().items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
