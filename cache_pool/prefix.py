"""Which rows hold the beginning of a prompt: blocks of 16 ids, found by the hash of all ids up to their end.

Whole blocks are told by their hashes; only what one has in common with a prompt behind them is compared id by id.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

BLOCK = 16
"""Ids of one block: shorter prefixes are not worth a copy, and a tile of keys is as long."""


class PrefixIndex:
    """The rows by the prefixes that they hold, or will have computed soon."""

    def __init__(self) -> None:
        self._hashes: dict[int, list[bytes]] = {}
        self._holders: dict[bytes, dict[int, None]] = {}

    def extend(self, row: int, ids: Sequence[int]) -> None:
        """The row's ids are these now: its earlier ones, and perhaps more behind them."""
        hashes = self._hashes.setdefault(row, [])
        for end in range((len(hashes) + 1) * BLOCK, len(ids) + 1, BLOCK):
            known = _hash(hashes[-1] if hashes else b"", ids[end - BLOCK : end])
            hashes.append(known)
            self._holders.setdefault(known, {})[row] = None

    def cut(self, row: int, length: int) -> None:
        """The row holds no more than its first `length` ids."""
        hashes = self._hashes.get(row, [])
        while len(hashes) > length // BLOCK:
            known = hashes.pop()
            del self._holders[known][row]
            if not self._holders[known]:
                del self._holders[known]

    def drop(self, row: int) -> None:
        """The row holds nothing that another could use."""
        self.cut(row, 0)
        self._hashes.pop(row, None)

    def candidates(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """The rows that share the most whole blocks with `ids`, and how many ids these are; none where not even the
        first is shared."""
        rows: dict[int, None] = {}
        known, shared = b"", 0
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            known = _hash(known, ids[end - BLOCK : end])
            holders = self._holders.get(known)
            if not holders:
                break
            rows, shared = holders, end
        return list(rows), shared

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when hashes and holders contradict each other."""
        pairs = {(known, row) for row, hashes in self._hashes.items() for known in hashes}
        if pairs != {(known, row) for known, rows in self._holders.items() for row in rows}:
            raise RuntimeError("the prefix index names other rows than hold its blocks")


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _hash(before: bytes, block: Sequence[int]) -> bytes:
    """Cryptographic, because ids come from strangers: two prefixes must not be made to look alike."""
    return blake2b(before + array("q", block).tobytes(), digest_size=16).digest()
