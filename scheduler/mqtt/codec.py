"""The JSON of every message, as pydantic models: what we read is checked, what we write has one form.

That form is compact UTF-8 with the keys in the order of the fields here, so that equal content is equal bytes.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import from_json

from drumline.model.errors import DrumlineError, EngineFailed, InvalidRequest, QueueFull, SchedulerClosed
from drumline.model.stop_reason import StopReason
from drumline.scheduler.journal.errors import JournalError
from drumline.scheduler.mqtt.quotas import QuotaExceeded
from drumline.scheduler.mqtt.topics import NAME
from drumline.scheduler.request import (
    STATUS,
    Choice,
    Chunk,
    Name,
    Request,
    Result,
    Status,
    Timings,
    TokenLogprob,
    Usage,
)

MAX_SUBMIT_BYTES = 256 * 2**10
MAX_CORRELATION = 1_024
"""Characters, or bytes, that are sent back with each message of a job."""
MAX_QUOTED = 1000
"""Characters of what a device sent, or of an error that quotes it, in a message of ours."""

JobState = Literal["accepted", "queued", "running", "done", "unknown"]
WorkerState = Literal["online", "draining", "offline"]
Parsed = TypeVar("Parsed")
ErrorCode = Literal["invalid", "queue_full", "draining", "failed", "duplicate_id", "quota", "journal", "changed"]

_chunks = TypeAdapter(Chunk)


class SubmitMessage(Request):
    """A job: the fields of `Request`, with `id` required, and for MQTT 3.1.1 what MQTT 5 has properties for."""

    id: Name
    response_topic: str | None = None
    correlation_data: str | None = Field(default=None, max_length=MAX_CORRELATION)

    @model_validator(mode="after")
    def _no_code_and_no_other_tenant(self) -> Self:
        if self.processors:
            raise InvalidRequest("processors", "cannot be sent over MQTT")
        if "tenant" in self.model_fields_set:
            raise InvalidRequest("tenant", "cannot be sent over MQTT: it is the client")
        return self

    def request(self, client: str, deadline_s: float | None = None) -> Request:
        """The engine's view: no `id` (two clients may use the same one), the client as tenant, and the earlier of the
        two deadlines."""
        fields = {name: getattr(self, name) for name in Request.model_fields if name != "id"}
        fields["deadline_s"] = min(
            (given for given in (self.deadline_s, deadline_s) if given is not None), default=None
        )
        return Request(**fields | {"tenant": client})

    @property
    def digest(self) -> bytes:
        """Tells a repeated job from a different one with the same id. Where the answer should go is no part of it."""
        body = self.model_dump_json(exclude={"response_topic", "correlation_data"})
        return hashlib.sha256(body.encode()).digest()


class Outgoing(BaseModel):
    """What we send. Readers ignore keys that they do not know, so that a newer worker may say more."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    only_when_given: ClassVar[frozenset[str]] = frozenset()
    """Fields that are left out where they are None."""

    @model_serializer(mode="wrap")
    def _leave_out_optional(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {key: value for key, value in document.items() if value is not None or key not in self.only_when_given}

    def encode(self) -> bytes:
        """The one JSON form."""
        return self.model_dump_json().encode()


class ErrorMessage(Outgoing):
    """Why a job has no answer: for `invalid`, the field and its limit; for `queue_full` and `quota`, the bound, its
    limit and how much of it is used."""

    only_when_given = frozenset({"limit", "queued"})

    code: ErrorCode
    field: str | None
    message: str
    limit: int | None = None
    queued: int | None = None


class StateMessage(Outgoing):
    """Where a job stands. `position` counts those ahead in the queue, `tokens` those generated.

    `error`: another job was sent under this id and refused; the one of the state goes on.
    """

    only_when_given = frozenset({"error"})

    job_id: str
    state: JobState
    position: int | None = None
    tokens: int = 0
    error: ErrorMessage | None = None


class ChoiceMessage(Outgoing):
    """One answer of a job."""

    only_when_given = frozenset({"logprobs"})

    choice: int
    text: str
    token_ids: tuple[int, ...]
    stop_reason: StopReason
    seed: int
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class ResultMessage(Outgoing):
    """The terminal message. A rejected job has no stop reason, no choices, usage or timings."""

    only_when_given = frozenset({"prompt_logprobs"})

    job_id: str
    status: Status
    stop_reason: StopReason | None
    choices: tuple[ChoiceMessage, ...]
    text: str
    token_ids: tuple[int, ...]
    usage: Usage | None
    timings: Timings | None
    error: ErrorMessage | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def properties(self) -> dict[str, str]:
        """What the user properties of the message say."""
        code = {} if self.error is None else {"code": self.error.code}
        return {"status": self.status, **code}


class WorkerStatus(Outgoing):
    """A worker's birth, life and will. `started_at` (Unix seconds) tells a late will from a present one.

    `tokens_per_s` were generated, over all jobs, in the last seconds.
    """

    worker: str
    status: WorkerState
    queue_depth: int
    rows_live: int
    rows: int
    model: str
    version: str
    started_at: float
    tokens_per_s: float = 0.0


class DeadMessage(Outgoing):
    """What could not be parsed or answered: where it was sent, how large it was, what was wrong with it."""

    topic: str
    client: str | None
    job_id: str | None
    code: str
    field: str | None
    reason: str
    payload_bytes: int


def parse_submit(payload: bytes, limit_bytes: int = MAX_SUBMIT_BYTES) -> SubmitMessage:
    """Read a job. Raises `InvalidRequest` that names the field, or `payload` when it is no JSON object at all."""
    if len(payload) > limit_bytes:
        raise InvalidRequest("payload", f"is {len(payload)} bytes long, the limit is {limit_bytes}")
    try:
        return SubmitMessage.from_json(payload)
    except InvalidRequest as error:
        if error.field == "request":
            raise InvalidRequest("payload", error.limit) from None
        raise


def read_id(payload: bytes, limit_bytes: int = MAX_SUBMIT_BYTES) -> str | None:
    """The job id of a message that is wrong otherwise, so that its sender can be told; None where there is none."""
    if len(payload) > limit_bytes:
        return None
    try:
        document = from_json(payload)
    except ValueError:
        return None
    job_id = document.get("id") if isinstance(document, dict) else None
    return job_id if isinstance(job_id, str) and NAME.fullmatch(job_id) else None


def encode_chunk(chunk: Chunk) -> bytes:
    """The JSON of a chunk; `logprobs` only where they were asked for."""
    return _chunks.dump_json(chunk, exclude={"logprobs"} if chunk.logprobs is None else None)


def with_correlation(payload: bytes, correlation_data: str | None) -> bytes:
    """Add the correlation data of a job that brought them in its JSON, for readers without MQTT 5."""
    if correlation_data is None:
        return payload
    return payload[:-1] + b',"correlation_data":' + json.dumps(correlation_data, ensure_ascii=False).encode() + b"}"


def result_message(job_id: str, result: Result) -> ResultMessage:
    """A job that the engine ended; the stop reason is that of the choice that set the status."""
    status = result.status
    return ResultMessage(
        job_id=job_id,
        status=status,
        stop_reason=next(choice.stop_reason for choice in result.choices if STATUS[choice.stop_reason] == status),
        choices=tuple(_choice_message(choice, result.seed) for choice in result.choices),
        text=result.text,
        token_ids=result.token_ids,
        usage=result.usage,
        timings=result.timings,
        error=ErrorMessage(code="failed", field=None, message=result.error or "") if status == "failed" else None,
        prompt_logprobs=result.prompt_logprobs,
    )


def _choice_message(choice: Choice, seed: int) -> ChoiceMessage:
    return ChoiceMessage(
        choice=choice.choice,
        text=choice.text,
        token_ids=choice.token_ids,
        stop_reason=choice.stop_reason,
        seed=seed,
        error=choice.error,
        logprobs=choice.logprobs,
    )


def failed_message(job_id: str, code: ErrorCode, reason: str, lost: ResultMessage | None = None) -> ResultMessage:
    """The terminal message of a job whose answer is lost: what it cost is told all the same, where `lost` knows it."""
    seed = lost.choices[0].seed if lost is not None and lost.choices else 0
    usage, timings = (None, None) if lost is None else (lost.usage, lost.timings)
    return ResultMessage(
        job_id=job_id,
        status="failed",
        stop_reason="error",
        choices=(ChoiceMessage(choice=0, text="", token_ids=(), stop_reason="error", seed=seed, error=reason),),
        text="",
        token_ids=(),
        usage=usage or Usage(0, 0, 0, 0, 0, 0, 0, None),
        timings=timings or Timings(0.0, 0.0, 0.0, None, 0.0),
        error=ErrorMessage(code=code, field=None, message=reason),
    )


def rejected_message(job_id: str, error: DrumlineError, code: ErrorCode | None = None) -> ResultMessage:
    """The terminal message of a job that was never accepted; `code` stands in for the error's own."""
    return ResultMessage(
        job_id=job_id,
        status="rejected",
        stop_reason=None,
        choices=(),
        text="",
        token_ids=(),
        usage=None,
        timings=None,
        error=error_message(error, code),
    )


def error_message(error: DrumlineError, code: ErrorCode | None = None) -> ErrorMessage:
    """What to tell of an error; `code` stands in for its own."""
    match error:
        case InvalidRequest():
            field, limit = shortened(error.field), shortened(error.limit)
            return ErrorMessage(code=code or "invalid", field=field, message=limit)
        case QueueFull():
            text = str(error)
            return ErrorMessage(
                code="queue_full", field=error.bound, message=text, limit=error.limit, queued=error.queued
            )
        case QuotaExceeded():
            return ErrorMessage(
                code="quota", field=error.bound, message=str(error), limit=error.limit, queued=error.used
            )
        case JournalError():
            return ErrorMessage(code="journal", field=None, message=error.reason)
        case SchedulerClosed():
            return ErrorMessage(code="draining", field=None, message=str(error))
    return ErrorMessage(code="failed", field=None, message=str(error))


def shortened(text: str) -> str:
    """At most `MAX_QUOTED` characters of it: a message of ours must not grow with what a device sent."""
    return text if len(text) <= MAX_QUOTED else text[: MAX_QUOTED - 1] + "…"


def parse_state(payload: bytes) -> StateMessage:
    """Read a state; raises `EngineFailed` for what is none."""
    return parse(StateMessage.model_validate_json, payload)


def parse_chunk(payload: bytes) -> Chunk:
    """Read a chunk; raises `EngineFailed` for what is none."""
    return parse(_chunks.validate_json, payload)


def parse_result(payload: bytes) -> ResultMessage:
    """Read a terminal message; raises `EngineFailed` for what is none."""
    return parse(ResultMessage.model_validate_json, payload)


def parse(validate: Callable[[bytes], Parsed], payload: bytes) -> Parsed:
    """What `validate` makes of it; raises `EngineFailed` for what a worker of ours would not send."""
    try:
        return validate(payload)
    except ValidationError as error:
        raise EngineFailed(f"the worker sent what this client cannot read: {error.errors()[0]['msg']}") from None


def to_result(message: ResultMessage) -> Result:
    """The `Result` that the message tells of; a rejected job raises the error that the scheduler raised."""
    if message.status == "rejected" or message.usage is None or message.timings is None or not message.choices:
        raise _typed_error(message.error)
    return Result(
        id=message.job_id,
        choices=tuple(
            Choice(
                choice=choice.choice,
                text=choice.text,
                token_ids=choice.token_ids,
                stop_reason=choice.stop_reason,
                logprobs=choice.logprobs,
                error=choice.error,
            )
            for choice in message.choices
        ),
        usage=message.usage,
        timings=message.timings,
        seed=message.choices[0].seed,
    )


def _typed_error(error: ErrorMessage | None) -> DrumlineError:
    match error:
        case ErrorMessage(code="invalid" | "duplicate_id"):
            return InvalidRequest(error.field or "request", error.message)
        case ErrorMessage(code="queue_full"):
            return QueueFull(error.field or "requests", error.limit or 0, error.queued or 0)
        case ErrorMessage(code="quota"):
            return QuotaExceeded(error.field or "jobs", error.limit or 0, error.queued or 0)
        case ErrorMessage(code="draining"):
            return SchedulerClosed(error.message)
    return EngineFailed(error.message if error else "the job was rejected without a reason")
