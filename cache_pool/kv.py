"""Where the torch backend's keys and values live: per layer two tensors `[rows, kv_heads, window, head_dim]`.

Int8 ones have a third and a fourth, the scales of their tokens and heads, float32 `[rows, kv_heads, window, 1]`.
"""

import torch
from torch import Tensor

from drumline.model.language_model import LanguageModel
from drumline.model.layers import quantise_rows


class KVCache:
    """Implements `model.batch.KVStore`. Starts as zeros: padded attention multiplies unused values by 0, so they
    must be finite."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        config = model.config
        shape = (rows, config.kv_heads, model.window, config.head_dim)
        kinds = [(shape, model.kv_dtype)] * 2
        if model.kv_dtype == torch.int8:
            kinds += [((*shape[:-1], 1), torch.float32)] * 2
        self._layers = [
            tuple(torch.zeros(size, dtype=dtype, device=model.device) for size, dtype in kinds)
            for _ in range(config.layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer)

    def write(self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Store packed `[tokens, kv_heads, head_dim]` at `(rows[t], positions[t])`, rounded to the cache's dtype."""
        arrays = self._layers[layer]
        if len(arrays) == 4:
            (key, key_scales), (value, value_scales) = quantise_rows(key), quantise_rows(value)
            arrays[2][rows, :, positions], arrays[3][rows, :, positions] = key_scales, value_scales
        arrays[0][rows, :, positions], arrays[1][rows, :, positions] = key.to(arrays[0]), value.to(arrays[1])

    def read(self, layer: int, rows: range | Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` positions of `rows`: a view for a range, a copy for an index tensor, or of int8."""
        key, value, *scales = (self._part(array, rows, tokens) for array in self._layers[layer])
        return (key * scales[0], value * scales[1]) if scales else (key, value)

    def _part(self, array: Tensor, rows: range | Tensor, tokens: int) -> Tensor:
        if isinstance(rows, Tensor):
            return array[:, :, :tokens].index_select(0, rows)
        return array[rows.start : rows.stop, :, :tokens]

    def wipe(self, row: int, start: int, stop: int) -> None:
        """Zero positions, so that a NaN or infinity of an earlier tenant cannot reach the next: padded attention
        multiplies what lies behind a row's end by 0, and 0 · NaN is NaN."""
        for layer in self._layers:
            for tensor in layer:
                tensor[row, :, start:stop].zero_()

    def copy(self, source: int, row: int, tokens: int) -> None:
        """Copy the first `tokens` positions of one row to another."""
        for layer in self._layers:
            for tensor in layer:
                tensor[row, :, :tokens] = tensor[source, :, :tokens]

    def finite(self, row: int, tokens: int) -> bool:
        """Whether the first `tokens` positions of a row hold no NaN or infinity."""
        return all(bool(tensor[row, :, :tokens].isfinite().all()) for layer in self._layers for tensor in layer)
