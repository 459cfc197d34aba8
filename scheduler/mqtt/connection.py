"""The one place that knows aiomqtt (asyncio-mqtt under its present name) and paho: connections and messages.

A connection is one attempt: a new aiomqtt client each time, because a client whose connecting was cancelled cannot be
used again. `reconnect.keep_connected` makes the next attempt.
"""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

import aiomqtt
from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY, MQTTMessageInfo
from paho.mqtt.enums import LogLevel
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from drumline.model.errors import DrumlineError, InvalidRequest
from drumline.scheduler.log import Event
from drumline.scheduler.mqtt.address import BrokerAddress

logger = logging.getLogger("drumline.mqtt")

ProtocolLevel = Literal[4, 5]
"""The protocol level on the wire: 4 is MQTT 3.1.1, 5 is MQTT 5."""

MAX_UNCONFIRMED = 10
"""QoS 1 publishes on their way at once: below paho's own limit of 20, above which it would reorder QoS 0 past QoS 1."""
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
ABANDON_TIMEOUT_S = 0.2
"""For a connection that never stood: nobody will answer, and the socket is closed at once."""
NO_RETAINED = SubscribeOptions.RETAIN_DO_NOT_SEND
FAILURE_CODES = 0x80


class BrokerError(DrumlineError):
    """The broker cannot be reached, refused us, or went away."""


class PublishRefused(DrumlineError):
    """The broker acknowledged a message and does not pass it on (not authorised, over a quota); MQTT 5 alone tells."""


