"""What a model and its K/V pool take, in bytes, before anything is allocated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ledger:
    """K/V bytes = 2 · layers · rows · kv_heads · tokens · (head_dim · element_bytes + scale_bytes).

    2: one key, one value. `scale_bytes` is what the scale of an int8 key or value takes; other dtypes have none.
    """

    layers: int
    rows: int
    kv_heads: int
    tokens: int
    head_dim: int
    element_bytes: int
    weight_bytes: int = 0
    scale_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self.rows * self.tokens * self.kv_bytes_per_token

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token of one row takes."""
        return 2 * self.layers * self.kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)

    @property
    def total_bytes(self) -> int:
        """Weights and K/V together."""
        return self.weight_bytes + self.kv_bytes
