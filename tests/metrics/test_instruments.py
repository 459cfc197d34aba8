import gc
import re
import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from drumline.metrics.definitions import LATENCY_BUCKETS
from drumline.metrics.instruments import Instruments

# The contract's list, written out once more so that a renamed metric fails here.
CONTRACT = {
    "gauge": {
        "ready": {},
        "healthy": {},
        "journal_up": {},
        "requests_queued": {"priority": {"low", "normal", "high"}},
        "rows_live": {},
        "rows_capacity": {},
        "kv_tokens": {},
        "kv_utilization_ratio": {},
        "mqtt_connected": {},
        "oldest_queued_seconds": {},
        "build_info": {"version": {"0.1.0"}},
        "model_info": {"model": {"tiny"}, "precision": {"float32"}, "backend": {"torch"}},
    },
    "counter": {
        "requests_total": {"outcome": {"completed", "cancelled", "expired", "failed", "rejected"}},
        "rejected_total": {
            "reason": {
                *("invalid", "queue_full", "draining", "failed", "duplicate_id", "too_large", "unparsable"),
                *("quota", "journal"),
            },
        },
        "prompt_tokens_total": {"source": {"computed", "reused"}},
        "generated_tokens_total": {},
        "draft_tokens_total": {"outcome": {"accepted", "rejected"}},
        "steps_total": {},
        "restarts_total": {},
        "journal_commits_total": {},
        "journal_events_total": {},
        "preemptions_total": {},
        "window_recomputes_total": {},
        "mqtt_messages_total": {
            "direction": {"in", "out"},
            "kind": {"submit", "cancel", "get", "state", "chunk", "result", "status", "dead"},
        },
    },
    "histogram": {
        "queue_seconds": {},
        "time_to_first_token_seconds": {},
        "inter_token_seconds": {},
        "request_seconds": {},
        "step_seconds": {"phase": {"plan", "forward", "sample", "commit"}},
        "step_rows": {},
        "step_tokens": {},
        "padding_ratio": {},
        "event_loop_lag_seconds": {},
        "journal_commit_seconds": {},
        "prompt_tokens": {},
        "generated_tokens": {},
    },
}


def identified(registry: CollectorRegistry, name: str) -> Instruments:
    instruments = Instruments(registry, name)
    instruments.identify(version="0.1.0", model="tiny", precision="float32", backend="torch")
    return instruments


def page(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page(registry))
        for sample in family.samples
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def instruments(registry: CollectorRegistry) -> Instruments:
    return Instruments(registry, "main")


def value(registry: CollectorRegistry, metric: str, scheduler: str = "main", **labels: str) -> float | None:
    return registry.get_sample_value(f"drumline_{metric}", {"scheduler": scheduler, **labels})


def test_names_types_and_label_values_are_the_contract(registry: CollectorRegistry) -> None:
    identified(registry, "main")
    types = set(re.findall(r"^# TYPE drumline_(\w+) (\w+)$", page(registry), re.MULTILINE))
    assert types == {(name, kind) for kind, names in CONTRACT.items() for name in names}

    seen: dict[str, dict[str, set[str]]] = {}
    for name, labels in samples(registry):
        values = seen.setdefault(re.sub("_(bucket|sum|count)$", "", name.removeprefix("drumline_")), {})
        for label, label_value in labels:
            if label != "le":
                values.setdefault(label, set()).add(label_value)
    expected = {
        name: {"scheduler": {"main"}, **labels} for names in CONTRACT.values() for name, labels in names.items()
    }
    assert seen == expected


def test_all_series_but_that_of_a_journal_start_at_zero(registry: CollectorRegistry) -> None:
    Instruments(registry, "main")
    first = samples(registry)
    assert len(first) > 200
    assert [(name, start) for (name, _), start in first.items() if start] == [("drumline_journal_up", 1.0)]


