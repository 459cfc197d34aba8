"""Whether the event loop and the engine move: noted by them, judged from other threads by who asks for their health."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pulse:
    """When the loop beat last, and since when a step runs. Its parts are single values: reading them needs no lock.

    A step, or a gap between two beats of the event loop, that takes longer than `stall_s` counts as hanging.
    """

    def __init__(self, clock: Callable[[], float], stall_s: float) -> None:
        self._clock, self._stall_s = clock, stall_s
        self._beat_at: float | None = None
        self._step_since: float | None = None

    def beat(self) -> None:
        """The event loop is alive."""
        self._beat_at = self._clock()

    def stop(self) -> None:
        """The loop will not beat any more, as planned."""
        self._beat_at = None

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A step runs in this block."""
        self._step_since = self._clock()
        try:
            yield
        finally:
            self._step_since = None

    def troubles(self) -> list[str]:
        """What hangs, in words; empty where nothing does."""
        now, beat_at, step_since = self._clock(), self._beat_at, self._step_since
        troubles = []
        if beat_at is not None and now - beat_at > self._stall_s:
            troubles.append(f"the event loop has not moved for {now - beat_at:.0f} s")
        if step_since is not None and now - step_since > self._stall_s:
            troubles.append(f"a step has been running for {now - step_since:.0f} s")
        return troubles
