from dataclasses import replace

import pytest
import torch

from drumline.model.ledger import Ledger
from tests.tiny import FAMILIES, tiny_model


def ledger(layers: int, rows: int, kv_heads: int, tokens: int, head_dim: int, element_bytes: int) -> Ledger:
    return Ledger(layers, rows, kv_heads, tokens, head_dim, element_bytes)


@pytest.mark.parametrize(
    ("given", "kv_bytes"),
    [
        (ledger(2, 1, 4, 16, 8, 4), 8 * 1024),
        (ledger(2, 8, 4, 16, 8, 4), 64 * 1024),
        (ledger(12, 1, 2, 1024, 64, 2), 6_291_456),
        (ledger(12, 1, 8, 1024, 64, 2), 25_165_824),
        (ledger(32, 1, 32, 4096, 128, 2), 2 * 1024**3),
    ],
    ids=["8 KiB", "64 KiB", "6.29 MB", "25.2 MB", "2 GiB"],
)
def test_figures_of_the_design(given: Ledger, kv_bytes: int):
    assert given.kv_bytes == kv_bytes
    assert given.kv_bytes_per_token * given.rows * given.tokens == kv_bytes


def test_an_int8_key_or_value_takes_a_scale_besides():
    """One float32 a token and head: 12 · 2 · 2 · 1,024 of them beside half of bfloat16's 6.29 MB."""
    given = Ledger(12, 1, 2, 1024, 64, 1, scale_bytes=4)
    assert given.kv_bytes == 6_291_456 // 2 + 2 * 12 * 2 * 1024 * 4
    assert given.kv_bytes_per_token * 1024 == given.kv_bytes


@pytest.mark.parametrize(("kv_dtype", "bytes_a_head"), [(torch.int8, 8 + 4), (torch.bfloat16, 16), (torch.float32, 32)])
def test_a_models_ledger_follows_its_kv_dtype(kv_dtype: torch.dtype, bytes_a_head: int):
    model = replace(tiny_model(precision="int8"), kv_dtype=kv_dtype)
    assert model.ledger(rows=3, tokens=5).kv_bytes == 2 * 2 * 3 * 2 * 5 * bytes_a_head


@pytest.mark.parametrize("family", FAMILIES)
def test_an_int8_model_takes_a_quarter_of_its_linear_weights(family: str):
    model, wide = tiny_model(family, precision="int8"), tiny_model(family)
    codes = sum(tensor.numel() for tensor in model.weights.tensors() if tensor.dtype == torch.int8)
    others = sum(tensor.nbytes for tensor in model.weights.tensors() if tensor.dtype != torch.int8)
    assert model.ledger(rows=1).weight_bytes == codes + others
    linears = (getattr(layer, slot) for layer in wide.weights.layers for slot in ("qkv", "output", "up", "down"))
    assert codes == wide.weights.head.numel() + sum(weight.numel() for weight in linears)


def test_total_adds_the_weights():
    assert Ledger(2, 8, 4, 16, 8, 4, weight_bytes=1000).total_bytes == 66_536


@pytest.mark.parametrize("family", FAMILIES)
def test_model_ledger_counts_each_tensor_once(family: str):
    model = tiny_model(family)
    tensors = {id(tensor): tensor.nbytes for tensor in model.weights.tensors()}
    config = model.config
    given = model.ledger(rows=3)
    assert given.weight_bytes == sum(tensors.values())
    assert given.kv_bytes == 2 * 2 * 3 * config.kv_heads * 32 * config.head_dim * 4
    assert model.ledger(rows=3, tokens=8).kv_bytes == given.kv_bytes // 4
    separate_head = 0 if config.tied_head else config.vocab_size * config.width * 4
    assert model.weights.head.nbytes == config.vocab_size * config.width * 4
    assert (model.weights.head is model.weights.embedding) == (separate_head == 0)
