import asyncio

import pytest
from prometheus_client import CollectorRegistry

from drumline.metrics.instruments import Instruments
from drumline.metrics.loop_lag import watch_loop_lag


async def test_loop_lag_is_what_a_sleep_overran() -> None:
    now = 100.0
    overruns = iter([0.0, 0.25, -0.125, 3.0])
    slept: list[float] = []
    lags: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        late = next(overruns, None)
        if late is None:
            raise asyncio.CancelledError
        slept.append(seconds)
        now += seconds + late

    with pytest.raises(asyncio.CancelledError):
        await watch_loop_lag(lags.append, 0.5, clock=lambda: now, sleep=sleep)
    assert slept == [0.5] * 4
    assert lags == [0.0, 0.25, 0.0, 3.0]


async def test_loop_lag_sees_a_real_loop() -> None:
    registry = CollectorRegistry()
    instruments = Instruments(registry, "main")
    seen = asyncio.Event()

    def observe(seconds: float) -> None:
        instruments.loop_lag(seconds)
        seen.set()

    task = asyncio.create_task(watch_loop_lag(observe, 0.001))
    await asyncio.wait_for(seen.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    count = registry.get_sample_value("drumline_event_loop_lag_seconds_count", {"scheduler": "main"})
    assert count is not None
    assert count >= 1
