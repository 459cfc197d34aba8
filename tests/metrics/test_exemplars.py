"""From a slow bucket to a job: exemplars, as prometheus_client's parser and a real Prometheus read them."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Exemplar

from drumline.metrics.definitions import HISTOGRAMS
from drumline.metrics.exporter import Exporter
from drumline.metrics.instruments import Instruments
from drumline.metrics.pages import Pages
from tests.metrics.prometheus_server import Prometheus, prometheus_server
from tests.metrics.scraping import OPENMETRICS, busy

PATIENCE_S = 30.0
SHOWN = {name for name, of in HISTOGRAMS.items() if of.exemplars}


def pages(registry: CollectorRegistry) -> Pages:
    return Pages(registry, health=list, ready=list)


def exemplars(registry: CollectorRegistry) -> dict[tuple[str, str], Exemplar]:
    """By family and upper bound, of the OpenMetrics page."""
    page = pages(registry).respond("GET", "/metrics", headers={"accept": OPENMETRICS}).body.decode()
    return {
        (family.name.removeprefix("drumline_"), sample.labels["le"]): sample.exemplar
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.exemplar is not None
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_job_is_on_the_buckets_of_its_times(registry: CollectorRegistry) -> None:
    instruments = Instruments(registry, "main")
    assert exemplars(registry) == {}
    before = time.time()
    instruments.request_done("completed", 0.25, 0.75, 20.0, 11, 5, "slow")
    instruments.request_done("completed", 0.004, 0.03, 1.5, 11, 5, "first")
    instruments.request_done("completed", 0.003, 0.04, 1.25, 11, 5, "second")
    instruments.token_gaps(0.012, 3, "slow")
    instruments.token_gaps(30.0, 1, "first")
    found = exemplars(registry)
    assert {key: (of.labels, of.value) for key, of in found.items()} == {
        ("queue_seconds", "0.5"): ({"job_id": "slow"}, 0.25),
        ("queue_seconds", "0.005"): ({"job_id": "second"}, 0.003),
        ("time_to_first_token_seconds", "1.0"): ({"job_id": "slow"}, 0.75),
        ("time_to_first_token_seconds", "0.05"): ({"job_id": "second"}, 0.04),
        ("request_seconds", "30.0"): ({"job_id": "slow"}, 20.0),
        ("request_seconds", "2.0"): ({"job_id": "second"}, 1.25),
        ("inter_token_seconds", "0.015"): ({"job_id": "slow"}, 0.012),
        ("inter_token_seconds", "+Inf"): ({"job_id": "first"}, 30.0),
    }
    assert {family for family, _ in found} == SHOWN
    assert all(before - 0.001 <= float(of.timestamp) <= time.time() for of in found.values())
    instruments.request_done("cancelled", None, None, 1.75, 11, 0, "third")
    assert exemplars(registry)["request_seconds", "2.0"].labels == {"job_id": "third"}
    instruments.close()
    assert exemplars(registry) == {}


def test_only_openmetrics_has_them(registry: CollectorRegistry) -> None:
    busy(registry, "main")
    text = pages(registry).respond("GET", "/metrics", headers={"accept": "text/plain; version=0.0.4"}).body
    assert b"job_id" not in text
    assert b"main-1" not in text
    assert len(exemplars(registry)) == len(SHOWN)


@pytest.mark.parametrize(("length", "shown"), [(122, True), (123, False), (5000, False)])
def test_an_id_that_is_too_long_is_counted_all_the_same(registry: CollectorRegistry, length: int, shown: bool) -> None:
    instruments = Instruments(registry, "main")
    instruments.token_gaps(0.012, 3, "ä" * length)
    assert [of.labels for of in exemplars(registry).values()] == [{"job_id": "ä" * length}] * shown
    assert registry.get_sample_value("drumline_inter_token_seconds_count", {"scheduler": "main"}) == 3


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=122))
def test_whatever_the_id_the_page_is_whole(job_id: str) -> None:
    registry = CollectorRegistry()
    Instruments(registry, "main").token_gaps(0.012, 1, job_id)
    labels = [of.labels for of in exemplars(registry).values()]
    assert labels in ([], [{"job_id": job_id}])


@pytest.mark.parametrize(
    ("job_id", "shown"), [("boiler/job-17", True), ("a.b:c@d_é", True), ('"', False), ("\\", False)]
)
def test_what_would_need_an_escape_is_no_exemplar(registry: CollectorRegistry, job_id: str, shown: bool) -> None:
    Instruments(registry, "main").token_gaps(0.012, 1, job_id)
    assert [of.labels for of in exemplars(registry).values()] == [{"job_id": job_id}] * shown


def stored(server: Prometheus, **query: object) -> list[dict[str, Any]]:
    """What Prometheus keeps, once it keeps some."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if found := server.get("query_exemplars", **{name: str(value) for name, value in query.items()}):
            return found
        time.sleep(0.05)
    raise AssertionError("no exemplar was stored")


def test_prometheus_stores_them(registry: CollectorRegistry, tmp_path: Path) -> None:
    busy(registry, "main")
    begun = time.time()
    with (
        Exporter(pages(registry), port=0) as exporter,
        prometheus_server(tmp_path, f"{exporter.host}:{exporter.port}") as server,
    ):
        query = {"query": '{__name__=~"drumline_.*_bucket"}', "start": begun - 60, "end": begun + 3600}
        found = {series["seriesLabels"]["__name__"]: series["exemplars"][0] for series in stored(server, **query)}
        said = (tmp_path / "prometheus.log").read_text()
    assert found.keys() == {f"drumline_{name}_bucket" for name in SHOWN}
    assert {json.dumps(of["labels"]) for of in found.values()} == {'{"job_id": "main-1"}'}
    assert float(found["drumline_request_seconds_bucket"]["value"]) == 1.5
    assert not re.search("level=(warn|error)", said)
