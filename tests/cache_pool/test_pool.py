import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.cache_pool.pool import CachePool, RowSnapshot
from drumline.cache_pool.store import make_kv
from drumline.model.random_state import RandomState
from tests.tiny import tiny_model

WINDOW = 8
REASONS = ("eos", "stop", "budget", "window", "cancelled", "deadline", "error")


def make_pool(rows: int = 3) -> CachePool:
    model = tiny_model(window=WINDOW)
    return CachePool(model, rows, make_kv("torch", model, rows))


def fill(pool: CachePool, row: int, start: int, end: int, number: float = 1.0) -> None:
    """What a step does: keys and values of positions start … end."""
    positions = torch.arange(start, end)
    states = torch.full((end - start, 2, 8), number)
    for layer in range(2):
        pool.kv.write(layer, torch.full_like(positions, row), positions, states, states)


def cached(pool: CachePool, row: int) -> torch.Tensor:
    return torch.stack([tensor[row] for layer in range(2) for tensor in pool.kv.read(layer, range(3), WINDOW)])


class TestLife:
    def test_prompt_then_decode(self):
        pool = make_pool()
        row = pool.take((4, 5, 6), RandomState(9, 1))
        assert (row, pool.free, pool.pending(row)) == (0, 2, 3)
        chunk = pool.segment(row, 2)
        assert (chunk.row, chunk.position, chunk.token_ids, chunk.wanted) == (0, 0, [4, 5], 0)
        pool.advance(row, 2)
        rest = pool.segment(row, 1)
        assert (rest.position, rest.token_ids, rest.wanted) == (2, [6], 1)
        pool.advance(row, 1)
        assert pool.pending(row) == 0
        assert pool.append(row, 7) is False
        newest = pool.segment(row, 1)
        assert (newest.position, newest.token_ids, newest.wanted) == (3, [7], 1)
        assert pool.random(row) == RandomState(9, 1, 1)
        assert pool.kv_tokens == 3
        pool.check_integrity()

    def test_lowest_free_row_is_taken(self):
        pool = make_pool()
        assert [pool.take((1,), RandomState(0)) for _ in range(3)] == [0, 1, 2]
        pool.retire(1, "eos")
        assert pool.take((1,), RandomState(0)) == 1
        with pytest.raises(RuntimeError, match="no free row"):
            pool.take((1,), RandomState(0))

    @pytest.mark.parametrize("reason", REASONS)
    def test_reason_stays_until_the_next_tenant(self, reason: str):
        pool = make_pool()
        row = pool.take((1, 2), RandomState(0))
        assert pool.reason(row) is None
        pool.retire(row, reason)
        assert pool.reason(row) == reason
        pool.check_integrity()
        assert pool.reason(pool.take((1,), RandomState(0))) is None

    def test_seed_of_64_bits_survives(self):
        pool = make_pool()
        for seed in (0, 2**63 - 1, 2**63, 2**64 - 1):
            row = pool.take((1,), RandomState(seed, 5, 77))
            assert pool.random(row) == RandomState(seed, 5, 77)
            pool.retire(row, "budget")


class TestWindow:
    def test_full_window_slides_by_recompute(self):
        pool = make_pool()
        row = pool.take(tuple(range(WINDOW - 1)), RandomState(0))
        pool.advance(row, WINDOW - 1)
        assert pool.append(row, 100) is False  # the window is full now
        pool.advance(row, 1)
        assert pool.append(row, 101) is True
        assert pool.pending(row) == WINDOW
        segment = pool.segment(row, WINDOW)
        assert (segment.position, segment.token_ids) == (0, [*range(1, WINDOW - 1), 100, 101])
        assert segment.wanted == 1
        assert pool.ids(row) == [*range(WINDOW - 1), 100, 101]
        pool.check_integrity()

    def test_long_prompt_keeps_its_last_ids_in_the_window_and_all_for_penalties(self):
        pool = make_pool()
        row = pool.take(tuple(range(20)), RandomState(0))
        assert pool.pending(row) == WINDOW
        assert pool.segment(row, 3).token_ids == [12, 13, 14]
        assert pool.ids(row) == list(range(20))


