"""A private broker of our own, for the demo, the tests and `serve --embedded-broker`.

mosquitto is the reference and is used where its binary is found; else iotcore, a Rust broker that pip installs. Either
runs as a child process with its files in a temporary directory, listens on 127.0.0.1 alone and ends with us.
"""

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil

from drumline.scheduler.mqtt.connection import BrokerError

BrokerKind = Literal["mosquitto", "iotcore"]

HOST = "127.0.0.1"
START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 5.0
LINGER_S = 2.0
"""How long clients may go on reading. They have no sign that all was read, so who stays connected is waited for."""
POLL_S = 0.02
WATCH_S = 0.5
PORT_RACES = 3
"""A free port is only free until somebody else takes it: how often to look for another."""
MAX_PACKET_BYTES = 64 * 2**20

# The child asks Linux to end it when we die, whatever kills us, and then becomes the broker. This is done in the child
# by a second interpreter because a `preexec_fn` is unsafe in a process that has threads, and torch starts some.
_LAUNCHER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class BrokerNotFound(BrokerError):
    """Neither mosquitto nor iotcore is installed."""


class EmbeddedBroker:
    """An async context manager around a broker child.

    `port` takes MQTT 5, `port_v311` takes MQTT 3.1.1 (mosquitto serves both on one). A given `port` is used as it is;
    otherwise a free one is found. Raises `BrokerNotFound`, or `BrokerError` with the broker's own words when it does
    not start.
    """

    host = HOST

    def __init__(self, port: int | None = None, prefer: BrokerKind | None = None) -> None:
        self.kind: BrokerKind = _find(prefer)
        self._fixed_port = port
        self.port = 0
        self.port_v311 = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The child's process id; raises `BrokerError` unless it runs."""
        if self._child is None:
            raise BrokerError("the embedded broker is not running")
        return self._child.pid

    async def __aenter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="drumline-broker-", ignore_cleanup_errors=True)
        races = 0 if self._fixed_port else PORT_RACES
        try:
            while (words := await self._start(Path(self._directory.name))) is not None:
                races -= 1
                if races <= 0:
                    raise BrokerError(f"{self.kind} did not start on {HOST}:{self.port}: {words or 'it said nothing'}")
        except BaseException:
            await self._clean_up()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self._let_clients_read()
        finally:
            await self._clean_up()

    async def _let_clients_read(self) -> None:
        """Wait until those who are connected have gone, for `LINGER_S` at most.

        A client that confirms a message to a broker that is gone loses all that it has not read yet: the answers that
        a worker published last.
        """
        if self._child is None:
            return
        with suppress(psutil.Error, TimeoutError):
            child = psutil.Process(self._child.pid)
            readers = _clients(child)
            async with asyncio.timeout(LINGER_S):
                while readers & _clients(child):  # noqa: ASYNC110 a child sets no event
                    await asyncio.sleep(POLL_S)

    async def wait_ended(self) -> None:
        """Wait until the child is no more; it ends by itself only when something is wrong."""
        while self._child is not None and self._child.poll() is None:  # noqa: ASYNC110 a child sets no event
            await asyncio.sleep(WATCH_S)

    async def stop(self) -> None:
        """End the child but keep its files, so that `restart` finds what it had saved."""
        await self._end_child()

    async def restart(self) -> None:
        """Start again on the same ports after `stop`; raises `BrokerError` where it does not come up."""
        if self._directory is None:
            raise BrokerError("the embedded broker was never started")
        words = await self._launch(Path(self._directory.name))
        if words is not None:
            raise BrokerError(f"{self.kind} did not start again on {HOST}:{self.port}: {words}")

    async def _start(self, directory: Path) -> str | None:
        self.port = self._fixed_port or _free_port()
        self.port_v311 = self.port if self.kind == "mosquitto" else _free_port()
        return await self._launch(directory)

    async def _launch(self, directory: Path) -> str | None:
        """Start the child and wait until both ports answer; otherwise returns its last words."""
        for port in (self.port, self.port_v311):
            # Checked first: whoever has the port already would answer in our child's stead.
            if not _is_free(port):
                return f"port {port} is taken"
        write_config = _mosquitto if self.kind == "mosquitto" else _iotcore
        self._child = child = _spawn(write_config(directory, self.port, self.port_v311), directory)
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                for port in (self.port, self.port_v311):
                    while child.poll() is None:
                        if await _answers(port):
                            break
                        await asyncio.sleep(POLL_S)
                if child.poll() is None:
                    return None
        return await self._end_child()

    async def _end_child(self) -> str:
        """Stop the child, if there is one; returns the tail of what it said."""
        child, self._child = self._child, None
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                await asyncio.to_thread(child.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                await asyncio.to_thread(child.wait)
        if self._directory is None:
            return ""
        log = Path(self._directory.name) / "broker.log"
        return log.read_text(errors="replace")[-500:].strip() if log.exists() else ""

    async def _clean_up(self) -> None:
        await self._end_child()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _spawn(command: list[str], directory: Path) -> subprocess.Popen[bytes]:
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    with (directory / "broker.log").open("wb") as log:
        # In a session of its own: a Ctrl-C in the terminal is for us, who still have results to publish.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory, start_new_session=True
        )


