"""Bias, query and key norms, RoPE and the write to the store, against float64."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.config import RopeConfig
from drumline.model.kernels.rope import write
from drumline.model.kernels.store import TILE, padded
from drumline.model.layers import rms_norm, rope_tables, rotate
from tests.model.kernels.judge import assert_codes, from_bfloat16, same_bits, wider

STORED = (np.float32, np.uint16, np.int8)
WIDTHS = (8, 10, 16, 24, 64, 80, 128)
EPS, SCALE = np.float32(1e-5), np.float32(0.37)
ROWS = 4


class Written(NamedTuple):
    """What the kernel left; everything was filled with NaN (or 99) before."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray


class Case:
    """Random projections of tokens that stand at different places of different rows."""

    def __init__(
        self,
        head_dim: int,
        kv_heads: int,
        group: int,
        tokens: int,
        window: int,
        normed: bool,
        rotary: bool,
        seed: int = 0,
    ) -> None:
        dice = np.random.default_rng(seed)
        self.head_dim, self.kv_heads, self.group, self.tokens = head_dim, kv_heads, group, tokens
        self.window, self.normed, self.rotary = window, normed, rotary
        self.columns = (kv_heads * group + 2 * kv_heads) * head_dim
        self.qkv = (dice.normal(size=(tokens, self.columns)) * 2).astype(np.float32)
        self.bias = dice.normal(size=self.columns).astype(np.float32)
        self.norms = (1 + dice.normal(size=(2, head_dim)) * 0.3).astype(np.float32)
        places = dice.permutation(ROWS * window)[:tokens]
        self.rows, self.positions = places // window, places % window
        tables = rope_tables(RopeConfig(), head_dim, window, torch.device("cpu"))
        self.cosine, self.sine = (np.ascontiguousarray(table.numpy()) for table in tables)

    def run(self, kind: type[np.generic], threads: int = 1) -> Written:
        width, length = padded(self.head_dim), padded(self.window)
        fill = 99 if kind == np.int8 else 0x7FC1 if kind == np.uint16 else math.nan
        keys = np.full((ROWS, self.kv_heads, length // TILE, self.head_dim, TILE), fill, kind)
        values = np.full((ROWS, self.kv_heads, length, width), fill, kind)
        scaled = kind == np.int8
        scales = (ROWS, self.kv_heads, length) if scaled else (1, 1, 1)
        key_scales, value_scales = (np.full(scales, np.nan, np.float32) for _ in range(2))
        qkv = np.full((self.tokens + 1, padded(self.columns)), np.nan, np.float32)
        qkv[: self.tokens, : self.columns] = self.qkv
        queries = np.full((self.kv_heads, self.tokens + 2, self.group, width), np.nan, np.float32)
        norms = wider(self.norms, width, 0.0)
        write(
            self.tokens, threads, qkv, wider(self.bias, padded(self.columns) + 16), self.kv_heads * self.group,
            self.kv_heads, self.head_dim, SCALE, norms[0], norms[1], EPS, self.normed, self.rotary, self.cosine,
            self.sine, self.rows, self.positions, np.full((threads, width + 16), np.nan, np.float32),
            np.full((threads, width), fill, kind), queries, keys, values, key_scales, value_scales, scaled,
        )  # fmt: skip
        assert np.isnan(queries[:, self.tokens :]).all()
        return Written(queries[:, : self.tokens], keys, values, key_scales, value_scales)

    def wanted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`, float64."""
        heads = self.kv_heads * self.group
        states = torch.from_numpy(self.qkv).double() + torch.from_numpy(self.bias).double()
        query, key, value = states.view(self.tokens, -1, self.head_dim).split([heads, self.kv_heads, self.kv_heads], 1)
        if self.normed:
            norms = torch.from_numpy(self.norms).double()
            query, key = rms_norm(query, norms[0], float(EPS)), rms_norm(key, norms[1], float(EPS))
        if self.rotary:
            cosine, sine = (torch.from_numpy(table[self.positions]).double() for table in (self.cosine, self.sine))
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        return (query * float(SCALE)).numpy(), key.numpy(), value.numpy()

    def kept(self, written: Written) -> tuple[np.ndarray, np.ndarray]:
        """Keys `[tokens, kv_heads, head_dim]` and values, padded, from where the tokens stand."""
        keys = written.keys[self.rows, :, self.positions // TILE, :, self.positions % TILE]
        return keys, written.values[self.rows, :, self.positions]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    window = draw(st.integers(1, 70))
    tokens = draw(st.integers(1, min(9, ROWS * window)))
    return Case(
        draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 3)), draw(st.integers(1, 8)), tokens, window,
        draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip


def assert_near(given_: np.ndarray, wanted: np.ndarray, error: float = 2e-6) -> None:
    """Within `error` of the largest of each vector."""
    assert np.max(np.abs(given_ - wanted) / np.abs(wanted).max(-1, keepdims=True)) < error


@pytest.mark.parametrize("kind", STORED, ids=["float32", "bfloat16", "int8"])
@given(case=cases(), threads=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_against_float64(kind: type[np.generic], case: Case, threads: int):
    written, head_dim = case.run(kind, threads), case.head_dim
    query, key, value = case.wanted()
    queries = written.queries.transpose(1, 0, 2, 3).reshape(case.tokens, -1, padded(head_dim))
    assert_near(queries[..., :head_dim], query)
    assert not queries[..., head_dim:].any()
    keys, values = case.kept(written)
    assert not values[..., head_dim:].any()
    values = values[..., :head_dim]
    if kind == np.int8:
        for codes, scales, wanted in ((keys, written.key_scales, key), (values, written.value_scales, value)):
            steps = scales[case.rows, :, case.positions]
            assert_codes(codes.reshape(-1, head_dim), steps.ravel(), wanted.reshape(-1, head_dim))
    elif kind == np.uint16:
        for bits, wanted in ((keys, key), (values, value)):
            error = np.abs(from_bfloat16(bits) - wanted)
            assert np.max(error / (np.abs(wanted) * 2**-8 + np.abs(wanted).max(-1, keepdims=True) * 2e-6)) <= 1
    else:
        assert_near(keys, key)
        assert_near(values, value)


@pytest.mark.parametrize("kind", STORED, ids=["float32", "bfloat16", "int8"])
@given(case=cases())
@settings(deadline=None, max_examples=20)
def test_only_the_tokens_own_places_are_written(kind: type[np.generic], case: Case):
    written = case.run(kind)
    untouched = np.ones((ROWS, padded(case.window)), bool)
    untouched[case.rows, case.positions] = False
    keys = np.moveaxis(written.keys, 4, 3).reshape(ROWS, case.kv_heads, padded(case.window), case.head_dim)
    fill = {np.float32: math.nan, np.uint16: 0x7FC1, np.int8: 99}[kind]
    for array in (keys, written.values):
        left = array.swapaxes(1, 2)[untouched]
        assert np.isnan(left).all() if kind == np.float32 else (left == fill).all()
    if kind == np.int8:
        assert np.isnan(written.key_scales.swapaxes(1, 2)[untouched]).all()
        assert np.isnan(written.value_scales.swapaxes(1, 2)[untouched]).all()


@pytest.mark.parametrize("kind", STORED, ids=["float32", "bfloat16", "int8"])
def test_a_token_s_bits_are_its_own(kind: type[np.generic]):
    case = Case(24, 2, 3, 7, 20, True, True)
    together = case.run(kind, threads=2)
    for t in range(case.tokens):
        alone = Case(24, 2, 3, 7, 20, True, True)
        alone.tokens, alone.qkv = 1, case.qkv[t : t + 1]
        alone.rows, alone.positions = case.rows[t : t + 1], case.positions[t : t + 1]
        single = alone.run(kind)
        assert same_bits(single.queries[:, 0], together.queries[:, t])
        for mine, ours in zip(alone.kept(single), case.kept(together), strict=True):
            assert same_bits(mine[0], ours[t])


def not_finite(kind: type[np.generic], stored: np.ndarray, scales: np.ndarray) -> bool:
    """Whether one token's vector of one head would make every score, or every mix, with it NaN or infinite."""
    if kind == np.int8:
        return bool(np.isnan(scales))
    return not np.isfinite(from_bfloat16(stored) if kind == np.uint16 else stored).all()


@pytest.mark.parametrize("kind", STORED, ids=["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_stays_in_its_head_and_is_kept(kind: type[np.generic], normed: bool, poison: float):
    case = Case(10, 2, 2, 3, 20, normed, True)
    clean = case.run(kind)
    row, position = case.rows[1], case.positions[1]
    for head, name in ((1, "query"), (4, "key"), (7, "value")):  # four heads of queries, two of keys, two of values
        poisoned = Case(10, 2, 2, 3, 20, normed, True)
        poisoned.qkv[1, head * 10 + 9] = poison
        written = poisoned.run(kind)
        if name == "query":
            assert not np.isfinite(written.queries[0, 1, 1, :10]).all()
            assert same_bits(written.queries[:, (0, 2)], clean.queries[:, (0, 2)])
            assert same_bits(written.queries[1, 1], clean.queries[1, 1])
            continue
        keys, values = case.kept(written)
        where, scales, of = (keys, written.key_scales, 0) if name == "key" else (values, written.value_scales, 1)
        scale = scales[row, of, position] if kind == np.int8 else None
        assert not_finite(kind, where[1, of, :10], scale)
        clean_keys, clean_values = case.kept(clean)
        for mine, ours in ((keys, clean_keys), (values, clean_values)):
            assert same_bits(mine[(0, 2), :], ours[(0, 2), :])
