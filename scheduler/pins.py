"""Prompts that stay computed, each in a row of its own."""

from typing import TYPE_CHECKING

from drumline.cache_pool.pool import CachePool
from drumline.cache_pool.prefix import BLOCK
from drumline.model.errors import InvalidRequest
from drumline.scheduler.live_rows import LiveRows
from drumline.scheduler.request import Request

if TYPE_CHECKING:
    from drumline.scheduler.scheduler import Scheduler

_ONLY_PROMPT = {
    "max_tokens": 1, "min_tokens": 0, "n": 1, "stop": (), "structured": None, "overflow": "stop", "processors": (),
    "prompt_logprobs": None, "logprobs": None,
}  # fmt: skip
"""What else a request asks for is of no concern to a pin."""


class Pin:
    """A prompt that stays computed, in a row of its own, until `release`, or until the engine starts anew."""

    def __init__(self, rows: LiveRows, pool: CachePool) -> None:
        self._rows, self._pool = rows, pool
        self.row: int | None = None
        """Where the prompt stays, once it is computed. Pins of one prompt share a row."""
        rows.pins.add(self)

    def hold(self, row: int, length: int) -> None:
        """The prompt was computed in this row."""
        if self not in self._rows.pins:
            return
        ids = self._pool.ids(row)[:length]
        held = (pin.row for pin in self._rows.pins if pin.row is not None)
        self.row = next((other for other in held if self._pool.ids(other) == ids), None)
        if self.row is None:
            self._pool.pin(row, length)
            self.row = row

    def release(self) -> None:
        """Give the row back. Twice is harmless."""
        if self in self._rows.pins:
            self._rows.pins.remove(self)
            if self.row is not None and all(pin.row != self.row for pin in self._rows.pins):
                self._pool.unpin(self.row)


async def pin_prompt(scheduler: "Scheduler", rows: LiveRows, pool: CachePool, request: Request) -> Pin:
    """`Scheduler.pin`."""
    if not scheduler.config.reuse:
        raise InvalidRequest("reuse", "is off: a pinned prompt would be of no use")
    pinned = {pin if pin.row is None else pin.row for pin in rows.pins}
    if len(pinned) + 2 > pool.rows:
        raise InvalidRequest("rows", f"{pool.rows} leave none beside those that are pinned")
    if isinstance(request, Request):
        request = request.model_copy(update=_ONLY_PROMPT)
    pin = Pin(rows, pool)  # before anything is waited for: others count it
    try:
        job = await scheduler.submit(request)
        try:
            if job.sequences[0].prompt_length < BLOCK:
                raise InvalidRequest("prompt", f"has fewer than {BLOCK} tokens: so short ones are not reused")
            job.pin = pin
            (await job.result()).raise_for_status()
        except BaseException:
            job.cancel()
            raise
    except BaseException:
        pin.release()
        raise
    return pin
