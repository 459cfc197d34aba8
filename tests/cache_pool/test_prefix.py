"""Prefix reuse: what is shared, between which rows, and that what a row finds is what it would have computed."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drumline.cache_pool.pool import CachePool
from drumline.cache_pool.prefix import BLOCK, PrefixIndex, common
from drumline.cache_pool.store import make_kv
from drumline.model.random_state import RandomState
from tests.tiny import tiny_model

WINDOW = 96
SYSTEM = tuple(range(100, 140))
NOBODY = RandomState(0)


def make_pool(rows: int = 3, backend: str = "torch", reuse: bool = True) -> CachePool:
    model = tiny_model(window=WINDOW, precision="int8" if backend == "cpu" else "float32")
    return CachePool(model, rows, make_kv(backend, model, rows), reuse)


def state(ids: list[int]) -> float:
    """What stands for the keys and values of the last of these ids: they depend on all before it."""
    return float(int.from_bytes(hashlib.sha256(str(ids).encode()).digest()[:1], "big"))


def step(pool: CachePool, row: int, tokens: int) -> None:
    """Compute the next tokens of a row."""
    pool.update_store()
    segment = pool.segment(row, tokens)
    ids = list(pool.ids(row))[int(pool.origin[row]) :]
    positions = torch.arange(segment.position, segment.end)
    numbers = torch.tensor([state(ids[: place + 1]) for place in range(segment.position, segment.end)])
    states = numbers[:, None, None].expand(-1, 2, 8)
    for layer in range(2):
        pool.kv.write(layer, torch.full_like(positions, row), positions, states, states)
    pool.advance(row, tokens)


def assert_computed(pool: CachePool, row: int) -> None:
    """Whatever a row counts as cached is what it would have computed."""
    pool.update_store()
    ids, held = list(pool.ids(row))[int(pool.origin[row]) :], int(pool.position[row])
    expected = torch.tensor([state(ids[: place + 1]) for place in range(held)])
    for layer in range(2):
        for tensor in pool.kv.read(layer, range(row, row + 1), WINDOW):
            torch.testing.assert_close(tensor[0, :, :held], expected[None, :, None].expand(2, held, 8))


def computed(pool: CachePool, ids: tuple[int, ...]) -> int:
    row = pool.take(ids, NOBODY)
    step(pool, row, pool.pending(row))
    return row


class TestIndex:
    def test_the_rows_that_share_most_blocks(self):
        index = PrefixIndex()
        index.extend(0, range(40))
        index.extend(1, range(20))
        index.extend(2, [*range(32), *range(90, 99)])
        assert index.candidates(range(40)) == ([0, 2], 32)
        assert index.candidates(range(31)) == ([0, 1, 2], 16)
        assert index.candidates([*range(15), 99]) == ([], 0)
        index.cut(0, 31)
        assert index.candidates(range(40)) == ([2], 32)
        index.drop(2)
        assert sorted(index.candidates(range(40))[0]) == [0, 1]
        index.check_integrity()

    def test_growing_is_the_same_as_whole(self):
        grown, whole = PrefixIndex(), PrefixIndex()
        for end in range(50):
            grown.extend(0, range(end))
        whole.extend(0, range(49))
        assert grown._hashes == whole._hashes

    @given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
    def test_common(self, first: list[int], second: list[int]):
        length = common(first, second)
        assert first[:length] == second[:length]
        assert first[length : length + 1] != second[length : length + 1] or length == min(len(first), len(second))


class TestTaking:
    def test_over(self):
        """The free row that holds the prefix is taken as it is; the last id is always computed."""
        pool = make_pool()
        row = computed(pool, SYSTEM)
        pool.retire(row, "eos")
        again = pool.take((*SYSTEM, 1, 2), NOBODY)
        assert (again, int(pool.reused[again]), pool.pending(again)) == (row, 40, 2)
        assert_computed(pool, again)
        pool.retire(again, "eos")
        same = pool.take(SYSTEM, NOBODY)
        assert (same, int(pool.reused[same]), pool.pending(same)) == (row, 39, 1)
        pool.check_integrity()

    def test_a_copy_where_the_holder_lives_or_holds_more(self):
        pool = make_pool()
        holder = computed(pool, (*SYSTEM, *range(30)))
        copied = pool.take((*SYSTEM, 77), NOBODY)
        assert (copied != holder, int(pool.reused[copied])) == (True, 40)
        assert_computed(pool, copied)
        pool.retire(holder, "stop")
        another = pool.take((*SYSTEM, 78), NOBODY)
        assert another not in (holder, copied)
        last = pool.take((*SYSTEM, *range(30), 5), NOBODY)  # its answer is still there
        assert (last, int(pool.reused[last])) == (holder, 70)
        assert_computed(pool, last)

    def test_generated_tokens_can_be_a_prefix(self):
        """The next turn of a conversation begins with the last one's answer."""
        pool = make_pool(1)
        row = computed(pool, SYSTEM)
        for token_id in range(20):
            pool.append(row, token_id)
            step(pool, row, 1)
        pool.append(row, 20)
        pool.retire(row, "budget")
        row = pool.take((*SYSTEM, *range(20), 20, 21), NOBODY)
        assert int(pool.reused[row]) == 60  # 20 was never fed
        assert_computed(pool, row)

    def test_it_waits_for_a_row_that_computes_the_same(self):
        pool = make_pool()
        leader, follower = pool.take((*SYSTEM, 1), NOBODY), pool.take((*SYSTEM, 2), NOBODY)
        assert pool.waits(follower)
        step(pool, leader, 32)
        assert pool.waits(follower)
        step(pool, leader, 9)
        assert not pool.waits(follower)
        assert int(pool.reused[follower]) == 40
        assert_computed(pool, follower)
        assert not pool.waits(leader)

    @pytest.mark.parametrize("leave", ["cancelled", "error", "release", "taken"])
    def test_a_leader_that_leaves(self, leave: str):
        """What it had computed counts, unless it failed."""
        pool = make_pool(2)
        leader, follower = pool.take((*SYSTEM, 1), NOBODY), pool.take((*SYSTEM, 2), NOBODY)
        step(pool, leader, 20)
        if leave == "release":
            pool.release(leader)
        else:
            pool.retire(leader, "error" if leave == "error" else "cancelled")
        if leave == "taken":
            assert pool.take((9,) * 30, NOBODY) == leader
        assert not pool.waits(follower)
        assert int(pool.reused[follower]) == (0 if leave == "error" else 20)
        assert_computed(pool, follower)

    def test_followers_of_a_leader_that_left_follow_one_of_them(self):
        pool = make_pool(4)
        rows = [pool.take((*SYSTEM, place), NOBODY) for place in range(4)]
        step(pool, rows[0], 20)
        pool.retire(rows[0], "cancelled")
        assert [pool.waits(row) for row in rows[1:]] == [False, True, True]
        step(pool, rows[1], pool.pending(rows[1]))
        assert not any(pool.waits(row) for row in rows[1:])
        assert [int(pool.reused[row]) for row in rows[1:]] == [20, 40, 40]
        for row in rows[1:]:
            assert_computed(pool, row)

    def test_a_leaders_row_that_is_retaken_gives_what_it_had(self):
        pool = make_pool(2)
        leader, follower = pool.take((*SYSTEM, 1), NOBODY), pool.take((*SYSTEM, 2), NOBODY)
        step(pool, leader, 30)
        pool.release(leader)
        assert pool.take((9,) * 30, NOBODY) == leader  # before anybody asked whether the follower waits
        assert not pool.waits(follower)
        assert int(pool.reused[follower]) == 30
        assert_computed(pool, follower)

    def test_a_follower_goes_on_with_one_that_shares_more(self):
        pool = make_pool(3)
        first = pool.take((*SYSTEM, 1), NOBODY)
        longer = (*SYSTEM, *range(200, 230))
        second, third = pool.take((*longer, 2), NOBODY), pool.take((*longer, 3), NOBODY)
        step(pool, first, 41)
        assert [pool.waits(second), pool.waits(third)] == [False, True]
        step(pool, second, pool.pending(second))
        assert not pool.waits(third)
        assert int(pool.reused[third]) == 70
        assert_computed(pool, third)

    def test_reset_forgets_all(self):
        pool = make_pool()
        pool.retire(computed(pool, SYSTEM), "eos")
        row = computed(pool, (*SYSTEM, 4))
        pool.reset()
        assert (pool.free, pool.kv_tokens) == (3, 0)
        assert pool.reused[pool.take(SYSTEM, NOBODY)] == 0
        pool.update_store()
        assert not any(tensor.any() for tensor in pool.kv.read(0, range(row, row + 1), WINDOW))
        pool.check_integrity()

    def test_rows_that_failed_or_slid_give_nothing(self):
        pool = make_pool(1)
        row = computed(pool, SYSTEM)
        pool.retire(row, "error")
        row = computed(pool, tuple(range(WINDOW)))
        assert pool.reused[row] == 0
        assert pool.append(row, 5)
        pool.retire(row, "eos")
        row = pool.take(tuple(range(50)), NOBODY)
        assert pool.reused[row] == 0
        pool.retire(row, "eos")
        pool.check_integrity()

    def test_short_prefixes_are_not_worth_it(self):
        pool = make_pool()
        pool.retire(computed(pool, SYSTEM[: BLOCK - 1]), "eos")
        assert pool.reused[pool.take(SYSTEM, NOBODY)] == 0

    def test_a_preempted_row_finds_itself(self):
        pool = make_pool()
        row = computed(pool, SYSTEM)
        back = pool.restore(pool.release(row))
        assert (back, int(pool.reused[back])) == (row, 39)

    def test_the_row_left_longest_ago_goes_first(self):
        pool = make_pool(3)
        rows = [computed(pool, tuple(range(start, start + 20))) for start in (0, 50, 100)]
        for row in (rows[1], rows[0], rows[2]):
            pool.retire(row, "eos")
        assert [pool.take((7, 7, 7), NOBODY) for _ in range(3)] == [rows[1], rows[0], rows[2]]

    def test_off(self):
        pool = make_pool(reuse=False)
        pool.retire(computed(pool, SYSTEM), "eos")
        assert pool.reused[pool.take(SYSTEM, NOBODY)] == 0
        pool.check_integrity()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_stores_copy_all_that_a_prefix_is(backend: str, kv_dtype: torch.dtype):
    from dataclasses import replace

    model = replace(tiny_model(window=WINDOW, precision="int8" if backend == "cpu" else "float32"), kv_dtype=kv_dtype)
    kv = make_kv(backend, model, 2)
    if backend == "cpu":
        arrays = [kv.keys, kv.values, *([kv.key_scales, kv.value_scales] if kv.scaled else [])]
        for array in arrays:
            array[:] = torch.randint(1, 100, array.shape).numpy()
        kv.copy(0, 1, 21)
        assert all((array[:, 1] == array[:, 0]).any() for array in arrays)
        assert (kv.keys[:, 1, :, :1] == kv.keys[:, 0, :, :1]).all()
        assert (kv.keys[:, 1, :, 1, :, :5] == kv.keys[:, 0, :, 1, :, :5]).all()
        assert not (kv.keys[:, 1, :, 2:] == kv.keys[:, 0, :, 2:]).all()
        for array in arrays[1:]:
            assert (array[:, 1, :, :21] == array[:, 0, :, :21]).all()
            assert not (array[:, 1, :, 21:] == array[:, 0, :, 21:]).all()
        return
    states = torch.randn(30, 2, 8)
    for layer in range(2):
        kv.write(layer, torch.zeros(30, dtype=torch.int64), torch.arange(30), states, states)
    kv.copy(0, 1, 21)
    for layer in range(2):
        for tensor in kv.read(layer, range(2), 30):
            assert torch.equal(tensor[1, :, :21], tensor[0, :, :21])
            assert not tensor[1, :, 21:].any()


