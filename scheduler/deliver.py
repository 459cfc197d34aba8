"""From the step to the reader: a job's chunks wait here, one pending chunk a choice, so a slow reader costs no more
memory than its answer and never holds up a step."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

from drumline.scheduler.request import Chunk


class ChunkStream:
    """One writer (the scheduler), at most one reader."""

    def __init__(self) -> None:
        self._pending: dict[int, Chunk] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, chunk: Chunk) -> None:
        """Add a chunk; it is joined to the choice's pending one when that has not been read yet."""
        waiting = self._pending.get(chunk.choice)
        self._pending[chunk.choice] = chunk if waiting is None else _joined(waiting, chunk)
        self._changed.set()

    def close(self) -> None:
        """No chunk follows."""
        self._closed = True
        self._changed.set()

    async def read(self) -> AsyncIterator[Chunk]:
        """Chunks until the stream is closed and empty."""
        while True:
            while self._pending:
                yield self._pending.pop(next(iter(self._pending)))
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


def _joined(first: Chunk, second: Chunk) -> Chunk:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    return replace(
        first,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
    )
