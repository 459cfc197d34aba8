"""Panels are drawn from the dashboard's own queries, with data of a real Prometheus."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.panels import FIGURES, draw_all, draw_figure, filled, formatter, legend, read_panels
from drumline.metrics.exporter import Exporter
from drumline.metrics.instruments import Instruments
from drumline.metrics.pages import Pages
from tests.metrics.prometheus_server import Prometheus, prometheus_server

MAX_BYTES = 300_000
INGESTED_S = 1.0
"""A sample bears the moment at which its scrape began: so much later it is there to be asked for."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    """It has seen 40 gaps of 0.012 s and 10 of 0.15 s, and three requests that completed."""
    registry = CollectorRegistry()
    instruments = Instruments(registry, "main")
    instruments.identify(version="1", model="tiny", precision="int8", backend="cpu")
    pages = Pages(registry, health=list, ready=list)
    with (
        Exporter(pages, port=0) as exporter,
        prometheus_server(tmp_path_factory.mktemp("panels"), f"127.0.0.1:{exporter.port}", interval="250ms") as running,
    ):
        running.wait_for("drumline_rows_live")
        instruments.token_gaps(0.012, 40, "a")
        instruments.token_gaps(0.15, 10, "a")
        for _ in range(3):
            instruments.request_done("completed", 0.1, 0.2, 0.3, 4, 5, "a")
        running.wait_for(f"rate(drumline_inter_token_seconds_count[10s] offset {INGESTED_S:.0f}s) > 0")
        yield running


def test_all_images_are_drawn_small_enough_for_a_readme(server: Prometheus, tmp_path: Path):
    end = time.time() - INGESTED_S
    drawn = draw_all(server, tmp_path / "new", (end - 60, end), "10s")
    assert [path.stem for path in drawn] == list(FIGURES)
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < MAX_BYTES


def test_lines_and_heatmaps_show_what_prometheus_knows(server: Prometheus):
    panels = read_panels()
    chosen = [panels["Requests by outcome"], panels["Time between tokens: distribution"]]
    end = time.time() - INGESTED_S
    figure = draw_figure(server, chosen, (end - 5, end), "10s")
    areas, heatmap = figure.axes[:2]
    assert areas.get_legend().get_texts()[0].get_text() == "completed"
    highest = max(area.get_paths()[0].vertices[:, 1].max() for area in areas.collections)
    [known] = server.query_range('sum(rate(drumline_requests_total{outcome="completed"}[10s]))', end - 5, end, 1.0)
    assert highest == pytest.approx(max(known.values), rel=1e-6)  # at the moments that are drawn, a second apart
    labels = [text.get_text() for text in heatmap.get_yticklabels()]
    assert (labels[0], labels[-1]) == ("≤ 15 ms", "≤ 200 ms")
    counts = np.ma.filled(heatmap.collections[0].get_array(), 0.0).max(axis=1)
    assert counts[0] == pytest.approx(4 * counts[-1], rel=0.01)
    assert counts[1:-1].max() == 0


def test_every_title_is_on_the_dashboard():
    assert {title for titles in FIGURES.values() for title in titles} <= set(read_panels())


def test_a_query_is_filled_as_grafana_would():
    query = filled('rate(x{instance=~"$instance", model=~"$model"}[$__rate_interval])', "20s")
    assert query == 'rate(x{instance=~".+", model=~".+"}[20s])'
    for panel in read_panels().values():
        for target in panel["targets"]:
            assert not re.search(r"\$", filled(target["expr"], "1m"))


@pytest.mark.parametrize(
    ("unit", "value", "shown"),
    [("s", 0.015, "15 ms"), ("s", 0, "0 s"), ("s", 5, "5 s"), ("s", 600, "10 min"), ("percentunit", 0.4, "40%"),
     ("reqps", 2.5, "2.5")],
)  # fmt: skip
def test_units(unit: str, value: float, shown: str):
    assert formatter(unit)(value, None) == shown


def test_legends():
    assert legend("{{kind}} of {{worker}}", {"kind": "chunk", "worker": "main"}) == "chunk of main"
