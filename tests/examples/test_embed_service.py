import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from drumline import Request, load_model
from tests.drive import Gate, generate
from tests.processes import ROOT, finish, read_until, run_python, running_python

pytestmark = pytest.mark.usefixtures("one_thread")

PROGRAM = ROOT / "examples" / "embed_service.py"
FREE = ("127.0.0.1", 0)
END = b"0\r\n\r\n"
ACCEPT_JSON = "Accept: application/json\r\n"


@pytest.fixture
def example(import_example):
    return import_example("embed_service")


@pytest.fixture
async def serving(example, checkpoint: Path):
    """`async with serving(**settings) as (service, port)`, with the endpoint on a free port."""

    @asynccontextmanager
    async def run(**settings: object) -> AsyncIterator[tuple[object, int]]:
        async with example.lifespan(checkpoint, "auto", FREE, **settings) as service:
            server = await asyncio.start_server(partial(example.handle, service), "127.0.0.1", 0)
            async with server:
                yield service, server.sockets[0].getsockname()[1]

    return run


async def send(port: int, body: dict | bytes, headers: str = "", target: str = "POST /generate", length: object = None):
    """A connection on which the request has been sent."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = len(payload) if length is None else length
    writer.write(f"{target} HTTP/1.1\r\nHost: x\r\nContent-Length: {count}\r\n{headers}\r\n".encode() + payload)
    return reader, writer


async def post(port: int, body: dict | bytes, headers: str = ACCEPT_JSON, **options: object) -> tuple[int, dict]:
    """The status and the JSON of an answer."""
    reader, writer = await send(port, body, headers, **options)
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(answer)


def joined(chunked: bytes) -> str:
    """The text of a whole answer in HTTP's chunked coding."""
    data = b""
    while True:
        size, _, rest = chunked.partition(b"\r\n")
        length = int(size, 16)
        if not length:
            assert rest == b"\r\n"
            return data.decode()
        data, chunked = data + rest[:length], rest[length + 2 :]


def value(service, name: str, **labels: str) -> float | None:
    return service.scheduler.registry.get_sample_value(name, labels)


async def test_json_and_streamed_answers_are_the_schedulers(serving, checkpoint):
    body = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True}
    (expected,) = await generate(load_model(checkpoint), Request(**body))
    async with serving() as (_, port):
        status, answer = await post(port, body)
        assert (status, answer["text"], answer["stop_reason"]) == (200, expected.text, "budget")
        assert answer["usage"]["generated_tokens"] == 24
        reader, writer = await send(port, body)
        head, _, streamed = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8")
        assert joined(streamed) == expected.text


async def test_bad_requests_name_what_is_wrong_and_hurt_nobody(serving):
    good = {"prompt": "hello", "max_tokens": 8}
    refused = (
        (b"{", "request: Invalid JSON"),
        (b"\xff", "request: "),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens: "),
        ({"prompt": "a", "max_tokns": 1}, "max_tokns: "),
        ({"max_tokens": 1}, "prompt: give exactly one"),
        ({"prompt": "x" * 5000}, "prompt: has 5000 tokens, the window holds 2048"),
        ({"prompt": "a", "sampling": {"top_p": 2.0}}, "sampling.top_p: "),
    )
    async with serving() as (service, port):
        before = await post(port, good)
        for body, message in refused:
            status, answer = await post(port, body)
            assert status == 400
            assert answer["error"].startswith(message)
        assert await post(port, good) == before
        assert before[0] == 200
        assert value(service, "host_answers_total", status="200") == 2
        assert value(service, "host_answers_total", status="400") == len(refused)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"target": "GET /generate"}, 405),
        ({"target": "POST /elsewhere"}, 404),
        ({"length": "many"}, 411),
        ({"length": 10**9}, 413),
        ({"headers": f"X: {'y' * 70_000}\r\n"}, 431),
    ],
)
async def test_other_requests_are_answered_at_the_door(serving, options, status):
    async with serving() as (_, port):
        assert (await post(port, b"", **options))[0] == status


