"""What one step computes: packed token segments, and the store their keys and values live in."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one row; `position` is where the first of them stands in the row's window."""

    row: int
    position: int
    token_ids: Sequence[int]
    wanted: int
    """Of how many of its last tokens logits are wanted."""

    @property
    def length(self) -> int:
        """Tokens in this segment."""
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """Tokens the row holds once this segment is computed."""
        return self.position + len(self.token_ids)


@dataclass(frozen=True)
class StepBatch:
    """The segments of one step, at most one a row. A decoding row's is its newest token, and perhaps drafts behind it.

    Logits come back one line for each token that they are wanted of, in packing order.
    """

    segments: tuple[Segment, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all segments."""
        return sum(segment.length for segment in self.segments)

    def packed(self) -> tuple[list[int], list[int], list[int]]:
        """Token id, row and position of each token, segment behind segment."""
        ids: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for segment in self.segments:
            ids.extend(segment.token_ids)
            rows.extend([segment.row] * segment.length)
            positions.extend(range(segment.position, segment.end))
        return ids, rows, positions

    def wanted(self) -> list[int]:
        """Which of the packed tokens logits are wanted of."""
        ends = accumulate(segment.length for segment in self.segments)
        pairs = zip(ends, self.segments, strict=True)
        return [token for end, segment in pairs for token in range(end - segment.wanted, end)]


@dataclass(frozen=True)
class StepRecord:
    """One forward pass of one row: tokens fed, and tokens cached before and after (0 and 0 where there is no cache)."""

    input_length: int
    cache_before: int
    cache_after: int


@dataclass(frozen=True)
class StepOutput:
    """Logits `[tokens that they are wanted of, vocab]`, float32, on the CPU, and what attention had to look at.

    The logits are the backend's own memory: its next step may write over them. `real_cells` are the query-key pairs
    that the tokens' own rows hold, `padded_cells` those that were computed.
    """

    logits: Tensor
    real_cells: int
    padded_cells: int

    @property
    def padding_ratio(self) -> float:
        """Share of attention's query-key pairs that were padding, 0–1."""
        return 1 - self.real_cells / self.padded_cells


class KVStore(Protocol):
    """Keys and values of all rows, per layer `[rows, kv_heads, window, head_dim]`."""

    def write(self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Store packed `key` and `value` `[tokens, kv_heads, head_dim]` at `(rows[t], positions[t])`."""

    def read(self, layer: int, rows: range | Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """The first `tokens` positions of `rows`: two tensors `[len(rows), kv_heads, tokens, head_dim]`.

        A range costs no copy; an index tensor gathers.
        """
