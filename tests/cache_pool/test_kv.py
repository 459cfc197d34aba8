import math

import pytest
import torch

from drumline.cache_pool.kv import KVCache
from tests.tiny import tiny_model


@pytest.fixture
def cache() -> KVCache:
    return KVCache(tiny_model(), rows=3)


def packed(tokens: int, start: float = 1.0) -> torch.Tensor:
    """`[tokens, 2 kv_heads, 8]`, each token filled with its own number."""
    return (torch.arange(tokens, dtype=torch.float32) + start).view(-1, 1, 1).expand(-1, 2, 8).clone()


def test_starts_as_zeros_of_the_ledgers_size(cache: KVCache):
    assert cache.nbytes == tiny_model().ledger(3).kv_bytes
    for layer in range(2):
        for tensor in cache.read(layer, range(3), 32):
            assert tensor.shape == (3, 2, 32, 8)
            assert not tensor.any()


def test_packed_tokens_land_at_their_row_and_position(cache: KVCache):
    rows, positions = torch.tensor([2, 0, 2]), torch.tensor([5, 0, 6])
    cache.write(1, rows, positions, packed(3), -packed(3))
    key, value = cache.read(1, range(3), 32)
    assert key[2, :, 5].unique().tolist() == [1.0]
    assert key[0, :, 0].unique().tolist() == [2.0]
    assert key[2, :, 6].unique().tolist() == [3.0]
    assert value[2, :, 6].unique().tolist() == [-3.0]
    assert key.count_nonzero() == 3 * 2 * 8
    assert not cache.read(0, range(3), 32)[0].any()


def test_a_range_is_a_view_and_an_index_gathers(cache: KVCache):
    cache.write(0, torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0]), packed(3), packed(3))
    view, _ = cache.read(0, range(1, 3), 4)
    gathered, _ = cache.read(0, torch.tensor([2, 1]), 4)
    assert view.shape == gathered.shape == (2, 2, 4, 8)
    assert view[:, 0, 0, 0].tolist() == [2.0, 3.0]
    assert gathered[:, 0, 0, 0].tolist() == [3.0, 2.0]
    cache.write(0, torch.tensor([1]), torch.tensor([0]), packed(1, 9.0), packed(1))
    assert view[0, 0, 0, 0] == 9.0
    assert gathered[1, 0, 0, 0] == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_wiped_positions_are_zeroed_in_all_layers(cache: KVCache, bad: float):
    for layer in range(2):
        for row in range(3):
            cache.write(layer, torch.tensor([row]), torch.tensor([3]), packed(1), packed(1) * bad)
    assert cache.finite(1, 3)
    assert not cache.finite(1, 4)
    cache.wipe(1, 3, 4)
    assert cache.finite(1, 32)
    for layer in range(2):
        for tensor in cache.read(layer, range(1, 2), 32):
            assert not tensor.any()
    assert not cache.finite(0, 4)
    assert cache.read(1, range(2, 3), 4)[0][0, 0, 3, 0] == 1.0