async def test_a_full_queue_is_429_and_a_drained_scheduler_503(serving):
    async with serving(rows=1, queue_requests=1) as (service, port):
        gate = Gate()
        running = await service.scheduler.submit(Request(prompt="a", max_tokens=1, processors=(gate,)))
        await gate.arrived()
        waiting = await service.scheduler.submit(Request(prompt="b", max_tokens=1))
        status, answer = await post(port, {"prompt": "c"})
        assert (status, answer["error"]) == (429, "queue is full: 1 requests queued, the bound is 1 requests")
        gate.open()
        assert [(await job.result()).stop_reason for job in (running, waiting)] == ["budget", "budget"]
        await service.scheduler.drain()
        status, answer = await post(port, {"prompt": "c"})
        assert (status, answer["error"]) == (503, "the scheduler is draining or closed")


async def test_a_client_that_hangs_up_frees_its_row(serving):
    async with serving(rows=1) as (service, port):
        reader, writer = await send(port, {"prompt": "a", "max_tokens": 2000, "ignore_eos": True})
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readline()
        writer.transport.abort()
        await service.scheduler.drain()
        statistics = service.scheduler.statistics()
        assert value(service, "drumline_requests_total", scheduler="embedded", outcome="cancelled") == 1
        assert statistics.generated_tokens < 2000


async def test_a_text_that_was_cut_short_has_no_end(serving):
    async with serving(rows=1) as (service, port):
        reader, writer = await send(port, {"prompt": "a", "max_tokens": 2000, "ignore_eos": True})
        await reader.readuntil(b"\r\n\r\n")
        await service.scheduler.drain(timeout=0)
        assert not (await reader.read()).endswith(END)
        writer.close()


async def test_one_page_has_the_hosts_metrics_and_the_schedulers(serving):
    async with serving(rows=3) as (service, port):
        await post(port, {"prompt": "hello", "max_tokens": 1})
        reader, writer = await asyncio.open_connection("127.0.0.1", service.exporter.port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        page = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
        writer.close()
        families = {family.name: family for family in text_string_to_metric_families(page)}
        assert [sample.value for sample in families["host_answers"].samples if sample.name.endswith("_total")] == [1]
        assert [sample.value for sample in families["drumline_rows_capacity"].samples] == [3]
        assert families["drumline_rows_capacity"].samples[0].labels["scheduler"] == "embedded"


def test_once_answers_a_request_of_its_own_and_stops(checkpoint: Path):
    run = run_python(PROGRAM, "--model", checkpoint, "--port", "0", "--metrics", "127.0.0.1:0", "--once")
    assert run.returncode == 0, run.stderr
    where, answer, end = run.stdout.splitlines()
    assert re.fullmatch(r"POST http://127.0.0.1:\d+/generate, metrics on http://127.0.0.1:\d+/metrics", where)
    assert json.loads(answer)["usage"]["prompt_tokens"] == len("The capital of France is")
    assert end == "drained and closed"


async def test_sigterm_lets_the_running_answer_end(checkpoint: Path):
    with running_python(PROGRAM, "--model", checkpoint, "--port", "0", "--metrics", "127.0.0.1:0") as process:
        port = int(read_until(process, r"POST http://127.0.0.1:(\d+)/")[1])
        reader, writer = await send(port, {"prompt": "a", "max_tokens": 200, "ignore_eos": True})
        head = await reader.readuntil(b"\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        assert head.startswith(b"HTTP/1.1 200")
        assert joined(await reader.read()) != ""
        writer.close()
        assert finish(process) == (0, "drained and closed\n", "")


def test_a_missing_model_is_one_line(example):
    with pytest.raises(SystemExit) as end:
        example.main(["--model", "/nowhere", "--port", "0", "--metrics", "127.0.0.1:0", "--once"])
    assert end.value.code == "/nowhere: no such file or folder"
