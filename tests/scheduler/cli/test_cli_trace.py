"""Traces of a running worker: over HTTP, by `drumline trace`, by signal, from the start."""

import asyncio
import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client import CollectorRegistry

from drumline import Scheduler
from drumline.metrics.exporter import Exporter
from drumline.metrics.pages import Pages
from drumline.scheduler.cli.tracing import TraceSettings, Tracing, trace_page
from tests.drive import asking, until
from tests.processes import CLI, finish, read_until, run_python, running_python
from tests.scheduler.trace_format import TraceChecked
from tests.tiny import tiny_model


def post(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """Of a scheduler that always has something to do, in this process."""
    async with Scheduler(tiny_model(window=64), rows=2) as scheduler:

        async def work() -> None:
            while True:
                await (await scheduler.submit(asking(tokens=20), label="boiler/job-17")).result()

        pages = Pages(scheduler.registry, health=scheduler.health, ready=list)
        tracing = Tracing(scheduler.trace, "main", TraceSettings(tmp_path))
        pages.add("/trace", trace_page(lambda: tracing, list))
        working = asyncio.create_task(work())
        with Exporter(pages, port=0) as exporter:
            yield exporter.url
        working.cancel()


async def test_the_next_seconds(url: str, tmp_path: Path):
    status, body = await asyncio.to_thread(post, f"{url}/trace?seconds=0.2")
    assert status == 200
    path = tmp_path / "got.json"
    path.write_bytes(body)
    trace = TraceChecked(path)
    assert set(trace.terminal()) == {"boiler/job-17"}
    steps = trace.slices("step phases")
    assert 0.05e6 < steps[-1]["ts"] - steps[0]["ts"] < 5e6
    assert list(tmp_path.iterdir()) == [path]  # what was recorded on the way is gone


async def test_one_at_a_time(url: str):
    asked = await asyncio.gather(*(asyncio.to_thread(post, f"{url}/trace?seconds=0.5") for _ in range(2)))
    assert sorted(status for status, _ in asked) == [200, 409]
    (refused,) = [body for status, body in asked if status == 409]
    assert json.loads(refused)["error"].startswith("trace: is being recorded already, into ")


@pytest.mark.parametrize("given", ["", "0", "-1", "61", "nan", "inf", "soon", "1e400", "1_0", " 1"])
async def test_other_seconds_are_refused(url: str, given: str):
    status, body = await asyncio.to_thread(post, f"{url}/trace?seconds={quote(given)}")
    assert status == 400
    assert json.loads(body) == {"error": f"seconds: must be a number above 0, up to 60, not {given!r}"}


async def test_other_queries_are_refused(url: str):
    status, body = await asyncio.to_thread(post, f"{url}/trace?second=1")
    assert (status, json.loads(body)["error"]) == (400, "second: is unknown; there is seconds alone")
    status, body = await asyncio.to_thread(post, f"{url}/trace?seconds=1&seconds=2")
    assert (status, json.loads(body)["error"]) == (400, "seconds: must be a number above 0, up to 60, not '1, 2'")


async def test_while_the_worker_starts_there_is_nothing_to_record(cli: Callable):
    pages = {"/trace": trace_page(lambda: None, lambda: ["the model is being loaded"])}
    with Exporter(Pages(CollectorRegistry(), health=list, ready=list, pages=pages), port=0) as exporter:
        run = await asyncio.to_thread(cli, "trace", exporter.url, "--seconds", 1)
    assert (run.code, run.err) == (2, f"drumline: {exporter.url}/trace?seconds=1: the model is being loaded\n")


async def test_a_signal_leaves_a_recording_to_who_waits_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async with Scheduler(tiny_model(window=64), rows=1) as scheduler:
        tracing = Tracing(scheduler.trace, "main", TraceSettings(tmp_path))
        recording = asyncio.create_task(tracing.record(0.1))
        await until(lambda: scheduler.trace.recording)
        tracing.switch()
        _, whole = await recording
        assert (whole, scheduler.trace.recording) == (True, False)
    assert "no trace" in caplog.text


async def test_the_end_of_the_worker_ends_a_recording(tmp_path: Path):
    async with Scheduler(tiny_model(window=64), rows=1) as scheduler:
        tracing = Tracing(scheduler.trace, "main", TraceSettings(tmp_path))
        pages = {"/trace": trace_page(lambda: tracing, list)}
        with Exporter(Pages(scheduler.registry, health=list, ready=list, pages=pages), port=0) as exporter:
            asked = asyncio.create_task(asyncio.to_thread(post, f"{exporter.url}/trace?seconds=50"))
            await until(lambda: scheduler.trace.recording)
            for task in asyncio.all_tasks():
                if task.get_coro().__qualname__ == "Tracing.record":
                    task.cancel()
            assert (await asked)[0] == 503


async def test_reading_is_not_recording(url: str):
    with pytest.raises(urllib.error.HTTPError) as refused:
        await asyncio.to_thread(urllib.request.urlopen, f"{url}/trace")
    with refused.value as error:
        assert (error.code, error.headers["Allow"]) == (405, "POST")


async def test_the_command(cli: Callable, url: str, tmp_path: Path):
    output = tmp_path / "here.json"
    run = await asyncio.to_thread(cli, "trace", url, "--seconds", 0.2, "--output", output)
    assert run.code == 0, run.err
    assert run.out == f"{output}: {output.stat().st_size / 1024:.0f} KiB; open it at ui.perfetto.dev\n"
    assert TraceChecked(output).named("X", "decode")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://here", "URL: must be like http://127.0.0.1:9464, not 'ftp://here'"),
        ("http://here:99999", "URL: must be like http://127.0.0.1:9464, not 'http://here:99999'"),
        ("127.0.0.1:9464", "URL: must be like http://127.0.0.1:9464, not '127.0.0.1:9464'"),
        ("http://127.0.0.1:9", "http://127.0.0.1:9/trace?seconds=1: [Errno 111] Connection refused"),
    ],
)
def test_no_worker_no_file(cli: Callable, url: str, message: str, tmp_path: Path):
    output = tmp_path / "none.json"
    run = cli("trace", url, "--seconds", 1, "--output", output)
    assert (run.code, run.err) == (2, f"drumline: {message}\n")
    assert not output.exists()


