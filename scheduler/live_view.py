"""What a scheduler looks like now: the JSON behind `drumline top` and the live page. A picture, not an account: counts
that must add up are on the metrics page."""

from collections.abc import Mapping
from typing import Literal

from pydantic import ConfigDict

from drumline.cache_pool.pool import CachePool
from drumline.metrics.definitions import Priority
from drumline.model.validated import Validated
from drumline.scheduler.request import Status
from drumline.scheduler.sequence import Sequence

RATE_TOKENS = 16
"""A row's rate is that of its newest tokens, so many of them."""

State = Literal["ready", "starting", "draining", "failed"]
RowPhase = Literal["prefill", "shares a prefix", "decode"]


class _Told(Validated):
    """Its readers ignore keys that they do not know, so that a newer worker may say more."""

    model_config = ConfigDict(strict=False, extra="ignore")


class LiveRow(_Told):
    """A row and the request in it; times in seconds."""

    row: int
    job: str
    choice: int
    tenant: str
    priority: Priority
    phase: RowPhase
    """`shares a prefix`: another row computes what its prompt begins with."""
    prompt_tokens: int
    cached_tokens: int
    """Of its prompt and its answer, what the row has computed."""
    generated_tokens: int
    budget_tokens: int
    tokens_per_s: float
    age_s: float
    """Since submit."""


class LiveAnswer(_Told):
    """A job that has ended; times in seconds from its submit."""

    job: str
    tenant: str
    priority: Priority
    status: Status
    stop_reason: str
    prompt_tokens: int
    generated_tokens: int
    queued_s: float
    first_token_s: float | None
    inter_token_s: float | None
    """Mean time between its tokens; None where there were fewer than two."""
    total_s: float
    ended_ago_s: float
    text: str | None
    """How it begins; None unless texts are to be shown."""


class Percentiles(_Told):
    """Of the answers remembered that have the value, in seconds."""

    p50: float
    p90: float
    p99: float


class LiveView(_Told):
    """A scheduler at one moment."""

    name: str
    model: str
    precision: str
    backend: str
    version: str
    state: State
    troubles: tuple[str, ...]
    uptime_s: float
    capacity: int
    rows: tuple[LiveRow, ...]
    """Those that hold a request."""
    queued: dict[Priority, int]
    oldest_queued_s: float
    kv_tokens: int
    kv_capacity_tokens: int
    generated_by_second: tuple[int, ...]
    """Tokens chosen in each of the last 60 whole seconds, the newest last."""
    prompt_by_second: tuple[int, ...]
    """Tokens of prompts computed in each of them."""
    finished: int
    """Jobs that have ended since the start."""
    steps: int
    first_token_s: Percentiles | None
    inter_token_s: Percentiles | None
    total_s: Percentiles | None
    answers: tuple[LiveAnswer, ...]
    """The newest first."""


def live_rows(by_row: Mapping[int, Sequence], pool: CachePool, now: float) -> tuple[LiveRow, ...]:
    """The rows that hold a request, by number."""
    return tuple(_row(row, sequence, pool, now) for row, sequence in sorted(by_row.items()))


def _row(row: int, sequence: Sequence, pool: CachePool, now: float) -> LiveRow:
    phase: RowPhase = "prefill" if sequence.prefilling else "decode"
    return LiveRow(
        row=row,
        job=sequence.job.label,
        choice=sequence.choice,
        tenant=sequence.tenant,
        priority=sequence.priority,
        phase="shares a prefix" if pool.follows(row) else phase,
        prompt_tokens=sequence.prompt_length,
        cached_tokens=int(pool.position[row]),
        generated_tokens=len(sequence.token_ids),
        budget_tokens=sequence.rules.budget,
        tokens_per_s=_rate(sequence.token_times_s[-RATE_TOKENS:]),
        age_s=now - sequence.job.submitted_at,
    )


def _rate(times_s: list[float]) -> float:
    """Tokens a second between the first and the last of these moments."""
    return (len(times_s) - 1) / (times_s[-1] - times_s[0]) if len(times_s) > 1 and times_s[-1] > times_s[0] else 0.0
