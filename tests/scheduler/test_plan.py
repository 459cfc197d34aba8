import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.config import GOLDEN
from drumline.scheduler.plan import Backlog, Portion, plan_step, token_cost

backlogs = st.lists(st.integers(1, 70), max_size=30).flatmap(
    lambda pending: st.permutations(range(len(pending))).map(
        lambda rows: [Backlog(row, count) for row, count in zip(rows, pending, strict=True)]
    )
)


def test_nothing_to_do():
    assert plan_step([], 256) == []


def test_decoding_rows_first_then_prompts_with_what_is_left():
    plan = plan_step([Backlog(0, 30), Backlog(1, 1), Backlog(2, 9), Backlog(3, 1), Backlog(4, 9)], 42)
    assert plan == [Portion(1, 1), Portion(3, 1), Portion(0, 30), Portion(2, 9), Portion(4, 1)]


def test_prompts_get_sixteen_tokens_however_many_rows_decode():
    decoding = [Backlog(row, 1) for row in range(40)]
    plan = plan_step([*decoding, Backlog(40, 100)], 32)
    assert plan[:40] == [Portion(row, 1) for row in range(40)]
    assert plan[40:] == [Portion(40, 16)]


def test_the_further_a_prompt_has_come_the_shorter_its_portions():
    """Twice the cost, half the tokens: what waits for the step waits as long."""
    assert plan_step([Backlog(0, 900, 2.0)], 256) == [Portion(0, 128)]
    assert plan_step([Backlog(0, 100, 2.0), Backlog(1, 900)], 256) == [Portion(0, 100), Portion(1, 56)]
    assert plan_step([Backlog(0, 900, 1000.0)], 256) == [Portion(0, 1)]  # it comes on, however far it is


def test_cost_grows_with_the_position():
    """At the position where attention has as many multiply-adds as the products it costs 1.6 times as much."""
    balance = GOLDEN.attention_balance
    assert balance == (2 * 512 * (512 + 128) + 3 * 512 * 1_408) / (2 * 512)
    assert token_cost(GOLDEN, 0) == 1
    assert token_cost(GOLDEN, int(balance)) == pytest.approx(2.6, abs=0.01)


@settings(deadline=None, max_examples=200)
@given(backlogs=backlogs, step_tokens=st.integers(16, 80))
def test_properties(backlogs: list[Backlog], step_tokens: int):
    plan = plan_step(backlogs, step_tokens)
    pending = {backlog.row: backlog.pending for backlog in backlogs}
    rows = [portion.row for portion in plan]
    assert len(rows) == len(set(rows))
    assert all(1 <= portion.length <= pending[portion.row] for portion in plan)

    decoding = [backlog.row for backlog in backlogs if backlog.pending == 1]
    assert set(decoding) <= set(rows)
    given_to = {portion.row: portion.length for portion in plan}
    budget = max(step_tokens - len(decoding), 16)
    prompts = [backlog for backlog in backlogs if backlog.pending > 1]
    used = sum(given_to.get(backlog.row, 0) for backlog in prompts)
    assert used == min(budget, sum(backlog.pending for backlog in prompts))

    # Oldest first: once a prompt is not served in full, those behind it get nothing.
    unfinished = [backlog for backlog in prompts if given_to.get(backlog.row, 0) < backlog.pending]
    for backlog in unfinished[1:]:
        assert backlog.row not in given_to
