"""A page does not grow with what it counts."""

import re

from prometheus_client import CollectorRegistry

from benchmarks.scrape import finish_jobs
from drumline.metrics.instruments import Instruments
from drumline.metrics.pages import Pages
from drumline.metrics.process import register_process
from tests.metrics.scraping import OPENMETRICS


def shape(pages: Pages, accept: str) -> tuple[list[str], bytes]:
    """The series, and the page with a 0 for every value and exemplar."""
    page = pages.respond("GET", "/metrics", headers={"accept": accept}).body.decode()
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    series = [line.partition(" # ")[0].rpartition(" ")[0] for line in lines]
    return series, re.sub(r"[-+.e\d]+", "0", page).encode()


def test_a_hundred_thousand_jobs_leave_the_page_of_a_hundred() -> None:
    registry = CollectorRegistry()
    instruments = Instruments(registry, "main")
    register_process(registry)
    pages = Pages(registry, health=list, ready=list)
    finish_jobs(instruments, range(100))
    young = {accept: shape(pages, accept) for accept in ("text/plain", OPENMETRICS)}
    finish_jobs(instruments, range(100, 100_000))
    old = {accept: shape(pages, accept) for accept in ("text/plain", OPENMETRICS)}
    assert old == young
    assert registry.get_sample_value("drumline_request_seconds_count", {"scheduler": "main"}) == 100_000
    assert len(young["text/plain"][0]) == len(set(young["text/plain"][0])) > 300
