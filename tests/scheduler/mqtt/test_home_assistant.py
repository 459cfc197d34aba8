"""Discovery by Home Assistant: keys and values that it documents, and templates over a real status message.

https://www.home-assistant.io/integrations/mqtt/ (device discovery payload, supported device and origin options) and
the pages of sensor.mqtt and binary_sensor.mqtt, as of 2026.
"""

import json
import time
from typing import Any

import jinja2
import pytest

from drumline.scheduler.mqtt.broker import EmbeddedBroker
from drumline.scheduler.mqtt.codec import WorkerStatus
from drumline.scheduler.mqtt.gateway import GatewayOptions
from drumline.scheduler.mqtt.home_assistant import discovery
from drumline.scheduler.mqtt.rate import Rate
from drumline.scheduler.mqtt.topics import Topics
from tests.scheduler.mqtt.support import BODY, address, device, serving

ROOT_KEYS = {
    "device", "origin", "components", "state_topic", "command_topic", "qos", "encoding", "availability",
    "availability_mode", "availability_topic", "availability_template", "payload_available", "payload_not_available",
}  # fmt: skip
DEVICE_KEYS = {
    "configuration_url", "connections", "hw_version", "identifiers", "manufacturer", "model", "model_id", "name",
    "serial_number", "suggested_area", "sw_version", "via_device",
}  # fmt: skip
ORIGIN_KEYS = {"name", "sw_version", "support_url"}
ENTITY_KEYS = {
    "platform", "availability", "availability_mode", "availability_template", "availability_topic", "default_entity_id",
    "device_class", "enabled_by_default", "encoding", "entity_category", "entity_picture", "expire_after",
    "force_update", "icon", "json_attributes_template", "json_attributes_topic", "name", "payload_available",
    "payload_not_available", "qos", "state_topic", "unique_id", "value_template",
}  # fmt: skip
PLATFORM_KEYS = {
    "sensor": ENTITY_KEYS
    | {"last_reset_value_template", "options", "state_class", "suggested_display_precision", "unit_of_measurement"},
    "binary_sensor": ENTITY_KEYS | {"off_delay", "payload_on", "payload_off"},
}
AVAILABILITY_KEYS = {"topic", "payload_available", "payload_not_available", "value_template"}

STATUS = WorkerStatus(
    worker="line-1", status="online", queue_depth=3, rows_live=2, rows=4, model="m", version="1", started_at=1.5,
    tokens_per_s=12.5,
)  # fmt: skip
SAYS = {"status": "online", "online": "ON", "queue_depth": "3", "rows_live": "2", "tokens_per_s": "12.5"}


def announced(topics: Topics | None = None) -> dict[str, Any]:
    return json.loads(discovery("homeassistant", topics or Topics(), "line-1", "m", "1").payload)


def render(template: str, status: WorkerStatus) -> str:
    """As Home Assistant does, which gives a template the payload as `value` and `value_json`."""
    payload = status.encode().decode()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    return environment.from_string(template).render(value=payload, value_json=json.loads(payload))


def test_where_it_is_announced():
    message = discovery("homeassistant", Topics(), "line-1", "m", "1")
    assert message.topic == "homeassistant/device/drumline_v1_line-1/config"
    assert (message.qos, message.retain, message.uses_v5) == (1, True, False)


def test_only_documented_keys():
    payload = announced()
    assert payload.keys() <= ROOT_KEYS
    assert payload["device"].keys() <= DEVICE_KEYS
    assert payload["origin"].keys() <= ORIGIN_KEYS
    for component in payload["components"].values():
        assert component.keys() <= PLATFORM_KEYS[component["platform"]]
        for availability in component.get("availability", ()):
            assert availability.keys() <= AVAILABILITY_KEYS


