"""Keys and values as the CPU kernels read them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drumline.model.config import ModelConfig

TILE = 16
"""Keys of one tile."""
_STORED = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.int8: np.int8}


def padded(length: int) -> int:
    """The next multiple of 16."""
    return -(-length // TILE) * TILE


class TiledKV:
    """All layers' keys and values, C-contiguous, of `rows` rows of `window` tokens (padded to a multiple of 16).

    - `keys` `[layers, rows, kv_heads, window / 16, head_dim, 16]`: one load takes one dimension of 16 keys
    - `values` `[layers, rows, kv_heads, window, head_dim padded to 16]`
    - `key_scales`, `value_scales` float32 `[layers, rows, kv_heads, window]` where the dtype is int8, else empty

    bfloat16 is kept as its bits, uint16. What lies behind a row's end never reaches a result: nothing is wiped.
    """

    def __init__(self, config: ModelConfig, rows: int, window: int, dtype: torch.dtype) -> None:
        stored, length, layers, heads = _STORED[dtype], padded(window), config.layers, config.kv_heads
        self.scaled = dtype == torch.int8
        self.keys: NDArray[Any] = np.zeros((layers, rows, heads, length // TILE, config.head_dim, TILE), stored)
        self.values: NDArray[Any] = np.zeros((layers, rows, heads, length, padded(config.head_dim)), stored)
        scales = (layers, rows, heads, length) if self.scaled else (layers, 1, 1, 1)
        self.key_scales, self.value_scales = (np.zeros(scales, np.float32) for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(array.nbytes for array in (self.keys, self.values, self.key_scales, self.value_scales))
