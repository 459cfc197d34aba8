"""What is told to Prometheus: every family with its labels and the values they take, in tables that hold no numbers.

Names lack the prefix `drumline_`; each series has a label `scheduler` beside those named here. `families` makes the
families of a registry from the tables, `document` a page about them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

PREFIX = "drumline_"

Priority = Literal["low", "normal", "high"]
Outcome = Literal["completed", "cancelled", "expired", "failed", "rejected"]
RejectReason = Literal[
    "invalid", "queue_full", "draining", "failed", "duplicate_id", "too_large", "unparsable", "quota", "journal"
]
Phase = Literal["plan", "forward", "sample", "commit"]
Direction = Literal["in", "out"]
MessageKind = Literal["submit", "cancel", "get", "state", "chunk", "result", "status", "dead"]

MESSAGES: dict[Direction, tuple[MessageKind, ...]] = {
    "in": ("submit", "cancel", "get"),
    "out": ("state", "chunk", "result", "status", "dead"),
}
"""Which kinds travel which way: `in` is what devices publish, `out` what the worker publishes."""

LATENCY_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.5, 1.0, 5.0),
)
"""Seconds of one step, one token or one commit: dense between 5 and 50 ms, where small models on a CPU live."""
DURATION_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Seconds of a whole request: up to ten minutes in a long queue."""
ROW_BUCKETS = tuple(float(2**power) for power in range(9))
TOKEN_BUCKETS = tuple(float(2**power) for power in range(15))
RATIO_BUCKETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Definition:
    """A family: what it tells, and the labels beside `scheduler` with the values that each takes.

    A label that takes any value, as those of an info do, has an empty tuple.
    """

    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class HistogramDefinition(Definition):
    """A family of histograms: also the upper bounds of its buckets, and whether these show a job's id as exemplar."""

    buckets: tuple[float, ...] = field(kw_only=True)
    exemplars: bool = field(default=False, kw_only=True)


GAUGES: dict[str, Definition] = {
    "ready": Definition("1 while requests would be taken and answered, as /readyz says."),
    "healthy": Definition("1 while the event loop and the engine make progress, as /healthz says."),
    "requests_queued": Definition("Requests that wait for a row.", {"priority": get_args(Priority)}),
    "oldest_queued_seconds": Definition("Age of the oldest waiting request, 0 when none waits."),
    "rows_live": Definition("Rows that hold a request."),
    "rows_capacity": Definition("Rows of the pool."),
    "kv_tokens": Definition("Tokens held in the K/V cache."),
    "kv_utilization_ratio": Definition("Tokens held in the K/V cache over its capacity."),
    "mqtt_connected": Definition("1 while connected to the broker."),
    "journal_up": Definition("1 while the journal takes writes; 1, too, where there is none."),
}
COUNTERS: dict[str, Definition] = {
    "requests_total": Definition("Requests that reached their end, by outcome.", {"outcome": get_args(Outcome)}),
    "rejected_total": Definition("Requests refused, by reason.", {"reason": get_args(RejectReason)}),
    "prompt_tokens_total": Definition(
        "Prompt tokens computed by the model or reused from the cache.", {"source": ("computed", "reused")}
    ),
    "generated_tokens_total": Definition("Tokens generated."),
    "draft_tokens_total": Definition(
        "Tokens drafted for rows that run nearly alone, by what became of them.", {"outcome": ("accepted", "rejected")}
    ),
    "steps_total": Definition("Steps of the engine."),
    "restarts_total": Definition("Failed steps after which the engine started anew."),
    "preemptions_total": Definition("Rows taken from a running request."),
    "window_recomputes_total": Definition("Recomputes of a full window."),
    "journal_commits_total": Definition("Groups of events that the journal has on the disk."),
    "journal_events_total": Definition("Events that the journal has on the disk."),
    "mqtt_messages_total": Definition(
        "MQTT messages: submit, cancel and get as they arrive, the others once the broker has taken them.",
        {"direction": get_args(Direction), "kind": get_args(MessageKind)},
    ),
}
HISTOGRAMS: dict[str, HistogramDefinition] = {
    "queue_seconds": HistogramDefinition("Time from submit to a row.", buckets=DURATION_BUCKETS, exemplars=True),
    "time_to_first_token_seconds": HistogramDefinition(
        "Time from submit to the first token.", buckets=DURATION_BUCKETS, exemplars=True
    ),
    "inter_token_seconds": HistogramDefinition(
        "Time between tokens of one row; those of one step come together.", buckets=LATENCY_BUCKETS, exemplars=True
    ),
    "request_seconds": HistogramDefinition("Time from submit to the end.", buckets=DURATION_BUCKETS, exemplars=True),
    "step_seconds": HistogramDefinition(
        "Time of one step, by phase.", {"phase": get_args(Phase)}, buckets=LATENCY_BUCKETS
    ),
    "step_rows": HistogramDefinition("Rows in one step.", buckets=ROW_BUCKETS),
    "step_tokens": HistogramDefinition("Tokens fed in one step.", buckets=TOKEN_BUCKETS),
    "padding_ratio": HistogramDefinition("Share of one step's positions that were padding.", buckets=RATIO_BUCKETS),
    "event_loop_lag_seconds": HistogramDefinition(
        "Delay of the event loop beyond a planned sleep.", buckets=LATENCY_BUCKETS
    ),
    "journal_commit_seconds": HistogramDefinition("Time of one group of events to the disk.", buckets=LATENCY_BUCKETS),
    "prompt_tokens": HistogramDefinition("Prompt tokens of one request.", buckets=TOKEN_BUCKETS),
    "generated_tokens": HistogramDefinition("Generated tokens of one request.", buckets=TOKEN_BUCKETS),
}
INFOS: dict[str, Definition] = {
    "build": Definition("The version that runs.", {"version": ()}),
    "model": Definition("The model that is served.", {"model": (), "precision": (), "backend": ()}),
}
