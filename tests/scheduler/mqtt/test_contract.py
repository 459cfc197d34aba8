"""The contract on paper says what the worker does: it is made from its models, and real messages fit it."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from drumline import InvalidRequest, QueueFull, Request
from drumline.scheduler.mqtt import codec
from drumline.scheduler.mqtt.contract import addresses, asyncapi, files, main
from drumline.scheduler.mqtt.parts import PartMessage
from drumline.scheduler.mqtt.schemas import message_schemas
from drumline.scheduler.mqtt.topics import JOB_KINDS, Topics
from drumline.scheduler.mqtt.yaml_text import to_yaml
from drumline.scheduler.request import Chunk, TokenLogprob
from tests.drive import generate
from tests.processes import ROOT
from tests.scheduler.mqtt.support import MODEL

DOCS = ROOT / "docs"
ALL_FIELDS = {
    "id": "j", "prompt": "p", "max_tokens": 3, "min_tokens": 1, "stop": ["x"], "stop_ids": [3], "keep_stop": True,
    "ignore_eos": True, "n": 2, "logprobs": 1, "prompt_logprobs": 0, "priority": "high", "deadline_s": 1.5,
    "sampling": {"temperature": 0.8, "seed": 2**64 - 1, "logit_bias": {"3": -1.5}, "allowed_ids": [1]},
    "structured": {"regex": "a+"}, "overflow": "slide", "response_topic": "a/b", "correlation_data": "c",
}  # fmt: skip


def validator(name: str) -> Draft202012Validator:
    schema = message_schemas()[name]
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_committed_files_are_what_is_made(tmp_path: Path):
    main(["--output", str(tmp_path)])
    made = {path.relative_to(tmp_path): path.read_text("utf-8") for path in tmp_path.rglob("*.*")}
    assert sorted(map(str, made)) == sorted(files())
    for path, text in made.items():
        assert (DOCS / path).read_text("utf-8") == text, "run: python -m drumline.scheduler.mqtt.contract --output docs"
    assert {path.stem for path in (DOCS / "schemas").iterdir()} == set(message_schemas())


def test_the_yaml_says_what_was_meant():
    assert yaml.safe_load(files()["asyncapi.yaml"]) == asyncapi()
    odd = {"null": [], "a b": {}, "x": [[1, [2]], {"y": None, "z": [True, "no: #"]}], "$ref": "#/a", "é": 1.5}
    assert yaml.safe_load(to_yaml(odd)) == odd


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        found = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return found + [reference for child in node.values() for reference in references(child)]
    return [reference for child in node for reference in references(child)] if isinstance(node, list) else []


def resolve(document: Any, pointer: str) -> Any:
    for part in pointer.removeprefix("#/").split("/"):
        document = document[part]
    return document


def test_every_reference_leads_somewhere():
    document = yaml.safe_load((DOCS / "asyncapi.yaml").read_text("utf-8"))
    found = references(document)
    assert len(found) > 40
    for reference in found:
        if reference.startswith("#/"):
            resolve(document, reference)
        else:
            assert (DOCS / reference).is_file()
    for schema in message_schemas().values():
        for reference in references(schema):
            resolve(schema, reference)


def test_every_topic_has_a_channel_and_every_channel_an_operation():
    channels, topics = asyncapi()["channels"], Topics()
    names = {"client": "c", "job_id": "j", "worker": "w"}
    built = {channel["address"].format(**names) for channel in channels.values() if channel["address"]}
    assert built == {
        topics.submit("c"), *(topics.job("c", kind, "j") for kind in JOB_KINDS), topics.worker_status("w"), topics.dead
    }  # fmt: skip
    for name, channel in channels.items():
        used = {parameter for parameter in names if channel["address"] and f"{{{parameter}}}" in channel["address"]}
        assert set(channel.get("parameters", ())) == used, name
    used = {operation["channel"]["$ref"].rsplit("/", 1)[1] for operation in asyncapi()["operations"].values()}
    assert used == set(channels) - {"replies"}
    assert set(addresses(Topics("other/prefix"))) == used


def test_what_the_codec_makes_fits():
    chunk = Chunk(0, 0, 0, "t", (1,), (TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))),))
    error = codec.error_message(QueueFull("requests", 3, 3))
    letter = codec.DeadMessage(
        topic="t", client=None, job_id=None, code="invalid", field="id", reason="r", payload_bytes=0
    )
    status = codec.WorkerStatus.model_validate(STATUS)
    for name, payload in {
        "state": codec.StateMessage(job_id="j", state="queued", position=3),
        "state ": codec.StateMessage(job_id="j", state="unknown", error=error),
        "worker_status": status,
        "dead": letter,
        "result": codec.rejected_message("j", InvalidRequest("prompt", "is missing")),
        "result ": codec.failed_message("j", "changed", "r"),
        "part": PartMessage(job_id="j", offset=0, total=9, body="{"),
    }.items():
        validator(name.strip()).validate(json.loads(payload.encode()))
    for said in (chunk, Chunk(0, 0, 0, "t", (1,))):
        validator("chunk").validate(json.loads(codec.encode_chunk(said)))
        validator("chunk").validate(json.loads(codec.with_correlation(codec.encode_chunk(said), "c")))


async def test_real_results_fit():
    [result] = await generate(MODEL, Request(prompt="abc", max_tokens=3, n=2, logprobs=2, prompt_logprobs=1), rows=2)
    payload = json.loads(codec.result_message("j", result).encode())
    validator("result").validate(payload)
    assert payload["prompt_logprobs"][0] is None


STATUS = {
    "worker": "w", "status": "online", "queue_depth": 0, "rows_live": 1, "rows": 2, "model": "m", "version": "v",
    "started_at": 1.5, "tokens_per_s": 12.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("worker_status", {"status": "away"}),
        ("worker_status", {"rows": None}),
        ("worker_status", {"started_at": "now"}),
        ("submit", {"id": "a/b"}),
        ("submit", {"id": ...}),
        ("submit", {"prompt": ...}),
        ("submit", {"prompt_ids": [1]}),
        ("submit", {"prompt": 1}),
        ("submit", {"tenant": "t"}),
        ("submit", {"processors": ["x"]}),
        ("submit", {"max_tokens": -1}),
        ("submit", {"sampling": {"temperatur": 1}}),
        ("submit", {"structured": {"regex": "a", "lark": "b"}}),
        ("submit", {"priority": "urgent"}),
        ("submit", {"surprise": 1}),
        ("submit", {"stop": ["x"] * 17}),
    ],
)
def test_what_the_worker_refuses_does_not_fit(name: str, change: dict[str, Any]):
    """The schema and the codec agree; `...` takes the field out."""
    good = STATUS if name == "worker_status" else ALL_FIELDS
    wrong = {key: value for key, value in (good | change).items() if value is not ...}
    assert validator(name).is_valid(good)
    assert not validator(name).is_valid(wrong)
    if name == "submit":
        codec.parse_submit(json.dumps(good).encode())
        with pytest.raises(InvalidRequest):
            codec.parse_submit(json.dumps(wrong).encode())


def test_a_prompt_in_each_of_its_forms():
    for given in ({"prompt": ""}, {"prompt_ids": []}, {"messages": [{"role": "user", "content": "x"}], "prompt": None}):
        assert validator("submit").is_valid({"id": "j"} | given)


def test_every_field_of_a_submit_is_in_the_schema():
    assert set(message_schemas()["submit"]["properties"]) == {*ALL_FIELDS, "prompt_ids", "messages"}
