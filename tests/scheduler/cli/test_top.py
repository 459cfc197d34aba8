"""`drumline top`: what it shows of a worker, at any size, and how it leaves the terminal."""

import asyncio
import fcntl
import io
import json
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry, Counter
from rich.console import Console

from drumline import InvalidRequest, Scheduler
from drumline.metrics.exporter import Exporter
from drumline.metrics.pages import Page, Pages, as_json
from drumline.scheduler.cli.top_screen import Counters, Marks, duration, screen, sparkline
from drumline.scheduler.live_page import live_json
from drumline.scheduler.live_view import LiveAnswer, LiveRow, LiveView, Percentiles
from tests.drive import asking, held, metric
from tests.processes import CLI, run_python
from tests.tiny import tiny_model

COUNTERS = Counters({"completed": 3, "failed": 0, "rejected": 2}, {"quota": 2}, 70, 40, 16, 1)
UTF8, ASCII = Marks.for_encoding("utf-8"), Marks.for_encoding("US-ASCII")


@asynccontextmanager
async def worker(**settings: object) -> AsyncIterator[tuple[Scheduler, str]]:
    """A scheduler and the URL of its pages."""
    async with Scheduler(tiny_model(window=64), **settings) as scheduler:
        pages = Pages(
            scheduler.registry, health=scheduler.health, ready=list, pages={"/live.json": live_json(lambda: scheduler)}
        )
        with Exporter(pages, port=0) as exporter:
            yield scheduler, exporter.url


def row(number: int, **fields: object) -> LiveRow:
    usual = {"job": f"job-{number}", "choice": 0, "tenant": "press", "priority": "high", "phase": "decode"}
    tokens = {"prompt_tokens": 20, "cached_tokens": 30, "generated_tokens": 11, "budget_tokens": 40}
    return LiveRow(row=number, **{**usual, **tokens, "tokens_per_s": 12.34, "age_s": 3.2, **fields})


def answer(**fields: object) -> LiveAnswer:
    who = {"job": "answered", "tenant": "press", "priority": "low", "status": "completed", "stop_reason": "budget"}
    tokens = {"prompt_tokens": 20, "generated_tokens": 11, "text": None}
    times = {"queued_s": 0.1, "first_token_s": 0.2, "inter_token_s": 0.01, "total_s": 1.4, "ended_ago_s": 3.0}
    return LiveAnswer(**{**who, **tokens, **times, **fields})


async def view(*rows: LiveRow, **fields: object) -> LiveView:
    async with Scheduler(tiny_model(), rows=8) as scheduler:
        return scheduler.live().model_copy(update={"rows": rows, **fields})


