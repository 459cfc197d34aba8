"""The CPU kernels' keys and values as a pool's store."""

import numpy as np
import torch

from drumline.model.kernels.store import TILE, TiledKV
from drumline.model.language_model import LanguageModel


class TiledKVCache(TiledKV):
    """A `TiledKV` of a pool's rows. Kernels read a row's own positions only, so nothing needs wiping."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        super().__init__(model.config, rows, model.window, model.kv_dtype)

    def wipe(self, row: int, start: int, stop: int) -> None:
        """Nothing: the next tenant never reads what it has not written."""

    def copy(self, source: int, row: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one row to another, and what else their tiles hold."""
        tiles = -(-tokens // TILE)
        self.keys[:, row, :, :tiles] = self.keys[:, source, :, :tiles]
        self.values[:, row, :, :tokens] = self.values[:, source, :, :tokens]
        if self.scaled:
            for scales in (self.key_scales, self.value_scales):
                scales[:, row, :, :tokens] = scales[:, source, :, :tokens]

    def finite(self, row: int, tokens: int) -> bool:
        """Whether the first `tokens` positions of a row hold no NaN or infinity."""
        if not tokens:
            return True
        tiles = -(-tokens // TILE)
        keys = np.moveaxis(self.keys[:, row, :, :tiles], -1, -2)  # [layers, heads, tiles, 16, head_dim]
        keys = keys.reshape(*keys.shape[:2], tiles * TILE, -1)[:, :, :tokens]
        stored = [keys, self.values[:, row, :, :tokens]]
        if self.scaled:
            stored += [self.key_scales[:, row, :, :tokens], self.value_scales[:, row, :, :tokens]]
        return all(_finite(array) for array in stored)


def _finite(array: np.ndarray) -> bool:
    if array.dtype == np.uint16:  # bfloat16's bits
        return bool(torch.from_numpy(np.ascontiguousarray(array)).view(torch.bfloat16).isfinite().all())
    return bool(np.isfinite(array).all())
