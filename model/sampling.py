"""Choosing the next token of a step's rows: the order of operations is a contract, and so is every tie.

Penalties, biases and masks are worked out in numpy, for the few ids that they touch; the choice itself is a kernel's,
in the whole-number weights of `distribution.py`. A row's choice depends on nothing but that row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from drumline.model.distribution import WEIGHT_BITS, least_weight
from drumline.model.errors import EngineFailed
from drumline.model.grammar import GrammarState
from drumline.model.kernels.compile import use_threads
from drumline.model.kernels.sampling import NOT_FINITE, OK, ROW, finish_rows
from drumline.model.kernels.selection import SHORT, make_scratch
from drumline.model.openmp import LOCK
from drumline.model.penalties import Processor, Row, forbidden, masked, penalised, penalties, processed
from drumline.model.random_state import RandomState
from drumline.model.sampling_params import SamplingParams

_scratch = lru_cache(maxsize=4)(make_scratch)
_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float64)
_OUTCOME = ["status", "chosen", "logprobs", "logprob"]
_NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class RowChoice:
    """What one row's choice depends on besides its logits.

    `ids` are the prompt's and generated ids so far, the first `prompt_length` of them the prompt's; `blocked` are
    masked besides the request's own bans (EOS and stop ids before min_tokens); `logprobs` is how many of the likeliest
    log-probabilities are wanted beside the chosen token's, None for none at all. `grammar` masks what may not come
    next. `told` ≥ 0 is a token that is known already: only its log-probabilities are wanted.
    """

    params: SamplingParams
    ids: Sequence[int]
    prompt_length: int
    random: RandomState
    blocked: Sequence[int] = ()
    processors: Sequence[Processor] = ()
    logprobs: int | None = None
    grammar: GrammarState | None = None
    told: int = -1

    @property
    def plain(self) -> bool:
        """Whether its scores are its logits."""
        params = self.params
        return self.grammar is None and not (
            self.blocked or self.processors or params.banned_ids or params.logit_bias or params.allowed_ids is not None
            or params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """A row's token; where they were wanted, its log-probability and the likeliest (id, log-probability) pairs."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose_rows(logits: Row, rows: Sequence[RowChoice]) -> list[Choice | Exception]:
    """The next token of each row, whose raw logits are float32 `[rows, vocab]`.

    A row's own failure is its own outcome: `EngineFailed` when its logits are not finite, a processor fails, or every
    token is masked; any other exception that its data raise.
    """
    work = _Work(logits)
    outcomes: list[Choice | Exception | None] = [None] * len(rows)
    for place, row in enumerate(rows):
        try:
            work.add(place, row)
        except Exception as error:
            outcomes[place] = error
    chosen = iter(work.finish())
    return [next(chosen) if outcome is None else outcome for outcome in outcomes]


def choose(
    logits: Row,
    params: SamplingParams,
    ids: Sequence[int],
    prompt_length: int,
    random: RandomState,
    blocked: Sequence[int] = (),
    processors: Sequence[Processor] = (),
) -> int:
    """`choose_rows` for one row `[vocab]`; its failure is raised."""
    (outcome,) = choose_rows(logits[None], [RowChoice(params, ids, prompt_length, random, blocked, processors)])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome.token_id