def test_buckets_start_at_a_millisecond_and_reach_minutes(registry: CollectorRegistry) -> None:
    Instruments(registry, "main")
    bounds: dict[str, list[float]] = {}
    for name, labels in samples(registry):
        if name.endswith("_bucket"):
            bounds.setdefault(name.removeprefix("drumline_"), []).append(float(dict(labels)["le"]))
    for name in ("queue", "time_to_first_token", "request"):
        finite = bounds[f"{name}_seconds_bucket"][:-1]
        assert (min(finite), max(finite)) == (0.001, 600.0)
    assert min(bounds["inter_token_seconds_bucket"]) == 0.001
    assert min(bounds["event_loop_lag_seconds_bucket"]) == 0.001
    assert bounds["step_rows_bucket"] == [*(2.0**power for power in range(9)), float("inf")]
    assert bounds["prompt_tokens_bucket"][-2:] == [16384.0, float("inf")]
    assert bounds["padding_ratio_bucket"][0] == 0.0
    assert bounds["padding_ratio_bucket"][-2] == 1.0


def test_a_rejection_counts_as_outcome_and_reason(registry: CollectorRegistry, instruments: Instruments) -> None:
    instruments.rejected("queue_full")
    instruments.rejected("invalid")
    instruments.rejected("invalid")
    assert value(registry, "requests_total", outcome="rejected") == 3
    assert value(registry, "rejected_total", reason="invalid") == 2
    assert value(registry, "rejected_total", reason="queue_full") == 1
    assert value(registry, "request_seconds_count") == 0


def test_a_request_that_ended_counts_once_everywhere(registry: CollectorRegistry, instruments: Instruments) -> None:
    instruments.request_done("completed", 0.25, 0.5, 2.0, 11, 500, "a")
    instruments.request_done("cancelled", None, None, 0.125, 7, 0, "b")
    assert value(registry, "requests_total", outcome="completed") == 1
    assert value(registry, "requests_total", outcome="cancelled") == 1
    assert value(registry, "requests_total", outcome="expired") == 0
    sums = {
        "queue_seconds": (1, 0.25),
        "time_to_first_token_seconds": (1, 0.5),
        "request_seconds": (2, 2.125),
        "prompt_tokens": (2, 18),
        "generated_tokens": (2, 500),
    }
    for name, (count, total) in sums.items():
        assert (value(registry, f"{name}_count"), value(registry, f"{name}_sum")) == (count, total), name
    assert value(registry, "prompt_tokens_bucket", le="8.0") == 1
    assert value(registry, "generated_tokens_bucket", le="512.0") == 2


def test_a_step(registry: CollectorRegistry, instruments: Instruments) -> None:
    instruments.step(3, 40, 0.75, {"plan": 0.001, "forward": 0.5, "sample": 0.25, "commit": 0.125})
    instruments.step(2, 2, 0.0, {"forward": 0.25})
    assert value(registry, "steps_total") == 2
    assert value(registry, "step_rows_sum") == 5
    assert value(registry, "step_tokens_sum") == 42
    assert value(registry, "padding_ratio_sum") == 0.75
    assert value(registry, "padding_ratio_bucket", le="0.0") == 1
    assert value(registry, "step_seconds_sum", phase="forward") == 0.75
    assert value(registry, "step_seconds_count", phase="sample") == 1
    assert value(registry, "step_seconds_bucket", phase="plan", le="0.001") == 1


def test_token_counters(registry: CollectorRegistry, instruments: Instruments) -> None:
    instruments.prompt_computed(30)
    instruments.prompt_reused(12)
    instruments.generated(5)
    instruments.window_recomputed()
    instruments.window_recomputed(3)
    instruments.preempted()
    instruments.token_gaps(0.25, 2, "a")
    instruments.loop_lag(0.25)
    assert value(registry, "prompt_tokens_total", source="computed") == 30
    assert value(registry, "prompt_tokens_total", source="reused") == 12
    assert value(registry, "generated_tokens_total") == 5
    assert value(registry, "window_recomputes_total") == 4
    assert value(registry, "preemptions_total") == 1
    assert value(registry, "inter_token_seconds_sum") == 0.5
    assert value(registry, "event_loop_lag_seconds_sum") == 0.25


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, *LATENCY_BUCKETS]) | st.floats(0, 20), st.integers(1, 9)), max_size=9))
def test_a_gap_counted_many_times_is_as_many_gaps(gaps: list[tuple[float, int]]) -> None:
    registry, twin = CollectorRegistry(), Histogram("twin", "", buckets=LATENCY_BUCKETS, registry=None)
    instruments = Instruments(registry, "main")
    for seconds, times in gaps:
        instruments.token_gaps(seconds, times, "a")
        for _ in range(times):
            twin.observe(seconds)
    (expected,) = twin.collect()
    for sample in expected.samples:
        if not sample.name.endswith("_created"):
            name = sample.name.replace("twin", "inter_token_seconds")
            assert value(registry, name, **sample.labels) == pytest.approx(sample.value)


