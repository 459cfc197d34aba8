"""Which sequence sits in which row: seating from the queue, committing a step, and every way of leaving."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import replace
from itertools import takewhile

from drumline.cache_pool.pool import CachePool
from drumline.metrics.instruments import Instruments
from drumline.model.stop_reason import StopReason
from drumline.scheduler.plan import Backlog, Portion
from drumline.scheduler.queue import RequestQueue
from drumline.scheduler.sequence import Sequence
from drumline.scheduler.speculation import most_drafts
from drumline.scheduler.step import RowOutcome

_log = logging.getLogger("drumline")


class LiveRows:
    """Moves sequences from the queue into rows and out again. Runs on the event loop, never during a step."""

    def __init__(
        self,
        pool: CachePool,
        queue: RequestQueue[Sequence],
        instruments: Instruments,
        clock: Callable[[], float],
        ended: Callable[[Sequence], None],
    ) -> None:
        self._pool, self._queue, self._instruments = pool, queue, instruments
        self._clock, self._ended = clock, ended
        self.by_row: dict[int, Sequence] = {}
        self.cancel_asked = False
        self._earliest_deadline = math.inf

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Put the sequences of a job in the queue; raises `QueueFull`."""
        self._queue.push(sequences)
        self._earliest_deadline = min(self._earliest_deadline, *map(_deadline, sequences))

    def backlogs(self) -> list[Backlog]:
        """What each live row still has to compute, in the order the rows were taken, or slid."""
        return [Backlog(row, self._pool.pending(row)) for row in self.by_row]

    def seat(self) -> None:
        """Give free rows to the sequences that waited longest."""
        while self._pool.free and len(self._queue):
            sequence = self._queue.pop()
            self.by_row[self._pool.restore(sequence.saved)] = sequence
            now = self._clock()
            sequence.seated(now)
            if sequence.job.started_at is None:
                sequence.job.started_at = now

    def sweep(self) -> None:
        """Act on what was asked since the last step: cancellations, deadlines, preemptions."""
        now = self._clock()
        if self.cancel_asked or now >= self._earliest_deadline:  # else there is no need to look through the queue
            for sequence in self._queue.take_out(lambda waiting: _end_asked(waiting, now) is not None):
                self._end(sequence, _end_asked(sequence, now) or "cancelled")
            self.cancel_asked = False
            self._earliest_deadline = min(map(_deadline, self._queue), default=math.inf)
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
        if sequence.request.processors:  # they may count their calls
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
        for outcome in outcomes:
            row = outcome.segment.row
            sequence = self.by_row[row]
            taken, reason, error = _accept(sequence, outcome)
            rejected = outcome.rejected + len(outcome.choices) - taken
            record = outcome.record(rejected)
            sequence.computed(record, now, reached_newest=outcome.segment.wanted > 0)
            self._pool.advance(row, record.cache_after - record.cache_before)
            self._count_drafts(sequence, outcome.segment.wanted - 1, rejected)
            gap_s = sequence.timed(now, taken)
            if gap_s is not None:
                gaps[gap_s] += 1
            generated += taken
            if reason is not None:
                self.retire(row, reason, error)
            elif taken:
                self._append(row, sequence, [choice.token_id for choice in outcome.choices])
        for gap_s, rows in gaps.items():
            self._instruments.token_gaps(gap_s, rows)
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

    def _count_drafts(self, sequence: Sequence, drafted: int, rejected: int) -> None:
        if drafted > 0:
            sequence.lookup.told(drafted, drafted - rejected)
            self._instruments.drafted(drafted - rejected, rejected)

    def retire(self, row: int, reason: StopReason, error: str | None = None) -> None:
        """End the sequence of a row and free the row."""
        self._pool.retire(row, reason)
        self._end(self.by_row.pop(row), reason, error)

    def end_unseated(self, sequences: Several[Sequence], reason: StopReason) -> None:
        """End sequences that hold no row and wait in no queue."""
        for sequence in sequences:
            self._end(sequence, reason)

    def fail_all(self, sequences: Iterable[Sequence], error: str) -> None:
        """The engine broke: these end with `error`, whether they run, wait, or were on their way between the two."""
        for row in self.by_row:
            self._pool.retire(row, "error")
        self.by_row.clear()
        self._queue.take_out(lambda _: True)
        for sequence in sequences:
            self._end(sequence, "error", error)

    def _preempt(self, rows: list[int]) -> None:
        """Rows whose job gives way: their state goes back to the head of the queue, the oldest foremost."""
        for row in reversed(rows):
            sequence = self.by_row.pop(row)
            sequence.saved = self._pool.release(row)
            sequence.job.preempt_requested = False
            self._queue.push_front(sequence)
            self._earliest_deadline = min(self._earliest_deadline, _deadline(sequence))
            self._instruments.preempted()

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
        except Exception as error:  # a tokenizer that fails on an id fails for this row alone
            _log.exception("a token could not be turned into text")
            return taken, "error", f"token {choice.token_id} could not be turned into text: {type(error).__name__}"
        if reason is not None:
            return taken, reason, None
    return len(outcome.choices), None if outcome.error is None else "error", outcome.error


def _deadline(sequence: Sequence) -> float:
    deadline_at = sequence.job.deadline_at
    return math.inf if deadline_at is None else deadline_at


def _end_asked(sequence: Sequence, now: float) -> StopReason | None:
    """Why the sequence is to end whatever its row does; a cancellation wins over a deadline."""
    job = sequence.job
    if job.cancel_requested:
        return "cancelled"
    return "deadline" if now >= _deadline(sequence) else None
