"""From the step to the reader: a job's chunks wait here, and those of a choice leave joined.

A slow reader costs no more memory than its answer, and never holds up a step.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import chain

from drumline.scheduler.request import Chunk


class ChunkStream:
    """One writer (the scheduler), at most one reader."""

    def __init__(self) -> None:
        self._pending: dict[int, list[Chunk]] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, chunk: Chunk) -> None:
        """Add a chunk; the reader gets it joined with those of its choice that it has not read yet."""
        self._pending.setdefault(chunk.choice, []).append(chunk)
        self._changed.set()

    def close(self) -> None:
        """No chunk follows."""
        self._closed = True
        self._changed.set()

    async def read(self) -> AsyncIterator[Chunk]:
        """Chunks until the stream is closed and empty."""
        while True:
            while self._pending:
                yield _joined(self._pending.pop(next(iter(self._pending))))
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    return replace(
        chunks[0],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(chain.from_iterable(logprobs)) if len(logprobs) == len(chunks) else None,
    )
