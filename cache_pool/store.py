"""What the pool asks of a store of keys and values, and which store a backend works on."""

from typing import Protocol

from drumline.cache_pool.kv import KVCache
from drumline.cache_pool.ledger import check_fits
from drumline.model.language_model import LanguageModel


class RowStore(Protocol):
    """Keys and values of all rows, in the layout of one backend: what the end of a row asks of them."""

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""

    def wipe(self, row: int, start: int, stop: int) -> None:
        """Make what an earlier tenant left at the positions from `start` up to `stop` harmless to the next one."""

    def copy(self, source: int, row: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one row to another."""

    def finite(self, row: int, tokens: int) -> bool:
        """Whether the first `tokens` positions of a row hold no NaN or infinity."""


def make_kv(backend: str, model: LanguageModel, rows: int) -> RowStore:
    """The store that the backend of that name works on; raises `InvalidRequest` where the memory does not hold it."""
    check_fits(model.ledger(rows), model.device)
    if backend == "torch":
        return KVCache(model, rows)
    from drumline.cache_pool.tiled_kv import TiledKVCache

    return TiledKVCache(model, rows)
