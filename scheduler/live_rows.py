"""Which sequence sits in which row: seating from the queue, committing a step, and every way of leaving."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from drumline.cache_pool.pool import CachePool, RowSnapshot
from drumline.model.config import ModelConfig
from drumline.model.errors import EngineFailed
from drumline.model.stop_reason import StopReason
from drumline.scheduler.job import GenerationJob
from drumline.scheduler.log import Event
from drumline.scheduler.plan import Backlog, Portion, token_cost
from drumline.scheduler.policy import PRIORITIES
from drumline.scheduler.queue import RequestQueue
from drumline.scheduler.reporting import Reporting
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.speculation import most_drafts
from drumline.scheduler.step import RowOutcome

if TYPE_CHECKING:
    from drumline.scheduler.pins import Pin

MIN_TOKENS_IN_ROW = 16
"""Tokens that a row generates before a higher class may take it: it comes on each time, however long its prompt is."""

_log = logging.getLogger("drumline")


class LiveRows:
    """Moves sequences from the queue into rows and out again. Runs on the event loop, never during a step."""

    def __init__(
        self,
        config: ModelConfig,
        pool: CachePool,
        queue: RequestQueue[Sequence],
        reporting: Reporting,
        clock: Callable[[], float],
        ended: Callable[[Sequence], None],
    ) -> None:
        self._config, self._pool, self._queue, self._reporting = config, pool, queue, reporting
        self._instruments = reporting.instruments
        self._clock, self._ended = clock, ended
        self.by_row: dict[int, Sequence] = {}
        self.cancel_asked: list[GenerationJob] = []
        """Jobs that were cancelled since the last sweep."""
        self.pins: set[Pin] = set()
        """Of rows that are pinned, or about to be."""

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Put the sequences of a job in the queue; raises `QueueFull`."""
        self._queue.push(sequences, self._clock())

    def backlogs(self) -> list[Backlog]:
        """What each live row still has to compute, in the order the rows were taken, or slid; without those whose
        prefix is being computed in another row."""
        return [
            Backlog(row, self._pool.pending(row), token_cost(self._config, int(self._pool.position[row])))
            for row in self.by_row
            if not self._pool.waits(row)
        ]

    def seat(self) -> None:
        """Give rows to those who are next: free ones, and those of a lower class that have run long enough."""
        now = self._clock()
        while (waiting := self._queue.foremost(now)) is not None:
            if not self._pool.free:
                victim = self._victim(waiting)
                if victim is None:
                    return
                self._preempt([victim])
            self._queue.remove(waiting)
            row = self._pool.restore(waiting.saved, reuse=not waiting.tells_prompt)
            self.by_row[row] = waiting
            waiting.seated(now)
            if waiting.job.started_at is None:
                waiting.job.started_at = now
            self._reporting.seated(row, waiting, now)
            if not waiting.charged:  # at once: else one tenant could take all rows before it has cost anything
                waiting.charged = True
                self._queue.served(waiting, waiting.prompt_length, 0)

    def _victim(self, waiting: Sequence) -> int | None:
        """The row to take for what is next: of the lowest class that it outranks, the one that came last."""
        below = [
            (PRIORITIES.index(sequence.priority), -place, row)
            for place, (row, sequence) in enumerate(self.by_row.items())
            if sequence.tokens_in_row >= MIN_TOKENS_IN_ROW and self._queue.outranks(waiting, sequence)
        ]
        return min(below)[2] if below else None

    def sweep(self) -> None:
        """Act on what was asked since the last step: cancellations, deadlines, preemptions."""
        now = self._clock()
        for sequence in self._queue.take_expired(now):
            self._end(sequence, "cancelled" if sequence.job.cancel_requested else "deadline")
        asked, self.cancel_asked = self.cancel_asked, []
        for sequence in (sequence for job in asked for sequence in job.sequences):
            if sequence in self._queue:
                self._queue.remove(sequence)
                self._end(sequence, "cancelled")
        for row, sequence in list(self.by_row.items()):
            reason = _end_asked(sequence, now)
            if reason is not None:
                self.retire(row, reason)
        self._preempt([row for row, sequence in self.by_row.items() if sequence.job.preempt_requested])

    def with_drafts(self, plan: list[Portion], limit: int) -> list[Portion]:
        """The plan with at most `limit` drafts for each row, where they are few and no prompt is among them."""
        most = most_drafts(len(plan), limit)
        if most == 0 or any(self.by_row[portion.row].prefilling for portion in plan):
            return plan
        return [replace(portion, drafts=self._drafts(portion.row, most)) for portion in plan]

    def _drafts(self, row: int, most: int) -> tuple[int, ...]:
        sequence = self.by_row[row]
        if sequence.request.processors or sequence.grammar:  # their state is that of the newest token
            return ()
        most = min(most, self._pool.room(row), sequence.rules.budget - len(sequence.token_ids) - 1)
        drafts = sequence.lookup.drafts(self._pool.ids(row), most)
        return tuple(takewhile(sequence.rules.goes_on, drafts))  # a row that ends with a token never feeds it

    def commit(self, outcomes: Several[RowOutcome]) -> int:
        """Count what a step computed, apply the stop rules row by row, and send the new text; returns how many tokens
        were generated."""
        now = self._clock()
        generated = 0
        gaps: Counter[float] = Counter()  # rows that decode together share theirs
        example: dict[float, str] = {}
        for outcome in outcomes:
            row = outcome.segment.row
            sequence = self.by_row[row]
            taken, reason, error = _accept(sequence, outcome)
            rejected = outcome.rejected + len(outcome.choices) - taken
            record = outcome.record(rejected)
            if not sequence.steps_in_row and self._pool.reused[row]:
                self._count_reused(sequence, int(self._pool.reused[row]))
            sequence.computed(record, now, reached_newest=outcome.reached_newest)
            self._pool.advance(row, record.cache_after - record.cache_before)
            sequence.tell_prompt(outcome.segment.position, outcome.told)
            self._count_drafts(sequence, outcome.drafted, rejected)
            gap_s = sequence.timed(now, taken)
            if gap_s is not None:
                gaps[gap_s] += 1
                example[gap_s] = sequence.job.label
            generated += taken
            self._queue.served(sequence, 0, taken)
            if reason is not None:
                self.retire(row, reason, error)
            elif taken:
                self._append(row, sequence, [choice.token_id for choice in outcome.choices])
        for gap_s, rows in gaps.items():
            self._instruments.token_gaps(gap_s, rows, example[gap_s])
        return generated

    def _append(self, row: int, sequence: Sequence, token_ids: list[int]) -> None:
        """A row goes on with the tokens that it chose: they are its newest, and their text leaves."""
        for token_id in token_ids:
            if self._pool.append(row, token_id):
                self.by_row[row] = self.by_row.pop(row)  # its recompute queues up behind the prompts that wait already
                sequence.window_recomputes += 1
                sequence.prefilling = True
                self._instruments.window_recomputed()
        self._send(sequence)

    def _count_reused(self, sequence: Sequence, tokens: int) -> None:
        if not sequence.steps:
            self._queue.served(sequence, -tokens, 0)  # they were charged for when it was seated
        sequence.reused_tokens += tokens
        self._instruments.prompt_reused(tokens)

    def _count_drafts(self, sequence: Sequence, drafted: int, rejected: int) -> None:
        if drafted > 0:
            sequence.lookup.told(drafted, drafted - rejected)
            self._instruments.drafted(drafted - rejected, rejected)

    def retire(self, row: int, reason: StopReason, error: str | None = None) -> None:
        """End the sequence of a row and free the row, or leave it to who pinned it."""
        self._pool.retire(row, reason)
        sequence = self.by_row.pop(row)
        self._reporting.left(row, sequence, reason)
        if sequence.job.pin is not None and len(self._pool.ids(row)) >= sequence.prompt_length:
            sequence.job.pin.hold(row, sequence.prompt_length)
        self._end(sequence, reason, error)

    def end_unseated(self, sequence: Sequence, reason: StopReason) -> None:
        """End a sequence that holds no row and waits in no queue."""
        self._end(sequence, reason)

    def restart(self) -> None:
        """A step failed, and nobody knows what it left: everything that runs goes on from its tokens and random state,
        in rows that hold nothing. What was pinned is lost."""
        saved = [(sequence, self._pool.snapshot(row)) for row, sequence in self.by_row.items()]
        for row, sequence in self.by_row.items():
            self._reporting.left(row, sequence, "restart")
        self.by_row.clear()
        self._pool.reset()
        self.pins.clear()
        for sequence, snapshot in reversed(saved):
            self._put_back(sequence, snapshot)

    def preempt(self, job: GenerationJob) -> None:
        """Take the rows of a job at the next step; nothing where it has none."""
        job.preempt_requested = any(sequence.job is job for sequence in self.by_row.values())

    def fail_all(self, sequences: Iterable[Sequence], error: str) -> None:
        """The engine broke: these end with `error`, whether they run, wait, or were on their way between the two."""
        for row, sequence in self.by_row.items():
            self._pool.retire(row, "error")
            self._reporting.left(row, sequence, "error")
        self.by_row.clear()
        self._queue.take_all()
        for sequence in sequences:
            self._end(sequence, "error", error)

    def _preempt(self, rows: list[int]) -> None:
        """Rows whose job gives way: their state goes back to the head of the queue, the oldest foremost."""
        for row in reversed(rows):
            sequence = self.by_row.pop(row)
            sequence.job.preempt_requested = False
            self._put_back(sequence, self._pool.release(row))
            self._reporting.preempted(row, sequence)

    def _put_back(self, sequence: Sequence, saved: RowSnapshot) -> None:
        """It goes on later, from what was saved."""
        sequence.saved = saved
        sequence.resumes += 1
        self._queue.put_back(sequence, self._clock())

    def _end(self, sequence: Sequence, reason: StopReason, error: str | None = None) -> None:
        sequence.finish(reason, error)
        self._send(sequence)
        self._ended(sequence)

    def _send(self, sequence: Sequence) -> None:
        chunk = sequence.take_chunk()
        if chunk is not None:
            sequence.job.stream_buffer.put(chunk)


def _accept(sequence: Sequence, outcome: RowOutcome) -> tuple[int, StopReason | None, str | None]:
    """How many of a step's choices the sequence took, and why it ends with the last of them."""
    for taken, choice in enumerate(outcome.choices, start=1):
        try:
            reason = sequence.accept(choice)
        except EngineFailed as error:
            return taken, "error", str(error)
        except Exception as error:  # a tokenizer that fails on an id fails for this row alone
            _log.exception(
                Event(
                    "row failed", job=sequence.job.label, error=f"token {choice.token_id} could not be turned into text"
                )
            )
            return taken, "error", f"token {choice.token_id} could not be turned into text: {type(error).__name__}"
        if reason is not None:
            return taken, reason, None
    return len(outcome.choices), None if outcome.error is None else "error", outcome.error


def _end_asked(sequence: Sequence, now: float) -> StopReason | None:
    """Why the sequence is to end whatever its row does; a cancellation wins over a deadline."""
    job = sequence.job
    if job.cancel_requested:
        return "cancelled"
    return "deadline" if now >= sequence.deadline_at else None
