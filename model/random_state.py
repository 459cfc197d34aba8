"""Random numbers of one row as a pure function, so that a row can be saved, resumed and moved.

`u(seed, choice, index)` is the top 53 bits of Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3") with key (seed, choice) and counter (index, 0, 0, 0).
"""

from dataclasses import dataclass, replace

_WORD = 2**64 - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10

DRAW_BITS = 53
"""Random bits in one draw."""


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10: four 64-bit words for a 128-bit key and a 256-bit counter."""
    k0, k1 = key
    a, b, c, d = counter
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (high >> 64) ^ b ^ k0, high & _WORD, (low >> 64) ^ d ^ k1, low & _WORD
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return a, b, c, d


@dataclass(frozen=True)
class RandomState:
    """Where one row's generator stands: `index` counts generated tokens, greedy ones included."""

    seed: int
    choice: int = 0
    index: int = 0

    def draw(self) -> int:
        """The draw of this index: an integer in 0 … 2^53 − 1, of which u = draw / 2^53."""
        return philox((self.seed, self.choice), (self.index, 0, 0, 0))[0] >> (64 - DRAW_BITS)

    def next(self) -> "RandomState":
        """The state of the next generated token."""
        return replace(self, index=self.index + 1)
