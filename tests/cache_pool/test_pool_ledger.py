from dataclasses import replace

import pytest
import torch

from drumline.cache_pool.ledger import available_bytes, check_fits
from drumline.cache_pool.store import make_kv
from drumline.model.errors import InvalidRequest
from drumline.model.ledger import Ledger
from tests.tiny import tiny_model

CPU = torch.device("cpu")


def test_free_memory_is_a_count_of_bytes():
    assert 2**20 < available_bytes(CPU) < 2**50


def test_what_fits_passes():
    small = Ledger(2, 8, 4, 16, 8, 4)
    assert small.kv_bytes < available_bytes(CPU)
    check_fits(small, CPU)


def test_what_does_not_fit_names_the_figures_and_the_way_out():
    free = available_bytes(CPU)
    rows = free // 500_000_000 + 20
    ledger = Ledger(layers=1, rows=rows, kv_heads=1, tokens=1_000_000, head_dim=250, element_bytes=1)  # 0.5 GB a row
    with pytest.raises(InvalidRequest) as caught:
        check_fits(ledger, CPU)
    assert caught.value.field == "rows"
    assert f"{rows} rows of 1000000 tokens take {rows * 0.5:.2f} GB of keys and values" in caught.value.limit
    most = int(caught.value.limit.split("at most ")[1].split()[0])
    assert 0 < most < rows
    check_fits(replace(ledger, rows=max(1, most // 2)), CPU)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_store_asks_before_it_allocates(backend: str):
    model = replace(tiny_model(), window=10**12)
    with pytest.raises(InvalidRequest, match=r"rows: 4 rows of 1000000000000 tokens take 1024000\.00 GB"):
        make_kv(backend, model, rows=4)
