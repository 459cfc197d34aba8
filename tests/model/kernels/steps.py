"""Steps through `CpuBackend`: every position's logits of requests alone, and in any company."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import torch

from drumline.model.backends import cpu_backend
from drumline.model.backends.cpu_backend import CpuBackend
from drumline.model.backends.products import Product
from drumline.model.batch import Segment, StepBatch
from drumline.model.config import ModelConfig
from drumline.model.kernels.store import TiledKV
from drumline.model.language_model import LanguageModel
from drumline.model.quantise import quantise
from tests.tiny import random_weights, tiny_model

Ids = Sequence[int]


def model_of(config: ModelConfig, kv_dtype: torch.dtype = torch.bfloat16) -> LanguageModel:
    """A random int8 model of any description."""
    weights = quantise(random_weights(config), config)
    given = tiny_model(precision="int8")
    return replace(given, config=config, weights=weights, window=config.window, kv_dtype=kv_dtype)


def backend_with(product: Product, model: LanguageModel) -> CpuBackend:
    with patch.object(cpu_backend, "choose_product", lambda: product):
        return CpuBackend(model)


def poisoned_store(model: LanguageModel, rows: int) -> TiledKV:
    """A store full of NaN."""
    kv = TiledKV(model.config, rows, model.window, model.kv_dtype)
    for array in (kv.keys, kv.values):
        array.fill({"f": np.nan, "u": 0x7FC1, "i": 99}[array.dtype.kind])
    kv.key_scales.fill(np.nan)
    kv.value_scales.fill(np.nan)
    return kv


def prompts(dice: random.Random, model: LanguageModel, count: int, longest: int) -> list[list[int]]:
    """Random ids, of length one, of the longest length, and between."""
    lengths = [1, longest, *(dice.randint(1, longest) for _ in range(count))][:count]
    return [[dice.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]


def step(backend: CpuBackend, kv: TiledKV, segments: Sequence[Segment]) -> list[np.ndarray]:
    """One step; the logits of all tokens of each segment."""
    batch = StepBatch(tuple(segments))
    logits = backend.logits_at(batch, kv, range(batch.tokens)).copy()
    return np.split(logits, np.cumsum([segment.length for segment in segments])[:-1])


def alone(backend: CpuBackend, model: LanguageModel, ids: Ids, chunk: int | None = None) -> np.ndarray:
    """Logits `[len(ids), vocab]` of one request in a store of one row."""
    kv, size = poisoned_store(model, 1), chunk or len(ids)
    parts = [
        step(backend, kv, [Segment(0, start, ids[start : start + size], True)])[0] for start in range(0, len(ids), size)
    ]
    return np.concatenate(parts)


def together(
    backend: CpuBackend, model: LanguageModel, requests: Sequence[Ids], dice: random.Random, chunk: Callable[[], int]
) -> list[np.ndarray]:
    """All requests at once, in random rows; each step a random part of them, in random order, by chunks of any size."""
    kv, rows = poisoned_store(model, len(requests) + 2), list(range(len(requests) + 2))
    dice.shuffle(rows)
    results: list[list[np.ndarray]] = [[] for _ in requests]
    done = [0] * len(requests)
    while live := [index for index, ids in enumerate(requests) if done[index] < len(ids)]:
        chosen = dice.sample(live, dice.randint((len(live) + 1) // 2, len(live)))
        segments = [
            Segment(rows[index], done[index], requests[index][done[index] : done[index] + chunk()], True)
            for index in chosen
        ]
        for index, segment, logits in zip(chosen, segments, step(backend, kv, segments), strict=True):
            results[index].append(logits)
            done[index] += segment.length
    return [np.concatenate(parts) for parts in results]
