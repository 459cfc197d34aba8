"""One step on the torch thread: forward, then choose each row's token."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from drumline.cache_pool.pool import CachePool
from drumline.model.backends import Backend
from drumline.model.batch import Segment, StepBatch
from drumline.model.errors import EngineFailed
from drumline.model.random_state import RandomState
from drumline.model.sampling import Choice, RowChoice, choose_rows
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.plan import Portion
from drumline.scheduler.request import TokenLogprob
from drumline.scheduler.sequence import Sequence

_log = logging.getLogger("drumline")


@dataclass(frozen=True)
class RowOutcome:
    """What the step did for one row: tokens computed, and a token or an error where logits were wanted."""

    segment: Segment
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepReport:
    """The outcomes of a step and what it cost."""

    outcomes: list[RowOutcome]
    decoded: int
    """Rows that were fed the one token they generated last."""
    padded_cells: int
    real_cells: int
    forward_s: float
    sample_s: float

    @cached_property
    def tokens(self) -> int:
        """Tokens fed."""
        return sum(outcome.segment.length for outcome in self.outcomes)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts, and of windows and rows that are computed again."""
        return self.tokens - self.decoded

    @cached_property
    def generated_tokens(self) -> int:
        """Tokens chosen."""
        return sum(outcome.token_id is not None for outcome in self.outcomes)

    @property
    def padding_ratio(self) -> float:
        """Share of attention's query-key pairs that were padding."""
        return 1 - self.real_cells / self.padded_cells


class StepRunner:
    """Runs plans against one pool. Reads the pool and the sequences, and changes nothing but keys and values: the
    scheduler commits afterwards, so a step that raises leaves every row where it was."""

    def __init__(self, backend: Backend, pool: CachePool) -> None:
        self._backend, self._pool = backend, pool

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute and choose one token for nobody, while no row is taken: no request is to wait for compilers."""
        output = self._backend.forward(StepBatch((Segment(0, 0, (0,), wants_logits=True),)), self._pool.kv)
        choose_rows(output.logits.numpy(), [RowChoice(SamplingParams(), (0,), 1, RandomState(0))])

    @torch.inference_mode()
    def run(self, plan: list[Portion], sequences: Mapping[int, Sequence]) -> StepReport:
        """Compute the plan's portions and choose a token for each row that reached its newest id."""
        self._pool.kv.wipe_retired()
        segments = tuple(self._pool.segment(portion.row, portion.length) for portion in plan)
        started = time.perf_counter()
        output = self._backend.forward(StepBatch(segments), self._pool.kv)
        forwarded = time.perf_counter()
        chosen = iter(self._choose(output.logits, [segment for segment in segments if segment.wants_logits], sequences))
        outcomes = [
            _outcome(segment, next(chosen)) if segment.wants_logits else RowOutcome(segment) for segment in segments
        ]
        return StepReport(
            outcomes,
            decoded=sum(not sequences[segment.row].prefilling for segment in segments),
            padded_cells=output.padded_cells,
            real_cells=output.real_cells,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def _choose(
        self, logits: torch.Tensor, segments: list[Segment], sequences: Mapping[int, Sequence]
    ) -> list[Choice | Exception]:
        """A token for each of the segments, whose logits are `[segments, vocab]`."""
        rows = []
        for segment in segments:
            sequence = sequences[segment.row]
            request = sequence.request
            rows.append(
                RowChoice(
                    request.sampling,
                    self._pool.ids(segment.row),
                    sequence.prompt_length,
                    self._pool.random(segment.row),
                    sequence.rules.blocked(len(sequence.token_ids)),
                    request.processors,
                    request.logprobs,
                )
            )
        return choose_rows(logits.numpy(), rows) if rows else []


def _outcome(segment: Segment, chosen: Choice | Exception) -> RowOutcome:
    """A row's own trouble ends in its outcome, never in the step."""
    if isinstance(chosen, EngineFailed):
        return RowOutcome(segment, error=str(chosen))
    if isinstance(chosen, Exception):
        _log.error("choosing a token failed", exc_info=chosen)
        return RowOutcome(segment, error=f"choosing a token failed: {type(chosen).__name__}")
    if chosen.logprob is None:
        return RowOutcome(segment, chosen.token_id)
    return RowOutcome(segment, chosen.token_id, TokenLogprob(chosen.token_id, chosen.logprob, chosen.top))
