"""The example configuration of mosquitto, with paths and port of the test: a device has its own jobs and no others."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from drumline.scheduler.mqtt.address import BrokerAddress, Tls
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import BrokerError, ConnectOptions, Message, PublishRefused, connect
from drumline.scheduler.mqtt.gateway import Gateway
from drumline.scheduler.mqtt.topics import Topics
from tests.processes import ROOT
from tests.scheduler.mqtt.brokers import Authority, free_port, mosquitto, passwords
from tests.scheduler.mqtt.support import BODY, device, expected_ids, serving

EXAMPLE = ROOT / "examples" / "mosquitto"
USERS = ("worker", "operator", "sensor-1", "sensor-2")
TOPICS = Topics()


@dataclass(frozen=True)
class Broker:
    """The running example; every user's password is its name twice."""

    anybody: BrokerAddress

    def user(self, name: str) -> BrokerAddress:
        return replace(self.anybody, username=name, password=name * 2)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    authority = Authority(tmp_path, "ca")
    certificate, key = authority.issue("broker")
    passwords(tmp_path, **{user: user * 2 for user in USERS})
    port = free_port()
    config = (EXAMPLE / "mosquitto.conf").read_text()
    for given, ours in (
        ("listener 8883", f"listener {port} 127.0.0.1"),
        ("/etc/mosquitto/certs/ca.pem", str(authority.certificate)),
        ("/etc/mosquitto/certs/broker.pem", str(certificate)),
        ("/etc/mosquitto/certs/broker.key", str(key)),
        ("/etc/mosquitto/passwords", str(tmp_path / "passwords")),
        ("/etc/mosquitto/acl", str(EXAMPLE / "acl")),
        ("/var/lib/mosquitto/", f"{tmp_path}/"),
    ):
        assert config.count(given) == 1
        config = config.replace(given, ours)
    async with mosquitto(tmp_path, config, port):
        yield Broker(BrokerAddress("127.0.0.1", port, tls=Tls(authority.certificate)))


@asynccontextmanager
async def worker(broker: Broker) -> AsyncIterator[Gateway]:
    async with serving(broker.user("worker"), TOPICS, worker="main") as gateway:
        yield gateway


def test_it_says_what_it_promises():
    """The settings that reliability and latency rest on."""
    settings = dict(re.findall(r"^(\w+) (.+)$", (EXAMPLE / "mosquitto.conf").read_text(), re.MULTILINE))
    for name, value in {
        "allow_anonymous": "false", "set_tcp_nodelay": "true", "persistence": "true", "autosave_on_changes": "true",
        "autosave_interval": "1", "max_queued_messages": "10000", "max_inflight_messages": "20",
    }.items():  # fmt: skip
        assert settings[name] == value


@pytest.mark.parametrize("protocol", [5, 4])
async def test_a_device_gets_its_answer(broker: Broker, protocol):
    own = broker.user("sensor-1")
    login = {"username": own.username, "password": own.password, "tls": own.tls}
    async with (
        worker(broker),
        device(broker.user("operator"), "drumline/v1/#") as operator,
        Client(own.host, own.port, name="sensor-1", protocol=protocol, topics=TOPICS, **login) as client,
    ):
        job = await client.submit(**BODY, id="job")
        result = await job.result()
        assert list(result.token_ids) == await expected_ids(**BODY)
        long = await client.submit("x", max_tokens=1_000_000, overflow="slide", ignore_eos=True)
        await anext(aiter(long))
        await long.cancel()
        assert (await long.result()).status == "cancelled"
        assert (await operator.body("/workers/main/status"))["status"] == "online"


async def test_a_device_cannot_speak_as_another(broker: Broker):
    async with device(broker.user("operator"), "drumline/v1/#") as operator:
        async with connect(ConnectOptions(broker.user("sensor-1"), "s1")) as connection:
            for topic in (
                TOPICS.submit("sensor-2"),
                TOPICS.job("sensor-2", "cancel", "j"),
                TOPICS.job("sensor-2", "get", "j"),
                TOPICS.job("sensor-2", "result", "j"),
                TOPICS.job("sensor-1", "result", "j"),
                TOPICS.worker_status("main"),
                TOPICS.dead,
                "homeassistant/device/x/config",
            ):
                with pytest.raises(PublishRefused, match="Not authorized"):
                    await connection.publish(Message(topic, b"{}", qos=1))
            await connection.publish(Message(TOPICS.submit("sensor-1"), b"{}", qos=1))
        assert (await operator.next()).topic == TOPICS.submit("sensor-1")


async def test_a_device_cannot_hear_another(broker: Broker):
    """It subscribes to everything; while another device's job runs, it hears of the worker and of nobody else."""
    other = broker.user("sensor-2")
    login = {"username": other.username, "password": other.password, "tls": other.tls}
    async with (
        worker(broker),
        device(broker.user("sensor-1"), "drumline/v1/#", "#") as nosy,
        Client(other.host, other.port, name="sensor-2", protocol=4, topics=TOPICS, **login) as client,
        Client(other.host, other.port, name="sensor-2", topics=TOPICS, **login) as client5,
    ):
        for sender in (client, client5):
            await (await sender.submit(**BODY)).result()
        await nosy.send(TOPICS.submit("sensor-1"), {"id": "mine"} | BODY)
        await nosy.body("/clients/sensor-1/jobs/mine/result")
    topics = {message.topic for message in nosy.heard}
    assert TOPICS.job("sensor-1", "result", "mine") in topics
    assert {topic for topic in topics if "sensor-1/jobs/mine" not in topic} == {TOPICS.worker_status("main")}


@pytest.mark.parametrize(("name", "password"), [(None, None), ("sensor-1", "wrong"), ("nobody", "nobody")])
async def test_nobody_comes_in_without_a_name(broker: Broker, name: str | None, password: str | None):
    with pytest.raises(BrokerError, match="Not authorized"):
        async with connect(ConnectOptions(replace(broker.anybody, username=name, password=password), "x")):
            pytest.fail("it let us in")
