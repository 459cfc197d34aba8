"""The device's side of MQTT: `Client`, the `RemoteJob` that it returns, and where a broker is."""

from drumline.scheduler.mqtt.address import BrokerAddress, Tls, parse_broker_url, with_credentials
from drumline.scheduler.mqtt.client import Client, RemoteJob
from drumline.scheduler.mqtt.connection import BrokerError
from drumline.scheduler.mqtt.quotas import QuotaExceeded

__all__ = [
    "BrokerAddress",
    "BrokerError",
    "Client",
    "QuotaExceeded",
    "RemoteJob",
    "Tls",
    "parse_broker_url",
    "with_credentials",
]
