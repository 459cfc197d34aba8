"""The same request, the same logits to the bit: whatever is computed beside it, in any order, chunks, rows, threads."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from drumline.model.backends.cpu_backend import CpuBackend
from drumline.model.backends.products import FloatProduct, OneDnnProduct, PanelProduct, why_not_exact
from drumline.model.batch import Segment, StepBatch
from drumline.model.language_model import LanguageModel
from tests.model.kernels.judge import same_bits
from tests.model.kernels.steps import alone, backend_with, model_of, poisoned_store, prompts, step, together
from tests.tiny import FAMILIES, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS: dict[str, Callable[[random.Random], Callable[[], int]]] = {
    "1": lambda dice: lambda: 1,
    "7": lambda dice: lambda: 7,
    "16": lambda dice: lambda: 16,
    "37": lambda dice: lambda: 37,
    "64": lambda dice: lambda: 64,
    "whole": lambda dice: lambda: 1_000,
    "any": lambda dice: lambda: dice.choice((1, 1, 2, 3, 5, 16, 17, 40)),
}
WINDOW = 70


def assert_same(given: list[np.ndarray], wanted: list[np.ndarray], where: str = "") -> None:
    for index, (mine, ours) in enumerate(zip(given, wanted, strict=True)):
        assert same_bits(mine, ours), f"request {index} {where}"


def tiny(family: str) -> LanguageModel:
    return tiny_model(family, window=WINDOW, precision="int8")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_company(family: str, chunks: str):
    model, dice = tiny(family), random.Random(f"{family}{chunks}")
    backend = CpuBackend(model)
    requests = prompts(dice, model, 34, WINDOW)
    wanted = [alone(backend, model, ids) for ids in requests]
    for count in (1, 2, 7, 34):
        chosen = dice.sample(range(34), count)
        given = together(backend, model, [requests[i] for i in chosen], dice, CHUNKS[chunks](dice))
        assert_same(given, [wanted[i] for i in chosen], f"of {count}")


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_company_with_other_keys_and_values(family: str, kv_dtype: torch.dtype):
    model, dice = replace(tiny(family), kv_dtype=kv_dtype), random.Random(family)
    backend = CpuBackend(model)
    requests = prompts(dice, model, 9, WINDOW)
    wanted = [alone(backend, model, ids) for ids in requests]
    assert_same(together(backend, model, requests, dice, CHUNKS["any"](dice)), wanted)
    assert_same([alone(backend, model, ids, chunk=1) for ids in requests], wanted)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_grouping_of_heads(group: int):
    """How many tokens share a block of attention depends on it."""
    config = replace(tiny_config("llama", WINDOW), heads=2 * group, head_dim=8 if group % 2 else 24)
    model, dice = model_of(config), random.Random(group)
    backend = CpuBackend(model)
    requests = prompts(dice, model, 5, WINDOW)
    wanted = [alone(backend, model, ids) for ids in requests]
    assert_same(together(backend, model, requests, dice, CHUNKS["any"](dice)), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_threads(one_thread, family: str):
    model, dice = tiny(family), random.Random(0)
    backend = CpuBackend(model)
    requests = prompts(dice, model, 5, WINDOW)
    wanted = [alone(backend, model, ids) for ids in requests]
    torch.set_num_threads(2)  # the fixture puts it back
    assert_same([alone(backend, model, ids) for ids in requests], wanted, "alone")
    assert_same(together(backend, model, requests, dice, CHUNKS["any"](dice)), wanted, "together")
    torch.set_num_threads(1)
    assert_same(together(backend, model, requests, dice, CHUNKS["any"](dice)), wanted, "together again")


@pytest.mark.parametrize("family", FAMILIES)
def test_few_tokens_and_many(family: str):
    """Up to two tokens a step runs without the threads."""
    model = tiny(family)
    backend = CpuBackend(model)
    ids = prompts(random.Random(1), model, 2, WINDOW)[1]
    wanted = alone(backend, model, ids)
    for size in (1, 2, 3, 4):
        assert same_bits(alone(backend, model, ids, chunk=size), wanted), f"chunks of {size}"


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_that_grow(family: str):
    model, dice = tiny(family), random.Random(2)
    backend, requests = CpuBackend(model), prompts(dice, model, 8, WINDOW)
    kv = poisoned_store(model, len(requests))
    wanted = [alone(backend, model, ids) for ids in requests]
    first = step(backend, kv, [Segment(0, 0, requests[0], True)])
    rest = step(backend, kv, [Segment(row, 0, ids, True) for row, ids in enumerate(requests) if row])
    again = step(backend, poisoned_store(model, 1), [Segment(0, 0, requests[0], True)])
    assert_same([*first, *rest, *again], [*wanted, wanted[0]])


@pytest.mark.parametrize("family", FAMILIES)
def test_with_timings_and_without(family: str):
    """Kernel by kernel from Python, and all layers in one call."""
    model, dice = tiny(family), random.Random(3)
    backend, requests = CpuBackend(model), prompts(dice, model, 6, WINDOW)
    wanted = [alone(backend, model, ids) for ids in requests]
    backend.timings = {}
    assert_same([alone(backend, model, ids, chunk=9) for ids in requests], wanted)
    assert set(backend.timings) == {"embedding", "norm", "linear", "rope", "attention", "feed_forward", "head"}
    assert all(seconds > 0 for seconds in backend.timings.values())
    assert_same(together(backend, model, requests, dice, CHUNKS["any"](dice)), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_exact_product_gives_the_same_bits(family: str):
    """The same whole numbers, scaled in the same order."""
    model, dice = tiny(family), random.Random(4)
    requests = prompts(dice, model, 6, WINDOW)
    wanted = [alone(backend_with(FloatProduct(), model), model, ids) for ids in requests]
    for product in (PanelProduct(), OneDnnProduct()):
        if why_not_exact(product) is None:
            backend = backend_with(product, model)
            assert_same([alone(backend, model, ids) for ids in requests], wanted, product.name)
            assert_same(together(backend, model, requests, dice, CHUNKS["any"](dice)), wanted, product.name)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("widths", [(24, 3, 8, 40), (36, 3, 10, 44), (80, 5, 16, 112)])
def test_odd_widths(family: str, widths: tuple[int, int, int, int]):
    width, heads, head_dim, ffn_width = widths
    model = model_of(replace(
        tiny_config(family, WINDOW), width=width, heads=heads, kv_heads=heads, head_dim=head_dim, ffn_width=ffn_width
    ))  # fmt: skip
    backend, dice = CpuBackend(model), random.Random(5)
    requests = prompts(dice, model, 6, WINDOW)
    wanted = [alone(backend, model, ids) for ids in requests]
    assert_same(together(backend, model, requests, dice, CHUNKS["any"](dice)), wanted)


def test_another_request_changes_the_bits():
    """So that these comparisons can fail."""
    model = tiny("llama")
    backend = CpuBackend(model)
    results = [alone(backend, model, ids) for ids in ([5, 6, 7], [5, 6, 8], [4, 6, 7])]
    assert not any(same_bits(mine[-1], other[-1]) for mine, other in pairwise(results))
    assert same_bits(results[0][:2], results[1][:2])


class TestSmolLM2:
    def last_logits(self, backend, model, requests, dice, chunk) -> list[np.ndarray]:
        """Only the logits that a step asks for: the vocabulary is large."""
        kv, rows, done = poisoned_store(model, len(requests)), list(range(len(requests))), [0] * len(requests)
        dice.shuffle(rows)
        found: list[np.ndarray] = [np.empty(0)] * len(requests)
        while live := [i for i, ids in enumerate(requests) if done[i] < len(ids)]:
            dice.shuffle(live)
            segments = [Segment(rows[i], done[i], requests[i][done[i] : done[i] + chunk()], True) for i in live]
            logits = backend.forward(StepBatch(tuple(segments)), kv).logits.numpy()
            for i, segment, line in zip(live, segments, logits, strict=True):
                done[i] += segment.length
                found[i] = line.copy()
        return found

    def test_company(self, one_thread, smollm2_int8: LanguageModel):
        model, dice = smollm2_int8, random.Random(6)
        backend = CpuBackend(model)
        requests = prompts(dice, model, 6, 70)
        wanted = [self.last_logits(backend, model, [ids], dice, lambda: 1_000)[0] for ids in requests]
        for chunks in ("7", "any"):
            given = self.last_logits(backend, model, requests, dice, CHUNKS[chunks](dice))
            assert_same(given, wanted, f"chunks of {chunks}")
        torch.set_num_threads(2)
        assert_same(self.last_logits(backend, model, requests, dice, CHUNKS["any"](dice)), wanted, "two threads")
        by_one = self.last_logits(backend, model, requests[-1:], dice, lambda: 1)
        assert_same(by_one, wanted[-1:], "token by token")
