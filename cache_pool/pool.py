"""The rows: who is alive, how far each has come, why it stopped, and its random state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from drumline.cache_pool.store import RowStore
from drumline.model.batch import Segment
from drumline.model.language_model import LanguageModel
from drumline.model.random_state import RandomState
from drumline.model.stop_reason import StopReason

_RUNNING = -1
_REASONS: tuple[StopReason, ...] = get_args(StopReason)


@dataclass(frozen=True)
class RowSnapshot:
    """All that a row needs to go on elsewhere; its keys and values are computed again from the tokens."""

    token_ids: tuple[int, ...]
    position: int
    random: RandomState


class CachePool:
    """A fixed number of rows over a store of their keys and values. Row state lies in numpy arrays `[rows]`:

    - `alive` bool; `stop_reason` int8 (index into the stop reasons, −1 while none)
    - `origin` int64: index of the row's id at window position 0 (0 until the window slides)
    - `position` int64: tokens cached, counted from `origin`
    - `seed` uint64, `choice` and `index` int64: the random state

    Not thread-safe: only the event loop changes it, and never during a step, which reads it on the torch thread.
    """

    def __init__(self, model: LanguageModel, rows: int, kv: RowStore) -> None:
        self.rows, self.window, self.kv = rows, model.window, kv
        self.alive = np.zeros(rows, dtype=np.bool_)
        self.stop_reason = np.full(rows, _RUNNING, dtype=np.int8)
        self.origin, self.position, self.choice, self.index = np.zeros((4, rows), dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self._ids: list[list[int]] = [[] for _ in range(rows)]

    @property
    def free(self) -> int:
        """Rows that can be taken."""
        return self.rows - int(np.count_nonzero(self.alive))

    @property
    def kv_tokens(self) -> int:
        """Tokens cached in live rows."""
        return int(self.position.sum())  # a free row's is 0

    def take(self, token_ids: tuple[int, ...], random: RandomState) -> int:
        """Give the lowest free row (live rows stay close together) to a sequence, and return it.

        Ids beyond the window slide at once: only the last `window` of them will be cached.
        """
        row = int(self.alive.argmin())
        if self.alive[row]:
            raise RuntimeError("no free row: check `free` before taking one")
        self.alive[row], self.stop_reason[row] = True, _RUNNING
        self._ids[row] = list(token_ids)
        self.origin[row], self.position[row] = max(0, len(token_ids) - self.window), 0
        self._set_random(row, random)
        return row

    def retire(self, row: int, reason: StopReason) -> None:
        """End a row and free it."""
        self._release(row)
        self.stop_reason[row] = _REASONS.index(reason)

    def pending(self, row: int) -> int:
        """Tokens known but not yet cached: the rest of a prompt, or the newest token."""
        return len(self._ids[row]) - int(self.origin[row]) - int(self.position[row])

    def segment(self, row: int, length: int, drafts: Sequence[int] = ()) -> Segment:
        """The next `length` tokens of a row as work for a step; logits are wanted once it reaches the newest id.

        `drafts` may follow the newest id: logits are wanted of each of them too.
        """
        position = int(self.position[row])
        start = int(self.origin[row]) + position
        ids = self._ids[row][start : start + length]
        newest = start + length == len(self._ids[row])
        if drafts and not (newest and position + length + len(drafts) <= self.window):
            raise ValueError(f"row {row}: {len(drafts)} drafts must follow its newest id within the window")
        return Segment(row, position, [*ids, *drafts], wanted=1 + len(drafts) if newest else 0)

    def ids(self, row: int) -> list[int]:
        """Every id of a row, prompt and generated, also those that slid out of the window. Not to be changed."""
        return self._ids[row]

    def room(self, row: int) -> int:
        """Tokens that may follow a row's newest id within the window."""
        return self.window - (len(self._ids[row]) - int(self.origin[row]))

    def advance(self, row: int, length: int) -> None:
        """Count `length` more tokens as cached."""
        self.position[row] += length

    def append(self, row: int, token_id: int) -> bool:
        """Add a generated id; True when the full window slid, so that it is to be recomputed from position zero."""
        self._ids[row].append(token_id)
        self.index[row] += 1
        origin = max(0, len(self._ids[row]) - self.window)
        slid = origin > int(self.origin[row])
        if slid:
            self.origin[row], self.position[row] = origin, 0
        return slid

    def random(self, row: int) -> RandomState:
        """The row's random state."""
        return RandomState(int(self.seed[row]), int(self.choice[row]), int(self.index[row]))

    def snapshot(self, row: int) -> RowSnapshot:
        """The row's tokens, position and random state."""
        return RowSnapshot(tuple(self._ids[row]), int(self.position[row]), self.random(row))

    def restore(self, snapshot: RowSnapshot) -> int:
        """Take a row for a saved one; its position starts at zero, and the tokens are to be computed again."""
        return self.take(snapshot.token_ids, snapshot.random)

    def release(self, row: int) -> RowSnapshot:
        """Free a row whose sequence goes on later (preemption), and return what it needs for that."""
        snapshot = self.snapshot(row)
        self._release(row)
        return snapshot

    def reason(self, row: int) -> StopReason | None:
        """Why the row's last tenant ended; None while it runs or after a release."""
        code = int(self.stop_reason[row])
        return None if code == _RUNNING else _REASONS[code]

    def check_integrity(self) -> None:
        """Raise `RuntimeError` naming the row and the invariant that does not hold."""
        for row in range(self.rows):
            held = len(self._ids[row]) - int(self.origin[row])
            position = int(self.position[row])
            if not self.alive[row]:
                self._require(row, not self._ids[row] and position == 0, "a free row holds nothing")
                continue
            self._require(row, self.reason(row) is None, "a live row has no stop reason")
            self._require(row, 0 < held <= self.window, f"holds 1 … {self.window} ids, not {held}")
            self._require(row, 0 <= position <= held, f"position {position} lies within its {held} ids")
            self._require(row, int(self.index[row]) <= len(self._ids[row]), "draws do not exceed ids")
            self._require(row, self.kv.finite(row, position), "cached keys and values are finite")

    def _require(self, row: int, holds: bool, invariant: str) -> None:
        if not holds:
            raise RuntimeError(f"pool row {row}: broken invariant: {invariant}")

    def _release(self, row: int) -> None:
        self.kv.retire(row, min(self.window, len(self._ids[row])))
        self.alive[row], self._ids[row] = False, []
        self.origin[row] = self.position[row] = 0

    def _set_random(self, row: int, random: RandomState) -> None:
        self.seed[row], self.choice[row], self.index[row] = random.seed, random.choice, random.index
