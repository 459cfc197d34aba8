import asyncio

import pytest

from drumline.scheduler.deliver import ChunkStream
from drumline.scheduler.request import Chunk, TokenLogprob


def chunk(choice: int, first: int, text: str, *, offset: int = 0, logprobs: bool = False) -> Chunk:
    ids = tuple(range(first, first + max(1, len(text))))
    values = tuple(TokenLogprob(token_id, -1.0, ()) for token_id in ids) if logprobs else None
    return Chunk(choice, first, offset, text, ids, values)


async def collect(stream: ChunkStream) -> list[Chunk]:
    return [each async for each in stream.read()]


async def test_chunks_come_as_they_were_put_while_the_reader_keeps_up():
    stream, seen = ChunkStream(), []
    reading = stream.read()
    for first, text in ((0, "ab"), (2, "c")):
        stream.put(chunk(0, first, text))
        seen.append(await anext(reading))
    stream.close()
    assert [(each.first_token, each.text) for each in seen] == [(0, "ab"), (2, "c")]
    with pytest.raises(StopAsyncIteration):
        await anext(reading)


async def test_slow_reader_gets_one_joined_chunk_a_choice():
    stream = ChunkStream()
    stream.put(chunk(0, 0, "ab", logprobs=True))
    stream.put(chunk(1, 0, "xy"))
    stream.put(chunk(0, 2, "c", offset=2, logprobs=True))
    stream.put(chunk(1, 2, "z", offset=2))
    stream.close()
    first, second = await collect(stream)
    assert first == chunk(0, 0, "abc", logprobs=True)
    assert second == chunk(1, 0, "xyz")


async def test_reader_waits_and_wakes():
    stream = ChunkStream()
    reader = asyncio.ensure_future(collect(stream))
    await asyncio.sleep(0)
    assert not reader.done()
    stream.put(chunk(0, 0, "a"))
    await asyncio.sleep(0)
    stream.close()
    assert [each.text for each in await reader] == ["a"]


async def test_what_is_pending_at_close_is_still_read():
    stream = ChunkStream()
    stream.put(chunk(0, 0, "last"))
    stream.close()
    assert [each.text for each in await collect(stream)] == ["last"]
