"""The adapter around aiomqtt, and the outbox that sends through it."""

import asyncio
import json
import socket
from uuid import uuid4

import pytest

from drumline import InvalidRequest
from drumline.scheduler.mqtt import connection as module
from drumline.scheduler.mqtt.address import BrokerAddress
from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.connection import (
    BrokerError,
    ConnectOptions,
    Message,
    connect,
)
from drumline.scheduler.mqtt.entries import MAX_COALESCED_TOKENS
from drumline.scheduler.mqtt.outbox import Outbox
from drumline.scheduler.mqtt.reply import Reply
from drumline.scheduler.mqtt.topics import Topics
from drumline.scheduler.request import Chunk
from tests.scheduler.mqtt.support import Counts, Network, address, device


async def test_properties_arrive_as_they_were_sent(broker: EmbeddedBroker, topics: Topics):
    sent = Message(
        topic=f"{topics.prefix}/x",
        payload=b"\x00\xff",
        qos=1,
        response_topic="re/ply",
        correlation_data=b"\x00\x01",
        user_properties=(("kind", "a"), ("kind", "b"), ("ü", "")),
        message_expiry_s=60,
    )
    async with device(address(broker), f"{topics.prefix}/#") as this:
        await this._connection.publish(sent)
        assert await this.next() == sent


async def test_tokens_do_not_wait_for_acknowledgements(broker: EmbeddedBroker):
    """Also pins the private attributes of aiomqtt that the adapter (`_disconnected`) and this test rely on."""
    async with connect(ConnectOptions(address(broker), "nodelay")) as connection:
        paho_socket = connection._client._client.socket()
        assert paho_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert isinstance(connection._client._disconnected, asyncio.Future)


async def test_a_message_that_mqtt_cannot_carry_costs_no_connection(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), f"{topics.prefix}/#") as this:
        with pytest.raises(InvalidRequest) as wrong:
            await this._connection.publish(Message(f"{topics.prefix}/#", b"", qos=1))
        assert wrong.value.field == "message"
        await this.send(f"{topics.prefix}/x", b"still here")
        assert (await this.next()).payload == b"still here"


async def test_a_lost_connection_is_a_broker_error_to_all(broker: EmbeddedBroker):
    async with Network(address(broker)) as network:
        async with connect(ConnectOptions(network.address, "cut")) as connection:
            await network.cut()
            with pytest.raises(BrokerError):
                await anext(connection.messages())
            with pytest.raises(BrokerError):
                await connection.publish(Message("t", b"", qos=1))
        with pytest.raises(BrokerError, match=f"cannot connect to 127.0.0.1:{network.port}"):
            async with connect(ConnectOptions(network.address, "cut")):
                pytest.fail("nobody listens there any more")


async def test_acknowledgements_keep_their_order_and_wait_for_us(broker: EmbeddedBroker, topics: Topics):
    """Also pins paho's `ack` behind aiomqtt: what is not acknowledged comes again, and what is does not."""
    options = ConnectOptions(address(broker), f"worker-{uuid4().hex}", session_expiry_s=60, receive_maximum=10)

    async def take(count: int) -> list[Message]:
        messages = connection.messages()
        return [await anext(messages) for _ in range(count)]

    async with device(address(broker), f"{topics.prefix}/other") as this:
        async with connect(options) as connection:
            await connection.subscribe(f"{topics.prefix}/x")
            for number in range(4):
                await this.send(f"{topics.prefix}/x", str(number).encode())
            first, second, third, _ = await take(4)
            connection.acknowledge(third)
            connection.acknowledge(first)
            sent: list[int] = []
            connection._client._client.ack = lambda number, qos: sent.append(number)  # type: ignore[method-assign]
            connection.acknowledge(second)
            assert sent == [second.packet_id, third.packet_id]  # the fourth is not done
            connection.acknowledge(first)
            assert len(sent) == 2
        async with connect(options) as connection:
            await connection.subscribe(f"{topics.prefix}/x")
            again = await take(3)
    assert [message.payload for message in again] == [b"1", b"2", b"3"]


async def test_an_acknowledgement_of_a_socket_that_has_gone(broker: EmbeddedBroker, topics: Topics):
    options = ConnectOptions(address(broker), f"worker-{uuid4().hex}", receive_maximum=10)
    async with device(address(broker), topics.dead) as this, connect(options) as connection:
        await connection.subscribe(f"{topics.prefix}/x")
        await this.send(f"{topics.prefix}/x", b"1")
        message = await anext(connection.messages())

        def gone(number: int, qos: int) -> None:
            raise OSError("bad file descriptor")

        connection._client._client.ack = gone  # type: ignore[method-assign, assignment]
        connection.acknowledge(message)
        assert connection._unacknowledged == {}


