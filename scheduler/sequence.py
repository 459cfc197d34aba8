"""One choice of a job on its way: what was generated, what of it has left, and how each pass went."""

import math
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import TYPE_CHECKING

from drumline.cache_pool.pool import RowSnapshot
from drumline.metrics.definitions import Priority
from drumline.model.batch import StepRecord
from drumline.model.detokenize import Detokenizer
from drumline.model.errors import EngineFailed, InvalidRequest
from drumline.model.random_state import RandomState
from drumline.model.sampling import Choice as ChosenToken
from drumline.model.stop_reason import StopReason
from drumline.model.tokenizer import Tokenizer
from drumline.scheduler.admission import Admitted
from drumline.scheduler.progress import Progress
from drumline.scheduler.request import Choice, Chunk, TokenLogprob
from drumline.scheduler.speculation import PromptLookup
from drumline.scheduler.stop import StopStrings

if TYPE_CHECKING:
    from drumline.scheduler.job import GenerationJob


class Sequence:
    """The mutable progress of one choice. The pool holds its row while it lives; `saved` is what starts it (again)."""

    def __init__(self, job: "GenerationJob", admitted: Admitted, choice: int, tokenizer: Tokenizer) -> None:
        self.job, self.admitted, self.choice = job, admitted, choice
        self.request, self.rules = admitted.request, admitted.rules
        self.grammar = None if admitted.grammar is None else admitted.grammar.start()
        self.saved = RowSnapshot(admitted.prompt_ids, 0, RandomState(admitted.seed, choice))
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.steps: list[StepRecord] = []
        self.window_recomputes = 0
        self.stop_reason: StopReason | None = None
        self.error: str | None = None
        self.token_times_s: list[float] = []
        self.prefill_s = self.decode_s = 0.0
        self.prefilling = True
        """Whether the row's next passes are over a prompt, a window that slid, or a row that resumes."""
        self.lookup = PromptLookup()
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's ids from the second on, where they are wanted."""
        self.steps_in_row = self.tokens_in_row = 0
        self.charged = False
        """Whether its prompt was counted against its tenant's share."""
        self.reused_tokens = 0
        self.resumes = 0
        """How often its row was taken away, to go on later."""
        self._marked_at = 0.0
        self._last_token_at: float | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_strings = StopStrings(self.request.stop, self.request.keep_stop)
        self._text: list[str] = []
        self._unsent = ""
        self._text_sent = 0
        self._tokens_sent = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.admitted.prompt_ids)

    @property
    def cost_tokens(self) -> int:
        """What the sequence counts for in the queue's token bound."""
        return self.prompt_length + self.rules.budget

    @property
    def priority(self) -> Priority:
        """The class that the request asks for."""
        return self.request.priority

    @property
    def tenant(self) -> str:
        """Whose share it counts against."""
        return self.request.tenant

    @property
    def deadline_at(self) -> float:
        """When it expires, on the scheduler's clock; infinity for never."""
        return math.inf if self.job.deadline_at is None else self.job.deadline_at

    @property
    def tells_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told: those of choice 0 are."""
        wanted = self.request.prompt_logprobs is not None and self.choice == 0
        return wanted and len(self.prompt_logprobs) < self.prompt_length - 1

    def tell_prompt(self, position: int, told: Several[ChosenToken]) -> None:
        """Log-probabilities of the ids behind `position`; those told before (the row resumed) change nothing."""
        for place, chosen in enumerate(told, start=position):
            if place == len(self.prompt_logprobs) < self.prompt_length - 1 and chosen.logprob is not None:
                self.prompt_logprobs.append(TokenLogprob(chosen.token_id, chosen.logprob, chosen.top))

    def go_on_from(self, progress: Progress) -> StopReason | None:
        """Take tokens that another worker chose, before there is a row; returns why it ends with the last of them, or
        None. Raises `InvalidRequest` for tokens that the request cannot have led to."""
        reason = None
        tokens = progress.tokens()
        if self.tells_prompt:
            tokens = tokens[:-1]  # an answer that is complete needs a row all the same, to tell the prompt's
        for token_id, known in tokens:
            if reason is not None:
                raise InvalidRequest("progress", "goes on behind the end of its answer")
            try:
                reason = self.accept(
                    ChosenToken(token_id) if known is None else ChosenToken(token_id, known.logprob, known.top)
                )
            except EngineFailed as error:
                raise InvalidRequest("progress", str(error)) from None
        ids = (*self.admitted.prompt_ids, *self.token_ids)
        self.saved = RowSnapshot(ids, 0, replace(self.saved.random, index=len(self.token_ids)))
        return reason

    def seated(self, now: float) -> None:
        """A row was given; time runs from here."""
        self._marked_at, self.prefilling = now, True
        self.steps_in_row = self.tokens_in_row = 0

    def computed(self, record: StepRecord, now: float, reached_newest: bool) -> None:
        """A pass of the row is done; after the one that reached its newest id, it decodes."""
        self.steps.append(record)
        self.steps_in_row += 1
        if self.prefilling:
            self.prefill_s += now - self._marked_at
        else:
            self.decode_s += now - self._marked_at
        self._marked_at = now
        self.prefilling = self.prefilling and not reached_newest

    def timed(self, now: float, tokens: int) -> float | None:
        """So many tokens were chosen now: seconds since those before them; None for the first, or for none."""
        self.tokens_in_row += tokens
        if not tokens:
            return None
        if self.job.first_token_at is None:
            self.job.first_token_at = now
        self.token_times_s += [now - self.job.submitted_at] * tokens
        before, self._last_token_at = self._last_token_at, now
        return None if before is None else now - before

    def accept(self, chosen: ChosenToken) -> StopReason | None:
        """Take a token that a step chose; returns why the row ends with it, or None."""
        token_id = chosen.token_id
        self.token_ids.append(token_id)
        if chosen.logprob is not None:
            self.logprobs.append(TokenLogprob(token_id, chosen.logprob, chosen.top))
        text = self._detokenizer.push(token_id)
        watched = len(self.token_ids) > self.request.min_tokens  # until then nothing may end the row
        self._add_text(self._stop_strings.push(text) if watched else text)
        complete = self.grammar is not None and self.grammar.advance(token_id)
        reason = self.rules.decide(token_id, len(self.token_ids))
        return "stop" if (complete or self._stop_strings.matched) and reason != "eos" else reason

    def finish(self, reason: StopReason, error: str | None = None) -> None:
        """Set why it ended, and release the text that was held back."""
        self.stop_reason, self.error = reason, error
        self.lookup = PromptLookup()  # the handle may be kept for long
        self._add_text(self._stop_strings.push(self._detokenizer.flush()))
        self._add_text(self._stop_strings.flush())

    def take_chunk(self) -> Chunk | None:
        """What has not left yet. A chunk has text, but for the last one, which may carry ids alone."""
        text, self._unsent = self._unsent, ""
        new_ids = self.token_ids[self._tokens_sent :]
        if not text and not (new_ids and self.stop_reason):
            return None
        logprobs = tuple(self.logprobs[self._tokens_sent :]) if self.request.logprobs is not None else None
        chunk = Chunk(self.choice, self._tokens_sent, self._text_sent, text, tuple(new_ids), logprobs)
        self._text_sent += len(text)
        self._tokens_sent += len(new_ids)
        return chunk

    def _add_text(self, text: str) -> None:
        self._text.append(text)
        self._unsent += text

    def to_choice(self) -> Choice:
        """The finished answer."""
        if self.stop_reason is None:
            raise RuntimeError("the sequence has not ended")
        return Choice(
            choice=self.choice,
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.request.logprobs is not None else None,
            token_times_s=tuple(self.token_times_s),
            steps=tuple(self.steps),
            error=self.error,
        )
