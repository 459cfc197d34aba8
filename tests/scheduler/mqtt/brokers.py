"""A mosquitto with a configuration of the test's own, and throwaway certificates for it."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import free_port
from drumline.scheduler.mqtt.address import BrokerAddress, Tls
from tests.processes import program
from tests.scheduler.mqtt.support import PATIENCE_S

PASSWORD = "drum-and-bass-9"


@asynccontextmanager
async def mosquitto(directory: Path, config: str, port: int) -> AsyncIterator[None]:
    """Runs with this configuration, which listens on `port`, while the block does."""
    binary = program("mosquitto")
    path = directory / "running.conf"
    # Started by root it would become a user who may not read a test's files.
    path.write_text(("user root\n" if os.geteuid() == 0 else "") + config)
    with (directory / "mosquitto.log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *(binary, "-c", path), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=directory
        )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await answers(port):
                assert child.returncode is None, (directory / "mosquitto.log").read_text()
                await asyncio.sleep(0.02)
        yield
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()


async def answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def passwords(directory: Path, **of: str) -> Path:
    """A mosquitto password file."""
    path = directory / "passwords"
    for number, (user, password) in enumerate(of.items()):
        create = () if number else ("-c",)
        subprocess.run([program("mosquitto_passwd"), "-b", *create, path, user, password], check=True)
    return path


class Authority:
    """Issues certificates that are good for a day."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self.certificate, self._key = self._make(name)

    def issue(self, name: str, host: str = "127.0.0.1") -> tuple[Path, Path]:
        """Certificate and key, for a host or a device."""
        kind = "IP" if host[0].isdigit() else "DNS"
        return self._make(
            f"{self._name}-{name}",
            *("-CA", self.certificate, "-CAkey", self._key),
            *("-addext", f"subjectAltName={kind}:{host}", "-addext", "basicConstraints=critical,CA:FALSE"),
        )

    def _make(self, name: str, *options: str | Path) -> tuple[Path, Path]:
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        command = (program("openssl"), "req", "-x509", *curve, "-days", "1", "-subj", f"/CN={name}", *options)
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        return certificate, key


@dataclass(frozen=True)
class Secured:
    """A broker that asks for a client certificate (`address`), and one that asks for a password (`named`)."""

    address: BrokerAddress
    named: BrokerAddress
    authority: Authority
    stranger: Authority


@asynccontextmanager
async def secured(directory: Path) -> AsyncIterator[Secured]:
    authority, stranger = Authority(directory, "ca"), Authority(directory, "stranger")
    certificate, key = authority.issue("broker")
    files = f"cafile {authority.certificate}\ncertfile {certificate}\nkeyfile {key}\n"
    mutual, named = free_port(), free_port()
    config = (
        "per_listener_settings true\n"
        f"listener {mutual} 127.0.0.1\n{files}require_certificate true\nuse_identity_as_username true\n"
        "set_tcp_nodelay true\n"
        f"listener {named} 127.0.0.1\n{files}password_file {passwords(directory, me=PASSWORD)}\nset_tcp_nodelay true\n"
    )
    own = Tls(authority.certificate, *authority.issue("device"))
    async with mosquitto(directory, config, named):
        yield Secured(
            BrokerAddress("127.0.0.1", mutual, tls=own),
            BrokerAddress("127.0.0.1", named, "me", PASSWORD, Tls(authority.certificate)),
            authority,
            stranger,
        )
