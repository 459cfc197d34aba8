"""The metrics of a scheduler: one verb per event, every series there from the first scrape.

Each series carries a label `scheduler`, so that several schedulers can share a host's registry. The other labels take
values from the fixed sets below, and any other value is a `ValueError`: a typo must not become a new time series.
"""

import asyncio
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Literal, TypeVar, get_args
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric
from prometheus_client.registry import Collector

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
"""Seconds of one step or one token: dense between 5 and 50 ms, where small models on a CPU live."""
DURATION_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Seconds of a whole request: up to ten minutes in a long queue."""
ROW_BUCKETS = tuple(float(2**power) for power in range(9))
TOKEN_BUCKETS = tuple(float(2**power) for power in range(15))
RATIO_BUCKETS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

# name: (help, labels beside `scheduler`)
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests_queued": ("Requests that wait for a row.", ("priority",)),
    "oldest_queued_seconds": ("Age of the oldest waiting request, 0 when none waits.", ()),
    "rows_live": ("Rows that hold a request.", ()),
    "rows_capacity": ("Rows of the pool.", ()),
    "kv_tokens": ("Tokens held in the K/V cache.", ()),
    "kv_utilization_ratio": ("Tokens held in the K/V cache over its capacity.", ()),
    "mqtt_connected": ("1 while connected to the broker.", ()),
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests_total": ("Requests that reached their end, by outcome.", ("outcome",)),
    "rejected_total": ("Requests refused, by reason.", ("reason",)),
    "prompt_tokens_total": ("Prompt tokens computed by the model or reused from the cache.", ("source",)),
    "generated_tokens_total": ("Tokens generated.", ()),
    "draft_tokens_total": ("Tokens drafted for rows that run nearly alone, by what became of them.", ("outcome",)),
    "steps_total": ("Steps of the engine.", ()),
    "restarts_total": ("Failed steps after which the engine started anew.", ()),
    "preemptions_total": ("Rows taken from a running request.", ()),
    "window_recomputes_total": ("Recomputes of a full window.", ()),
    "journal_commits_total": ("Groups of events that the journal has on the disk.", ()),
    "mqtt_messages_total": ("MQTT messages handled.", ("direction", "kind")),
}
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "queue_seconds": ("Time from submit to a row.", (), DURATION_BUCKETS),
    "time_to_first_token_seconds": ("Time from submit to the first token.", (), DURATION_BUCKETS),
    "inter_token_seconds": ("Time between tokens of one row; those of one step come together.", (), LATENCY_BUCKETS),
    "request_seconds": ("Time from submit to the end.", (), DURATION_BUCKETS),
    "step_seconds": ("Time of one step, by phase.", ("phase",), LATENCY_BUCKETS),
    "step_rows": ("Rows in one step.", (), ROW_BUCKETS),
    "step_tokens": ("Tokens fed in one step.", (), TOKEN_BUCKETS),
    "padding_ratio": ("Share of one step's positions that were padding.", (), RATIO_BUCKETS),
    "event_loop_lag_seconds": ("Delay of the event loop beyond a planned sleep.", (), LATENCY_BUCKETS),
    "prompt_tokens": ("Prompt tokens of one request.", (), TOKEN_BUCKETS),
    "generated_tokens": ("Generated tokens of one request.", (), TOKEN_BUCKETS),
}
INFOS: dict[str, str] = {
    "build": "The version that runs.",
    "model": "The model that is served.",
}


class _Histogram(Histogram):
    """A histogram that takes one value many times at the price of once."""

    def observe_times(self, amount: float, times: int) -> None:
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


_K = TypeVar("_K")
_V = TypeVar("_V")
_Family = Gauge | Counter | _Histogram | Info
_F = TypeVar("_F", Gauge, Counter, _Histogram, Info)


class _Families(Collector):
    """All metric families of one registry, as one collector.

    One collector registers wholly or not at all, and it may do what the registry forbids two collectors: hold both a
    counter `prompt_tokens_total` and a histogram `prompt_tokens`, whose family names in OpenMetrics are the same.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.gauges = {
            name: Gauge(f"drumline_{name}", text, ("scheduler", *labels), registry=None)
            for name, (text, labels) in GAUGES.items()
        }
        self.counters = {
            name: Counter(f"drumline_{name}", text, ("scheduler", *labels), registry=None)
            for name, (text, labels) in COUNTERS.items()
        }
        self.histograms = {
            name: _Histogram(f"drumline_{name}", text, ("scheduler", *labels), buckets=buckets, registry=None)
            for name, (text, labels, buckets) in HISTOGRAMS.items()
        }
        self.infos = {
            name: Info(f"drumline_{name}", text, ("scheduler",), registry=None) for name, text in INFOS.items()
        }

    def members(self) -> Iterable[_Family]:
        """Every family."""
        yield from self.gauges.values()
        yield from self.counters.values()
        yield from self.histograms.values()
        yield from self.infos.values()

    def describe(self) -> Iterable[Metric]:
        """The names that the registry holds for us."""
        for member in self.members():
            yield from member.describe()

    def collect(self) -> Iterable[Metric]:
        """Families that have a series, without `_created`: of two families of one name, both would claim it."""
        for member in self.members():
            for metric in member.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                if metric.samples:
                    yield metric


