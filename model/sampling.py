"""Choosing a row's next token: the order of operations is a contract, and so is every tie.

Everything works on one row and is written in float64 numpy; probabilities become whole numbers before they are summed,
so that no sum depends on the order in which it is taken.
"""

import math
import traceback
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from drumline.model.errors import EngineFailed
from drumline.model.random_state import DRAW_BITS, RandomState
from drumline.model.sampling_params import SamplingParams

Row = NDArray[np.floating]
Processor = Callable[[Sequence[int], Row], Row]
"""`(prompt and generated ids, logits [vocab] float64) -> logits [vocab]`."""

WEIGHT_BITS = 37
"""The likeliest token weighs 2^37: sums over any vocabulary stay exact in int64."""


def choose(
    logits: Row,
    params: SamplingParams,
    ids: Sequence[int],
    prompt_length: int,
    random: RandomState,
    blocked: Sequence[int] = (),
    processors: Sequence[Processor] = (),
) -> int:
    """The next token of a row whose raw logits are `[vocab]`.

    `ids` are the prompt's and generated ids so far, the first `prompt_length` of them the prompt's; `blocked` are
    masked besides the request's own bans (EOS and stop ids before min_tokens). Raises `EngineFailed` when the logits
    are not finite, a processor fails, or every token is masked.
    """
    if not np.isfinite(logits).all():
        raise EngineFailed("the model's logits are not finite")
    with np.errstate(over="ignore", invalid="ignore"):  # told below, as an error of this row
        scores = penalised(logits, params, ids, prompt_length)
    if not np.isfinite(scores).all():
        raise EngineFailed("penalties or biases took a logit beyond the range of numbers")
    scores = _masked(_processed(scores, ids, processors), params, blocked)
    best = int(np.argmax(scores))  # the smallest id on ties
    if scores[best] == -np.inf:
        raise EngineFailed("every token is masked")
    if params.greedy:
        return best
    kept, weights = distribution(scores, params)
    return draw(kept, weights, random)


def penalised(logits: Row, params: SamplingParams, ids: Sequence[int], prompt_length: int) -> Row:
    """Repetition, presence and frequency penalties and logit_bias, in this order; `logits` is left unchanged."""
    scores = logits.astype(np.float64)
    if params.repetition_penalty != 1.0:
        seen = np.setdiff1d(np.asarray(ids, dtype=np.int64), np.asarray(params.exempt_ids, dtype=np.int64))
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        generated, counts = np.unique(np.asarray(ids[prompt_length:], dtype=np.int64), return_counts=True)
        scores[generated] -= params.presence_penalty + params.frequency_penalty * counts
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    return scores


def distribution(scores: Row, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kept ids in ascending order and their whole-number weights, after temperature, top-k, min_p and top-p.

    A weight is rint(2^37 · exp((score − max) / temperature)); ids whose weight rounds to zero are not kept.
    """
    kept = np.flatnonzero(scores > -np.inf)
    if 0 < params.top_k < len(kept):
        kept = np.sort(kept[_top_ids(scores[kept], params.top_k)])
    with np.errstate(over="ignore"):  # far below the maximum, −inf is as good as any number
        scaled = (scores[kept] - scores[kept].max()) / params.temperature
    weights = np.rint(np.exp(scaled) * 2.0**WEIGHT_BITS).astype(np.int64)
    stay = weights >= max(1, math.ceil(Fraction(params.min_p) * int(weights.max())))
    kept, weights = kept[stay], weights[stay]
    if params.top_p < 1.0:
        stay = _within_mass(scores[kept], weights, params.top_p)
        kept, weights = kept[stay], weights[stay]
    return kept, weights


def _within_mass(scores: Row, weights: NDArray[np.int64], top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of those before which at most `top_p` of the whole mass lies, the best first."""
    order = np.argsort(-scores, kind="stable")  # the smaller id first on ties
    before = np.cumsum(weights[order]) - weights[order]
    return np.sort(order[before <= int(Fraction(top_p) * int(weights.sum()))])


def draw(kept: NDArray[np.int64], weights: NDArray[np.int64], random: RandomState) -> int:
    """The first id, in ascending order, whose running sum of weights exceeds u · total."""
    sums = np.cumsum(weights)
    threshold = (random.draw() * int(sums[-1])) >> DRAW_BITS  # a whole sum exceeds x where it exceeds floor(x)
    return int(kept[np.searchsorted(sums, threshold, side="right")])


def log_probabilities(logits: Row, chosen: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """log_softmax of the raw logits, rounded to float32: the chosen id's, and the `top` likeliest (id, value) pairs."""
    wide = logits.astype(np.float64)
    highest = wide.max()
    values = wide - highest - np.log(np.exp(wide - highest).sum())
    values = np.maximum(values, np.finfo(np.float32).min).astype(np.float32)  # −inf is no number in JSON
    likeliest = _top_ids(wide, top)
    return float(values[chosen]), tuple((int(i), float(values[i])) for i in likeliest)


def _top_ids(scores: Row, count: int) -> NDArray[np.int64]:
    """Indices of the `count` highest scores, best first, the smaller index first on ties."""
    if count <= 0 or count >= len(scores):
        return np.argsort(-scores, kind="stable")[: max(count, 0)]
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > threshold)
    ties = np.flatnonzero(scores == threshold)[: count - len(above)]
    candidates = np.union1d(above, ties)
    return candidates[np.argsort(-scores[candidates], kind="stable")]


def _processed(scores: Row, ids: Sequence[int], processors: Sequence[Processor]) -> Row:
    """The scores after a request's own processors, in an array of our own: masks must not reach into theirs."""
    for processor in processors:
        try:
            changed = np.array(processor(tuple(ids), scores), dtype=np.float64)
        except BaseException as error:  # whatever it raises, SystemExit too, is the row's trouble alone
            reason = "".join(traceback.format_exception_only(error)).strip()
            raise EngineFailed(f"a logits processor failed: {reason}") from error
        if changed.shape != scores.shape or np.isnan(changed).any() or np.isposinf(changed).any():
            raise EngineFailed(f"a logits processor must return {scores.shape} numbers below infinity")
        scores = changed
    return scores


def _masked(scores: Row, params: SamplingParams, blocked: Sequence[int]) -> Row:
    if params.allowed_ids is not None:
        allowed = np.asarray(params.allowed_ids, dtype=np.int64)
        masked = np.full_like(scores, -np.inf)
        masked[allowed] = scores[allowed]
        scores = masked
    scores[np.asarray((*params.banned_ids, *blocked), dtype=np.int64)] = -np.inf
    return scores