class TestSnapshots:
    def test_snapshot_and_restore(self):
        pool = make_pool()
        row = pool.take((4, 5, 6), RandomState(9, 2))
        pool.advance(row, 3)
        pool.append(row, 7)
        snapshot = pool.snapshot(row)
        assert snapshot == RowSnapshot((4, 5, 6, 7), 3, RandomState(9, 2, 1))
        other = pool.restore(snapshot)
        assert other != row
        assert pool.ids(other) == pool.ids(row)
        assert pool.random(other) == pool.random(row)
        assert pool.pending(other) == 4
        pool.append(row, 8)
        assert pool.ids(other) == [4, 5, 6, 7]

    def test_release_frees_without_a_reason(self):
        pool = make_pool()
        row = pool.take((4, 5, 6), RandomState(9))
        pool.advance(row, 2)
        assert pool.release(row) == RowSnapshot((4, 5, 6), 2, RandomState(9))
        assert pool.free == 3
        assert pool.reason(row) is None
        pool.check_integrity()

    def test_slid_row_comes_back_slid(self):
        pool = make_pool()
        row = pool.take(tuple(range(WINDOW)), RandomState(0))
        pool.advance(row, WINDOW)
        pool.append(row, 50)
        row = pool.restore(pool.release(row))
        assert pool.segment(row, WINDOW).token_ids == [*range(1, WINDOW), 50]


class TestWiping:
    def test_a_row_that_ended_is_zeroed_and_no_other(self):
        pool = make_pool()
        for row in range(2):
            pool.take((1, 2), RandomState(0))
            fill(pool, row, 0, 2, math.nan if row == 0 else 3.0)
            pool.advance(row, 2)
        pool.retire(0, "error")
        assert pool.take((7, 8), RandomState(0)) == 0
        pool.update_store()
        assert not cached(pool, 0).any()
        assert cached(pool, 1)[:, :, :2].unique().tolist() == [3.0]

    @pytest.mark.parametrize("leave", ["eos", "cancelled", "deadline", "release"])
    def test_a_row_stopped_from_outside_may_hold_nan_too(self, leave: str):
        """It may not have come to its logits yet, so nobody saw them fail."""
        pool = make_pool()
        row = pool.take((1, 2, 3), RandomState(0))
        fill(pool, row, 0, 2, math.nan)
        pool.advance(row, 2)
        if leave == "release":
            pool.release(row)
        else:
            pool.retire(row, leave)
        assert pool.take((7, 8, 9), RandomState(0)) == 1  # the lowest row that keeps nothing
        pool.take((7, 8, 9), RandomState(0))
        assert pool.take((7, 8, 9), RandomState(0)) == row
        pool.update_store()
        assert not cached(pool, row).any()


