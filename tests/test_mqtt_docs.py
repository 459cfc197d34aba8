"""What docs/mqtt.md and the README show is so: their commands run, with a real mosquitto and a real worker."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.contract import addresses
from drumline.scheduler.mqtt.topics import Topics
from tests.processes import ROOT, program
from tests.scheduler.mqtt.brokers import free_port, mosquitto
from tests.scheduler.mqtt.support import serving
from tests.tiny import tiny_model

DOCUMENT = (ROOT / "docs" / "mqtt.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```sh\n(.*?)^```", DOCUMENT + README, re.MULTILINE | re.DOTALL)


def status(out: str) -> None:
    said = json.loads(out)
    assert (said["worker"], said["status"], said["model"]) == ("main", "online", "tiny-llama")


def first_result(out: str) -> None:
    result = json.loads(out)
    assert (result["job_id"], result["status"], len(result["token_ids"])) == ("first", "completed", 8)


def stream(out: str) -> None:
    """States, chunks that make up the answer, and the result, all of one job."""
    lines = [line.split(" ", 1) for line in out.splitlines()]
    heard = [(topic.rsplit("/", 1)[1], json.loads(payload)) for topic, payload in lines]
    assert {topic.split("/")[5] for topic, _ in lines} == {"streamed"}
    states = [body["state"] for kind, body in heard if kind == "state"]
    assert (states[0], states[-1]) == ("accepted", "done")
    [result] = [body for kind, body in heard if kind == "result"]
    assert "".join(body["text"] for kind, body in heard if kind == "chunks") == result["text"]
    assert result["choices"][0]["seed"] == 7


def cancelled(out: str) -> None:
    result = json.loads(out)
    assert (result["job_id"], result["status"], result["stop_reason"]) == ("long", "cancelled", "cancelled")


def state_of_long(out: str) -> None:
    state = json.loads(out)
    assert (state["job_id"], state["state"]) == ("long", "done")


def properties(out: str) -> None:
    """Everything comes to one topic, with correlation data, and user properties that tell what it is."""
    lines = [
        re.fullmatch(r"A-17 kind:(\w+) job_id:five( status:completed)? (\{.*\})", line) for line in out.splitlines()
    ]
    kinds = [line[1] for line in lines]
    assert (kinds[0], set(kinds)) == ("state", {"state", "chunk", "result"})
    [result] = [line for line in lines if line[1] == "result"]
    assert result[2]
    assert len(json.loads(result[3])["token_ids"]) == 4


def accepted(out: str) -> None:
    assert json.loads(out)["state"] == "accepted"


def rejected(out: str) -> None:
    result = json.loads(out)
    assert (result["status"], result["error"]["code"], result["error"]["field"]) == (
        "rejected",
        "invalid",
        "max_tokens",
    )


def letter(out: str) -> None:
    said = json.loads(out)
    assert (said["code"], said["client"], said["payload_bytes"]) == ("unparsable", "desk", len("this is no JSON"))


def kitchen(out: str) -> None:
    """README's: a result that waited for its reader, and the state afterwards."""
    result, state = (json.loads(line) for line in out.splitlines())
    assert (result["job_id"], result["status"], len(result["token_ids"])) == ("job-2", "completed", 8)
    assert (state["job_id"], state["state"], state["tokens"]) == ("job-2", "done", 8)


CHECKS: list[Callable[[str], None]] = [
    status, first_result, stream, cancelled, state_of_long, properties, accepted, rejected, letter,
    kitchen,
]  # fmt: skip


async def test_the_commands_work_as_written(tmp_path: Path):
    for tool in ("mosquitto_pub", "mosquitto_sub", "mosquitto_rr"):
        program(tool)
    port = free_port()
    assert len(BLOCKS) == len(CHECKS)
    async with (
        mosquitto(tmp_path, f"listener {port} 127.0.0.1\nallow_anonymous true\n", port),
        serving(BrokerAddress("127.0.0.1", port), Topics(), model=tiny_model(window=64), worker="main"),
    ):
        for block, check in zip(BLOCKS, CHECKS, strict=True):
            check(await run(block.replace("-h localhost -p 1883", f"-h 127.0.0.1 -p {port}")))


async def run(commands: str) -> str:
    """What bash prints for them; fails where one fails or complains (that `-W` was over is no complaint)."""
    assert "1883" not in commands
    assert "localhost" not in commands
    pipe = asyncio.subprocess.PIPE
    bash = await asyncio.create_subprocess_exec("bash", "-euc", commands, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(30):
            out, errors = await bash.communicate()
    finally:
        if bash.returncode is None:
            bash.kill()
            await bash.wait()
    assert (bash.returncode, errors.decode().replace("Timed out\n", "")) == (0, ""), commands
    return out.decode()


def test_the_table_lists_all_topics():
    listed = re.findall(r"^\| `(drumline/v1/\S+)` \|", DOCUMENT, re.MULTILINE)
    braces = [address.replace("{job_id}", "<id>") for address in addresses(Topics()).values()]
    assert sorted(listed) == sorted(re.sub(r"\{(\w+)\}", r"<\1>", address) for address in braces)


@pytest.mark.parametrize("path", ["asyncapi.yaml", "schemas", "../examples/mosquitto"])
def test_what_it_points_to_is_there(path: str):
    assert path.removeprefix("../") in DOCUMENT
    assert (ROOT / "docs" / path).exists()
