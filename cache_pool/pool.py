"""The rows: who is alive, how far each has come, why it stopped, its random state, and which prefix it can give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import numpy as np

from drumline.cache_pool.prefix import BLOCK, PrefixIndex, common
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


@dataclass(frozen=True)
class _Lead:
    """A row that is computing the first `length` ids that another needs, too. `tenancy` tells its tenants apart."""

    row: int
    tenancy: int
    length: int


class CachePool:
    """A fixed number of rows over a store of their keys and values. Row state lies in numpy arrays `[rows]`:

    - `alive` bool; `stop_reason` int8 (index into the stop reasons, −1 while none)
    - `origin` int64: index of the row's id at window position 0 (0 until the window slides)
    - `position` int64: tokens cached, counted from `origin`
    - `seed` uint64, `choice` and `index` int64: the random state
    - `reused` int64: tokens that the row's tenant found computed
    - `pinned` bool: a row that no tenant gets, so that others can have its prefix

    A free row keeps its ids and their keys and values until it is needed: a new tenant whose ids begin alike takes it
    over, or gets a copy. Rows that slid, or ended in error, neither give nor take.

    Not thread-safe: only the event loop changes it, and never during a step, which reads it on the torch thread.
    """

    def __init__(self, model: LanguageModel, rows: int, kv: RowStore, reuse: bool = True) -> None:
        self.rows, self.window, self.kv, self._reuse = rows, model.window, kv, reuse
        self.alive, self.pinned = np.zeros((2, rows), dtype=np.bool_)
        self.stop_reason = np.full(rows, _RUNNING, dtype=np.int8)
        self.origin, self.position, self.choice, self.index, self.reused = np.zeros((5, rows), dtype=np.int64)
        self.seed = np.zeros(rows, dtype=np.uint64)
        self._ids: list[list[int]] = [[] for _ in range(rows)]  # of a free row: what it keeps
        self._written, self._tenancy, self._left_at = np.zeros((3, rows), dtype=np.int64)
        self._departures = 0
        self._index = PrefixIndex()
        self._leads: dict[int, _Lead] = {}
        self._store_work: list[Callable[[], None]] = []

    @property
    def free(self) -> int:
        """Rows that can be taken."""
        return self.rows - int(np.count_nonzero(self.alive | self.pinned))

    @property
    def kv_tokens(self) -> int:
        """Tokens cached in live rows."""
        return int(self.position[self.alive].sum())

    def take(self, token_ids: tuple[int, ...], random: RandomState, reuse: bool = True) -> int:
        """Give a free row to a sequence, and return it: one that holds its prefix, else the one that is missed least
        (the lowest that keeps nothing; live rows stay close together).

        Ids beyond the window slide at once: only the last `window` of them will be cached. Without `reuse` all of them
        are computed.
        """
        if not self.free:
            raise RuntimeError("no free row: check `free` before taking one")
        slid = max(0, len(token_ids) - self.window)
        source, length = self._prefix_of(token_ids) if reuse and not slid else (None, 0)
        row = self._row_for(source, length)
        kept = length if row == source else 0
        for follower in [follower for follower, lead in self._leads.items() if lead.row == row]:
            self._follow_no_more(follower)  # while what it needs is still there
        self._index.drop(row)
        if self._written[row] > kept:
            self._store_work.append(partial(self.kv.wipe, row, kept, int(self._written[row])))
        self.alive[row], self.stop_reason[row] = True, _RUNNING
        self.origin[row], self.position[row], self.reused[row], self._written[row] = slid, kept, kept, kept
        self._ids[row] = list(token_ids)
        self._tenancy[row] += 1
        self._set_random(row, random)
        if source is not None and row != source:
            self._follow(row, source, length)
        if self._reuse and not slid:
            self._index.extend(row, token_ids)
        return row

    def waits(self, row: int) -> bool:
        """Whether a row's next tokens are being computed in another row, from which they will be copied."""
        lead = self._leads.get(row)
        if lead is None:
            return False
        if self._goes_on(lead) and self.alive[lead.row] and self.position[lead.row] < lead.length:
            return True
        self._follow_no_more(row)
        source, length = self._prefix_of(self._ids[row], new=False)  # the leader has left, or another has more of it
        if source is None or length < self.position[row] + BLOCK:
            return False
        return self._follow(row, source, length)

    def _follow(self, row: int, source: int, length: int) -> bool:
        """Have a row get its first ids from another; whether it waits for them."""
        self._leads[row] = _Lead(source, int(self._tenancy[source]), length)
        return self.waits(row)

    def follows(self, row: int) -> bool:
        """Whether it did when last asked by `waits`, which acts on the answer: this may be asked during a step."""
        return row in self._leads

    def _goes_on(self, lead: _Lead) -> bool:
        """Whether the leader's row is still its own, and has not slid."""
        return bool(self._tenancy[lead.row] == lead.tenancy and not self.origin[lead.row])

    def _follow_no_more(self, row: int) -> None:
        """Copy what the row's leader has computed, unless it failed, slid or its row is somebody else's."""
        lead = self._leads.pop(row)
        ready = min(lead.length, int(self.position[lead.row])) if self._goes_on(lead) else 0
        if ready > self.position[row]:
            self._store_work.append(partial(self.kv.copy, lead.row, row, ready))
            self.position[row] = self.reused[row] = self._written[row] = ready

    def update_store(self) -> None:
        """Do to keys and values what `take` and `waits` decided. Called by the step, off the event loop."""
        for work in self._store_work:
            work()
        self._store_work.clear()

    def retire(self, row: int, reason: StopReason) -> None:
        """End a row and free it."""
        self._release(row, keep=reason != "error")
        self.stop_reason[row] = _REASONS.index(reason)

    def pin(self, row: int, length: int) -> None:
        """Keep the first `length` ids of a free row for others to copy; nobody gets the row."""
        if self.alive[row] or length > len(self._ids[row]):
            raise RuntimeError(f"row {row} does not hold {length} ids of an ended tenant")
        del self._ids[row][length:]
        self._index.cut(row, length)
        self.position[row], self.pinned[row] = length, True

    def unpin(self, row: int) -> None:
        """The row can be taken again."""
        self.pinned[row] = False

    def pending(self, row: int) -> int:
        """Tokens known but not yet cached: the rest of a prompt, or the newest token."""
        return len(self._ids[row]) - int(self.origin[row]) - int(self.position[row])

    def segment(self, row: int, length: int, drafts: Sequence[int] = (), every: bool = False) -> Segment:
        """The next `length` tokens of a row as work for a step; logits are wanted once it reaches the newest id, or of
        `every` token. `drafts` may follow the newest id: logits are wanted of each of them too.
        """
        position = int(self.position[row])
        start = int(self.origin[row]) + position
        ids = self._ids[row][start : start + length]
        newest = start + length == len(self._ids[row])
        if drafts and not (newest and position + length + len(drafts) <= self.window):
            raise ValueError(f"row {row}: {len(drafts)} drafts must follow its newest id within the window")
        wanted = 1 + len(drafts) if newest else 0
        return Segment(row, position, [*ids, *drafts], wanted=length if every else wanted)

    def ids(self, row: int) -> list[int]:
        """Every id of a row, prompt and generated, also those that slid out of the window. Not to be changed."""
        return self._ids[row]

    def room(self, row: int) -> int:
        """Tokens that may follow a row's newest id within the window."""
        return self.window - (len(self._ids[row]) - int(self.origin[row]))

    def advance(self, row: int, length: int) -> None:
        """Count `length` more tokens as cached."""
        self.position[row] += length
        self._written[row] = max(self._written[row], self.position[row])

    def append(self, row: int, token_id: int) -> bool:
        """Add a generated id; True when the full window slid, so that it is to be recomputed from position zero."""
        ids = self._ids[row]
        ids.append(token_id)
        self.index[row] += 1
        origin = max(0, len(ids) - self.window)
        slid = origin > int(self.origin[row])
        if slid:
            self.origin[row], self.position[row] = origin, 0
            self._index.drop(row)
        elif self._reuse and not origin and len(ids) % BLOCK == 0:
            self._index.extend(row, ids)
        return slid

    def reset(self) -> None:
        """Forget all rows, pinned ones too, and what they hold."""
        for row in range(self.rows):
            self._index.drop(row)
            self._ids[row] = []
        self._store_work = [partial(self.kv.wipe, row, 0, self.window) for row in range(self.rows)]
        self._leads.clear()
        self.alive[:] = self.pinned[:] = False
        self.origin[:] = self.position[:] = self.reused[:] = self._written[:] = 0
        self._tenancy += 1

    def random(self, row: int) -> RandomState:
        """The row's random state."""
        return RandomState(int(self.seed[row]), int(self.choice[row]), int(self.index[row]))

    def snapshot(self, row: int) -> RowSnapshot:
        """The row's tokens, position and random state."""
        return RowSnapshot(tuple(self._ids[row]), int(self.position[row]), self.random(row))

    def restore(self, snapshot: RowSnapshot, reuse: bool = True) -> int:
        """Take a row for a saved one; its position starts at zero, or behind what some row still holds of it."""
        return self.take(snapshot.token_ids, snapshot.random, reuse)

    def release(self, row: int) -> RowSnapshot:
        """Free a row whose sequence goes on later (preemption), and return what it needs for that."""
        snapshot = self.snapshot(row)
        self._release(row, keep=True)
        return snapshot

    def reason(self, row: int) -> StopReason | None:
        """Why the row's last tenant ended; None while it runs or after a release."""
        code = int(self.stop_reason[row])
        return None if code == _RUNNING else _REASONS[code]

    def check_integrity(self) -> None:
        """Raise `RuntimeError` naming the row and the invariant that does not hold."""
        self._index.check_integrity()
        for row in range(self.rows):
            held = len(self._ids[row]) - int(self.origin[row])
            position = int(self.position[row])
            self._require(row, 0 <= position <= held, f"position {position} lies within its {held} ids")
            self._require(row, not (self.alive[row] and self.pinned[row]), "a pinned row has no tenant")
            if not self.alive[row]:
                self._require(row, position == held and not self.origin[row], "a free row keeps what it has computed")
                continue
            self._require(row, self._store_work or self.kv.finite(row, position), "cached keys and values are finite")
            self._require(row, self.reason(row) is None, "a live row has no stop reason")
            self._require(row, 0 < held <= self.window, f"holds 1 … {self.window} ids, not {held}")
            self._require(row, int(self.index[row]) <= len(self._ids[row]), "draws do not exceed ids")

    def _prefix_of(self, token_ids: Sequence[int], new: bool = True) -> tuple[int | None, int]:
        """The row that holds most of these ids, or will have computed them soon; and how many. The last is never among
        them: its logits are wanted. Only a `new` row may follow one that follows another."""
        best, length = None, 0
        rows, blocks = self._index.candidates(token_ids)
        behind = token_ids[blocks : blocks + BLOCK]
        for row in rows:
            if (not new and row in self._leads) or self._ids[row] is token_ids:
                continue  # the row itself, or one that waits: two could wait for each other
            shared = blocks + common(self._ids[row][blocks : blocks + BLOCK], behind)
            shared = min(shared, len(token_ids) - 1)
            if not self.alive[row] or self.pending(row) == 1:
                shared = min(shared, int(self.position[row]))
            if shared > length:
                best, length = row, shared
        return (best, length) if length >= BLOCK else (None, 0)

    def _row_for(self, source: int | None, length: int) -> int:
        """The free row to take: the source where little else is lost with it, else the one left longest ago."""
        free = np.flatnonzero(~(self.alive | self.pinned))
        kept = [len(self._ids[row]) for row in free]
        if source is not None and source in free and (len(free) == 1 or len(self._ids[source]) < length + BLOCK):
            return source
        ranked = ((self._left_at[row] if held else 0, row == source, row) for row, held in zip(free, kept, strict=True))
        return int(min(ranked)[2])

    def _release(self, row: int, keep: bool) -> None:
        self.alive[row] = False
        self._leads.pop(row, None)
        if not keep or not self._reuse or self.origin[row]:
            self._ids[row] = []
            self._index.drop(row)
        else:
            del self._ids[row][int(self.position[row]) :]
            self._index.cut(row, len(self._ids[row]))
        self.origin[row], self.position[row] = 0, len(self._ids[row])
        self._departures += 1
        self._left_at[row] = self._departures

    def _require(self, row: int, holds: object, invariant: str) -> None:
        if not holds:
            raise RuntimeError(f"pool row {row}: broken invariant: {invariant}")

    def _set_random(self, row: int, random: RandomState) -> None:
        self.seed[row], self.choice[row], self.index[row] = random.seed, random.choice, random.index