class Reuse(RuleBasedStateMachine):
    """Random lives of rows over few, much alike prompts: each row always holds what it would have computed."""

    @initialize(rows=st.integers(1, 4))
    def start(self, rows: int) -> None:
        self.pool = make_pool(rows)

    def live(self) -> list[int]:
        return [row for row in range(self.pool.rows) if self.pool.alive[row]]

    @precondition(lambda self: self.pool.free)
    @rule(shared=st.integers(0, 90), own=st.integers(1, 30), other=st.integers(0, 1))
    def take(self, shared: int, own: int, other: int) -> None:
        ids = (*range(shared), *(200 + other + place for place in range(own)))
        row = self.pool.take(ids, NOBODY)
        assert self.pool.pending(row) >= 1

    @precondition(lambda self: self.live())
    @rule(data=st.data(), tokens=st.integers(1, 60), generated=st.integers(0, 3))
    def step(self, data: st.DataObject, tokens: int, generated: int) -> None:
        rows = [row for row in self.live() if not self.pool.waits(row)]
        assert rows, "some row can always be computed"
        row = data.draw(st.sampled_from(rows))
        tokens = min(tokens, self.pool.pending(row))
        step(self.pool, row, tokens)
        if self.pool.pending(row) == 0:
            self.pool.append(row, generated)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), how=st.sampled_from(["eos", "cancelled", "error", "release"]))
    def leave(self, data: st.DataObject, how: str) -> None:
        row = data.draw(st.sampled_from(self.live()))
        if how == "release":
            self.pool.release(row)
        else:
            self.pool.retire(row, how)

    @invariant()
    def holds_what_it_would_have_computed(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            for row in range(self.pool.rows):
                assert_computed(self.pool, row)


TestReuse = Reuse.TestCase
TestReuse.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)
