"""What goes in and what comes out: frozen requests, snapshots of results. Progress lives in the scheduler, not here."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from drumline.metrics.definitions import Priority
from drumline.model.batch import StepRecord
from drumline.model.errors import DeadlineExceeded, EngineFailed, InvalidRequest, JobCancelled
from drumline.model.grammar import Structured
from drumline.model.penalties import Processor
from drumline.model.sampling_params import SamplingParams
from drumline.model.stop_reason import StopReason
from drumline.model.validated import Validated

Status = Literal["completed", "cancelled", "expired", "failed", "rejected"]
STATUS: dict[StopReason, Status] = {
    "eos": "completed",
    "stop": "completed",
    "budget": "completed",
    "window": "completed",
    "cancelled": "cancelled",
    "deadline": "expired",
    "error": "failed",
}

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""Client and job ids: they become topic levels, so nothing that a broker could read as a wildcard or a separator."""

TokenId = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Checked against the model's vocabulary at submit."""

MAX_TOKENS = 1_000_000
"""A row whose window slides could otherwise grow for ever."""
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256


def _one_grammar(given: object) -> object:
    """In JSON, which kind of grammar it is stands in its one key."""
    if isinstance(given, dict) and (len(given) != 1 or not given.keys() <= {"json_schema", "regex", "lark"}):
        raise ValueError("must hold one of json_schema, regex and lark, and nothing else")
    return given


class Message(Validated):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Request(Validated):
    """One generation request. Exactly one of `prompt`, `prompt_ids` and `messages` is given."""

    id: Name | None = None
    prompt: str | None = None
    prompt_ids: tuple[TokenId, ...] | None = Field(default=None, strict=False)
    messages: tuple[Message, ...] | None = Field(default=None, min_length=1, strict=False)
    max_tokens: int = Field(default=128, ge=0, le=MAX_TOKENS)
    min_tokens: int = Field(default=0, ge=0)
    stop: tuple[Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)], ...] = Field(
        default=(), strict=False, max_length=MAX_STOPS
    )
    stop_ids: tuple[TokenId, ...] = Field(default=(), strict=False)
    keep_stop: bool = False
    """Whether a matched stop string stays in the text."""
    ignore_eos: bool = False
    sampling: SamplingParams = Field(default_factory=SamplingParams)
    n: int = Field(default=1, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """How many alternatives to report beside the chosen token; None reports nothing."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """The same for the prompt's own ids, each given those before it. Such a prompt is computed whole."""
    structured: Annotated[Structured, BeforeValidator(_one_grammar)] | None = None
    """What the answer must be: a JSON document, or derived from a grammar."""
    processors: tuple[Processor, ...] = Field(default=(), strict=False, exclude=True)
    priority: Priority = "normal"
    """The class in which it waits; a higher one may also take the row of a lower one."""
    tenant: Name = "default"
    """Whose share of the rows it counts against."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Seconds from submit."""
    overflow: Literal["stop", "slide"] | None = None
    """What a full window does; None is the model's own habit (`slide` for the course model, else `stop`)."""

    @property
    def text_length(self) -> int:
        """Characters that are to be tokenised."""
        return len(self.prompt or "") + sum(len(message.content) for message in self.messages or ())

    def with_seed(self, seed: int | None) -> Self:
        """The same request, drawn from this seed."""
        return self.model_copy(update={"sampling": self.sampling.model_copy(update={"seed": seed})})

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        given = [name for name in ("prompt", "prompt_ids", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequest("prompt", f"give exactly one of prompt, prompt_ids, messages (got {given or 'none'})")
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must not exceed max_tokens ({self.max_tokens})")
        if self.prompt_logprobs is not None and not self.max_tokens:
            raise InvalidRequest("prompt_logprobs", "needs max_tokens of at least 1: the prompt is not computed else")
        return self


@dataclass(frozen=True)
class TokenLogprob:
    """log_softmax of the raw logits at one generated token: the chosen id, and the `logprobs` likeliest ids."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Chunk:
    """New tokens and text of one choice. Offsets count generated tokens and code points, so readers can overlay.

    Ids whose text cannot leave yet (half a character, the start of a stop string, special tokens) come with the next
    text, or with the last chunk.
    """

    choice: int
    first_token: int
    text_offset: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class Usage:
    """Token counts of a job. `evaluated_positions` went through the model, wrong drafts among them; an uncached loop
    needs `uncached_positions`.

    `reused_tokens` are those whose keys and values were there already: of another request that begins alike, or from
    before one of the `resumes` (rows taken away, to go on later). `window_filled_step` is the index of the generated
    token at which the window was first full, or None.
    """

    prompt_tokens: int
    generated_tokens: int
    evaluated_positions: int
    uncached_positions: int
    reused_tokens: int
    resumes: int
    window_recomputes: int
    window_filled_step: int | None


@dataclass(frozen=True)
class Timings:
    """Seconds: waiting for a row; choice 0's passes over its prompt (and over windows that slid), and over its new
    tokens; submit to first token; submit to end."""

    queued_s: float
    prefill_s: float
    decode_s: float
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True)
class Choice:
    """One answer. `token_ids` holds every generated id, an EOS that ended it too; `text` leaves special tokens out."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    stop_reason: StopReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    token_times_s: tuple[float, ...] = ()
    """Seconds from submit at which each token was chosen; drafts that were right share the time of their step."""
    steps: tuple[StepRecord, ...] = ()
    error: str | None = None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds that a reader waited between tokens; those of one step came together."""
        return [later - earlier for earlier, later in pairwise(dict.fromkeys(self.token_times_s))]


@dataclass(frozen=True)
class Result:
    """How a job ended, whatever way it ended."""

    id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    seed: int
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """One a prompt id, where they were asked for; nothing is known of the first, nor of what was not computed when the
    job ended."""

    @property
    def text(self) -> str:
        """The text of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated ids of choice 0."""
        return self.choices[0].token_ids

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The forward passes of choice 0."""
        return self.choices[0].steps

    @property
    def stop_reason(self) -> StopReason:
        """Why choice 0 ended."""
        return self.choices[0].stop_reason

    @property
    def error(self) -> str | None:
        """What went wrong, when the stop reason is `error`."""
        return next((choice.error for choice in self.choices if choice.error), None)

    @property
    def status(self) -> Status:
        """The outcome in the words of the MQTT contract; the worst of the choices."""
        statuses = [STATUS[choice.stop_reason] for choice in self.choices]
        return next((s for s in ("failed", "expired", "cancelled") if s in statuses), "completed")

    def raise_for_status(self) -> None:
        """Raise `JobCancelled`, `DeadlineExceeded` or `EngineFailed` unless the job completed."""
        if self.status == "cancelled":
            raise JobCancelled(f"job {self.id} was cancelled after {self.usage.generated_tokens} tokens")
        if self.status == "expired":
            raise DeadlineExceeded(f"job {self.id} ran out of time after {self.usage.generated_tokens} tokens")
        if self.status == "failed":
            raise EngineFailed(f"job {self.id} failed: {self.error}")