def drawn(
    view: LiveView, width: int = 120, height: int | None = None, marks: Marks = UTF8, counters: Counters = COUNTERS
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(screen(view, counters, width, height, marks))
    return console.file.getvalue().splitlines()


async def test_a_lane_tells_the_whole_row():
    lines = drawn(await view(row(2, phase="prefill", cached_tokens=10, generated_tokens=0), row(5)))
    (lane,) = [line for line in lines if line.startswith("  5 ")]
    assert lane.split() == ["5", "job-5", "press", "high", "decode", "▒▒▒▒▒███········", "20+11/40", "12.3", "3.2", "s"]
    (filling,) = [line for line in lines if line.startswith("  2 ")]
    assert filling.split()[4:6] == ["prefill", "▒▒▒·············"]
    assert sum(line.split()[1:2] == ["free"] for line in lines) == 6
    assert any("completed 3  failed 0  rejected 2  (quota 2)" in line for line in lines)
    assert any("70 generated, of prompts 40 computed, 16 reused; 1 preemptions" in line for line in lines)


@pytest.mark.parametrize("width", [120, 80, 60, 40])
@pytest.mark.parametrize("marks", [UTF8, ASCII])
async def test_no_line_is_longer_than_the_terminal(width: int, marks: Marks):
    seen = await view(*(row(number, job="x" * 200, tenant="y" * 200) for number in range(8)), troubles=("z" * 30,))
    lines = drawn(seen, width, None, marks)
    assert max(map(len, lines)) <= width
    assert sum("xxx" in line for line in lines) == 8
    if marks is ASCII:
        assert all(line.isascii() for line in lines)


@pytest.mark.parametrize("width", [120, 80, 60, 40])
async def test_what_matters_stays_at_any_width(width: int):
    """The newest seconds, the rows in use, each percentile on its line, and whose answer it was."""
    seconds = (0,) * 55 + (1, 2, 4, 6, 8)
    times = dict.fromkeys(("first_token_s", "inter_token_s", "total_s"), Percentiles(p50=0.999, p90=59.9, p99=86_340.0))
    seen = await view(row(0), generated_by_second=seconds, answers=(answer(),), **times)
    lines = drawn(seen, width)
    (flow,) = [line for line in lines if "▂▄▆█" in line]
    assert flow.split()[0].removesuffix("/s") == "4"  # of five seconds
    assert "rows 1/8" in flow
    assert sum("p50 999 ms" in line and "p90 59.9 s" in line and "p99 23h59m" in line for line in lines) == 3
    (told,) = [line for line in lines if line.startswith("answered ")]
    assert told.split()[1] == "completed"
    assert told.endswith("1.4 s")


async def test_other_alphabets_in_ascii():
    seen = await view(row(0, job="küche-" + "x" * 80, tenant="日本"), row(1))
    first, second = [line for line in drawn(seen, 100, None, ASCII) if "decode" in line]
    assert first.isascii()
    assert "k?che-xx" in first
    assert "x~ ????" in first
    assert first.index("decode") == second.index("decode")


@pytest.mark.parametrize("height", [14, 16, 24, 50])
async def test_what_does_not_fit_is_counted(height: int):
    rows = [row(number) for number in range(3, 40)]
    lines = drawn(await view(*rows, capacity=64), 100, height)
    assert len(lines) <= height
    busy = sum(" job-" in line for line in lines)
    free = sum(" free " in line for line in lines)
    (more,) = [line.strip() for line in lines if "rows more" in line]
    assert more == f"and {64 - busy - free} rows more, {37 - busy} of them busy"
    assert busy >= 1
    assert not free or busy == 37


async def test_nobody_writes_to_the_terminal_through_a_name():
    hostile = "\x1b[2J\x1b]0;owned\x07[bold]me[/bold]\nnext\u202e"
    theirs = dict.fromkeys(("name", "model", "precision", "backend"), hostile)
    answers = (answer(job=hostile, tenant=hostile, stop_reason=hostile, text=hostile),)
    seen = await view(row(0, job=hostile, tenant=hostile), troubles=(hostile,), answers=answers, **theirs)
    text = "\n".join(drawn(seen, 200, counters=Counters({hostile: 3}, {hostile: 2}, 70, 40, 16, 1)))
    assert not set("\x1b\x07\u202e") & set(text)
    assert "[bold]me[/bold]·next" in text
    assert len(drawn(seen, 200)) == len(drawn(await view(row(0), troubles=("a",), answers=(answer(),)), 200))


def test_a_sparkline_is_as_high_as_its_highest():
    assert sparkline((0, 1, 4, 8), UTF8) == " ▁▄█"
    assert sparkline((0, 0), UTF8) == "  "
    assert sparkline((), UTF8) == ""


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0124, "12 ms"), (0.9999, "1.0 s"), (59.94, "59.9 s"), (59.96, "1m00s"), (125, "2m05s"), (26_000, "7h13m"),
     (300_000, "3d11h")],
)  # fmt: skip
def test_durations_are_short(seconds: float, shown: str):
    assert duration(seconds) == shown


