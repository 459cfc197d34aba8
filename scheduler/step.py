"""One step on the torch thread: forward, then choose each row's token."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from drumline.cache_pool.pool import CachePool
from drumline.model.backends import Backend
from drumline.model.batch import Segment, StepBatch
from drumline.model.errors import EngineFailed
from drumline.model.sampling import Row, choose, log_probabilities
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

    @property
    def tokens(self) -> int:
        """Tokens fed."""
        return sum(outcome.segment.length for outcome in self.outcomes)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts, and of windows and rows that are computed again."""
        return self.tokens - self.decoded

    @property
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
    def run(self, plan: list[Portion], sequences: Mapping[int, Sequence]) -> StepReport:
        """Compute the plan's portions and choose a token for each row that reached its newest id."""
        started = time.perf_counter()
        self._pool.kv.wipe_retired()
        segments = tuple(self._pool.segment(portion.row, portion.length) for portion in plan)
        output = self._backend.forward(StepBatch(segments), self._pool.kv)
        forwarded = time.perf_counter()
        logits = iter(output.logits.numpy())
        outcomes = [
            self._choose(segment, sequences[segment.row], next(logits)) if segment.wants_logits else RowOutcome(segment)
            for segment in segments
        ]
        return StepReport(
            outcomes,
            decoded=sum(not sequences[segment.row].prefilling for segment in segments),
            padded_cells=sum(group.padded_cells for group in output.groups),
            real_cells=sum(group.real_cells for group in output.groups),
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def _choose(self, segment: Segment, sequence: Sequence, logits: Row) -> RowOutcome:
        """A row's own trouble ends in its outcome, never in the step."""
        try:
            return self._chosen(segment, sequence, logits)
        except EngineFailed as error:
            return RowOutcome(segment, error=str(error))
        except Exception as error:
            _log.exception("choosing a token failed")
            return RowOutcome(segment, error=f"choosing a token failed: {type(error).__name__}")

    def _chosen(self, segment: Segment, sequence: Sequence, logits: Row) -> RowOutcome:
        request = sequence.request
        token_id = choose(
            logits,
            request.sampling,
            self._pool.ids(segment.row),
            sequence.prompt_length,
            self._pool.random(segment.row),
            sequence.rules.blocked(len(sequence.token_ids)),
            request.processors,
        )
        if request.logprobs is None:
            return RowOutcome(segment, token_id)
        logprob, top = log_probabilities(logits, token_id, request.logprobs)
        return RowOutcome(segment, token_id, TokenLogprob(token_id, logprob, top))
