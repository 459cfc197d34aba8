"""What changes a row's logits before a token is chosen: penalties, biases, a request's own processors, and masks."""

import traceback
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from drumline.model.errors import EngineFailed
from drumline.model.sampling_params import SamplingParams

Row = NDArray[np.floating]
Ids = NDArray[np.int64]
Processor = Callable[[Sequence[int], Row], Row]
"""`(prompt and generated ids, logits [vocab] float64) -> logits [vocab]`."""


def penalised(logits: Row, params: SamplingParams, ids: Sequence[int], prompt_length: int) -> NDArray[np.float64]:
    """All scores `[vocab]` after `penalties`; `logits` is left unchanged."""
    scores = logits.astype(np.float64)
    affected, values = penalties(logits, params, ids, prompt_length)
    scores[affected] = values
    return scores


def penalties(
    logits: Row, params: SamplingParams, ids: Sequence[int], prompt_length: int
) -> tuple[Ids, NDArray[np.float64]]:
    """The ids, ascending, whose score is not simply their logit, and their scores.

    Repetition penalty over all `ids` (the first `prompt_length` of them the prompt's), then presence and frequency
    penalties over the generated ones, then logit_bias. Raises `EngineFailed` when a score leaves the range of numbers.
    """
    known = np.asarray(ids, dtype=np.int64)
    counted = known[prompt_length:] if params.presence_penalty or params.frequency_penalty else known[:0]
    biased = np.fromiter(params.logit_bias, np.int64, len(params.logit_bias))
    repeated = np.zeros(len(logits), dtype=np.bool_)  # marks over the vocabulary: quicker than sorting the ids
    if params.repetition_penalty != 1.0:
        repeated[known] = True
        repeated[list(params.exempt_ids)] = False
    marks = repeated.copy()
    marks[counted] = marks[biased] = True
    affected = np.flatnonzero(marks)
    scores = logits[affected].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # told below, as an error of this row
        if params.repetition_penalty != 1.0:
            by = params.repetition_penalty
            scores = np.where(repeated[affected], np.where(scores > 0, scores / by, scores * by), scores)
        if len(counted):
            counts = np.bincount(np.searchsorted(affected, counted), minlength=len(affected))
            lowered = scores - (params.presence_penalty + params.frequency_penalty * counts)
            scores = np.where(counts > 0, lowered, scores)
        scores[np.searchsorted(affected, biased)] += np.fromiter(params.logit_bias.values(), np.float64, len(biased))
    if not np.isfinite(scores).all():
        raise EngineFailed("penalties or biases took a logit beyond the range of numbers")
    return affected, scores


def processed(scores: Row, ids: Sequence[int], processors: Sequence[Processor]) -> Row:
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


def masked(scores: Row, params: SamplingParams, blocked: Sequence[int], mask: NDArray[np.bool_] | None = None) -> Row:
    """The scores with −inf for all ids that must not be chosen; `mask` `[vocab]` is true for those that may."""
    if params.allowed_ids is not None:
        allowed = np.asarray(params.allowed_ids, dtype=np.int64)
        only = np.full_like(scores, -np.inf)
        only[allowed] = scores[allowed]
        scores = only
    if mask is not None:
        scores[~mask] = -np.inf
    scores[forbidden(params, blocked)] = -np.inf
    return scores


def forbidden(params: SamplingParams, blocked: Sequence[int]) -> Ids:
    """The ids that are masked one by one."""
    return np.asarray((*params.banned_ids, *blocked), dtype=np.int64)
