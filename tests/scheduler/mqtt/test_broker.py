import asyncio
import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from drumline.model.errors import DrumlineError
from drumline.scheduler.mqtt import broker as module
from drumline.scheduler.mqtt.broker import BrokerNotFound, EmbeddedBroker
from drumline.scheduler.mqtt.connection import BrokerError, ConnectOptions, Message, connect
from tests.scheduler.mqtt.conftest import embedded
from tests.scheduler.mqtt.support import address, device

KINDS = ["iotcore", "mosquitto"]


@pytest.mark.parametrize("kind", KINDS)
async def test_it_listens_here_alone_and_is_gone_afterwards(kind: str):
    async with embedded(kind) as broker:
        assert (broker.kind, broker.host) == (kind, "127.0.0.1")
        directory = Path(broker._directory.name)
        listening = _listening_ports(broker)
        assert listening == {("0100007F", broker.port), ("0100007F", broker.port_v311)}
        async with device(address(broker, 4), "t", protocol=4) as this:
            await this.send("t", b"hello")
            assert (await this.next()).payload == b"hello"
    assert not directory.exists()
    with pytest.raises(BrokerError):
        async with connect(ConnectOptions(address(broker), "late")):
            pytest.fail("it should be gone")
    with pytest.raises(BrokerError, match="not running"):
        broker.pid  # noqa: B018


@pytest.mark.parametrize("kind", KINDS)
async def test_a_taken_port_is_an_error(kind: str):
    async with embedded(kind) as first:
        message = f"{kind} did not start on 127.0.0.1:{first.port}: port {first.port} is taken"
        with pytest.raises(BrokerError, match=message):
            async with EmbeddedBroker(port=first.port, prefer=kind):
                pytest.fail("two brokers on one port")
        async with connect(ConnectOptions(address(first), "still-there")):
            pass


async def test_a_broker_that_does_not_start_is_quoted(monkeypatch: pytest.MonkeyPatch):
    words = [sys.executable, "-c", "raise SystemExit('no such option')"]
    monkeypatch.setattr(module, "_iotcore", lambda directory, port, port_v311: words)
    with pytest.raises(BrokerError, match=r"iotcore did not start on .*: no such option"):
        async with embedded("iotcore"):
            pytest.fail("it cannot have started")


async def test_mosquitto_keeps_what_it_had_over_a_restart():
    async with embedded("mosquitto") as broker:
        session = ConnectOptions(address(broker), "device", session_expiry_s=100)
        async with connect(session) as connection:
            await connection.subscribe("t")
        async with connect(ConnectOptions(address(broker), "other")) as connection:
            await connection.publish(Message("t", b"meanwhile", qos=1))
        await broker.stop()
        await broker.restart()
        async with connect(session) as connection:
            assert (await anext(connection.messages())).payload == b"meanwhile"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("kind", KINDS)
async def test_the_child_ends_when_its_parent_is_killed(kind: str, tmp_path: Path):
    embedded(kind)
    program = (
        "import asyncio\n"
        "from drumline.scheduler.mqtt.broker import EmbeddedBroker\n"
        "async def main():\n"
        f"    async with EmbeddedBroker(prefer={kind!r}) as broker:\n"
        "        print(broker.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    child = os.pidfd_open(int(await parent.stdout.readline()))
    try:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(child, ended.set)
        async with asyncio.timeout(20):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(child)
        os.close(child)


def test_without_any_broker_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_mosquitto_binary", lambda: None)
    assert EmbeddedBroker().kind == "iotcore"
    with pytest.raises(BrokerNotFound, match="mosquitto"):
        EmbeddedBroker(prefer="mosquitto")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BrokerNotFound, match=r"pip install drumline\[demo\]") as missing:
        EmbeddedBroker()
    assert isinstance(missing.value, DrumlineError)


def _listening_ports(broker: EmbeddedBroker) -> set[tuple[str, int]]:
    """(address, port) of every listening socket with one of the broker's ports, from the kernel's own table."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            where, port = local.rsplit(":", 1)
            if state == "0A" and int(port, 16) in (broker.port, broker.port_v311):
                found.add((where, int(port, 16)))
    return found
