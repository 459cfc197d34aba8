"""What a draw is made from, by a full sort of one row: the judge of the kernels that select instead.

Probabilities become whole numbers before they are summed, so that no sum depends on the order in which it is taken.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from drumline.model.kernels.sampling import exponentials
from drumline.model.random_state import DRAW_BITS, RandomState
from drumline.model.sampling_params import SamplingParams

Row = NDArray[np.floating]

WEIGHT_BITS = 37
"""The likeliest token weighs 2^37: sums over any vocabulary stay exact in int64."""


def distribution(scores: Row, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kept ids in ascending order and their whole-number weights, after temperature, top-k, min_p and top-p.

    A weight is rint(2^37 · exp((score − max) / temperature)); ids whose weight rounds to zero are not kept.
    """
    kept = np.flatnonzero(scores > -np.inf)
    if 0 < params.top_k < len(kept):
        kept = np.sort(kept[np.argsort(-scores[kept], kind="stable")[: params.top_k]])
    with np.errstate(over="ignore"):  # far below the maximum, −inf is as good as any number
        scaled = (scores[kept] - scores[kept].max()) / params.temperature
    weights = np.rint(exponential(scaled) * 2.0**WEIGHT_BITS).astype(np.int64)
    stay = weights >= least_weight(params.min_p)
    kept, weights = kept[stay], weights[stay]
    if params.top_p < 1.0:
        within = _within_mass(scores[kept], weights, params.top_p)
        kept, weights = kept[within], weights[within]
    return kept, weights


def exponential(values: Row) -> NDArray[np.float64]:
    """e^x by the kernels' own series, within 1 unit in the last place for |x| ≤ 700; beyond, that of ±700."""
    padded = np.zeros(-(-len(values) // 16) * 16)
    padded[: len(values)] = values
    exponentials(padded)
    return padded[: len(values)]


def least_weight(min_p: float) -> int:
    """The smallest weight that stays beside the likeliest token's 2^37: min_p of it, exactly, and at least 1."""
    return max(1, math.ceil(min_p * 2.0**WEIGHT_BITS))  # a power of two rounds nothing


def draw(kept: NDArray[np.int64], weights: NDArray[np.int64], random: RandomState) -> int:
    """The first id, in ascending order, whose running sum of weights exceeds u · total."""
    sums = np.cumsum(weights)
    threshold = (random.draw() * int(sums[-1])) >> DRAW_BITS  # a whole sum exceeds x where it exceeds floor(x)
    return int(kept[np.searchsorted(sums, threshold, side="right")])


def _within_mass(scores: Row, weights: NDArray[np.int64], top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of those before which at most `top_p` of the whole mass lies, the best first."""
    order = np.argsort(-scores, kind="stable")  # the smaller id first on ties
    before = np.cumsum(weights[order]) - weights[order]
    return np.sort(order[before <= int(Fraction(top_p) * int(weights.sum()))])
