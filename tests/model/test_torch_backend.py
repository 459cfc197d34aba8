import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.cache_pool.kv import KVCache
from drumline.model.backends import make_backend
from drumline.model.backends.torch_backend import StepOutput, TorchBackend
from drumline.model.batch import Segment, StepBatch
from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.reference import uncached_logits
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 6


class Engine:
    """A backend, a cache and the ids each row holds, stepped by hand."""

    def __init__(self, model: LanguageModel, rows: int = ROWS) -> None:
        self.model = model
        self.kv = KVCache(model, rows)
        self.backend = TorchBackend(model)
        self.ids: dict[int, list[int]] = {row: [] for row in range(rows)}

    def step(self, *work: tuple[int, list[int]], wanted: int = 1) -> StepOutput:
        segments = tuple(Segment(row, len(self.ids[row]), ids, wanted) for row, ids in work)
        output = self.backend.forward(StepBatch(segments), self.kv)
        for row, ids in work:
            self.ids[row] += ids
        return output

    def poison(self, row: int, positions: range) -> None:
        shape = (len(positions), self.model.config.kv_heads, self.model.config.head_dim)
        bad = torch.full(shape, math.nan)
        for layer in range(self.model.config.layers):
            self.kv.write(layer, torch.full((len(positions),), row), torch.tensor(positions), bad, bad)

    def judge(self, row: int) -> torch.Tensor:
        return uncached_logits(self.model, self.ids[row], last=1)[0]


def some_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_masks_and_padding_of_a_mixed_step():
    """Rows 1 and 4 decode, rows 0 and 3 bring prompt chunks, row 2 between them is dead."""
    engine = Engine(tiny_model())
    engine.step((1, some_ids(4, 1)), (4, some_ids(9, 4)), (3, some_ids(2, 3)))
    output = engine.step((4, [7]), (0, [5, 6, 7]), (1, [8]), (3, some_ids(5, 5)))

    decoding, prompts = output.groups
    assert decoding.rows == range(1, 5)
    assert decoding.tokens.tolist() == [0, 4]  # packed: row 4's token, three of row 0, row 1's, five of row 3
    assert decoding.slots.tolist() == [3, 0]
    first_five = [True] * 5 + [False] * 5
    key_zero_alone = [True] + [False] * 9
    assert decoding.visible.tolist() == [[first_five], [key_zero_alone], [key_zero_alone], [[True] * 10]]
    assert decoding.real_cells == 5 + 10
    assert decoding.padded_cells == 40

    assert prompts.rows.tolist() == [0, 3]
    assert prompts.tokens.tolist() == [1, 2, 3, 5, 6, 7, 8, 9]
    assert prompts.slots.tolist() == [0, 1, 2, 5, 6, 7, 8, 9]
    seen = [[1, 2, 3, 1, 1], [3, 4, 5, 6, 7]]
    assert prompts.visible.tolist() == [[[True] * n + [False] * (7 - n) for n in line] for line in seen]
    assert prompts.real_cells == (1 + 2 + 3) + (3 + 4 + 5 + 6 + 7)
    assert prompts.padded_cells == 2 * 5 * 7

    assert output.padding_ratio == 1 - (15 + 31) / (40 + 70)
    for line, row in enumerate((4, 0, 1, 3)):
        assert torch.allclose(output.logits[line], engine.judge(row), atol=1e-4)


def test_rows_of_equal_length_side_by_side_need_no_padding():
    engine = Engine(tiny_model())
    engine.step((0, some_ids(4)), (1, some_ids(4, 1)))
    output = engine.step((0, [9]), (1, [10]))
    assert output.padding_ratio == 0.0
    assert output.groups[0].visible.all()