@pytest.mark.usefixtures("one_thread")
async def test_once_shows_the_true_counts(cli: Callable):
    async with worker(rows=2, queue_requests=3) as (scheduler, url):
        for tokens in (3, 4):
            await (await scheduler.submit(asking(tokens=tokens))).result()
        gate, running = await held(scheduler, id="running", tenant="boiler")
        waiting = [scheduler.submit_nowait(asking(id=f"waits-{n}", priority="low")) for n in range(2)]
        waiting[1].cancel()
        with pytest.raises(InvalidRequest):
            scheduler.submit_nowait(asking(id="running"))
        text = await asyncio.to_thread(cli, "top", url, "--once")
        told = json.loads((await asyncio.to_thread(cli, "top", url, "--once", "--json")).out)
        statistics = scheduler.statistics()
        counted = {name: metric(scheduler, "requests_total", outcome=name) for name in told["counters"]["outcomes"]}
        tokens = [metric(scheduler, "prompt_tokens_total", source=source) for source in ("computed", "reused")]
        tokens += [metric(scheduler, "generated_tokens_total"), metric(scheduler, "preemptions_total")]
        gate.open()
        for job in (running, *waiting):
            await job.result()
    assert text.code == 0, text.err
    assert told["counters"]["outcomes"] == counted == {
        **{"completed": 2, "cancelled": 0, "expired": 0, "failed": 0}, "rejected": 1
    }  # fmt: skip
    assert told["counters"]["rejected"] == {"duplicate_id": 1}
    names = ("computed_tokens", "reused_tokens", "generated_tokens", "preemptions")
    assert [told["counters"][name] for name in names] == tokens
    assert tokens[2:] == [7, 0]
    assert [row["job"] for row in told["rows"]] == ["running"]
    assert (len(told["rows"]), told["queued"]) == (statistics.live, {"low": 2, "normal": 0, "high": 0})
    lines = text.out.splitlines()
    assert sum(" running " in line and " boiler " in line for line in lines) == 1
    assert any(line.startswith("queue    high 0  normal 0  low 2") for line in lines)
    assert any("completed 2  cancelled 0  expired 0  failed 0  rejected 1  (duplicate_id 1)" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("here", "--once"), "URL: must be like http://127.0.0.1:9464, not 'here'"),
        (("http://127.0.0.1:9", "--once"), "http://127.0.0.1:9/live.json: [Errno 111] Connection refused"),
        (("--interval", "0"), "--interval: must be from 0.1 to 3600 seconds, not 0"),
        (("--interval", "nan"), "--interval: must be from 0.1 to 3600 seconds, not nan"),
        (("--json",), "--json: needs --once"),
    ],
)
def test_what_cannot_be_looked_at(cli: Callable, options: tuple[str, ...], message: str):
    run = cli("top", *options)
    assert (run.code, run.out, run.err) == (2, "", f"drumline: {message}\n")


def _take_terminal() -> None:
    """In the child: stdin becomes the terminal that Ctrl-C and resizes come from."""
    os.setsid()
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first terminal that a session opens is its own