class TestIntegrity:
    """Each invariant is broken by hand, and the check says which."""

    @pytest.fixture
    def pool(self) -> CachePool:
        pool = make_pool()
        row = pool.take((4, 5, 6), RandomState(9))
        fill(pool, row, 0, 3)
        pool.advance(row, 3)
        pool.append(row, 7)
        pool.check_integrity()
        return pool

    def test_nan_in_the_cache(self, pool: CachePool):
        fill(pool, 0, 2, 3, math.nan)
        with pytest.raises(RuntimeError, match=r"pool row 0: .*finite"):
            pool.check_integrity()

    def test_nan_behind_what_is_cached_is_no_matter(self, pool: CachePool):
        fill(pool, 0, 3, 4, math.nan)
        pool.check_integrity()

    def test_position_beyond_the_ids(self, pool: CachePool):
        pool.advance(0, 2)
        with pytest.raises(RuntimeError, match="position 5 lies within its 4 ids"):
            pool.check_integrity()

    def test_more_ids_than_the_window_holds(self, pool: CachePool):
        pool.ids(0).extend(range(WINDOW))
        with pytest.raises(RuntimeError, match=f"holds 1 … {WINDOW} ids, not 12"):
            pool.check_integrity()

    def test_free_row_that_holds_something(self, pool: CachePool):
        pool.position[2] = 1
        with pytest.raises(RuntimeError, match=r"pool row 2: .*position 1 lies within its 0 ids"):
            pool.check_integrity()

    def test_row_lost_without_retiring(self, pool: CachePool):
        pool.alive[0] = False
        with pytest.raises(RuntimeError, match="a free row keeps what it has computed"):
            pool.check_integrity()

    def test_live_row_with_a_stop_reason(self, pool: CachePool):
        pool.stop_reason[0] = 2
        with pytest.raises(RuntimeError, match="a live row has no stop reason"):
            pool.check_integrity()

    def test_more_draws_than_ids(self, pool: CachePool):
        pool.index[0] = 9
        with pytest.raises(RuntimeError, match="draws do not exceed ids"):
            pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: each live row is its ids, tokens cached, and random state."""

    @initialize(rows=st.integers(1, 4))
    def start(self, rows: int) -> None:
        self.pool = make_pool(rows)
        self.ids: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.random: dict[int, RandomState] = {}
        self.reason: dict[int, str | None] = dict.fromkeys(range(rows))
        self.saved: list[tuple[RowSnapshot, list[int], RandomState]] = []

    def window_ids(self, row: int) -> list[int]:
        return self.ids[row][-WINDOW:]

    def settle(self, row: int, ids: list[int], random: RandomState) -> None:
        assert row not in self.ids
        self.ids[row], self.cached[row], self.random[row], self.reason[row] = list(ids), 0, random, None

    def leave(self, row: int, reason: str | None) -> None:
        del self.ids[row], self.cached[row], self.random[row]
        self.reason[row] = reason

    @precondition(lambda self: len(self.ids) < self.pool.rows)
    @rule(length=st.integers(1, 2 * WINDOW), seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 3))
    def take(self, length: int, seed: int, choice: int) -> None:
        ids = [(seed + place) % 259 for place in range(length)]
        self.settle(self.pool.take(tuple(ids), RandomState(seed, choice)), ids, RandomState(seed, choice))

    @precondition(lambda self: self.saved and len(self.ids) < self.pool.rows)
    @rule()
    def restore(self) -> None:
        snapshot, ids, random = self.saved.pop()
        self.settle(self.pool.restore(snapshot), ids, random)

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), token_id=st.integers(0, 258), portion=st.integers(1, WINDOW))
    def step(self, data: st.DataObject, token_id: int, portion: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.ids)))
        pending = self.window_ids(row)[self.cached[row] :]
        known = min(portion, len(pending))
        room = WINDOW - len(self.window_ids(row)) if known == len(pending) else 0
        assert self.pool.room(row) == WINDOW - len(self.window_ids(row))
        drafts = data.draw(st.lists(st.integers(0, 258), max_size=min(room, 4)))
        segment = self.pool.segment(row, known, drafts)
        assert segment.position == self.cached[row]
        assert segment.token_ids == pending[:known] + drafts
        assert segment.wanted == (1 + len(drafts) if known == len(pending) else 0)
        fill(self.pool, row, segment.position, segment.end)
        accepted = data.draw(st.integers(0, len(drafts)))
        self.pool.advance(row, known + accepted)
        self.cached[row] += known + accepted
        for draft in drafts[:accepted]:
            assert self.pool.append(row, draft) is False
            self.ids[row].append(draft)
            self.random[row] = self.random[row].next()
        if segment.wanted:
            full = len(self.ids[row]) >= WINDOW
            assert self.pool.append(row, token_id) is full
            self.ids[row].append(token_id)
            self.random[row] = self.random[row].next()
            if full:
                self.cached[row] = 0

    @precondition(lambda self: self.ids)
    @rule(data=st.data(), reason=st.sampled_from(REASONS))
    def retire(self, data: st.DataObject, reason: str) -> None:
        row = data.draw(st.sampled_from(sorted(self.ids)))
        self.pool.retire(row, reason)
        self.leave(row, reason)

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.ids)))
        snapshot = self.pool.release(row)
        assert snapshot == RowSnapshot(tuple(self.ids[row]), self.cached[row], self.random[row])
        self.saved.append((snapshot, self.ids[row], self.random[row]))
        self.leave(row, None)

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check_integrity()
        assert {row for row in range(pool.rows) if pool.alive[row]} == set(self.ids)
        assert pool.free == pool.rows - len(self.ids)
        assert pool.kv_tokens == sum(self.cached.values())
        for row in range(pool.rows):
            assert pool.reason(row) == self.reason[row]
        for row, ids in self.ids.items():
            assert pool.ids(row) == ids
            assert pool.pending(row) == len(self.window_ids(row)) - self.cached[row]
            assert pool.random(row) == self.random[row]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(deadline=None, max_examples=25, stateful_step_count=30)