@dataclass(frozen=True)
class Message:
    """One message, coming or going. MQTT 3.1.1 carries only the first four fields."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: tuple[tuple[str, str], ...] = ()
    message_expiry_s: int | None = None
    packet_id: int | None = field(default=None, compare=False)
    """Of a received QoS 1 message, for its acknowledgement."""

    @property
    def uses_v5(self) -> bool:
        """Whether it has anything that only MQTT 5 carries."""
        given = (self.response_topic, self.correlation_data, self.message_expiry_s)
        return bool(self.user_properties) or any(value is not None for value in given)

    @property
    def size_bytes(self) -> int:
        """What it takes on the wire, but for a few bytes of headers."""
        texts = [self.topic, self.response_topic or "", *(text for pair in self.user_properties for text in pair)]
        return len(self.payload) + len(self.correlation_data or b"") + sum(len(text.encode()) for text in texts)


@dataclass(frozen=True)
class ConnectOptions:
    """How to connect. With `session_expiry_s` > 0 the broker keeps our subscriptions and messages while we are away.

    With `receive_maximum` the broker sends at most so many messages at QoS 1 ahead of their acknowledgement, which is
    then ours to send (`Connection.acknowledge`).
    """

    address: BrokerAddress
    client_id: str
    protocol: ProtocolLevel = 5
    will: Message | None = None
    keepalive_s: int = 30
    session_expiry_s: int = 0
    receive_maximum: int | None = None


class Connection:
    """A live connection; every method raises `BrokerError` once it is lost.

    `subscribed_at` is when it became of use, on the given clock; None until the first subscription stands.
    """

    def __init__(self, client: aiomqtt.Client, options: ConnectOptions, clock: Callable[[], float]) -> None:
        self.subscribed_at: float | None = None
        self._client = client
        self._protocol = options.protocol
        self._acknowledges = options.receive_maximum is not None
        self._clock = clock
        self._refusals = _Refusals(client)
        self._unconfirmed = asyncio.Semaphore(MAX_UNCONFIRMED)
        self._unacknowledged: dict[int, bool] = {}  # whether we are done with them, as they came

    async def subscribe(self, *filters: str, retained: bool = False) -> None:
        """Subscribe at QoS 1. Without `retained`, an MQTT 5 broker is asked not to send retained messages at all."""
        topics: list[tuple[str, int]] | list[tuple[str, SubscribeOptions]]
        if self._protocol == 5:
            handling = SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE if retained else NO_RETAINED
            topics = [(name, SubscribeOptions(qos=1, retainHandling=handling)) for name in filters]
        else:
            topics = [(name, 1) for name in filters]
        with _typed_errors("filter"), _cancellation_kept():
            codes = await self._client.subscribe(topics, timeout=ANSWER_TIMEOUT_S)
        for name, code in zip(filters, codes, strict=True):
            value = code.value if isinstance(code, ReasonCode) else code
            if isinstance(value, int) and value >= FAILURE_CODES:
                raise BrokerError(f"the broker refuses a subscription to {name}: {code}")
        if self.subscribed_at is None:
            self.subscribed_at = self._clock()

    async def unsubscribe(self, *filters: str) -> None:
        """The broker keeps nothing for us any more that matches these."""
        with _typed_errors("filter"), _cancellation_kept():
            await self._client.unsubscribe(list(filters), timeout=ANSWER_TIMEOUT_S)

    def acknowledge(self, message: Message) -> None:
        """Tell the broker that it need not send this message again, once all before it were acknowledged: MQTT wants
        them in order. On a lost connection nothing happens, and it will.

        Private: paho's `ack`, behind aiomqtt. (A test pins it.)
        """
        if message.packet_id is not None:
            self._done(message.packet_id)

    def _done(self, packet_id: int) -> None:
        if packet_id in self._unacknowledged:
            self._unacknowledged[packet_id] = True
        for packet_id in list(takewhile(self._unacknowledged.__getitem__, self._unacknowledged)):
            del self._unacknowledged[packet_id]
            with suppress(OSError, RuntimeError, ValueError):  # what event loops say of a socket that has gone
                self._client._client.ack(packet_id, 1)

    async def publish(self, message: Message) -> None:
        """Hand over one message: QoS 0 returns when it was written to the socket, QoS 1 when the broker confirmed it.

        Raises `InvalidRequest("message")` for one that MQTT cannot carry and `PublishRefused` for one that the broker
        does not pass on; the connection is none the worse for it.
        """
        async with self._unconfirmed:
            with self._refusals.raised(message.topic):
                await self._publish(message)

    async def _publish(self, message: Message) -> None:
        with _typed_errors("message"), _cancellation_kept():
            await self._client.publish(
                message.topic,
                message.payload,
                qos=message.qos,
                retain=message.retain,
                properties=_properties(message) if self._protocol == 5 else None,
                timeout=ANSWER_TIMEOUT_S,
            )

    async def messages(self) -> AsyncIterator[Message]:
        """Messages as they come, without an end; to be read by one task for as long as the connection lives."""
        with _typed_errors("message"):
            async for message in self._client.messages:
                received: Message | None
                try:
                    received = _received(message)
                except ValueError:
                    logger.exception(Event("message ignored", error="it cannot be decoded"))
                    received = None
                if message.qos == 1 and self._acknowledges:
                    self._unacknowledged[message.mid] = False
                if received is not None:
                    yield received
                else:
                    self._done(message.mid)


class _Refusals:
    """Tells which publish a broker refused: aiomqtt takes every acknowledgement for a success.

    Private: `publish` and `on_publish` of aiomqtt's paho client are wrapped. (A test pins both.)
    """

    def __init__(self, client: aiomqtt.Client) -> None:
        paho = client._client
        self._publish = paho.publish
        self._on_publish: Callable[..., None] | None = paho.on_publish
        self._number: ContextVar[int | None] = ContextVar("number", default=None)
        self._reasons: dict[int, ReasonCode] = {}
        paho.publish = self._note_number  # type: ignore[method-assign]
        paho.on_publish = self._note_reason

    @contextmanager
    def raised(self, topic: str) -> Iterator[None]:
        """Raise `PublishRefused` if the one publish in this block was refused."""
        self._number.set(None)
        try:
            yield
            reason = self._reasons.get(self._number.get() or 0)
        finally:
            self._reasons.pop(self._number.get() or 0, None)
        if reason is not None:
            raise PublishRefused(f"the broker refuses a message to {topic}: {reason}")

    def _note_number(self, *args: Any, **kwargs: Any) -> MQTTMessageInfo:
        """Called in the task that publishes, so that its number is kept with the task."""
        info = self._publish(*args, **kwargs)
        self._number.set(info.mid)
        return info

    def _note_reason(self, client: Any, userdata: Any, number: int, reason: ReasonCode, properties: Any) -> None:
        if reason.value >= FAILURE_CODES:
            self._reasons[number] = reason
        if self._on_publish is not None:
            self._on_publish(client, userdata, number, reason, properties)


@contextmanager
def _typed_errors(field: str) -> Iterator[None]:
    """Turn what aiomqtt and paho raise into our own errors; `field` is what a `ValueError` of theirs is about."""
    try:
        yield
    except (aiomqtt.MqttError, OSError) as error:
        raise BrokerError(str(error) or type(error).__name__) from error
    except ValueError as error:
        raise InvalidRequest(field, str(error)) from error


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raise a cancellation that came together with the broker's answer: `wait_for` of Python 3.11 swallows it."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


@asynccontextmanager
async def connect(options: ConnectOptions, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Connection]:
    """Connect, yield the connection, disconnect; a connection that is left open by an error is closed all the same."""
    try:
        client = _client(options)
    except InvalidRequest as error:  # files may come back, as a broker may
        raise BrokerError(f"cannot connect to {options.address.host}:{options.address.port}: {error}") from error
    await _enter(client, options.address)
    try:
        yield Connection(client, options, clock)
    finally:
        await _leave(client, CLOSE_TIMEOUT_S)


def _client(options: ConnectOptions) -> aiomqtt.Client:
    persistent = options.session_expiry_s > 0
    will = options.will
    properties = None
    if options.protocol == 5:
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        if persistent:
            properties.SessionExpiryInterval = options.session_expiry_s
        if options.receive_maximum is not None:
            properties.ReceiveMaximum = options.receive_maximum
    client = aiomqtt.Client(
        hostname=options.address.host,
        port=options.address.port,
        username=options.address.username,
        password=options.address.password,
        tls_context=None if options.address.tls is None else options.address.tls.context(),
        identifier=options.client_id,
        protocol=aiomqtt.ProtocolVersion.V5 if options.protocol == 5 else aiomqtt.ProtocolVersion.V311,
        will=None if will is None else aiomqtt.Will(will.topic, will.payload, will.qos, will.retain),
        clean_session=None if options.protocol == 5 else not persistent,
        clean_start=not persistent if options.protocol == 5 else MQTT_CLEAN_START_FIRST_ONLY,
        properties=properties,
        timeout=CONNECT_TIMEOUT_S,
        keepalive=options.keepalive_s,
        logger=logger.getChild("aiomqtt"),
        # Without it a small message waits for the acknowledgement of the one before: tokens stall by 40 ms.
        socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
    )
    client.pending_calls_threshold = MAX_UNCONFIRMED + 2
    client._client.manual_ack_set(options.receive_maximum is not None)
    _tell_early_end(client, encrypted=options.address.tls is not None)
    return client


def _tell_early_end(client: aiomqtt.Client, encrypted: bool) -> None:
    """End the connecting when the broker hangs up instead of answering: aiomqtt would wait for its timeout, and not say
    why. In TLS 1.3 a broker that does not like our certificate does that.

    Private: `_connected` is what aiomqtt waits for. (A test shows that it is told.)
    """
    paho, loop = client._client, asyncio.get_running_loop()
    on_disconnect = paho.on_disconnect
    reasons = [] if encrypted else ["if that port speaks TLS, use mqtts://"]

    def note(paho: Any, userdata: Any, level: int, text: str) -> None:
        if level == LogLevel.MQTT_LOG_ERR:
            reasons.append(text)

    def end() -> None:
        if not client._connected.done():
            told = f" ({'; '.join(reasons[-2:])})" if reasons else ""
            client._connected.set_exception(aiomqtt.MqttError(f"the broker hung up without an answer{told}"))
            client._connected.exception()  # nobody may be waiting any more

    def disconnected(*arguments: Any) -> None:
        loop.call_soon_threadsafe(end)
        if on_disconnect is not None:
            on_disconnect(*arguments)

    paho.on_log = note
    paho.on_disconnect = disconnected


async def _enter(client: aiomqtt.Client, address: BrokerAddress) -> None:
    """Connect, and leave nothing behind when that fails or is cancelled: a thread may still be opening the socket."""
    entering = asyncio.ensure_future(client.__aenter__())
    try:
        await asyncio.shield(entering)
    except (aiomqtt.MqttError, ValueError) as error:
        await _leave(client, ABANDON_TIMEOUT_S)
        raise BrokerError(f"cannot connect to {address.host}:{address.port}: {error}") from error
    except asyncio.CancelledError:
        # Cancelling aiomqtt here would let its thread open a socket that nobody owns.
        await asyncio.wait([entering])
        await _leave(client, ABANDON_TIMEOUT_S if entering.exception() else CLOSE_TIMEOUT_S)
        raise


async def _leave(client: aiomqtt.Client, timeout_s: float) -> None:
    """Disconnect. That a dead connection cannot be closed politely is no news: what broke it has been reported."""
    with suppress(aiomqtt.MqttError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await client.__aexit__(None, None, None)
    # Private: nobody may have been reading when the connection was lost, and asyncio would complain of the
    # exception that nobody saw. (A test pins the attribute.)
    lost = client._disconnected
    if lost.done() and not lost.cancelled():
        lost.exception()


def _properties(message: Message) -> Properties:
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    if message.response_topic is not None:
        properties.ResponseTopic = message.response_topic
    if message.correlation_data is not None:
        properties.CorrelationData = message.correlation_data
    if message.user_properties:
        properties.UserProperty = list(message.user_properties)
    if message.message_expiry_s is not None:
        properties.MessageExpiryInterval = message.message_expiry_s
    return properties


def _received(message: aiomqtt.Message) -> Message:
    properties = message.properties
    return Message(
        topic=message.topic.value,
        payload=message.payload,
        qos=message.qos,
        retain=message.retain,
        response_topic=getattr(properties, "ResponseTopic", None),
        correlation_data=getattr(properties, "CorrelationData", None),
        user_properties=tuple((str(key), str(value)) for key, value in getattr(properties, "UserProperty", ())),
        message_expiry_s=getattr(properties, "MessageExpiryInterval", None),
        packet_id=message.mid,
    )
