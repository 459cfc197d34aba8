"""The reference of an exact model: the same kernels on one request, with nothing beside it.

Whole-number products leave a float pass nothing to say about the last bit, so the judge of an exact model's bits is the
kernels themselves on the plainest work there is: a store of its own, every position at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.model.backends.cpu_backend import CpuBackend
from drumline.model.batch import Segment, StepBatch
from drumline.model.kernels.store import TiledKV
from drumline.model.language_model import LanguageModel
from drumline.model.openmp import LOCK


@dataclass
class ExactRow:
    """Keys and values of one sequence, and how many tokens they are of."""

    store: TiledKV
    length: int = 0


def exact_row(model: LanguageModel) -> ExactRow:
    """An empty row of that model."""
    return ExactRow(TiledKV(model.config, 1, model.window, model.kv_dtype))


def exact_logits(model: LanguageModel, ids: Sequence[int], row: ExactRow, last: int | None) -> Tensor:
    """Logits `[time, vocab]`, float32, of ids that stand behind what the row holds, which grows by them.

    `last` keeps only the last so many positions. Raises `ValueError` for no ids, and past the model's window.
    """
    end = row.length + len(ids)
    if not ids or end > model.window:
        raise ValueError(f"{len(ids)} ids at position {row.length} do not fit a window of 1 … {model.window} tokens")
    batch = StepBatch((Segment(0, row.length, ids, wanted=1),))
    wanted = range(0 if last is None else len(ids) - last, len(ids))
    with LOCK:  # the backend and its logits are everybody's
        logits = _backend(model).logits_at(batch, row.store, wanted).copy()
    row.length = end
    return torch.from_numpy(logits)


def _backend(model: LanguageModel) -> CpuBackend:
    """The model's backend; the last one is kept, because laying out the weights takes its time."""
    if not _kept or _kept[0][0] is not model:
        _kept[:] = [(model, CpuBackend(model))]
    return _kept[0][1]


_kept: list[tuple[LanguageModel, CpuBackend]] = []
