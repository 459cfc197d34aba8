"""Encrypted connections and credentials, with a real mosquitto: who gets in, and what is said of those who do not."""

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.scheduler.mqtt.address import BrokerAddress, Tls
from drumline.scheduler.mqtt.client import Client
from drumline.scheduler.mqtt.connection import BrokerError, ConnectOptions, connect
from drumline.scheduler.mqtt.reconnect import Backoff
from drumline.scheduler.mqtt.topics import Topics
from tests.scheduler.mqtt.brokers import PASSWORD, Secured, secured
from tests.scheduler.mqtt.support import BODY, PATIENCE_S, expected_ids, serving


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured(tmp_path) as running:
        yield running


async def test_a_job_over_tls(broker: Secured, topics: Topics):
    """Worker and device both show certificates; the answer is what the scheduler says without MQTT."""
    where = broker.address
    tls = Tls(broker.authority.certificate, *broker.authority.issue("sensor"))
    async with (
        serving(where, topics),
        Client(where.host, where.port, name="sensor", tls=tls, topics=topics) as client,
    ):
        job = await client.submit(**BODY)
        text = "".join([chunk.text async for chunk in job])
        result = await job.result()
    assert (result.status, list(result.token_ids)) == ("completed", await expected_ids(**BODY))
    assert text == result.text


async def test_tokens_do_not_wait_for_acknowledgements_in_tls_either(broker: Secured):
    async with connect(ConnectOptions(broker.address, "nodelay")) as connection:
        paho_socket = connection._client._client.socket()
        assert paho_socket.version() in ("TLSv1.2", "TLSv1.3")
        assert paho_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def other_ca(broker: Secured) -> BrokerAddress:
    return replace(broker.named, tls=Tls(broker.stranger.certificate))


def other_name(broker: Secured) -> BrokerAddress:
    """The certificate is for 127.0.0.1."""
    return replace(broker.named, host="localhost")


def no_certificate(broker: Secured) -> BrokerAddress:
    return replace(broker.address, tls=Tls(broker.authority.certificate))


def certificate_of_a_stranger(broker: Secured) -> BrokerAddress:
    return replace(broker.address, tls=Tls(broker.authority.certificate, *broker.stranger.issue("device")))


def wrong_password(broker: Secured) -> BrokerAddress:
    return replace(broker.named, password=f"not-{PASSWORD}")


def no_password(broker: Secured) -> BrokerAddress:
    return replace(broker.named, username=None, password=None)


def no_tls(broker: Secured) -> BrokerAddress:
    return replace(broker.named, tls=None)


def file_is_gone(broker: Secured) -> BrokerAddress:
    return replace(broker.named, tls=Tls(Path("/nowhere/ca.pem")))


REFUSALS = [
    (other_ca, "certificate verify failed: self-signed certificate"),
    (other_name, "certificate verify failed: Hostname mismatch"),
    # The alert that says so may be lost with the connection that the broker resets behind it.
    (no_certificate, "hung up .*(certificate required|EOF|reset)"),
    (certificate_of_a_stranger, "hung up .*(unknown ca|EOF|reset)"),
    (wrong_password, "Not authorized"),
    (no_password, "Not authorized"),
    (no_tls, "hung up .*use mqtts://"),
    (file_is_gone, "tls_ca: cannot read /nowhere/ca.pem"),
]


@pytest.mark.parametrize(("address", "reason"), REFUSALS, ids=[address.__name__ for address, _ in REFUSALS])
async def test_who_does_not_get_in_is_told_why(
    broker: Secured, address: Callable[[Secured], BrokerAddress], reason: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    where = address(broker)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(BrokerError, match=f"cannot connect to {where.host}:{where.port}: .*{reason}") as refused:
            async with connect(ConnectOptions(where, "refused")):
                pytest.fail("it should not have let us in")
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert PASSWORD not in caplog.text + repr(refused.value)


async def test_a_worker_says_why_it_is_not_let_in_and_keeps_its_secret(
    broker: Secured, topics: Topics, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    attempts, waiting = 0, asyncio.Event()

    async def sleep(_: float) -> None:
        nonlocal attempts
        attempts += 1
        if attempts >= 4:
            waiting.set()
            await asyncio.Event().wait()

    async def serve() -> None:
        async with serving(wrong_password(broker), topics, backoff=lambda: Backoff(sleep=sleep)):
            pytest.fail("it should not have been let in")

    task = asyncio.create_task(serve())
    async with asyncio.timeout(PATIENCE_S):
        await waiting.wait()
    task.cancel()
    await asyncio.wait([task])
    assert 'connection lost connection=jobs error="cannot connect to 127.0.0.1' in caplog.text
    assert "Not authorized" in caplog.text
    assert PASSWORD not in caplog.text