def test_what_is_required_is_there():
    payload = announced()
    assert {"device", "origin", "components"} <= payload.keys()
    assert payload["device"]["identifiers"] == ["drumline_v1_line-1"]
    assert payload["origin"]["name"] == "drumline"
    assert payload["state_topic"] == "drumline/v1/workers/line-1/status"
    components = payload["components"]
    assert list(components) == list(SAYS)
    assert components["queue_depth"] == {
        "platform": "sensor",
        "name": "Queue depth",
        "icon": "mdi:tray-full",
        "state_class": "measurement",
        "unit_of_measurement": "jobs",
        "value_template": "{{ value_json.queue_depth }}",
        "availability": [
            {
                "topic": "drumline/v1/workers/line-1/status",
                "value_template": "{{ 'offline' if value_json.status == 'offline' else 'online' }}",
            }
        ],
        "unique_id": "drumline_v1_line-1_queue_depth",
        "default_entity_id": "sensor.drumline_v1_line_1_queue_depth",
    }
    assert components["online"]["device_class"] == "connectivity"
    assert components["status"]["options"] == ["online", "draining", "offline"]
    for component in components.values():  # an enum has no state class and no unit, or Home Assistant refuses it
        assert ("state_class" in component) == (component.get("device_class") is None)


def test_ids_are_of_one_worker_alone():
    ids = [
        component["unique_id"]
        for topics in (Topics(), Topics("other/v1"))
        for component in announced(topics)["components"].values()
    ]
    assert len(set(ids)) == len(ids) == 10


def test_templates_read_the_status():
    for key, component in announced()["components"].items():
        assert render(component["value_template"], STATUS) == SAYS[key]


@pytest.mark.parametrize(("state", "online"), [("online", "ON"), ("draining", "ON"), ("offline", "OFF")])
def test_who_is_gone_is_offline_and_has_no_numbers(state: str, online: str):
    status = STATUS.model_copy(update={"status": state})
    components = announced()["components"]
    assert render(components["online"]["value_template"], status) == online
    assert render(components["status"]["value_template"], status) == state
    for key in ("queue_depth", "rows_live", "tokens_per_s"):
        [availability] = components[key]["availability"]
        assert render(availability["value_template"], status) == ("offline" if state == "offline" else "online")
    assert not {"availability"} & (components["online"].keys() | components["status"].keys())


async def test_a_worker_announces_itself_and_its_speed(broker: EmbeddedBroker, topics: Topics):
    """Retained, for a Home Assistant that starts later; and the status says how fast tokens come.

    Ten seconds of the worker's clock are one: speed is of two whole seconds.
    """
    options = GatewayOptions(refresh_s=0.02, status_s=0.1, home_assistant=f"{topics.prefix}/ha")
    found = f"{topics.prefix}/ha/device/#"
    async with (
        serving(address(broker), topics, options=options, worker="w", edge_clock=lambda: 10 * time.monotonic()),
        device(address(broker), found, topics.worker_status("w")) as this,
    ):
        message = await this.next(lambda message: "/ha/" in message.topic)
        payload = json.loads(message.payload)
        assert message.retain
        assert payload["state_topic"] == topics.worker_status("w")
        assert (payload["device"]["model"], payload["device"]["sw_version"]) == ("tiny-llama", "test")
        await this.send(topics.submit("a"), BODY | {"id": "j"})
        moving = await this.next(
            lambda message: message.topic == payload["state_topic"] and b'"tokens_per_s":0.0' not in message.payload
        )
        rate = float(
            render(
                payload["components"]["tokens_per_s"]["value_template"],
                WorkerStatus.model_validate_json(moving.payload),
            )
        )
        assert 0 < rate <= BODY["max_tokens"] / 2
        await this.next(lambda message: b'"tokens_per_s":0.0' in message.payload)


async def test_nothing_is_announced_unasked(broker: EmbeddedBroker, topics: Topics):
    async with (
        device(address(broker), "homeassistant/#", topics.worker_status("w")) as this,
        serving(address(broker), topics, worker="w"),
    ):
        await this.body("/status")
    assert [message.topic for message in this.heard] == [topics.worker_status("w")]


def test_a_rate_is_of_a_whole_window():
    rate = Rate(100.0, window_s=2.0)
    assert rate.measure(101.9, 50) == 0.0
    assert rate.measure(102.0, 50) == 25.0
    assert rate.measure(103.0, 90) == 25.0
    assert rate.measure(106.0, 90) == 10.0
    assert rate.measure(110.0, 90) == 0.0
