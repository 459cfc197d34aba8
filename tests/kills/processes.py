"""The processes that are killed: workers from a nursery, and a mosquitto that keeps what it has on the disk."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drumline.scheduler.mqtt.address import BrokerAddress
from tests.processes import ENVIRONMENT, ROOT, program
from tests.scheduler.mqtt.brokers import answers, free_port

PATIENCE_S = 60.0


class Nursery:
    """Forks workers; see `nursery.py`. One question at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def ask(self, **command: Any) -> dict[str, Any]:
        async with self._turn, asyncio.timeout(PATIENCE_S):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            line = await self._process.stdout.readline()
        assert line, "the nursery is gone"
        return json.loads(line)


@asynccontextmanager
async def nursery() -> AsyncIterator[Nursery]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kills.nursery"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]).strip(":")},
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert "ready" in json.loads(await process.stdout.readline())
        yield Nursery(process)
    finally:
        process.stdin.close()
        await process.wait()


class Worker:
    """`drumline serve` with a journal, started as often as it is killed. `log` is what all of them said."""

    def __init__(
        self, nursery: Nursery, model: Path, broker: BrokerAddress, folder: Path, *options: str, name: str = "main"
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.journal, self.log = folder / "journal.db", folder / "worker.log"
        self._nursery = nursery
        self._command = [
            *("serve", "--model", str(model), "--broker", broker.url, "--journal", str(self.journal), "--name", name),
            *("--metrics", "127.0.0.1:0", "--precision", "int8", "--rows", "8", "--threads", "1", *options),
        ]
        self.pid: int | None = None
        self._said_before = 0

    async def start(self, *options: str) -> None:
        """Does not wait until it is up."""
        command = {"spawn": [*self._command, *options], "log": str(self.log)}
        self._said_before = len(self.said)
        self.pid = (await self._nursery.ask(**command))["pid"]

    async def is_up(self) -> None:
        """Wait until it has both connections."""
        await self.says("drumline serves")

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is no more."""
        self.send(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL, self.said[-2000:]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait for the end; the exit code."""
        async with asyncio.timeout(PATIENCE_S):
            while (code := (await self._nursery.ask(poll=self.pid))["code"]) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.pid = None
        return code

    async def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        await self.is_up()  # before, it has nothing to finish and just dies
        self.send(signal.SIGTERM)
        return await self.ended()

    def limit_files(self, size_bytes: int) -> None:
        """From now on it writes nothing behind this place of a file, as on a full disk; may be lifted again."""
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))

    @property
    def said(self) -> str:
        """By all that were started."""
        return self.log.read_text() if self.log.exists() else ""

    async def says(self, words: str) -> None:
        """Wait until the one that was started last has said this."""
        async with asyncio.timeout(PATIENCE_S):
            while words not in self.said[self._said_before :]:  # noqa: ASYNC110 a file
                await asyncio.sleep(0.02)


class Mosquitto:
    """On one port for its life, with its sessions in a file."""

    def __init__(self, folder: Path, more: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.address = BrokerAddress("127.0.0.1", free_port())
        self._folder, self._config = folder, folder / "kills.conf"
        self._binary = program("mosquitto")
        self._config.write_text(
            ("user root\n" if os.geteuid() == 0 else "")
            + f"listener {self.address.port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n"
            f"persistence true\npersistence_location {folder}/\nautosave_on_changes true\nautosave_interval 1\n"
            f"max_queued_messages 100000\nlog_dest stderr\nlog_type error\nlog_type warning\n{more}"
        )
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        with (self._folder / "broker.log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220 a fork and no more
                [self._binary, "-c", self._config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        async with asyncio.timeout(PATIENCE_S):
            while not await answers(self.address.port):
                assert self.process.poll() is None, (self._folder / "broker.log").read_text()
                await asyncio.sleep(0.005)

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def __aenter__(self) -> "Mosquitto":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            await self.kill()
