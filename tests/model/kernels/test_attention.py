"""Attention by each row's own length against float64, over a store that is full of NaN behind every end."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drumline.model.backends.cpu_backend import attention_tasks
from drumline.model.batch import Segment
from drumline.model.kernels.attention import attend, quantise_mixed
from drumline.model.kernels.attention_tiles import QUERIES
from drumline.model.kernels.store import TILE, padded
from tests.model.kernels.judge import assert_codes, bfloat16_bits, from_bfloat16, rotated, same_bits, wider

STORED = (np.float32, np.uint16, np.int8)
KINDS = pytest.mark.parametrize("kind", STORED, ids=["float32", "bfloat16", "int8"])
WIDTHS = (8, 10, 16, 24, 64, 80, 128)


def codes(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x * 40), -127, 127)


class Case:
    """Rows of random keys and values; `spans` are (position, tokens) of each row's segment, in packing order."""

    def __init__(
        self, spans: Sequence[tuple[int, int]], head_dim: int = 16, kv_heads: int = 2, group: int = 2, window: int = 40,
        seed: int = 0,
    ) -> None:  # fmt: skip
        dice = np.random.default_rng(seed)
        self.head_dim, self.kv_heads, self.group, self.window = head_dim, kv_heads, group, window
        self.spans, self.rows = list(spans), dice.permutation(len(spans))
        size = (len(spans), kv_heads, padded(window), head_dim)
        self.keys, self.values = (dice.normal(size=size).astype(np.float32) for _ in range(2))
        self.steps = dice.uniform(0.01, 0.03, (2, *size[:3])).astype(np.float32)
        tokens = sum(length for _, length in spans)
        self.queries = dice.normal(size=(kv_heads, tokens, group, head_dim)).astype(np.float32)
        self.queries *= np.float32(4 / math.sqrt(head_dim))
        self.poison: list[tuple[str, int, int, float]] = []

    def stored(self, kind: type[np.generic]) -> tuple[np.ndarray, ...]:
        """The kernel's arrays, with NaN (of int8: a NaN scale) wherever no row has written."""
        keys, values = self.keys.copy(), self.values.copy()
        if kind == np.int8:
            keys, values = codes(keys), codes(values)
        steps = self.steps.copy()
        for row, (position, length) in zip(self.rows, self.spans, strict=True):
            for array in (keys, values) if kind != np.int8 else steps:
                array[row, :, position + length :] = math.nan
        keys, values, steps[0], steps[1] = (self._poisoned(*pair) for pair in zip(
            ("key", "value", "key_scale", "value_scale"), (keys, values, *steps), strict=True
        ))  # fmt: skip
        kept = {np.float32: lambda x: x, np.uint16: bfloat16_bits, np.int8: lambda x: x.astype(np.int8)}[kind]
        values = kept(wider(values, padded(self.head_dim), 0.0))
        shape = (*keys.shape[:2], padded(self.window) // TILE, TILE, self.head_dim)
        keys = np.ascontiguousarray(np.moveaxis(kept(keys).reshape(shape), -1, -2))
        return keys, values, *(steps if kind == np.int8 else np.zeros((2, 1, 1, 1), np.float32))

    def _poisoned(self, name: str, array: np.ndarray) -> np.ndarray:
        for where, row, position, value in self.poison:
            if where == name:
                array[row, 0, position, ...] = value
        return array

    def run(self, kind: type[np.generic], threads: int = 1) -> np.ndarray:
        """`[kv_heads, tokens, group, head_dim]`."""
        tokens = self.queries.shape[1]
        segments = [
            Segment(int(row), position, [0] * length, True)
            for row, (position, length) in zip(self.rows, self.spans, strict=True)
        ]
        tasks = attention_tasks(segments, self.kv_heads, max(1, QUERIES // self.group))
        order = np.random.default_rng(1).permutation(len(tasks))
        width = padded(self.head_dim)
        scratch = np.full((threads, QUERIES, padded(self.window) + 16), math.nan, np.float32)
        out = np.full((self.kv_heads, tokens + 2, self.group, width), math.nan, np.float32)
        queries = np.zeros_like(out)
        queries[:, :tokens] = wider(self.queries, width, 0.0)
        attend(threads, tasks, order, self.head_dim, queries, *self.stored(kind), kind == np.int8, scratch, out)
        assert np.isnan(out[:, tokens:]).all()
        assert not out[:, :tokens, :, self.head_dim :].any()
        return out[:, :tokens, :, : self.head_dim]

    def wanted(self, kind: type[np.generic]) -> np.ndarray:
        keys, values = self.keys.astype(np.float64), self.values.astype(np.float64)
        if kind == np.uint16:
            keys, values = (from_bfloat16(bfloat16_bits(x)) for x in (keys, values))
        elif kind == np.int8:
            keys, values = (
                codes(x) * step[..., None]
                for x, step in zip((self.keys, self.values), self.steps.astype(np.float64), strict=True)
            )
        out, t = np.empty(self.queries.shape), 0
        for row, (position, length) in zip(self.rows, self.spans, strict=True):
            for seen in range(position + 1, position + length + 1):
                scores = np.einsum("hgd,hkd->hgk", self.queries[:, t].astype(np.float64), keys[row, :, :seen])
                weights = np.exp2(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                out[:, t] = np.einsum("hgk,hkd->hgd", weights, values[row, :, :seen])
                t += 1
        return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    window = draw(st.integers(1, 80))
    spans = []
    for _ in range(draw(st.integers(1, 5))):
        position = draw(st.integers(0, window - 1))
        spans.append((position, draw(st.integers(1, window - position))))
    return Case(
        spans, draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 3)), draw(st.integers(1, 8)), window,
        draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip


@KINDS
@given(case=cases(), threads=st.integers(1, 3))
@example(Case([(0, 1)]), 1)  # a prompt of one token
@example(Case([(0, 40), (39, 1), (0, 33)]), 2)  # full windows
@example(Case([(2047, 1), (0, 2048)], 64, 1, 3, 2048), 2)
@settings(deadline=None, max_examples=50)
def test_against_float64(kind: type[np.generic], case: Case, threads: int):
    largest = np.abs(case.values).max()
    assert np.max(np.abs(case.run(kind, threads) - case.wanted(kind))) < 5e-6 * largest


@KINDS
@given(case=cases(), data=st.data())
@settings(deadline=None, max_examples=40)
def test_bits_depend_on_neither_neighbours_nor_chunks(kind: type[np.generic], case: Case, data: st.DataObject):
    """Each row alone, in another row of another store, cut anywhere."""
    together, t = case.run(kind, threads=2), 0
    for row, (position, length) in zip(case.rows.tolist(), case.spans, strict=True):
        cut = data.draw(st.integers(0, length - 1))
        for start, count in ((0, cut), (cut, length - cut)):
            if count:
                alone = Case([(position + start, count)], case.head_dim, case.kv_heads, case.group, case.window)
                alone.keys, alone.values = case.keys[row : row + 1], case.values[row : row + 1]
                alone.steps = case.steps[:, row : row + 1]
                alone.queries = case.queries[:, t + start : t + start + count]
                assert same_bits(alone.run(kind), together[:, t + start : t + start + count])
        t += length


@KINDS
def test_scores_of_any_size(kind: type[np.generic]):
    """The largest is taken off first, so exponentials neither overflow nor vanish all together."""
    for size in (1e-30, 1e-3, 30.0, 1e4):
        case = Case([(0, 9), (20, 3)])
        case.queries *= np.float32(size)
        assert np.isfinite(case.run(kind)).all()
        if size < 100:
            assert np.max(np.abs(case.run(kind) - case.wanted(kind))) < 2e-4


@KINDS
def test_equal_scores_give_the_mean(kind: type[np.generic]):
    case = Case([(36, 1)])
    case.queries[:] = 0
    assert np.max(np.abs(case.run(kind) - case.wanted(kind))) < 1e-6


POISONS = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize("kind", [np.float32, np.uint16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("place", [0, 15, 16, 20, 22])
@pytest.mark.parametrize("poison", POISONS)
def test_poison_in_the_store_reaches_its_row_alone(kind: type[np.generic], name: str, place: int, poison: float):
    """Of K/V head 0; the other head's and the other rows' numbers keep their bits. An infinite key fills a vector, as
    RoPE would spread it, with both signs, so that some score is NaN."""
    case = Case([(20, 3), (22, 2)])
    clean = case.run(kind)
    case.poison = [(name, int(case.rows[0]), place, poison)]
    poisoned = case.run(kind)
    assert not np.isfinite(poisoned[0, 2]).any()
    assert same_bits(poisoned[1], clean[1])
    assert same_bits(poisoned[:, 3:], clean[:, 3:])
    if place < 20 or name == "key":  # a key above a query's own place is never looked at; a value is, times zero
        unseen = max(0, place - 20)
        assert same_bits(poisoned[:, :unseen], clean[:, :unseen])


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
@pytest.mark.parametrize("place", [0, 15, 16, 20, 22])
def test_a_poisoned_scale_reaches_its_row_alone(name: str, place: int):
    case = Case([(20, 3), (22, 2)])
    clean = case.run(np.int8)
    case.poison = [(name, int(case.rows[0]), place, math.nan)]
    poisoned = case.run(np.int8)
    assert np.isnan(poisoned[0, 2]).all()
    assert same_bits(poisoned[1], clean[1])
    assert same_bits(poisoned[:, 3:], clean[:, 3:])
    unseen = max(0, place - 20)
    assert same_bits(poisoned[:, :unseen], clean[:, :unseen])


@KINDS
def test_a_poisoned_query_reaches_its_own_head_and_token_alone(kind: type[np.generic]):
    case = Case([(20, 3), (22, 2)])
    clean = case.run(kind)
    case.queries[1, 1, 0, 3] = math.nan
    poisoned = case.run(kind)
    assert np.isnan(poisoned[1, 1, 0]).all()
    poisoned[1, 1, 0] = clean[1, 1, 0]
    assert same_bits(poisoned, clean)


class TestQuantisingTheMix:
    @given(
        st.sampled_from(WIDTHS), st.integers(1, 3), st.integers(1, 8), st.integers(1, 9), st.integers(1, 3),
        st.integers(0, 2**32 - 1), st.data(),
    )  # fmt: skip
    @settings(deadline=None, max_examples=50)
    def test_against_float64(self, head_dim, kv_heads, group, tokens, threads, seed, data):
        length = kv_heads * group * head_dim
        rotation = data.draw(st.sampled_from([w for w in (1, 2, 4, 8, 16, 32, 64) if length % w == 0]))
        dice = np.random.default_rng(seed)
        mixed = dice.normal(size=(kv_heads, tokens + 2, group, head_dim)).astype(np.float32)
        codes = np.full((tokens, padded(length)), 99, np.int16)
        scales = np.full(tokens, 99, np.float32)
        quantise_mixed(
            tokens, threads, wider(mixed, padded(head_dim), 0.0), head_dim, rotation,
            np.full((threads, padded(length) + 16), math.nan, np.float32), codes, scales,
        )  # fmt: skip
        flat = mixed[:, :tokens].transpose(1, 0, 2, 3).reshape(tokens, length)
        assert_codes(codes, scales, rotated(flat, rotation))

    @pytest.mark.parametrize("poison", POISONS)
    @pytest.mark.parametrize("head_dim", [10, 16])
    def test_poison_stays_with_its_token(self, poison: float, head_dim: int):
        mixed = np.ones((2, 4, 3, padded(head_dim)), np.float32)
        mixed[1, 2, 1, head_dim - 1] = poison
        codes, scales = np.zeros((4, padded(6 * head_dim)), np.int16), np.zeros(4, np.float32)
        quantise_mixed(4, 2, mixed, head_dim, 1, np.zeros((2, padded(6 * head_dim)), np.float32), codes, scales)
        assert np.flatnonzero(np.isnan(scales)).tolist() == [2]
        assert (codes[[0, 1, 3], : 6 * head_dim] == 127).all()