class Terminal:
    """A command that runs in a terminal of its own."""

    def __init__(self, *command: object, lines: int = 30, columns: int = 100) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(lines, columns)
        self.before = termios.tcgetattr(self.theirs)
        ends = {"stdin": self.theirs, "stdout": self.theirs, "stderr": self.theirs}
        environment = {**os.environ, "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)], **ends, env=environment, preexec_fn=_take_terminal
        )
        self.shown = ""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_for(self, text: str) -> None:
        """Until it has written `text` since it was last asked."""
        deadline = time.monotonic() + 30
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown[-3000:]
            if select.select([self.ours], [], [], 0.2)[0]:
                self.shown += os.read(self.ours, 65536).decode(errors="replace")
        self.shown = ""

    def end(self) -> int:
        """Its exit code; what it writes meanwhile is read, so that it can end."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                pytest.fail(f"it did not end: {self.shown[-3000:]}")
            if select.select([self.ours], [], [], 0.05)[0]:
                self.shown += os.read(self.ours, 65536).decode(errors="replace")
        return self.process.returncode


async def test_a_terminal_is_as_it_was():
    async with worker(rows=4, name="press") as (scheduler, url):
        await (await scheduler.submit(asking(id="answered"))).result()
        terminals = [Terminal(*CLI, "top", url, "--interval", 0.1) for _ in range(3)]
        first, second, third = terminals
        await asyncio.gather(*(asyncio.to_thread(terminal.wait_for, "answered") for terminal in terminals))
        first.resize(20, 60)
        await asyncio.to_thread(first.wait_for, "answered")
        os.write(first.ours, b"q")
        os.write(second.ours, b"\x1a\x03")  # Ctrl-Z, which does nothing, and Ctrl-C
        third.process.terminate()
        codes = await asyncio.gather(*(asyncio.to_thread(terminal.end) for terminal in terminals))
    assert codes == [0, 0, 0]
    for terminal in terminals:
        assert termios.tcgetattr(terminal.theirs) == terminal.before
        assert "\x1b[?1049l" in terminal.shown  # the screen that was there before is back
        assert "\x1b[?25h" in terminal.shown  # and so is the cursor
        assert "Traceback" not in terminal.shown


async def test_a_worker_that_goes_away_is_waited_for():
    async with worker(rows=1, name="press") as (_, url):
        terminal = Terminal(*CLI, "top", url, "--interval", 0.1)
        await asyncio.to_thread(terminal.wait_for, "press")
    await asyncio.to_thread(terminal.wait_for, "no answer for ")
    os.write(terminal.ours, b"q")
    assert await asyncio.to_thread(terminal.end) == 0


def test_another_server_is_no_worker(cli: Callable):
    other = Pages(CollectorRegistry(), health=list, ready=list, pages={"/live.json": Page(lambda _: as_json({"a": 1}))})
    with Exporter(other, port=0) as exporter:
        run = cli("top", exporter.url, "--once")
    assert (run.code, run.err) == (2, f"drumline: {exporter.url}: what answers there is no drumline worker\n")


async def test_a_number_that_no_worker_counts_to_is_no_worker(cli: Callable):
    registry = CollectorRegistry()
    Counter("drumline_steps_total", "Too many.", ["scheduler"], registry=registry).labels("main").inc(float("inf"))
    async with Scheduler(tiny_model()) as scheduler:
        pages = Pages(registry, health=list, ready=list, pages={"/live.json": live_json(lambda: scheduler)})
        with Exporter(pages, port=0) as exporter:
            run = await asyncio.to_thread(cli, "top", exporter.url, "--once")
    assert (run.code, run.err) == (2, f"drumline: {exporter.url}: what answers there is no drumline worker\n")


async def test_a_worker_that_starts_says_how_far_it_is(cli: Callable):
    starts = {"/live.json": live_json(lambda: None, starting=lambda: ["the model is being loaded"])}
    with Exporter(Pages(CollectorRegistry(), health=list, ready=list, pages=starts), port=0) as exporter:
        run = await asyncio.to_thread(cli, "top", exporter.url, "--once")
    assert (run.code, run.out, run.err) == (2, "", f"drumline: {exporter.url}/live.json: the model is being loaded\n")


def test_another_port_of_a_worker_says_which_one_to_give(cli: Callable):
    with Exporter(Pages(CollectorRegistry(), health=list, ready=list), port=0) as exporter:
        run = cli("trace", exporter.url)
    assert (run.code, run.out) == (2, "")
    assert run.err.endswith("there is no such page; give the address that `drumline serve` has for --metrics\n")


def test_what_speaks_no_http_is_no_worker(cli: Callable):
    def greet(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            client.recv(1000)
            client.sendall(b"SSH-2.0-\x1b[2J\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        greeting = threading.Thread(target=greet, args=(server,))
        greeting.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        run = cli("top", url, "--once")
        greeting.join()
    assert (run.code, run.out, run.err) == (2, "", f"drumline: {url}/live.json: SSH-2.0-·[2J\n")


async def test_a_worker_that_hangs_says_so(cli: Callable):
    async with worker() as (scheduler, _):
        slow = {"/live.json": live_json(lambda: scheduler, patience_s=0.1)}
        pages = Pages(scheduler.registry, health=scheduler.health, ready=list, pages=slow)
        with Exporter(pages, port=0) as exporter:
            asked = asyncio.create_task(asyncio.to_thread(cli, "top", exporter.url, "--once"))
            while not asked.done():
                await asyncio.sleep(0)
                threading.Event().wait(0.5)  # the event loop is held up
            run = await asked
    reason = f"{exporter.url}/live.json: the event loop did not answer within 0.1 s"
    assert (run.code, run.out, run.err) == (2, "", f"drumline: {reason}\n")


async def test_a_terminal_without_unicode():
    """Where the output is said to be ASCII, and where the locale alone says so."""
    async with worker(rows=1) as (scheduler, url):
        await (await scheduler.submit(asking(id="x" * 64))).result()
        command = (*CLI, "top", url, "--once")
        runs = await asyncio.gather(
            asyncio.to_thread(run_python, *command, PYTHONIOENCODING="ascii"),
            asyncio.to_thread(run_python, *command, LC_ALL="C"),
        )
    for run in runs:
        assert (run.returncode, run.stderr) == (0, "")
        assert run.stdout.isascii()
        assert "xxx~" in run.stdout