def test_only_wanted_logits_come_back_in_segment_order():
    engine = Engine(tiny_model())
    segments = (
        Segment(2, 0, some_ids(3), True),
        Segment(0, 0, some_ids(2, 1), False),
        Segment(1, 0, some_ids(5, 2), True),
    )
    output = engine.backend.forward(StepBatch(segments), engine.kv)
    assert output.logits.shape == (2, 259)
    assert output.logits.dtype == torch.float32
    for line, segment in enumerate((segments[0], segments[2])):
        expected = uncached_logits(engine.model, segment.token_ids, last=1)[0]
        assert torch.allclose(output.logits[line], expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_rows_equal_rows_alone(family: str):
    model = tiny_model(family)
    together, lengths = Engine(model), [1, 3, 8, 17, 31, 2]
    prompts = [some_ids(length, length) for length in lengths]
    first = together.step(*enumerate(prompts)).logits
    second = together.step(*((row, [row + 3]) for row in range(ROWS))).logits
    for row, prompt in enumerate(prompts):
        alone = Engine(model, rows=1)
        assert torch.allclose(first[row], alone.step((0, prompt)).logits[0], atol=1e-4)
        assert torch.allclose(second[row], alone.step((0, [row + 3])).logits[0], atol=1e-4)
        assert torch.allclose(second[row], together.judge(row), atol=1e-4)


@settings(deadline=None, max_examples=20)
@given(
    family=st.sampled_from(FAMILIES),
    chunks=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=4),
    backwards=st.booleans(),
)
def test_any_chunking_equals_one_pass(family: str, chunks: list[list[int]], backwards: bool):
    """`chunks[row][step]` tokens of a row are computed in a step; 0: the row does not step."""
    engine = Engine(tiny_model(family))
    for step in range(max(map(len, chunks))):
        lengths = {row: mine[step] for row, mine in enumerate(chunks) if step < len(mine) and mine[step]}
        work = [(row, some_ids(lengths[row], 10 * row + step)) for row in sorted(lengths, reverse=backwards)]
        if work:
            output = engine.step(*work)
            assert 0.0 <= output.padding_ratio < 1.0
            for line, (row, _) in enumerate(work):
                assert torch.allclose(output.logits[line], engine.judge(row), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "course"])
def test_poisoned_neighbours_do_not_touch_a_row(family: str):
    engine, clean = Engine(tiny_model(family)), Engine(tiny_model(family))
    for each in (engine, clean):
        each.step((0, some_ids(4)), (1, some_ids(20, 1)), (3, some_ids(6, 3)), (5, some_ids(12, 5)))
    engine.poison(0, range(4))  # a prompt whose keys are bad already
    engine.poison(1, range(20))  # a decoding neighbour within the same rectangle
    engine.poison(2, range(32))  # a dead row within it
    work = (0, some_ids(3, 9)), (1, [4]), (3, [5]), (5, [6])
    poisoned, healthy = engine.step(*work).logits, clean.step(*work).logits
    assert poisoned[:2].isnan().all()
    assert torch.equal(poisoned[2:], healthy[2:])


def test_what_stands_behind_a_row_in_its_own_cache_is_not_seen():
    """A former tenant's finite keys stay behind the newest token."""
    engine = Engine(tiny_model())
    engine.step((0, some_ids(30, 7)))
    engine.ids[0] = []
    engine.step((0, some_ids(3, 1)))
    output = engine.step((0, [9]))
    assert torch.allclose(output.logits[0], engine.judge(0), atol=1e-4)


def test_window_may_be_filled_to_the_last_position():
    for family in ("llama", "gpt2"):
        engine = Engine(tiny_model(family))
        engine.step((0, some_ids(31)))
        output = engine.step((0, [5]))
        assert torch.allclose(output.logits[0], engine.judge(0), atol=1e-4)


def test_cache_dtype_may_differ_from_the_weights():
    model = replace(tiny_model(), kv_dtype=torch.bfloat16)
    engine = Engine(model)
    engine.step((0, some_ids(7)))
    logits = engine.step((0, [5])).logits[0]
    assert logits.dtype == torch.float32
    assert engine.kv.nbytes == model.ledger(ROWS).kv_bytes
    difference = (logits - uncached_logits(tiny_model(), engine.ids[0], last=1)[0]).abs().max()
    assert 1e-4 < difference < 0.5  # keys and values were rounded to 8 bits, and little else happened


def test_unknown_backend_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        make_backend("magic", tiny_model())
    assert caught.value.field == "backend"
    assert make_backend("torch", tiny_model()).name == "torch"