def _find(prefer: BrokerKind | None) -> BrokerKind:
    found: dict[BrokerKind, bool] = {
        "mosquitto": _mosquitto_binary() is not None,
        "iotcore": importlib.util.find_spec("iotcore") is not None,
    }
    for kind, is_here in found.items():
        if is_here and prefer in (None, kind):
            return kind
    raise BrokerNotFound(
        f"no {prefer or 'broker'} found here: `pip install drumline[demo]` brings iotcore, "
        "or install mosquitto with your system's package manager"
    )


def _mosquitto_binary() -> str | None:
    """Debian puts it in sbin, which is often missing from a user's PATH."""
    return shutil.which("mosquitto", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


def _mosquitto(directory: Path, port: int, port_v311: int) -> list[str]:
    """Write the configuration; returns the command. `autosave_*` makes every change survive a kill of the broker."""
    config = directory / "mosquitto.conf"
    # Started by root, mosquitto would become the user "mosquitto", who may not write into our directory.
    user = "user root\n" if hasattr(os, "geteuid") and os.geteuid() == 0 else ""
    config.write_text(
        f"{user}listener {port} {HOST}\n"
        "allow_anonymous true\n"
        "set_tcp_nodelay true\n"
        "max_queued_messages 10000\n"
        "persistence true\n"
        f"persistence_location {directory}/\n"
        "autosave_on_changes true\n"
        "autosave_interval 1\n"
        "log_dest stderr\n"
        "log_type error\n"
        "log_type warning\n"
    )
    return [_mosquitto_binary() or "mosquitto", "-c", str(config)]


def _iotcore(directory: Path, port: int, port_v311: int) -> list[str]:
    """Write the configuration; returns the command. It speaks 5 and 3.1.1 on ports of their own."""
    config = directory / "iotcore.toml"
    listeners = "".join(
        f'[{version}.1]\nname = "{version}"\nlisten = "{HOST}:{number}"\nnext_connection_delay_ms = 1\n'
        f"[{version}.1.connections]\nconnection_timeout_ms = 60000\nmax_payload_size = {MAX_PACKET_BYTES}\n"
        "max_inflight_count = 100\ndynamic_filters = true\n"
        for version, number in (("v5", port), ("v4", port_v311))
    )
    config.write_text(
        "id = 0\n[router]\nid = 0\nmax_connections = 1000\nmax_outgoing_packet_count = 200\n"
        "max_segment_size = 104857600\nmax_segment_count = 10\n" + listeners
    )
    # -P: a host's own iotcore.py in the working directory must not be imported instead.
    return [sys.executable, "-P", "-m", "iotcore", "--config", str(config), "--log-level", "CRITICAL"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # On Unix: a port whose last connections are only lingering is free, as the brokers see it.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _clients(child: psutil.Process) -> set[object]:
    """Where they are."""
    return {found.raddr for found in child.net_connections("tcp") if found.status == psutil.CONN_ESTABLISHED}


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True