def test_levels_are_set_not_added(registry: CollectorRegistry, instruments: Instruments) -> None:
    instruments.levels({"high": 2, "normal": 5}, 1.5, 3, 16, 512, 2048)
    assert value(registry, "requests_queued", priority="normal") == 5
    assert value(registry, "kv_utilization_ratio") == 0.25
    instruments.levels({"normal": 1}, 0.0, 2, 16, 0, 0)
    read = {priority: value(registry, "requests_queued", priority=priority) for priority in ("low", "normal", "high")}
    assert read == {"low": 0, "normal": 1, "high": 0}
    assert value(registry, "oldest_queued_seconds") == 0
    assert (value(registry, "rows_live"), value(registry, "rows_capacity")) == (2, 16)
    assert (value(registry, "kv_tokens"), value(registry, "kv_utilization_ratio")) == (0, 0)


def test_mqtt(registry: CollectorRegistry, instruments: Instruments) -> None:
    instruments.mqtt_connected(True)
    instruments.mqtt_message("in", "submit")
    instruments.mqtt_message("out", "chunk")
    instruments.mqtt_message("out", "chunk")
    assert value(registry, "mqtt_connected") == 1
    assert value(registry, "mqtt_messages_total", direction="in", kind="submit") == 1
    assert value(registry, "mqtt_messages_total", direction="out", kind="chunk") == 2
    instruments.mqtt_connected(False)
    assert value(registry, "mqtt_connected") == 0


def test_the_journal(registry: CollectorRegistry, instruments: Instruments) -> None:
    instruments.journal_commit(3, 0.25)
    instruments.journal_commit(40, 0.5)
    counted = {name: value(registry, f"journal_{name}") for name in ("commits_total", "events_total")}
    assert counted == {"commits_total": 2, "events_total": 43}
    assert value(registry, "journal_commit_seconds_sum") == 0.75
    assert value(registry, "journal_commit_seconds_bucket", le="0.2") == 0
    assert value(registry, "journal_commit_seconds_bucket", le="0.5") == 2
    instruments.journal_up(False)
    assert value(registry, "journal_up") == 0
    instruments.journal_up(True)
    assert value(registry, "journal_up") == 1


def test_readiness_and_health_are_asked_for_at_each_scrape(
    registry: CollectorRegistry, instruments: Instruments
) -> None:
    def read() -> tuple[float | None, float | None]:
        return value(registry, "ready"), value(registry, "healthy")

    def ready() -> bool:
        if not state["healthy"]:
            raise RuntimeError("the engine is gone")
        return state["ready"]

    state = {"ready": False, "healthy": True}
    assert read() == (0, 0)
    instruments.watch(ready, lambda: state["healthy"])
    assert read() == (0, 1)
    state["ready"] = True
    assert read() == (1, 1)
    state["healthy"] = False
    assert read() == (0, 0), "a callable that raises reads as 0"
    instruments.close()
    assert read() == (None, None)
    instruments.watch(ready, ready)
    assert read() == (None, None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda i: i.rejected("because"), "reason: 'because' is not one of invalid, queue_full"),
        (lambda i: i.request_done("done", 0, 0, 0, 1, 1, "a"), "outcome: 'done' is not one of completed"),
        (lambda i: i.request_done("rejected", 0, 0, 0, 1, 1, "a"), r"counted by rejected\(reason\)"),
        (lambda i: i.step(1, 1, 0.0, {"forward": 1.0, "nap": 1.0}), "phase: 'nap' is not one of plan, forward"),
        (lambda i: i.levels({"normal": 4, "urgent": 1}, 0, 1, 1, 1, 1), "priority: 'urgent' is not one of low"),
        (lambda i: i.mqtt_message("up", "submit"), "direction: 'up' is not one of in, out"),
        (lambda i: i.mqtt_message("in", "chunk"), "kind: 'chunk' is not one of submit, cancel, get"),
    ],
)
def test_an_unknown_label_value_is_refused_and_nothing_is_counted(
    registry: CollectorRegistry, instruments: Instruments, call: object, message: str
) -> None:
    before = page(registry)
    with pytest.raises(ValueError, match=message):
        call(instruments)  # type: ignore[operator]
    assert page(registry) == before


