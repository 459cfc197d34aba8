"""Home Assistant finds the worker by itself: one retained message that describes the worker's status topic.

It is Home Assistant's discovery by device (2024.11 and newer):
https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload. Entities are named by `default_entity_id`,
which took the place of `object_id`.
"""

import json
import re
from typing import Any, get_args

from drumline.scheduler.mqtt.codec import WorkerState
from drumline.scheduler.mqtt.connection import Message
from drumline.scheduler.mqtt.topics import Topics

DEFAULT_DISCOVERY_PREFIX = "homeassistant"
OFFLINE = "value_json.status == 'offline'"

_STATUS: dict[str, Any] = {
    "platform": "sensor",
    "name": "Status",
    "icon": "mdi:robot-outline",
    "device_class": "enum",
    "options": list(get_args(WorkerState)),
    "value_template": "{{ value_json.status }}",
}
_ONLINE: dict[str, Any] = {
    "platform": "binary_sensor",
    "name": "Online",
    "device_class": "connectivity",
    "value_template": f"{{{{ 'OFF' if {OFFLINE} else 'ON' }}}}",
}


def discovery(prefix: str, topics: Topics, worker: str, model: str, version: str) -> Message:
    """The message that announces a worker under Home Assistant's discovery prefix.

    Its id is made of the topic prefix and the worker's name, so that workers of several prefixes can stand side by
    side. An empty retained message on the same topic takes the worker out of Home Assistant.
    """
    status_topic = topics.worker_status(worker)
    identity = re.sub(r"[^A-Za-z0-9_-]", "_", f"{topics.prefix}_{worker}")
    # Status and "online" stay available without the worker: that it is gone is what they say.
    available = {
        "availability": [{"topic": status_topic, "value_template": f"{{{{ 'offline' if {OFFLINE} else 'online' }}}}"}]
    }
    components = {
        "status": _STATUS,
        "online": _ONLINE,
        "queue_depth": _number("queue_depth", "Queue depth", "jobs", "mdi:tray-full") | available,
        "rows_live": _number("rows_live", "Rows live", "rows", "mdi:table-row") | available,
        "tokens_per_s": _number("tokens_per_s", "Tokens per second", "tokens/s", "mdi:speedometer") | available,
    }
    payload = {
        "device": {
            "identifiers": [identity],
            "name": f"drumline {worker}",
            "manufacturer": "drumline",
            "model": model,
            "sw_version": version,
        },
        "origin": {"name": "drumline", "sw_version": version},
        "state_topic": status_topic,
        "qos": 1,
        "components": {key: part | _names(identity, key, part["platform"]) for key, part in components.items()},
    }
    encoded = json.dumps(payload, separators=(",", ":")).encode()
    return Message(f"{prefix}/device/{identity}/config", encoded, qos=1, retain=True)


def _number(field: str, name: str, unit: str, icon: str) -> dict[str, Any]:
    """A number of the status message, kept in Home Assistant's long-term statistics."""
    return {
        "platform": "sensor",
        "name": name,
        "icon": icon,
        "state_class": "measurement",
        "unit_of_measurement": unit,
        "value_template": f"{{{{ value_json.{field} }}}}",
    }


def _names(identity: str, key: str, platform: str) -> dict[str, str]:
    entity = re.sub(r"[^a-z0-9_]", "_", f"{identity}_{key}".lower())
    return {"unique_id": f"{identity}_{key}", "default_entity_id": f"{platform}.{entity}"}
