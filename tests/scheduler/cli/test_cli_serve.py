"""`serve` and `submit` as the processes they are, over the embedded broker."""

import asyncio
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from drumline import Request, load_model
from drumline.scheduler.mqtt.address import BrokerAddress, parse_broker_url
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import ConnectOptions, connect
from tests.drive import generate
from tests.log_lines import Logged, read_text
from tests.processes import CLI, finish, read_until, run_python, running_python

FOOTER = r"\[(\w+): (\d+) \+ (\d+) tokens, first after [\d.]+ s, seed \d+\]\n"
LONG = {"max_tokens": 250, "ignore_eos": True}


class Worker:
    """A running `drumline serve` and what it announced."""

    def __init__(self, process) -> None:
        self.process = process
        self.title = read_until(process, r"^drumline serves .*")[0]
        self.broker, port_v311 = read_until(process, r"broker +(mqtt://\S+) \(\w+, embedded\)(?:.* (\d+))?$").groups()
        self.broker_v311 = f"mqtt://127.0.0.1:{port_v311}" if port_v311 else self.broker
        read_until(process, r"jobs +drumline/v1/clients/<client>/submit")
        self.metrics = read_until(process, r"metrics +(http://\S+)/metrics")[1]

    @property
    def address(self) -> BrokerAddress:
        return parse_broker_url(self.broker)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"{self.metrics}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def read_until_event(process, name: str) -> Logged:
    return next(logged for logged in map(read_text, map(str.strip, process.stderr)) if logged.event == name)


def ending(process) -> tuple[int, str, list[str]]:
    """Exit code, what is left of stdout, and the log from the end of the service on."""
    code, out, err = finish(process)
    events = [read_text(line).event for line in err.splitlines()]
    return code, out, events[events.index("draining") :]


def serve(checkpoint: Path, *options: str) -> tuple[str | Path, ...]:
    return (*CLI, "serve", "--model", checkpoint, "--embedded-broker", "--metrics", "127.0.0.1:0", *options)


@pytest.fixture(scope="module")
def worker(checkpoint: Path) -> Iterator[Worker]:
    with running_python(
        *serve(checkpoint, "--rows", "4", "--name", "line-1", "--home-assistant", "--http", "127.0.0.1:0")
    ) as process:
        worker = Worker(process)
        worker.page = read_until(process, r"page +(http://\S+)/$")[1]
        yield worker
        process.terminate()
        assert ending(process) == (0, "", ["draining", "stopped"])


async def test_submit_streams_an_answer_and_exits_0(worker: Worker, checkpoint: Path):
    options = ("--broker", worker.broker, "--client", "desk", "--raw", "--max-tokens", "9")
    run = run_python(*CLI, "submit", "hello", *options)
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(FOOTER, run.stderr).groups() == ("budget", "5", "9")
    (expected,) = await generate(load_model(checkpoint), Request(prompt="hello", max_tokens=9))
    assert run.stdout == expected.text + "\n"


@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_submit_speaks_both_versions(cli, worker: Worker, version):
    broker = worker.broker if version == "5" else worker.broker_v311
    options = ("--broker", broker, "--mqtt", version, "--id", f"v{version[0]}", "--raw", "--max-tokens", 3)
    run = cli("submit", "hello", *options)
    assert (run.code, re.fullmatch(FOOTER, run.err).groups()) == (0, ("budget", "5", "3"))


TOO_LONG = "prompt: has 2100 tokens, the window holds 2048; overflow='slide' keeps the last of them"
NOBODY = ("--prefix", "nobody/here", "--timeout", "0.2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("x" * 2100, "--raw"), TOO_LONG),
        (("hello",), "messages: the model tiny has no chat template"),
        (("hello", "--raw", *NOBODY), "--broker: no worker accepted the job within 0.2 s"),
        (("hello", "--raw", "--deadline", "1e-9"), "job late ran out of time after 0 tokens"),
    ],
)
def test_submit_says_in_one_line_why_not(cli, worker: Worker, options, message):
    run = cli("submit", *options, "--broker", worker.broker, "--id", "late")
    assert run.code == 2
    assert run.err.splitlines()[-1] == f"drumline: {message}"


def test_the_page_and_the_probes(cli, worker: Worker):
    assert worker.title == "drumline serves tiny (int8, 4 rows of 2048 tokens)"
    before = completed(worker)
    assert cli("submit", "hello", "--broker", worker.broker, "--raw", "--max-tokens", 2).code == 0
    assert completed(worker) == before + 1
    for path in ("/healthz", "/readyz"):
        status, body = worker.get(path)
        assert (status, json.loads(body)) == (200, {"ok": True, "reasons": []})
    assert worker.get("/elsewhere")[0] == 404
    page = worker.get("/metrics")[1]
    for line in (r'drumline_(ready|healthy){scheduler="line-1"} 1\.0', r"process_open_fds \d", "python_info{.*} 1"):
        assert re.search(f"^{line}", page, re.MULTILINE), line


@pytest.mark.parametrize(
    ("path", "holds"), [("/", "<title>drumline"), ("/live.json", '"capacity":4'), ("/readyz", "true")]
)
def test_the_page_for_browsers_stands_where_http_says(worker: Worker, path, holds):
    with urllib.request.urlopen(worker.page + path, timeout=10) as response:
        assert holds in response.read().decode()


