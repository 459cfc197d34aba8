"""Time as the MQTT edge sees it, injected."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Clocks:
    """Seconds of this process, Unix seconds, and a way to wait."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
