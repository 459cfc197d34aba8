"""Both judges of every family in int8: the same kernels one request at a time, and float64 without any of them.

Against float64 one code may round the other way, where a value lies within float32's rounding of a tie; on these tiny
models such a flip, once in some thousand tokens, moves logits by as much as the rounding of that code moved them.
Everything else agrees to float32's last bits, so flips are told from faults by how rare they are.
"""

import random

import numpy as np
import pytest
import torch

from drumline.cache_pool.kv import KVCache
from drumline.model.backends.cpu_backend import CpuBackend
from drumline.model.backends.torch_backend import TorchBackend
from drumline.model.batch import Segment, StepBatch
from drumline.model.language_model import LanguageModel
from drumline.model.reference import compare, emulated_logits, uncached_logits, uncached_steps
from tests.model.kernels.judge import same_bits
from tests.model.kernels.steps import alone, poisoned_store, prompts, together
from tests.tiny import FAMILIES, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 70
TEXT = "The old drummer tightened the skin of his drum, listened to the rain, and counted: one, two, three."
AGREE = 5e-6  # of most positions; largest logits are about 10, so these are a few float32 roundings
OFF, SHARE, FLIP = 1e-4, 0.1, 0.5  # positions beyond OFF: what share of them, by how much (measured: 0.05 and 0.34)


def cases(family: str, seeds: int = 4, **settings: object):
    for seed in range(seeds):
        model = tiny_model(family, window=WINDOW, seed=seed, precision="int8")
        for ids in prompts(random.Random(f"{family}{seed}"), model, 4, WINDOW):
            yield model, ids


def assert_agree(given: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """But for flips, which may reach what comes after them in their own request."""
    off = np.concatenate([np.abs(mine - ours).max(-1) for mine, ours in zip(given, wanted, strict=True)])
    assert np.isfinite(off).all()
    assert np.median(off) < AGREE
    assert (off > OFF).mean() < SHARE, f"{(off > OFF).sum()} of {len(off)} positions"
    assert off.max() < FLIP


@pytest.mark.parametrize("family", FAMILIES)
class TestTheSameKernels:
    def test_uncached_and_in_company(self, family: str):
        dice, model = random.Random(family), tiny_model(family, window=WINDOW, precision="int8")
        requests = prompts(dice, model, 8, WINDOW)
        given = together(CpuBackend(model), model, requests, dice, lambda: dice.choice((1, 1, 4, 16, 40)))
        for ids, logits in zip(requests, given, strict=True):
            assert same_bits(uncached_logits(model, ids).numpy(), logits)
            assert same_bits(uncached_logits(model, ids, last=1).numpy(), logits[-1:])

    def test_teacher_forced_beyond_a_window_that_slides(self, family: str):
        model, dice = tiny_model(family, window=24, precision="int8"), random.Random(family)
        prompt, *_, tokens = prompts(dice, model, 6, 24)
        assert compare(model, prompt, tokens * 2) == 0
        backend, ids = CpuBackend(model), [*prompt, *tokens, *tokens]
        steps = list(uncached_steps(model, prompt, [*tokens, *tokens]))
        for index, logits in enumerate(steps):
            window = ids[max(0, len(prompt) + index - 24) : len(prompt) + index]
            assert same_bits(logits.numpy(), alone(backend, model, window)[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_against_float64(family: str):
    given, wanted = [], []
    for model, ids in cases(family):
        given.append(alone(CpuBackend(model), model, ids))
        wanted.append(emulated_logits(model, ids).numpy())
    assert_agree(given, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_torch_backend_teacher_forced(family: str):
    given, wanted = [], []
    for model, ids in cases(family):
        given.append(alone(CpuBackend(model), model, ids))
        wanted.append(by_torch(model, ids))
    assert_agree(given, wanted)


def by_torch(model: LanguageModel, ids: list[int]) -> np.ndarray:
    """Token by token, as a row that decodes."""
    backend, kv = TorchBackend(model), KVCache(model, 1)
    steps = (StepBatch((Segment(0, i, ids[i : i + 1], True),)) for i in range(len(ids)))
    return torch.cat([backend.forward(step, kv).logits for step in steps]).numpy()


def divergence(judge: np.ndarray, other: np.ndarray) -> float:
    """The mean Kullback-Leibler divergence of the next token's distribution, in nats."""
    left, right = (torch.from_numpy(logits).double().log_softmax(-1) for logits in (judge, other))
    return float((left.exp() * (left - right)).sum(-1).mean())


def test_the_real_model(smollm2_int8: LanguageModel):
    """Through thirty layers some code flips at every position: the kernels may be as far from float64 as the torch
    backend's float32 is, not farther."""
    model = smollm2_int8
    ids = model.tokenizer.encode(TEXT)
    step = StepBatch((Segment(0, 0, ids, True),))
    kernels = CpuBackend(model).logits_at(step, poisoned_store(model, 1), range(len(ids)))
    judge = emulated_logits(model, ids).numpy()
    theirs, ours = divergence(judge, by_torch(model, ids)), divergence(judge, kernels)
    assert ours < min(2 * theirs, 0.006), f"{ours:.5f} nats, the torch backend {theirs:.5f}"
