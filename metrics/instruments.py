"""The metrics of a scheduler: one verb per event, every series there from the first scrape.

Each series carries a label `scheduler`, so that several schedulers can share a host's registry. The other labels take
values from the fixed sets of `definitions`, and any other value is a `ValueError`: a typo must not become a new time
series.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Info

from drumline.metrics.definitions import (
    MESSAGES,
    Direction,
    MessageKind,
    Outcome,
    Phase,
    Priority,
    RejectReason,
)
from drumline.metrics.families import Family, Histogram, claim, lock, one_of

_F = TypeVar("_F", Gauge, Counter, Histogram, Info)


class Instruments:
    """The metrics of one scheduler; its verbs may be called from any thread.

    `registry` may be a host's own and may hold other schedulers; `name` is the value of the label `scheduler`. Raises
    `ValueError` when the name is empty, or taken in this registry by Instruments that have not been closed.
    """

    def __init__(self, registry: CollectorRegistry, name: str) -> None:
        self.name = name
        self._families = claim(registry, name)
        self._closed = False
        self._children: set[tuple[Family, tuple[str, ...]]] = set()
        gauges, counters, histograms = self._families.gauges, self._families.counters, self._families.histograms
        child = self._child

        self._ready = child(gauges["ready"])
        self._healthy = child(gauges["healthy"])
        self._queued: dict[Priority, Gauge] = {
            value: child(gauges["requests_queued"], value) for value in get_args(Priority)
        }
        self._oldest_queued = child(gauges["oldest_queued_seconds"])
        self._rows_live = child(gauges["rows_live"])
        self._rows_capacity = child(gauges["rows_capacity"])
        self._kv_tokens = child(gauges["kv_tokens"])
        self._kv_utilization = child(gauges["kv_utilization_ratio"])
        self._mqtt_connected = child(gauges["mqtt_connected"])
        self._journal_up = child(gauges["journal_up"])
        self._journal_up.set(1)

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
        self._journal_events = child(counters["journal_events_total"])
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
        self._step_seconds: dict[str, Histogram] = {
            value: child(histograms["step_seconds"], value) for value in get_args(Phase)
        }
        self._step_rows = child(histograms["step_rows"])
        self._step_tokens = child(histograms["step_tokens"])
        self._padding = child(histograms["padding_ratio"])
        self._loop_lag = child(histograms["event_loop_lag_seconds"])
        self._journal_commit_seconds = child(histograms["journal_commit_seconds"])
        self._prompt_length = child(histograms["prompt_tokens"])
        self._generated_length = child(histograms["generated_tokens"])

    def _child(self, family: _F, *values: str) -> _F:
        """The series of these label values, remembered for `close`."""
        self._children.add((family, (self.name, *values)))
        return family.labels(self.name, *values)

    def identify(self, *, version: str, model: str, precision: str, backend: str) -> None:
        """Say what runs, as `drumline_build_info` and `drumline_model_info`; a second call replaces the first."""
        with lock:
            if self._closed:
                return
            infos = self._families.infos
            self._child(infos["build"]).info({"version": version})
            self._child(infos["model"]).info({"model": model, "precision": precision, "backend": backend})

    def watch(self, ready: Callable[[], bool], healthy: Callable[[], bool]) -> None:
        """Ask these at each scrape for `drumline_ready` and `drumline_healthy`, which are 0 until then.

        They are called on the scrape's thread, so they must be quick and safe to call from there; one that raises
        reads as 0.
        """
        self._ready.set_function(lambda: _one_if(ready))
        self._healthy.set_function(lambda: _one_if(healthy))

    def rejected(self, reason: RejectReason) -> None:
        """A request was refused: its terminal outcome, counted with its reason."""
        child = one_of(self._rejected, "reason", reason)
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
        job_id: str,
    ) -> None:
        """An accepted request reached its end. Seconds are from submit; None where it never got that far.

        The buckets of its times show `job_id` as their exemplar from now on.
        """
        if outcome == "rejected":
            raise ValueError("outcome: a refused request is counted by rejected(reason)")
        one_of(self._requests, "outcome", outcome).inc()
        if queue_s is not None:
            self._queue_seconds.observe_times(queue_s, 1, job_id)
        if first_token_s is not None:
            self._first_token.observe_times(first_token_s, 1, job_id)
        self._request_seconds.observe_times(total_s, 1, job_id)
        self._prompt_length.observe(prompt_tokens)
        self._generated_length.observe(generated_tokens)

    def request_lost(self, outcome: Outcome) -> None:
        """An accepted request ended without ever getting here: it has no times and no tokens."""
        one_of(self._requests, "outcome", outcome).inc()

    def step(self, rows: int, tokens: int, padding_ratio: float, seconds_by_phase: Mapping[str, float]) -> None:
        """One step ran `rows` rows and fed `tokens` tokens; phases that it did not have may be left out."""
        phases = [(one_of(self._step_seconds, "phase", phase), s) for phase, s in seconds_by_phase.items()]
        for child, seconds in phases:
            child.observe(seconds)
        self._steps.inc()
        self._step_rows.observe(rows)
        self._step_tokens.observe(tokens)
        self._padding.observe(padding_ratio)

    def token_gaps(self, seconds: float, times: int, job_id: str) -> None:
        """Time between two tokens of one row, as its reader sees it, for `times` rows that stepped together.

        `job_id`, which the bucket shows as its exemplar, is the job of one of them.
        """
        self._inter_token.observe_times(seconds, times, job_id)

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

    def journal_commit(self, events: int, seconds: float) -> None:
        """The journal has a group of `events` events on the disk, which took `seconds`."""
        self._journal_commits.inc()
        self._journal_events.inc(events)
        self._journal_commit_seconds.observe(seconds)

    def journal_up(self, up: bool) -> None:
        """The journal takes writes (again), or no longer does."""
        self._journal_up.set(1 if up else 0)

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
            one_of(self._queued, "priority", given)
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
        kinds = one_of(self._messages, "direction", direction)
        one_of(kinds, "kind", kind).inc()

    def mqtt_connected(self, connected: bool) -> None:
        """The connection to the broker came or went."""
        self._mqtt_connected.set(1 if connected else 0)

    def close(self) -> None:
        """Take these series off the page and free the name; closing again does nothing.

        A verb called later is harmless: it updates a series that nobody exports.
        """
        with lock:
            if self._closed:
                return
            self._closed = True
            for family, values in self._children:
                family.remove(*values)
            self._families.names.discard(self.name)


def _one_if(holds: Callable[[], bool]) -> float:
    try:
        return 1.0 if holds() else 0.0
    except Exception:  # a page must not fail with what it tells of; /readyz and /healthz say why
        return 0.0