async def test_a_cancelled_connect_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    """The server takes the connection and never answers; pytest turns a leaked socket or task into a failure."""
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)  # it is waited for
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        while await reader.read(100):
            pass
        writer.close()
        gone.set()

    async def attempt(port: int) -> None:
        async with connect(ConnectOptions(BrokerAddress("127.0.0.1", port), "never")):
            pytest.fail("that was no broker")

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        connecting = asyncio.create_task(attempt(server.sockets[0].getsockname()[1]))
        await arrived.wait()
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        async with asyncio.timeout(20):
            await gone.wait()


def chunk(first: int, text: str) -> Chunk:
    return Chunk(0, first, first, text, tuple(range(first, first + len(text))))


async def test_chunks_coalesce_only_while_they_wait(broker: EmbeddedBroker, topics: Topics):
    reply = Reply(topics, "a", "j")
    async with device(address(broker), f"{topics.prefix}/#") as this:
        outbox = Outbox(topics)
        outbox.put("result", Message(f"{topics.prefix}/first", b"", qos=1))
        sending = asyncio.create_task(outbox.send(this._connection))
        assert (await this.next()).topic.endswith("/first")
        for first, text in ((0, "a"), (1, "bc"), (3, "d")):
            outbox.put_chunk(reply, chunk(first, text), "j")
        outbox.put_chunk(reply, chunk(9, "gap"), "j")
        outbox.put_chunk(reply, chunk(12, "x" * MAX_COALESCED_TOKENS), "j")
        await outbox.flushed()
        outbox.put_chunk(reply, chunk(4, "e"), "j")
        bodies = [json.loads((await this.next()).payload) for _ in range(4)]
        sending.cancel()
        await asyncio.wait([sending])
    assert [(body["first_token"], body["text"][:4]) for body in bodies] == [
        (0, "abcd"),
        (9, "gap"),
        (12, "xxxx"),
        (4, "e"),
    ]
    assert bodies[0]["token_ids"] == [0, 1, 2, 3]


async def test_the_newest_of_a_key_is_sent_in_the_place_of_the_oldest(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), f"{topics.prefix}/#") as this:
        outbox = Outbox(topics)
        for payload in (b"1", b"2", b"3"):
            outbox.put("status", Message(f"{topics.prefix}/status", payload, qos=1), key="status")
            outbox.put("result", Message(f"{topics.prefix}/result", payload, qos=1))
        assert len(outbox) == 4
        sending = asyncio.create_task(outbox.send(this._connection))
        heard = [(await this.next()).payload for _ in range(4)]
        sending.cancel()
        await asyncio.wait([sending])
    assert heard == [b"3", b"1", b"2", b"3"]


async def test_order_is_kept_for_more_than_may_be_on_their_way(broker: EmbeddedBroker, topics: Topics):
    async with device(address(broker), f"{topics.prefix}/#") as this:
        outbox = Outbox(topics, room=50)
        for number in range(100):
            outbox.put("result", Message(f"{topics.prefix}/x", str(number).encode(), qos=1))
        waiting = asyncio.create_task(outbox.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        sending = asyncio.create_task(outbox.send(this._connection))
        await waiting
        assert len(outbox) < 50
        heard = [int((await this.next()).payload) for _ in range(100)]
        await outbox.flushed()
        sending.cancel()
        await asyncio.wait([sending])
    assert heard == list(range(100))


async def test_one_that_cannot_be_sent_does_not_hold_up_the_rest(
    broker: EmbeddedBroker, topics: Topics, caplog: pytest.LogCaptureFixture
):
    async with device(address(broker), f"{topics.prefix}/#") as this:
        counts = Counts()
        outbox = Outbox(topics, counts)
        outbox.put("result", Message(f"{topics.prefix}/+", b"", qos=1))
        outbox.put("result", Message(f"{topics.prefix}/good", b"", qos=1))
        sending = asyncio.create_task(outbox.send(this._connection))
        assert (await this.next()).topic.endswith("/good")
        letter = await this.body("/dead")
        await outbox.flushed()
        sending.cancel()
        await asyncio.wait([sending])
    assert "message not sent kind=result" in caplog.text
    assert (letter["code"], letter["topic"]) == ("invalid", f"{topics.prefix}/+")
    assert counts.messages == [("out", "result"), ("out", "dead")]
