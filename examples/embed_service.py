"""A host service that embeds the scheduler: its own HTTP endpoint, and one metrics page for both of them.

    python examples/embed_service.py [--model PATH] [--port N] [--metrics HOST:PORT] [--rows N] [--once]
    curl -N -d '{"prompt": "The capital of France is", "max_tokens": 16}' http://127.0.0.1:8080/generate
    curl -H 'Accept: application/json' -d '{"prompt": "Hello", "max_tokens": 16}' http://127.0.0.1:8080/generate

The body holds the fields of `Request`. `lifespan` is of the kind that FastAPI takes; the endpoint here is bare asyncio,
so that nothing beyond drumline's own dependencies is needed. `--once` starts, answers one request of its own and stops.
"""

import argparse
import asyncio
import json
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from drumline import Chunk, DrumlineError, InvalidRequest, QueueFull, Request, Scheduler, load_model
from drumline.metrics.exporter import Exporter, parse_address
from drumline.metrics.pages import Pages
from drumline.model.registry import packaged_model

HOST = "127.0.0.1"
MAX_BODY_BYTES = 256 * 2**10
READ_TIMEOUT_S = 10.0
DRAIN_S = 10.0
FAREWELL_S = 2.0
"""How long the last answers may take to be written once the scheduler has ended."""


@dataclass(frozen=True)
class Service:
    """What the host holds while it runs."""

    scheduler: Scheduler
    exporter: Exporter
    answers: Counter


@asynccontextmanager
async def lifespan(
    model_path: Path, precision: str, metrics: tuple[str, int], **settings: Any
) -> AsyncIterator[Service]:
    """Load, open, serve; at the end take no more requests, give what runs `DRAIN_S` seconds, and close."""
    registry = CollectorRegistry()
    answers = Counter("host_answers", "HTTP answers of this service.", ["status"], registry=registry)
    model = await asyncio.to_thread(load_model, model_path, precision=precision)
    async with Scheduler(model, registry=registry, name="embedded", **settings) as scheduler:
        pages = Pages(
            registry,
            health=scheduler.health,
            ready=lambda: [] if scheduler.ready else ["engine"],
        )
        scheduler.instruments.watch(ready=lambda: scheduler.ready, healthy=lambda: not scheduler.health())
        with Exporter(pages, *metrics) as exporter:
            yield Service(scheduler, exporter, answers)
            await scheduler.drain(timeout=DRAIN_S)


class HttpError(Exception):
    """A request that never reaches the scheduler."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


async def handle(service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, one request."""
    try:
        status = await answer(service.scheduler, reader, writer)
        service.answers.labels(status.value).inc()
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # the client went away; if its text was being streamed, leaving that loop has cancelled the job
    finally:
        writer.close()


async def answer(scheduler: Scheduler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HTTPStatus:
    """Read a request, run it, write the answer; returns the status that was sent."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            headers, body = await read_post(reader)
        job = scheduler.submit_nowait(Request.from_json(body))
        if headers.get("accept") == "application/json":
            result = await job.result()
            result.raise_for_status()
            fields = {"text": result.text, "stop_reason": result.stop_reason, "usage": asdict(result.usage)}
            return write_json(writer, HTTPStatus.OK, fields)
    except (DrumlineError, HttpError, TimeoutError) as error:
        return write_json(writer, status_of(error), {"error": str(error) or "the request did not arrive in time"})

    write_head(writer, HTTPStatus.OK, "text/plain; charset=utf-8", "Transfer-Encoding: chunked")
    async with job.stream() as chunks:
        await write_chunks(writer, chunks)
    if (await job.result()).status == "completed":
        writer.write(b"0\r\n\r\n")  # without this the client knows that the text is not whole
    return HTTPStatus.OK


def status_of(error: Exception) -> HTTPStatus:
    """Whose fault it is, and whether it is worth trying again."""
    match error:
        case HttpError():
            return error.status
        case TimeoutError():
            return HTTPStatus.REQUEST_TIMEOUT
        case InvalidRequest():
            return HTTPStatus.BAD_REQUEST
        case QueueFull():
            return HTTPStatus.TOO_MANY_REQUESTS
        case _:
            return HTTPStatus.SERVICE_UNAVAILABLE


async def read_post(reader: asyncio.StreamReader) -> tuple[dict[str, str], bytes]:
    """Headers and body of `POST /generate`; raises `HttpError` for any other request, and for one that is too large."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE) from None
    request_line, *lines = head.strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    method, _, rest = request_line.partition(" ")
    if rest.partition(" ")[0] != "/generate":
        raise HttpError(HTTPStatus.NOT_FOUND)
    if method != "POST":
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED)
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdigit() and len(length) < 20):
        raise HttpError(HTTPStatus.LENGTH_REQUIRED)
    if int(length) > MAX_BODY_BYTES:
        raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return headers, await reader.readexactly(int(length))


def write_head(writer: asyncio.StreamWriter, status: HTTPStatus, content_type: str, header: str) -> None:
    """Status line and headers."""
    lines = (f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {content_type}", header, "Connection: close")
    writer.write("\r\n".join((*lines, "", "")).encode())


def write_json(writer: asyncio.StreamWriter, status: HTTPStatus, fields: dict[str, Any]) -> HTTPStatus:
    """A whole answer."""
    body = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
    write_head(writer, status, "application/json", f"Content-Length: {len(body)}")
    writer.write(body)
    return status


async def write_chunks(writer: asyncio.StreamWriter, chunks: AsyncIterator[Chunk]) -> None:
    """The text as it comes, no faster than the client reads."""
    async for chunk in chunks:
        if data := chunk.text.encode():  # an empty chunk would end the answer
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C (or, with `--once`, until one request is answered), then drain."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    connections: set[asyncio.Task[None]] = set()
    loaded = (arguments.model, arguments.precision, arguments.metrics)
    async with lifespan(*loaded, rows=arguments.rows) as service:

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(handle(service, reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        server = await asyncio.start_server(connected, HOST, arguments.port)
        url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}/generate"
        print(f"POST {url}, metrics on {service.exporter.url}/metrics", flush=True)
        if arguments.once:
            print(await asyncio.to_thread(ask, url))
        else:
            await stop.wait()
        server.close()
    if connections:
        await asyncio.wait(connections, timeout=FAREWELL_S)
    print("drained and closed", flush=True)


def ask(url: str) -> str:
    """One request, as a client of the service would send it."""
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 16}).encode()
    request = urllib.request.Request(url, body, {"Accept": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode().strip())


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A host service that embeds the scheduler.")
    parser.add_argument("--model", type=Path, default=packaged_model(), help="a GGUF file or a checkpoint folder")
    parser.add_argument("--precision", default="auto", choices=("auto", "int8", "bfloat16", "float32"))
    parser.add_argument("--port", type=int, default=8080, help="of the HTTP endpoint; 0 picks a free one")
    parser.add_argument("--metrics", type=parse_address, default=(HOST, 9464), help="HOST:PORT of the metrics page")
    parser.add_argument("--rows", type=int, default=8, help="requests that are stepped together")
    parser.add_argument("--once", action="store_true", help="answer one request of its own, then stop")
    arguments = parser.parse_args(given)
    if arguments.model is None:
        sys.exit("the packaged model is not installed: name one with --model PATH")
    try:
        asyncio.run(serve(arguments))
    except (DrumlineError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