def test_from_the_start_and_by_signal(checkpoint: Path, tmp_path: Path):
    options = ("--model", checkpoint, "--embedded-broker", "--metrics", "127.0.0.1:0", "--rows", "1")
    with running_python(*CLI, "serve", *options, "--trace", "--trace-folder", tmp_path) as process:
        broker = read_until(process, r"broker +(mqtt://\S+)")[1]
        read_until(process, "metrics")
        finish_job(broker, "first")
        process.send_signal(signal.SIGUSR2)  # ends the one that runs since the start
        first = brought_about(lambda: [path for path in traces(tmp_path) if path.read_text().endswith("\n]\n")])[0]
        process.send_signal(signal.SIGUSR2)
        brought_about(lambda: len(traces(tmp_path)) == 2)
        finish_job(broker, "second")
        process.terminate()
        assert finish(process)[0] == 0
    assert [set(TraceChecked(path).terminal()) for path in traces(tmp_path)] == [{"desk/first"}, {"desk/second"}]
    assert re.fullmatch(r"drumline-main-\d{8}T\d{6}\.\d{6}\.trace\.json", first.name)


def test_a_folder_that_is_none(cli: Callable, checkpoint: Path, tmp_path: Path):
    run = cli("serve", "--model", checkpoint, "--embedded-broker", "--trace-folder", tmp_path / "none")
    assert (run.code, run.err) == (2, f"drumline: --trace-folder: must be a folder that exists, not {tmp_path}/none\n")


def finish_job(broker: str, job_id: str) -> None:
    options = ("--broker", broker, "--client", "desk", "--id", job_id, "--raw", "--max-tokens", "3")
    assert run_python(*CLI, "submit", "hello", *options).returncode == 0


def traces(folder: Path) -> list[Path]:
    """The recordings of a folder, oldest first."""
    return sorted(folder.glob("*.trace.json"))


def brought_about(found: Callable[[], Any]) -> Any:
    """What another process brings about, once it has."""
    for _ in range(2_000):
        if value := found():
            return value
        time.sleep(0.005)
    raise TimeoutError("it never came")
