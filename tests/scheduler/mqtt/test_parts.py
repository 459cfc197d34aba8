"""Terminal messages in parts: none too long, nothing missing, whatever comes twice or in another order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline import EngineFailed
from drumline.scheduler.mqtt.parts import Joined, PartMessage, read_part, split

texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=300)


def whole(text: str) -> PartMessage:
    return PartMessage(job_id="j", offset=0, total=len(text), body=text)


@settings(deadline=None, max_examples=200)
@given(text=texts, limit=st.integers(120, 400), seed=st.integers(0, 99))
def test_parts_fit_and_join_in_any_order(text: str, limit: int, seed: int):
    parts = split(whole(text), limit)
    assert all(len(part.encode()) <= limit for part in parts)
    again = [piece for part in parts for piece in split(part, limit - 30)]  # cut in other places after a loss
    messages = [part.encode() for part in (*parts, *again, *parts)]
    random.Random(seed).shuffle(messages)
    joined = Joined()
    said = [joined.add(read_part(message)) for message in messages]
    assert said[-1] == text.encode()
    assert {answer for answer in said if answer is not None} == {text.encode()}


@settings(deadline=None, max_examples=50)
@given(text=texts)
def test_nothing_is_said_while_a_part_is_missing(text: str):
    parts = split(whole(text), 100)
    for missing in range(len(parts)):
        joined = Joined()
        assert {joined.add(part) for place, part in enumerate(parts) if place != missing} <= {None}


def test_a_limit_that_is_too_small_leaves_one_character_each():
    assert [part.body for part in split(whole("añ\n"), 1)] == ["a", "ñ", "\n"]


def test_what_is_no_part():
    assert read_part(b'{"job_id":"j","status":"completed"}') is None
    assert read_part(b"[1]") is None
    assert read_part(b"\xff") is None
    with pytest.raises(EngineFailed):
        read_part(b'{"job_id":"j","offset":"x"}')
