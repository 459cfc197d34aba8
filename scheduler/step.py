"""One step on the torch thread: forward, then choose each row's token."""

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest

import torch

from drumline.cache_pool.pool import CachePool
from drumline.model.backends import Backend
from drumline.model.batch import Segment, StepBatch, StepRecord
from drumline.model.errors import EngineFailed
from drumline.model.random_state import RandomState
from drumline.model.sampling import Choice, RowChoice, choose_rows
from drumline.model.sampling_params import SamplingParams
from drumline.scheduler.log import Event
from drumline.scheduler.plan import Portion
from drumline.scheduler.sequence import Sequence

_log = logging.getLogger("drumline")


@dataclass(frozen=True)
class RowOutcome:
    """What the step did for one row."""

    segment: Segment
    told: tuple[Choice, ...] = ()
    """Log-probabilities of the ids that follow its first tokens, where the prompt's are wanted."""
    choices: tuple[Choice, ...] = ()
    """The tokens chosen, in order: one where logits were wanted, and one more for each draft that was right."""
    rejected: int = 0
    """Drafts of the segment that were wrong, or stood behind one."""
    error: str | None = None
    """Why no token could be chosen behind these."""

    drafted: int = 0
    reached_newest: bool = False
    """Whether logits of its newest id, and of the drafts behind it, were computed."""

    def record(self, rejected: int) -> StepRecord:
        """Tokens fed, and tokens cached before and after, so many of the drafts not among them."""
        return StepRecord(self.segment.length, self.segment.position, self.segment.end - rejected)


@dataclass(frozen=True)
class StepReport:
    """The outcomes of a step and what it cost."""

    outcomes: list[RowOutcome]
    prompt_tokens: int
    """Tokens of prompts, and of windows and rows that were computed again."""
    padded_cells: int
    real_cells: int
    forward_s: float
    sample_s: float

    @cached_property
    def tokens(self) -> int:
        """Tokens fed."""
        return sum(outcome.segment.length for outcome in self.outcomes)

    @property
    def padding_ratio(self) -> float:
        """Share of attention's query-key pairs that were padding."""
        return 1 - self.real_cells / self.padded_cells


@dataclass(frozen=True)
class StepTimes:
    """When the parts of a step began and ended, in seconds of `time.perf_counter`."""

    started: float
    planned: float
    computed: float
    committed: float


class StepFailed(Exception):
    """The backend raised `reason`."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


class StepRunner:
    """Runs plans against one pool. Reads the pool and the sequences, and changes nothing but keys and values: the
    scheduler commits afterwards, so a step that raises leaves every row where it was."""

    def __init__(self, backend: Backend, pool: CachePool) -> None:
        self._backend, self._pool = backend, pool

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute and choose one token for nobody, while no row is taken: no request is to wait for compilers."""
        output = self._backend.forward(StepBatch((Segment(0, 0, (0,), wanted=1),)), self._pool.kv)
        choose_rows(output.logits.numpy(), [RowChoice(SamplingParams(), (0,), 1, RandomState(0))])

    @torch.inference_mode()
    def run(self, plan: list[Portion], sequences: Mapping[int, Sequence]) -> StepReport:
        """Compute the plan's portions, and choose a token for each row that reached its newest id, and behind each
        draft that proves right."""
        self._pool.update_store()
        segments = tuple(
            self._pool.segment(portion.row, portion.length, portion.drafts, sequences[portion.row].tells_prompt)
            for portion in plan
        )
        started = time.perf_counter()
        output = self._backend.forward(StepBatch(segments), self._pool.kv)
        forwarded = time.perf_counter()
        chosen = iter(self._choose(output.logits, segments, sequences))
        outcomes = []
        for portion, segment in zip(plan, segments, strict=True):
            lines = list(islice(chosen, segment.wanted))
            newest = segment.wanted > 0 and self._pool.pending(segment.row) == portion.length
            own = 1 + len(portion.drafts) if newest else 0
            outcomes.append(_outcome(segment, lines[: len(lines) - own], lines[len(lines) - own :]))
        return StepReport(
            outcomes,
            prompt_tokens=sum(segment.length for segment in segments if sequences[segment.row].prefilling),
            padded_cells=output.padded_cells,
            real_cells=output.real_cells,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def _choose(
        self, logits: torch.Tensor, segments: Iterable[Segment], sequences: Mapping[int, Sequence]
    ) -> list[Choice | Exception]:
        """A token for each line of the logits: of a row's newest id, and of its drafts as if they were its own."""
        rows = []
        for segment in segments:
            sequence = sequences[segment.row]
            request, ids, random = sequence.request, self._pool.ids(segment.row), self._pool.random(segment.row)
            known = ids[segment.end - segment.wanted + 1 : segment.end + 1] if sequence.tells_prompt else []
            rows += [_told(token_id, request.prompt_logprobs) for token_id in known]
            for accepted in range(segment.wanted - len(known)):
                rows.append(
                    RowChoice(
                        request.sampling,
                        ids,
                        sequence.prompt_length,
                        replace(random, index=random.index + accepted),
                        sequence.rules.blocked(len(sequence.token_ids) + accepted),
                        request.processors,
                        request.logprobs,
                        sequence.grammar,
                    )
                )
                if accepted + 1 < segment.wanted:
                    ids = [*ids, segment.token_ids[accepted + 1 - segment.wanted]]
        return choose_rows(logits.numpy(), rows) if rows else []


def _told(token_id: int, logprobs: int | None) -> RowChoice:
    return RowChoice(SamplingParams(), (), 0, RandomState(0), logprobs=logprobs, told=token_id)


def _outcome(segment: Segment, told: Several[Choice | Exception], chosen: Several[Choice | Exception]) -> RowOutcome:
    """What was told, and the choices up to the first that the next draft does not repeat. A row's own trouble ends in
    its outcome, never in the step."""
    drafts = segment.token_ids[segment.length - len(chosen) + 1 :] if chosen else []
    outcome = RowOutcome(segment, drafted=len(drafts), reached_newest=bool(chosen))
    for choice in told:
        if isinstance(choice, Exception):
            return replace(outcome, rejected=len(drafts), error=_reason(choice))
    outcome = replace(outcome, told=tuple(choice for choice in told if isinstance(choice, Choice)))
    choices: list[Choice] = []
    for choice, draft in zip_longest(chosen, drafts):
        if isinstance(choice, Exception):
            rejected = len(drafts) - len(choices)
            return replace(outcome, choices=tuple(choices), rejected=rejected, error=_reason(choice))
        choices.append(choice)
        if choice.token_id != draft:
            break
    return replace(outcome, choices=tuple(choices), rejected=len(chosen) - len(choices))


def _reason(error: Exception) -> str:
    if isinstance(error, EngineFailed):
        return str(error)
    _log.error(Event("row failed", error="choosing a token failed"), exc_info=error)
    return f"choosing a token failed: {type(error).__name__}"