def test_the_view_is_on_the_metrics_port_and_the_page_is_not(worker: Worker):
    assert json.loads(worker.get("/live.json")[1])["name"] == "line-1"
    assert worker.get("/")[0] == 404


def test_the_page_names_the_last_job_of_a_bucket(cli, worker: Worker):
    assert cli("submit", "hello", "--broker", worker.broker, "--raw", "--max-tokens", 2).code == 0
    asked = urllib.request.Request(f"{worker.metrics}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(asked, timeout=10) as response:
        families = list(parse_openmetrics(response.read().decode()))
    shown = {family.name for family in families for sample in family.samples if sample.exemplar is not None}
    times = ("queue", "time_to_first_token", "inter_token", "request")
    assert shown == {f"drumline_{name}_seconds" for name in times}


def completed(worker: Worker) -> float:
    status, page = worker.get("/metrics")
    assert status == 200
    (family,) = [family for family in text_string_to_metric_families(page) if family.name == "drumline_requests"]
    return sum(sample.value for sample in family.samples if sample.labels.get("outcome") == "completed")


async def test_sigterm_finishes_what_runs_and_takes_no_more(checkpoint: Path):
    with running_python(*serve(checkpoint, "--rows", "1")) as process:
        worker = Worker(process)
        async with Client(worker.address.host, worker.address.port, name="desk") as client:
            running = await client.submit("a", id="running", **LONG)
            waiting = await client.submit("b", id="waiting", max_tokens=3, ignore_eos=True)
            await anext(aiter(running))
            process.terminate()
            results = [await job.result() for job in (running, waiting)]
        assert [(result.stop_reason, len(result.token_ids)) for result in results] == [("budget", 250), ("budget", 3)]
        assert ending(process) == (0, "", ["draining", "job ended", "job ended", "stopped"])


async def test_a_client_that_reads_late_has_its_answer_before_the_embedded_broker_ends(checkpoint: Path):
    with running_python(*serve(checkpoint, "--rows", "1")) as process:
        worker = Worker(process)
        async with Client(worker.address.host, worker.address.port, name="desk") as client:
            job = await client.submit("a", id="late", **LONG)
            await anext(aiter(job))
            process.terminate()
            read_until_event(process, "job ended")  # nothing else is done meanwhile, and nothing read
            time.sleep(0.5)  # noqa: ASYNC251 nor in the time that a broker needs to end
            result = await asyncio.wait_for(job.result(), 20)
        assert (result.stop_reason, len(result.token_ids)) == ("budget", 250)
        assert finish(process)[0] == 0


async def test_what_does_not_finish_in_time_is_cancelled(checkpoint: Path):
    with running_python(*serve(checkpoint, "--rows", "1", "--drain", "0")) as process:
        worker = Worker(process)
        async with Client(worker.address.host, worker.address.port, name="desk") as client:
            running = await client.submit("a", id="running", max_tokens=2000, ignore_eos=True)
            await anext(aiter(running))
            process.send_signal(signal.SIGINT)
            result = await running.result()
        assert (result.stop_reason, result.status) == ("cancelled", "cancelled")
        assert 1 <= len(result.token_ids) < 2000
        assert ending(process) == (0, "", ["draining", "job ended", "stopped"])


async def test_a_second_signal_ends_at_once(checkpoint: Path):
    with running_python(*serve(checkpoint, "--rows", "1")) as process:
        worker = Worker(process)
        async with Client(worker.address.host, worker.address.port, name="desk") as client:
            running = await client.submit("a", id="running", max_tokens=2000, ignore_eos=True)
            await anext(aiter(running))
            process.terminate()
            read_until_event(process, "draining")
            process.terminate()
            assert finish(process) == (130, "", "drumline: interrupted\n")


def test_a_signal_while_the_broker_is_away_ends_at_once(checkpoint: Path):
    command = ("serve", "--model", checkpoint, "--broker", "mqtt://127.0.0.1:1", "--metrics", "127.0.0.1:0")
    with running_python(*CLI, *command) as process:
        assert "cannot connect to 127.0.0.1:1" in str(read_until_event(process, "connection lost").fields["error"])
        process.terminate()
        code, out, err = finish(process)
        assert (code, out, err.splitlines()[-1]) == (130, "", "drumline: interrupted")
        assert "Traceback" not in err


def broker_of(process) -> int:
    """The process id of the embedded broker: the one child of `serve` that is a program of its own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (broker,) = [int(child) for child in children]
    return broker


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc to find the broker")
def test_a_dead_broker_of_its_own_ends_the_worker(checkpoint: Path):
    with running_python(*serve(checkpoint)) as process:
        worker = Worker(process)
        assert worker.get("/readyz")[0] == 200
        os.kill(broker_of(process), signal.SIGKILL)
        code, out, err = finish(process)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "drumline: the embedded broker ended: it gave no reason"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc to find the broker")
def test_the_broker_is_out_of_reach_of_a_terminals_ctrl_c(worker: Worker):
    """Ctrl-C goes to the whole group of the terminal; the broker must live on until the results are out."""
    assert os.getsid(broker_of(worker.process)) != os.getsid(worker.process.pid)


async def test_home_assistant_is_told_where_asked(worker: Worker):
    async with connect(ConnectOptions(worker.address, "home-assistant")) as connection:
        await connection.subscribe("homeassistant/#", retained=True)
        message = await anext(connection.messages())
    assert message.topic == "homeassistant/device/drumline_v1_line-1/config"
    assert json.loads(message.payload)["device"]["model"] == "tiny"