def log_probabilities(logits: Row, chosen: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """log_softmax of a row's raw logits `[vocab]`, rounded to float32: the chosen id's, and the `top` likeliest
    (id, value) pairs, the smaller id first on ties. Raises `EngineFailed` when the logits are not finite."""
    if not 0 <= chosen < len(logits):
        raise IndexError(f"id {chosen} in a vocabulary of {len(logits)}")
    work = _Work(logits[None])
    work.add(0, RowChoice(SamplingParams(), (), 0, RandomState(0), logprobs=top, told=chosen))
    (outcome,) = work.finish()
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome.logprob is not None
    return outcome.logprob, outcome.top


@lru_cache(maxsize=256)
def _limits(min_p: float, top_p: float) -> tuple[int, int, float, float]:
    """`top_p`, `top_p_shift`, `least` and `farthest` of `ROW`."""
    least = least_weight(min_p)
    numerator, denominator = top_p.as_integer_ratio()
    shift = denominator.bit_length() - 1
    if shift > 127:  # of any mass it is less than one
        numerator, shift = 0, 1
    return numerator, shift, least, math.log(least - 0.5) - WEIGHT_BITS * math.log(2) - 1e-6  # rather too far


class _Work:
    """The kernel's arguments, collected row by row."""

    def __init__(self, logits: Row) -> None:
        logits, self._vocab = np.asarray(logits, dtype=np.float32), logits.shape[1]
        down, across = logits.strides
        if len(logits) > 1 and across == logits.itemsize and down >= logits[0].nbytes and down % across == 0:
            logits = as_strided(logits, (len(logits), down // across))  # a backend's padding, which is never read
        self._logits = np.ascontiguousarray(logits)
        self._rows: list[tuple[float, ...]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []
        self._changes = 0
        self._replaced: list[Row] = []
        self._top = 0

    def add(self, place: int, row: RowChoice) -> None:
        """Take in the row whose logits lie at `place`."""
        params, random, start, replaced = row.params, row.random, self._changes, -1
        if not row.plain:
            replaced = self._change(self._logits[place, : self._vocab], row)
        logprobs = -1 if row.logprobs is None else row.logprobs
        self._top = max(self._top, logprobs)
        top_k = params.top_k if params.top_k < self._vocab else 0
        self._rows.append(
            (
                *(place, params.greedy, params.temperature, top_k, *_limits(params.min_p, params.top_p)),
                *(random.seed, random.choice, random.index, start, self._changes, replaced),
                *(logprobs, OK, row.told, 0.0),
            )
        )

    def _change(self, logits: NDArray[np.float32], row: RowChoice) -> int:
        """Note the scores that differ from the logits, or replace all of them; return which full row, −1 for none."""
        params = row.params
        full = bool(row.processors) or row.grammar is not None or params.allowed_ids is not None
        if full and not np.isfinite(logits).all():
            raise EngineFailed(_NOT_FINITE)
        try:
            if full:
                scores = penalised(logits, params, row.ids, row.prompt_length)
                mask = None if row.grammar is None else row.grammar.mask()
                self._replaced.append(masked(processed(scores, row.ids, row.processors), params, row.blocked, mask))
                return len(self._replaced) - 1
            ids, values = penalties(logits, params, row.ids, row.prompt_length)
        except EngineFailed:
            if not np.isfinite(logits).all():
                raise EngineFailed(_NOT_FINITE) from None
            raise
        banned = forbidden(params, row.blocked)
        ids = np.concatenate((ids, banned))  # after the penalties: of two values for an id the later counts
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(logits):
            raise IndexError(f"ids {ids.min()} … {ids.max()} in a vocabulary of {len(logits)}")
        self._ids.append(ids)
        self._values += [values, np.full(len(banned), -np.inf)]
        self._changes += len(ids)
        return -1

    def finish(self) -> list[Choice | Exception]:
        """Run the kernel; the outcomes in the order in which the rows came."""
        if not self._rows:
            return []
        rows, vocab = np.array(self._rows, dtype=ROW), self._vocab
        top_ids, top_values = np.empty((len(rows), self._top), np.int64), np.empty((len(rows), self._top), np.float32)
        arguments = (
            self._logits,
            vocab,
            rows,
            np.concatenate(self._ids) if self._ids else _NO_IDS,
            np.concatenate(self._values) if self._values else _NO_VALUES,
            np.stack(self._replaced) if self._replaced else _NO_VALUES.reshape(0, vocab),
            top_ids,
            top_values,
        )
        with LOCK:
            threads = max(1, min(use_threads(), len(rows)))
            numba.set_num_threads(threads)  # a lone row wakes nobody
            finish_rows(threads, *arguments, _scratch(threads, vocab, max(SHORT, self._top)))
        outcomes: list[Choice | Exception] = []
        for i, (status, chosen, wanted, logprob) in enumerate(rows[_OUTCOME].tolist()):
            if status != OK:
                outcomes.append(EngineFailed(_NOT_FINITE if status == NOT_FINITE else "every token is masked"))
            elif wanted < 0:
                outcomes.append(Choice(chosen))
            else:
                likeliest = top_ids[i, : min(wanted, vocab)].tolist(), top_values[i].tolist()
                outcomes.append(Choice(chosen, logprob, tuple(zip(*likeliest, strict=False))))
        return outcomes
