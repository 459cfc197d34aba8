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
        self._row: int | None = None
        rows.pins.add(self)

    def hold(self, row: int, length: int) -> None:
        """The prompt was computed in this row."""
        if self in self._rows.pins:
            self._pool.pin(row, length)
            self._row = row

    def release(self) -> None:
        """Give the row back. Twice is harmless."""
        if self in self._rows.pins:
            self._rows.pins.remove(self)
            if self._row is not None:
                self._pool.unpin(self._row)


async def pin_prompt(scheduler: "Scheduler", rows: LiveRows, pool: CachePool, request: Request) -> Pin:
    """`Scheduler.pin`."""
    if not scheduler.config.reuse:
        raise InvalidRequest("reuse", "is off: a pinned prompt would be of no use")
    if len(rows.pins) + 2 > pool.rows:
        raise InvalidRequest("rows", f"{pool.rows} leave none beside those that are pinned")
    if isinstance(request, Request):
        request = request.model_copy(update=_ONLY_PROMPT)
    job = await scheduler.submit(request)
    if job.sequences[0].prompt_length < BLOCK:
        job.cancel()
        raise InvalidRequest("prompt", f"has fewer than {BLOCK} tokens: so short ones are not reused")
    job.pin = Pin(rows, pool)
    try:
        (await job.result()).raise_for_status()
    except BaseException:
        job.cancel()
        job.pin.release()
        raise
    return job.pin
