"""What is not finite ends in NaN logits of its own row, whichever stage it comes from, and in nobody else's."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from drumline.model.backends.cpu_backend import CpuBackend
from drumline.model.backends.products import FloatProduct
from drumline.model.batch import Segment, StepBatch
from drumline.model.kernels.store import TiledKV
from drumline.model.language_model import LanguageModel
from tests.model.kernels.judge import same_bits
from tests.model.kernels.steps import alone, backend_with, model_of, poisoned_store
from tests.tiny import FAMILIES, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

POISONS = (math.nan, math.inf, -math.inf)
CONTEXT = [[5, 9, 200, 17, 33, 8, 120], [], [], [77, 3]]
NEW = ([41], [12, 250, 6, 19, 90], [101], [66])
"""Two rows that decode, a prompt, and a prompt of one token; all in one step."""
STRANGER = [200, 4, 31, 8]


class PoisonedStack:
    """Puts one value into one token's line of a product's output, in one layer."""

    def __init__(self, stack, layer: int, token: int, column: int, value: float) -> None:
        self.stack, self.layer, self.place, self.value = stack, layer, (token, column), value

    def multiply(self, layer, tokens, codes, token_scales, out):
        self.stack.multiply(layer, tokens, codes, token_scales, out)
        if layer == self.layer:
            out[self.place] = self.value


def started(backend: CpuBackend, model: LanguageModel) -> TiledKV:
    kv = poisoned_store(model, len(NEW))
    context = [Segment(row, 0, ids, False) for row, ids in enumerate(CONTEXT) if ids]
    backend.forward(StepBatch(tuple(context)), kv)
    return kv


def next_step(backend: CpuBackend, kv: TiledKV) -> np.ndarray:
    """Logits of the four rows."""
    segments = [Segment(row, len(CONTEXT[row]), ids, True) for row, ids in enumerate(NEW)]
    return backend.forward(StepBatch(tuple(segments)), kv).logits.numpy().copy()


def last_token(row: int) -> int:
    return sum(len(ids) for ids in NEW[: row + 1]) - 1


@contextmanager
def poisoned(backend: CpuBackend, slot: str, *place: object) -> Iterator[None]:
    stack, timings = getattr(backend, slot), backend.timings
    setattr(backend, slot, PoisonedStack(stack, *place))
    backend.timings = {}  # kernel by kernel
    yield
    setattr(backend, slot, stack)
    backend.timings = timings


def stages(model: LanguageModel) -> dict[str, tuple[str, int]]:
    """Where a product's output column leads."""
    config = model.config
    queries, kv = config.query_width, config.kv_width
    found = {
        "query": ("_qkv", 3), "last query": ("_qkv", queries - 1), "key": ("_qkv", queries),
        "last key": ("_qkv", queries + kv - 1), "value": ("_qkv", queries + kv),
        "last value": ("_qkv", queries + 2 * kv - 1), "output": ("_output", config.width - 1), "up": ("_up", 5),
        "down": ("_down", 0),
    }  # fmt: skip
    return found | ({"gated": ("_up", config.ffn_width + 5)} if config.gated else {})


def assert_only(row: int, given: np.ndarray, clean: np.ndarray, where: str) -> None:
    others = np.arange(len(clean)) != row
    assert np.isnan(given[row]).all(), f"{where}: the poisoned row's logits are numbers"
    assert same_bits(given[others], clean[others]), f"{where}: another row changed"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("poison", POISONS)
def test_every_stage_of_every_layer(family: str, poison: float):
    model = tiny_model(family, precision="int8")
    backend = CpuBackend(model)
    clean, stranger = next_step(backend, started(backend, model)), alone(backend, model, STRANGER)
    problems = []
    for layer in range(model.config.layers):
        for stage, (slot, column) in stages(model).items():
            for row in range(len(NEW)):
                kv = started(backend, model)
                with poisoned(backend, slot, layer, last_token(row), column, poison):
                    given = next_step(backend, kv)
                try:
                    assert_only(row, given, clean, f"layer {layer}, {stage}, row {row}")
                except AssertionError as problem:
                    problems.append(str(problem).splitlines()[0])
                again = backend.logits_at(StepBatch((Segment(row, 0, STRANGER, True),)), kv, range(len(STRANGER)))
                if not same_bits(again, stranger):
                    problems.append(f"layer {layer}, {stage}, row {row}: the next tenant suffers")
    assert not problems


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("poison", POISONS)
def test_the_embedding_of_one_id(family: str, poison: float):
    """Through `run_layers`, in a step of a few tokens and in one of many."""
    model = tiny_model(family, precision="int8")
    embedding = model.weights.embedding.clone()
    embedding[NEW[0][0], 7] = poison
    backend = CpuBackend(replace(model, weights=replace(model.weights, embedding=embedding)))
    clean = next_step(CpuBackend(model), started(CpuBackend(model), model))
    assert_only(0, next_step(backend, started(backend, model)), clean, "embedding")
    assert np.isnan(alone(backend, model, NEW[0])).all()
    assert same_bits(alone(backend, model, STRANGER), alone(CpuBackend(model), model, STRANGER))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("widths", [(24, 3, 8, 40), (40, 5, 8, 72), (36, 3, 10, 44)])
def test_a_slot_is_clean_again_in_models_of_odd_widths(family: str, widths: tuple[int, int, int, int]):
    """Whose vectors are padded: what a poisoned token leaves in the padding must not reach the next one there."""
    width, heads, head_dim, ffn_width = widths
    model = model_of(replace(
        tiny_config(family), width=width, heads=heads, kv_heads=heads, head_dim=head_dim, ffn_width=ffn_width
    ))  # fmt: skip
    backend = CpuBackend(model)
    clean, stranger = next_step(backend, started(backend, model)), alone(backend, model, STRANGER)
    model.weights.embedding[250] = math.nan  # NEW[1] has it
    assert_only(1, next_step(backend, started(backend, model)), clean, "embedding")
    assert same_bits(alone(backend, model, STRANGER), stranger)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("position", [0, 6])
def test_a_nan_in_the_store(family: str, name: str, position: int):
    model = tiny_model(family, precision="int8")
    backend = CpuBackend(model)
    clean = next_step(backend, started(backend, model))
    for layer in range(model.config.layers):
        for head in range(model.config.kv_heads):
            kv = started(backend, model)
            if name == "keys":
                kv.keys[layer, 0, head, position // 16, 3, position % 16] = 0x7FC0
            else:
                kv.values[layer, 0, head, position, 3] = 0x7FC0
            assert_only(0, next_step(backend, kv), clean, f"layer {layer}, head {head}")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("poison", POISONS)
def test_with_the_float_product_too(family: str, poison: float):
    """Its codes are float32, so a NaN may stand in the codes themselves."""
    model = tiny_model(family, precision="int8")
    backend = backend_with(FloatProduct(), model)
    clean = next_step(backend, started(backend, model))
    for slot in ("_output", "_up", "_down"):
        kv = started(backend, model)
        with poisoned(backend, slot, 0, last_token(1), 3, poison):
            assert_only(1, next_step(backend, kv), clean, slot)