_lock = threading.Lock()
_families: WeakKeyDictionary[CollectorRegistry, _Families] = WeakKeyDictionary()


def _claim(registry: CollectorRegistry, name: str) -> _Families:
    """The families of `registry`, made at the first call, with `name` taken."""
    if not name:
        raise ValueError("name: a scheduler's metrics need a name that is not empty")
    with _lock:
        families = _families.get(registry)
        if families is None:
            families = _Families()
            registry.register(families)
            _families[registry] = families
        if name in families.names:
            raise ValueError(f"name: another scheduler {name!r} already exports metrics in this registry")
        families.names.add(name)
        return families


def _one_of(children: Mapping[_K, _V], label: str, value: _K) -> _V:
    """The child of a label's value; `ValueError` names the label and what it may be."""
    try:
        return children[value]
    except KeyError:
        allowed = ", ".join(str(key) for key in children)
        raise ValueError(f"{label}: {value!r} is not one of {allowed}") from None


class Instruments:
    """The metrics of one scheduler; its verbs may be called from any thread.

    `registry` may be a host's own and may hold other schedulers; `name` is the value of the label `scheduler`. Raises
    `ValueError` when the name is empty, or taken in this registry by Instruments that have not been closed.
    """

    def __init__(self, registry: CollectorRegistry, name: str) -> None:
        self.name = name
        self._families = _claim(registry, name)
        self._closed = False
        self._children: set[tuple[_Family, tuple[str, ...]]] = set()
        gauges, counters, histograms = self._families.gauges, self._families.counters, self._families.histograms
        child = self._child

        self._queued: dict[Priority, Gauge] = {
            value: child(gauges["requests_queued"], value) for value in get_args(Priority)
        }
        self._oldest_queued = child(gauges["oldest_queued_seconds"])
        self._rows_live = child(gauges["rows_live"])
        self._rows_capacity = child(gauges["rows_capacity"])
        self._kv_tokens = child(gauges["kv_tokens"])
        self._kv_utilization = child(gauges["kv_utilization_ratio"])
        self._mqtt_connected = child(gauges["mqtt_connected"])

        self._requests: dict[str, Counter] = {
            value: child(counters["requests_total"], value) for value in get_args(Outcome)
        }
        self._rejected: dict[str, Counter] = {
            value: child(counters["rejected_total"], value) for value in get_args(RejectReason)
        }
        self._computed = child(counters["prompt_tokens_total"], "computed")
        self._reused = child(counters["prompt_tokens_total"], "reused")
        self._generated = child(counters["generated_tokens_total"])
        self._drafts = {outcome: child(counters["draft_tokens_total"], outcome) for outcome in ("accepted", "rejected")}
        self._steps = child(counters["steps_total"])
        self._preemptions = child(counters["preemptions_total"])
        self._journal_commits = child(counters["journal_commits_total"])
        self._restarts = child(counters["restarts_total"])
        self._recomputes = child(counters["window_recomputes_total"])
        self._messages: dict[str, dict[str, Counter]] = {
            direction: {kind: child(counters["mqtt_messages_total"], direction, kind) for kind in kinds}
            for direction, kinds in MESSAGES.items()
        }

        self._queue_seconds = child(histograms["queue_seconds"])
        self._first_token = child(histograms["time_to_first_token_seconds"])
        self._inter_token = child(histograms["inter_token_seconds"])
        self._request_seconds = child(histograms["request_seconds"])
        self._step_seconds: dict[str, _Histogram] = {
            value: child(histograms["step_seconds"], value) for value in get_args(Phase)
        }
        self._step_rows = child(histograms["step_rows"])
        self._step_tokens = child(histograms["step_tokens"])
        self._padding = child(histograms["padding_ratio"])
        self._loop_lag = child(histograms["event_loop_lag_seconds"])
        self._prompt_length = child(histograms["prompt_tokens"])
        self._generated_length = child(histograms["generated_tokens"])

    def _child(self, family: _F, *values: str) -> _F:
        """The series of these label values, remembered for `close`."""
        self._children.add((family, (self.name, *values)))
        return family.labels(self.name, *values)

    def identify(self, *, version: str, model: str, precision: str, backend: str) -> None:
        """Say what runs, as `drumline_build_info` and `drumline_model_info`; a second call replaces the first."""
        with _lock:
            if self._closed:
                return
            infos = self._families.infos
            self._child(infos["build"]).info({"version": version})
            self._child(infos["model"]).info({"model": model, "precision": precision, "backend": backend})

    def rejected(self, reason: RejectReason) -> None:
        """A request was refused: its terminal outcome, counted with its reason."""
        child = _one_of(self._rejected, "reason", reason)
        child.inc()
        self._requests["rejected"].inc()

    def request_done(
        self,
        outcome: Outcome,
        queue_s: float | None,
        first_token_s: float | None,
        total_s: float,
        prompt_tokens: int,
        generated_tokens: int,
    ) -> None:
        """An accepted request reached its end. Seconds are from submit; None where it never got that far."""
        if outcome == "rejected":
            raise ValueError("outcome: a refused request is counted by rejected(reason)")
        _one_of(self._requests, "outcome", outcome).inc()
        if queue_s is not None:
            self._queue_seconds.observe(queue_s)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
        self._request_seconds.observe(total_s)
        self._prompt_length.observe(prompt_tokens)
        self._generated_length.observe(generated_tokens)

    def step(self, rows: int, tokens: int, padding_ratio: float, seconds_by_phase: Mapping[str, float]) -> None:
        """One step ran `rows` rows and fed `tokens` tokens; phases that it did not have may be left out."""
        phases = [(_one_of(self._step_seconds, "phase", phase), s) for phase, s in seconds_by_phase.items()]
        for child, seconds in phases:
            child.observe(seconds)
        self._steps.inc()
        self._step_rows.observe(rows)
        self._step_tokens.observe(tokens)
        self._padding.observe(padding_ratio)

    def token_gaps(self, seconds: float, times: int) -> None:
        """Time between two tokens of one row, as its reader sees it, for `times` rows that stepped together."""
        self._inter_token.observe_times(seconds, times)

    def prompt_computed(self, tokens: int) -> None:
        """The model evaluated this many prompt tokens (those of a window recompute count too)."""
        self._computed.inc(tokens)

    def prompt_reused(self, tokens: int) -> None:
        """A cached prefix spared the model this many prompt tokens."""
        self._reused.inc(tokens)

    def generated(self, tokens: int) -> None:
        """This many tokens were chosen."""
        self._generated.inc(tokens)

    def drafted(self, accepted: int, rejected: int) -> None:
        """So many drafted tokens were what their rows chose, and so many were not."""
        self._drafts["accepted"].inc(accepted)
        self._drafts["rejected"].inc(rejected)

    def journal_commit(self) -> None:
        """The journal wrote a group of events."""
        self._journal_commits.inc()

    def restarted(self) -> None:
        """The engine failed and started anew."""
        self._restarts.inc()

    def window_recomputed(self, times: int = 1) -> None:
        """A full window was recomputed from position zero, `times` times."""
        self._recomputes.inc(times)

    def preempted(self) -> None:
        """A running request lost its row."""
        self._preemptions.inc()

    def levels(
        self,
        queued: Mapping[Priority, int],
        oldest_queued_s: float,
        rows_live: int,
        rows_capacity: int,
        kv_tokens: int,
        kv_capacity: int,
    ) -> None:
        """What waits by priority (a class left out is 0), what runs, and tokens in the cache of `kv_capacity`."""
        for given in queued:
            _one_of(self._queued, "priority", given)
        for priority, child in self._queued.items():
            child.set(queued.get(priority, 0))
        self._oldest_queued.set(oldest_queued_s)
        self._rows_live.set(rows_live)
        self._rows_capacity.set(rows_capacity)
        self._kv_tokens.set(kv_tokens)
        self._kv_utilization.set(kv_tokens / kv_capacity if kv_capacity else 0.0)

    def loop_lag(self, seconds: float) -> None:
        """The event loop woke this much later than planned (see `watch_loop_lag`)."""
        self._loop_lag.observe(seconds)

    def mqtt_message(self, direction: Direction, kind: MessageKind) -> None:
        """One MQTT message came `in` or went `out`; `MESSAGES` lists the kinds of each."""
        kinds = _one_of(self._messages, "direction", direction)
        _one_of(kinds, "kind", kind).inc()

    def mqtt_connected(self, connected: bool) -> None:
        """The connection to the broker came or went."""
        self._mqtt_connected.set(1 if connected else 0)

    def close(self) -> None:
        """Take these series off the page and free the name; closing again does nothing.

        A verb called later is harmless: it updates a series that nobody exports.
        """
        with _lock:
            if self._closed:
                return
            self._closed = True
            for family, values in self._children:
                family.remove(*values)
            self._families.names.discard(self.name)


async def watch_loop_lag(
    observe: Callable[[float], None],
    interval_s: float = 0.5,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Sleep `interval_s` seconds again and again and observe by how many seconds each sleep was late.

    Runs until cancelled: start it as a task with `observe=instruments.loop_lag`.
    """
    while True:
        planned = clock() + interval_s
        await sleep(interval_s)
        observe(max(0.0, clock() - planned))
