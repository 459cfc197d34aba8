"""Where keys and values live: per layer two tensors `[rows, kv_heads, window, head_dim]`."""

import torch
from torch import Tensor

from drumline.model.language_model import LanguageModel


class KVCache:
    """Implements `model.batch.KVStore`. Starts as zeros: padded attention multiplies unused values by 0, so they
    must be finite."""

    def __init__(self, model: LanguageModel, rows: int) -> None:
        config = model.config
        self._retired: dict[int, int] = {}
        shape = (rows, config.kv_heads, model.window, config.head_dim)
        self._layers = [
            tuple(torch.zeros(shape, dtype=model.kv_dtype, device=model.device) for _ in ("key", "value"))
            for _ in range(config.layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer)

    def write(self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Store packed `[tokens, kv_heads, head_dim]` at `(rows[t], positions[t])`, rounded to the cache's dtype."""
        for stored, new in zip(self._layers[layer], (key, value), strict=True):
            stored[rows, :, positions] = new.to(stored.dtype)

    def read(self, layer: int, rows: range | Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` positions of `rows`: a view for a range, a copy for an index tensor."""
        index = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        key, value = self._layers[layer]
        if isinstance(index, Tensor):
            return key[:, :, :tokens].index_select(0, index), value[:, :, :tokens].index_select(0, index)
        return key[index, :, :tokens], value[index, :, :tokens]

    def retire(self, row: int, tokens: int) -> None:
        """Note that the first `tokens` positions of a row are nobody's any more; the next step zeroes them."""
        self._retired[row] = max(tokens, self._retired.get(row, 0))

    def wipe_retired(self) -> None:
        """Zero what was retired, so that a NaN or infinity in it cannot reach the row's next tenant: padded attention
        multiplies what lies behind a row's end by 0, and 0 · NaN is NaN. Called by the step, off the event loop."""
        while self._retired:
            row, tokens = self._retired.popitem()
            for layer in self._layers:
                for tensor in layer:
                    tensor[row, :, :tokens].zero_()

    def finite(self, row: int, tokens: int) -> bool:
        """Whether the first `tokens` positions of a row hold no NaN or infinity."""
        return all(bool(tensor[row, :, :tokens].isfinite().all()) for layer in self._layers for tensor in layer)
