"""`drumline serve` as an operator, a kubelet, a log collector and systemd see it, from its start to its end."""

import asyncio
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drumline.scheduler.mqtt.address import parse_broker_url
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import Connection, ConnectOptions, Message, connect
from tests.log_lines import Logged, read_json, read_text
from tests.processes import CLI, finish, run_python, running_python
from tests.scheduler.cli.test_health import ask

PROMPT = "a prompt that is nobody's business"
SERVE = (*CLI, "serve", "--embedded-broker", "--metrics", "127.0.0.1:0", "--rows", "2")
HOSTILE_TOPIC = 'x" y="\u2028{}\u2028 error engine failed level=error error="'  # brokers let no line end pass here
HOSTILE_FIELD = 'x\n{"event": "engine failed"}\r\n2026-01-01T00:00:00.000Z error engine failed error="'


class Log:
    """What a worker says on stderr, read on a thread as it comes."""

    def __init__(self, process, read) -> None:
        self._process, self._read = process, read
        self.lines: list[str] = []
        self.events: list[Logged] = []
        self._new = threading.Condition()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        for line in self._process.stderr:
            with self._new:
                self.lines.append(line.rstrip("\n"))
                self.events.append(self._read(self.lines[-1]))
                self._new.notify_all()

    def wait(self, event: str, **fields: object) -> Logged:
        """The first event of this name with these fields."""

        def found() -> Logged | None:
            return next((e for e in self.events if e.event == event and fields.items() <= e.fields.items()), None)

        with self._new:
            assert self._new.wait_for(lambda: found() is not None, 40.0), self.lines
            return found()

    def all(self) -> list[Logged]:
        """Every line, once the process has ended."""
        self._thread.join(20.0)
        assert len(self.events) == len(self.lines)  # each could be read
        return self.events


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(40.0)
        yield manager


def hear(manager: socket.socket, state: str) -> None:
    """Read on until systemd is told this."""
    while state not in manager.recv(4096).decode().split("\n"):
        pass


async def misbehave(evil: Connection) -> None:
    """Send what is refused, and would be lines of its own if it could."""
    await evil.publish(
        Message("drumline/v1/clients/evil/submit", json.dumps({"id": "wrong", HOSTILE_FIELD: 1}).encode())
    )
    await evil.publish(Message(f"drumline/v1/clients/{HOSTILE_TOPIC}/submit", b"{}"))


async def test_json_lines_probes_and_systemd(checkpoint: Path, tmp_path: Path):
    systemd = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
    with (
        listening(tmp_path / "notify") as manager,
        running_python(*SERVE, "--model", checkpoint, "--log-format", "json", **systemd) as process,
    ):
        log = Log(process, read_json)
        await asyncio.to_thread(hear, manager, "READY=1")
        ready = log.wait("ready").fields
        url = ready["metrics"].removesuffix("/metrics")
        assert await asyncio.to_thread(ask, url, "/readyz") == (200, [])
        for _ in range(3):
            await asyncio.to_thread(hear, manager, "WATCHDOG=1")

        address = parse_broker_url(ready["broker"])
        async with (
            Client(address.host, address.port, name="desk") as client,
            connect(ConnectOptions(address, "evil")) as evil,
        ):
            done = await client.submit(PROMPT, id="done", max_tokens=3, ignore_eos=True)
            answer = await done.result()
            await misbehave(evil)
            await asyncio.to_thread(log.wait, "job rejected", job="wrong")
            await asyncio.to_thread(log.wait, "message refused")
            running = await client.submit(PROMPT, id="running", max_tokens=2000, ignore_eos=True)
            await anext(aiter(running))
            process.terminate()
            await asyncio.to_thread(hear, manager, "STOPPING=1")
            draining = ["draining: what runs is finished, nothing new is taken"]
            assert await asyncio.to_thread(ask, url, "/readyz") == (503, draining)
            assert await asyncio.to_thread(ask, url, "/healthz") == (200, [])
            await running.cancel()
            await running.result()
        process.wait(40.0)
        assert (process.returncode, process.stdout.read()) == (0, "")
        events = log.all()

    names = [event.event for event in events]
    assert names[0] == "starting"
    assert names[-1] == "stopped"
    ended = {event.fields["job"]: event.fields for event in events if event.event == "job ended"}
    assert ended.keys() == {"done", "running"}
    assert (
        ended["done"].items()
        >= {
            "client": "desk",
            "outcome": "completed",
            "stop_reason": "budget",
            "prompt_tokens": len(PROMPT),
            "tokens": 3,
        }.items()
    )
    assert 0 <= ended["done"]["queued_s"] <= ended["done"]["first_token_s"] <= ended["done"]["total_s"]
    assert ended["running"]["outcome"] == "cancelled"
    (rejected,) = [event.fields for event in events if event.event == "job rejected"]
    assert rejected.items() >= {"client": "evil", "reason": "invalid", "field": HOSTILE_FIELD}.items()
    assert "engine failed" not in names
    assert PROMPT not in "".join(log.lines)
    assert answer.text not in "".join(str(event.fields) for event in events)


async def test_text_lines_with_the_texts(checkpoint: Path):
    with running_python(*SERVE, "--model", checkpoint, "--show-text") as process:
        log = Log(process, read_text)
        address = parse_broker_url((await asyncio.to_thread(log.wait, "ready")).fields["broker"])
        async with (
            Client(address.host, address.port, name="desk") as client,
            connect(ConnectOptions(address, "evil")) as evil,
        ):
            answer = await (await client.submit(PROMPT, id="j", max_tokens=12, ignore_eos=True)).result()
            await misbehave(evil)
            await asyncio.to_thread(log.wait, "message refused")
        process.terminate()
        process.wait(40.0)
        events = log.all()
    (ended,) = [event.fields for event in events if event.event == "job ended"]
    assert (ended["job"], ended["prompt"], ended["text"]) == ("j", PROMPT, answer.text)
    (refused,) = [event.fields for event in events if event.event == "message refused"]
    assert HOSTILE_TOPIC in refused["topic"]
    (rejected,) = [event.fields for event in events if event.event == "job rejected"]
    assert rejected["field"] == HOSTILE_FIELD


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a file whose reading waits")
def test_while_the_model_is_loaded_probes_answer_and_a_signal_ends_it_at_once(tmp_path: Path):
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "config.json")
    with running_python(*SERVE, "--model", tmp_path / "model") as process:
        line = process.stderr.readline()
        url = re.search(r"info starting .*metrics=(http://\S+)/metrics", line)[1]
        assert ask(url, "/healthz") == (200, [])
        assert ask(url, "/readyz") == (503, ["the model is being loaded"])
        process.terminate()
        assert finish(process, timeout=10) == (130, "", "drumline: interrupted\n")


WHILE_IT_IMPORTS = """
import importlib.abc, os, signal, sys
from drumline.scheduler.cli import main

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "drumline.scheduler.cli.app":
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Interrupting())
main(["serve"])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGUSR2"), reason="needs SIGUSR2")
def test_signals_while_python_imports():
    ended = run_python("-c", WHILE_IT_IMPORTS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "drumline: interrupted\n")


def test_a_mistake_is_one_more_json_line(tmp_path: Path):
    with running_python(*SERVE, "--model", tmp_path / "nowhere", "--log-format", "json") as process:
        code, out, err = finish(process)
    assert (code, out) == (2, "")
    first, last = map(read_json, err.splitlines())
    assert first.event == "starting"
    assert last == Logged("error", "ended", {"reason": f"{tmp_path}/nowhere: no such file or folder"})