def test_two_schedulers_share_a_registry(registry: CollectorRegistry) -> None:
    host = Gauge("host_temperature_celsius", "The host's own.", registry=registry)
    host.set(21)
    left, right = Instruments(registry, "left"), Instruments(registry, "right")
    left.generated(3)
    right.generated(40)
    assert value(registry, "generated_tokens_total", "left") == 3
    assert value(registry, "generated_tokens_total", "right") == 40
    left.close()
    assert value(registry, "generated_tokens_total", "left") is None
    assert 'scheduler="left"' not in page(registry)
    assert value(registry, "generated_tokens_total", "right") == 40
    assert registry.get_sample_value("host_temperature_celsius") == 21


def test_a_name_is_taken_until_closed_and_starts_again_at_zero(registry: CollectorRegistry) -> None:
    first = Instruments(registry, "main")
    first.generated(3)
    with pytest.raises(ValueError, match="another scheduler 'main' already exports"):
        Instruments(registry, "main")
    assert value(registry, "generated_tokens_total") == 3, "the refusal must not touch the one that is there"
    with pytest.raises(ValueError, match="need a name"):
        Instruments(registry, "")
    Instruments(CollectorRegistry(), "main").close()
    first.close()
    second = Instruments(registry, "main")
    assert value(registry, "generated_tokens_total") == 0
    first.close()
    first.generated(9)
    first.levels({}, 0.0, 7, 7, 0, 1)
    first.identify(version="9", model="stale", precision="float32", backend="torch")
    assert value(registry, "generated_tokens_total") == 0
    assert value(registry, "rows_live") == 0
    assert "stale" not in page(registry)
    second.close()
    assert samples(registry) == {}


def test_a_clash_with_the_host_leaves_nothing_behind(registry: CollectorRegistry) -> None:
    theirs = Gauge("drumline_rows_live", "Somebody else's.", registry=registry)
    before = page(registry)
    with pytest.raises(ValueError, match="drumline_rows_live"):
        Instruments(registry, "main")
    assert page(registry) == before
    registry.unregister(theirs)
    Instruments(registry, "main")
    assert value(registry, "rows_live") == 0


def test_opening_and_closing_fifty_times_is_flat(registry: CollectorRegistry) -> None:
    def live_metrics() -> int:
        gc.collect()
        return sum(type(thing) is Gauge for thing in gc.get_objects())

    def once(index: int) -> str:
        instruments = identified(registry, f"run-{index}")
        instruments.step(1, 1, 0.0, {"forward": 0.01})
        text = page(registry)
        instruments.close()
        return text.replace(f"run-{index}", "run")

    first = once(0)
    objects = live_metrics()
    assert {once(index) for index in range(1, 51)} == {first}
    assert live_metrics() == objects
    assert page(registry) == ""


def test_a_registry_that_nobody_holds_is_freed() -> None:
    registry = CollectorRegistry()
    Instruments(registry, "main")
    gone = weakref.ref(registry)
    del registry
    gc.collect()
    assert gone() is None


def test_only_one_of_many_threads_gets_the_name(registry: CollectorRegistry) -> None:
    barrier = threading.Barrier(8)
    won: list[Instruments] = []
    refused: list[str] = []

    def claim() -> None:
        barrier.wait()
        try:
            won.append(Instruments(registry, "main"))
        except ValueError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(refused)) == (1, 7)
    won[0].generated(1)
    assert value(registry, "generated_tokens_total") == 1
