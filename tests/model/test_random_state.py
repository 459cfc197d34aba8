from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.model.random_state import DRAW_BITS, RandomState, philox

words = st.integers(0, 2**64 - 1)


def numpy_philox(key: tuple[int, int], counter: int) -> list[int]:
    """numpy increments the counter before its first block."""
    generator = np.random.Philox(key=key[0] + (key[1] << 64), counter=(counter - 1) % 2**256)
    return [int(word) for word in generator.random_raw(4)]


@settings(deadline=None, max_examples=100)
@given(seed=words, choice=words, index=words)
def test_equals_numpys_philox(seed: int, choice: int, index: int):
    assert list(philox((seed, choice), (index, 0, 0, 0))) == numpy_philox((seed, choice), index)


@settings(deadline=None, max_examples=50)
@given(key=st.tuples(words, words), counter=st.tuples(words, words, words, words))
def test_every_word_of_the_counter_counts(key: tuple[int, int], counter: tuple[int, int, int, int]):
    whole = sum(word << (64 * place) for place, word in enumerate(counter))
    assert list(philox(key, counter)) == numpy_philox(key, whole)


def test_published_answer_for_zeros():
    # Random123's kat_vectors: philox4x64 10, all zero.
    assert [f"{word:016x}" for word in philox((0, 0), (0, 0, 0, 0))] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]


def test_draw_is_the_double_that_numpy_draws():
    state = RandomState(seed=7, choice=3, index=5)
    generator = np.random.Generator(np.random.Philox(key=7 + (3 << 64), counter=4))
    assert state.draw() / 2**DRAW_BITS == generator.random()


def test_draw_is_pure_and_next_counts():
    state = RandomState(seed=2**64 - 1, choice=1)
    assert state.draw() == state.draw()
    assert state.next() == RandomState(2**64 - 1, 1, 1)
    assert len({RandomState(9, choice, index).draw() for choice in range(4) for index in range(8)}) == 32


def test_state_is_frozen():
    with pytest.raises(FrozenInstanceError):
        RandomState(1).index = 4


def test_resumed_state_goes_on_where_it_was():
    whole = [RandomState(11, 0, index).draw() for index in range(6)]
    state = RandomState(11)
    first = []
    for _ in range(3):
        first.append(state.draw())
        state = state.next()
    resumed = RandomState(state.seed, state.choice, state.index)
    rest = []
    for _ in range(3):
        rest.append(resumed.draw())
        resumed = resumed.next()
    assert first + rest == whole


def test_draws_are_uniform():
    draws = np.array([RandomState(3, 0, index).draw() for index in range(8_000)]) / 2**DRAW_BITS
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_square = float(((counts - 400) ** 2 / 400).sum())
    assert chi_square < 43.8  # 0.1 % point for 19 degrees of freedom
    assert draws.min() >= 0
    assert draws.max() < 1
