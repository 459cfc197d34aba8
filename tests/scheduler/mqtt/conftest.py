import os
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
import pytest_asyncio
import torch

from drumline.scheduler.mqtt.broker import BrokerNotFound, EmbeddedBroker
from drumline.scheduler.mqtt.topics import Topics


@pytest.fixture(autouse=True)
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def embedded(kind: str) -> EmbeddedBroker:
    """iotcore comes with the test dependencies; mosquitto is a system package, which CI must have and others may."""
    try:
        return EmbeddedBroker(prefer=kind)
    except BrokerNotFound as error:
        if kind == "iotcore" or os.environ.get("DRUMLINE_REQUIRE_EXTERNAL") == "1":
            raise
        pytest.skip(str(error))


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["iotcore", "mosquitto"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[EmbeddedBroker]:
    async with embedded(request.param) as running:
        yield running


@pytest.fixture
def topics() -> Topics:
    """A prefix of the test's own, so that tests can share a broker."""
    return Topics(f"test/{uuid4().hex}")
