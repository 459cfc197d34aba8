"""The handle a caller holds: chunks as they come, the result, and the means to stop."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

from drumline.model.errors import InvalidRequest
from drumline.model.language_model import LanguageModel
from drumline.model.reference import uncached_positions
from drumline.model.stop_reason import StopReason
from drumline.scheduler.admission import Admitted
from drumline.scheduler.deliver import ChunkStream
from drumline.scheduler.progress import Progress
from drumline.scheduler.request import Chunk, Result, Timings, TokenLogprob, Usage
from drumline.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from drumline.scheduler.pins import Pin


class GenerationJob:
    """An accepted request. `async for chunk in job` streams it, `await job.result()` waits for the end."""

    def __init__(
        self,
        admitted: Admitted,
        model: LanguageModel,
        submitted_at: float,
        cancelled: Callable[["GenerationJob"], None],
        label: str | None = None,
        accepted_elsewhere: bool = False,
    ) -> None:
        self.id = admitted.request.id or uuid4().hex
        self.label = label or self.id
        """What people are shown: exemplars, traces, logs and live views."""
        self.accepted_elsewhere = accepted_elsewhere
        """Whether its caller had accepted it before, and counts how it ends."""
        self.request = admitted.request
        self.sequences = [Sequence(self, admitted, choice, model.tokenizer) for choice in range(admitted.request.n)]
        self.stream_buffer = ChunkStream()
        self.cancel_requested = False
        self.preempt_requested = False
        self.pin: Pin | None = None
        """Who keeps its row, and the prompt in it, after the end."""
        self.submitted_at = submitted_at
        self.started_at: float | None = None
        """When it got its first row."""
        self.first_token_at: float | None = None
        self._seed = admitted.seed
        self._window = model.window
        self._cancelled = cancelled
        self._result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._has_reader = False
        self.settled: dict[int, StopReason] = {}
        """Choices that end before they get a row, and why."""

    def go_on_from(self, progress: Iterable[Progress]) -> None:
        """Begin behind the tokens that another worker chose; raises `InvalidRequest`."""
        for entry in progress:
            reason = self.sequences[entry.choice].go_on_from(entry)
            if reason is not None:
                self.settled[entry.choice] = reason

    def settle(self, reason: StopReason) -> None:
        """No choice gets a row: those that have not ended end for this reason."""
        self.settled = dict.fromkeys(range(self.request.n), reason) | self.settled

    @property
    def seed(self) -> int:
        """The request's, or the one that was drawn."""
        return self._seed

    @property
    def state(self) -> str:
        """`queued`, `running` or `done`."""
        if self._result.done():
            return "done"
        return "queued" if self.started_at is None else "running"

    @property
    def generated(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def deadline_at(self) -> float | None:
        """When the job expires, on the scheduler's clock."""
        return None if self.request.deadline_s is None else self.submitted_at + self.request.deadline_s

    def expired(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline_at is not None and now >= self.deadline_at

    def cancel(self) -> None:
        """Stop at the next step boundary, queued or running; the result says `cancelled`. Harmless after the end."""
        self.cancel_requested = True
        self._cancelled(self)

    async def result(self) -> Result:
        """Wait for the end. Never raises for the row's own end: see `Result.raise_for_status`."""
        return await asyncio.shield(self._result)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Stream the chunks; leaving early cancels the job once the generator is finalised. Only one reader."""
        return self._read(self._claim_reader())

    @asynccontextmanager
    async def stream(self) -> AsyncGenerator[AsyncIterator[Chunk]]:
        """`async with job.stream() as chunks`: like iterating the job, but leaving the block cancels at once."""
        chunks = self._read(self._claim_reader())
        try:
            yield chunks
        finally:
            await chunks.aclose()
            if not self._result.done():
                self.cancel()

    def finish(self, now: float) -> Result | None:
        """Complete the result once every choice has ended; None while one still runs."""
        if any(sequence.stop_reason is None for sequence in self.sequences):
            return None
        result = Result(
            id=self.id,
            choices=tuple(sequence.to_choice() for sequence in self.sequences),
            usage=self._usage(),
            timings=self._timings(now),
            seed=self._seed,
            prompt_logprobs=self._prompt_logprobs(),
        )
        self._result.set_result(result)
        self.stream_buffer.close()
        return result

    def _prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if self.request.prompt_logprobs is None:
            return None
        told = self.sequences[0].prompt_logprobs
        return (None, *told, *[None] * (self.sequences[0].prompt_length - 1 - len(told)))

    def _claim_reader(self) -> ChunkStream:
        if self._has_reader:
            raise InvalidRequest("job", f"{self.id} already has a reader")
        self._has_reader = True
        return self.stream_buffer

    async def _read(self, buffer: ChunkStream) -> AsyncGenerator[Chunk]:
        try:
            async for chunk in buffer.read():
                yield chunk
        finally:
            if not self._result.done():
                self.cancel()

    def _usage(self) -> Usage:
        prompt, window = self.sequences[0].prompt_length, self._window
        return Usage(
            prompt_tokens=prompt,
            generated_tokens=self.generated,
            evaluated_positions=sum(record.input_length for s in self.sequences for record in s.steps),
            uncached_positions=sum(uncached_positions(prompt, len(s.token_ids), window) for s in self.sequences),
            reused_tokens=sum(s.reused_tokens for s in self.sequences),
            resumes=sum(s.resumes for s in self.sequences),
            window_recomputes=sum(s.window_recomputes for s in self.sequences),
            window_filled_step=self._window_filled_step(),
        )

    def _window_filled_step(self) -> int | None:
        step = max(0, self._window - self.sequences[0].prompt_length)
        return step if len(self.sequences[0].token_ids) > step else None

    def _timings(self, now: float) -> Timings:
        started = now if self.started_at is None else self.started_at
        return Timings(
            queued_s=started - self.submitted_at,
            prefill_s=self.sequences[0].prefill_s,
            decode_s=self.sequences[0].decode_s,
            first_token_s=None if self.first_token_at is None else self.first_token_at - self.submitted_at,
            total_s=now - self.submitted_at,
        )
