"""What other tests rely on: scrapes of a real page, queries of all kinds, rules, errors that say what is wrong."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from drumline.metrics.exporter import Exporter
from drumline.metrics.instruments import Instruments
from drumline.metrics.pages import Pages
from tests.metrics.prometheus_server import PrometheusError, prometheus_server

RULES = "groups: [{name: g, rules: [{record: 'steps:doubled', expr: '2 * drumline_steps_total'}]}]"


def test_it_scrapes_evaluates_and_answers(tmp_path: Path):
    registry = CollectorRegistry()
    instruments = Instruments(registry, "main")
    instruments.step(1, 1, 0.0, {"forward": 0.01})
    rules = tmp_path / "rules.yml"
    rules.write_text(RULES)
    with Exporter(Pages(registry, health=list, ready=list), port=0) as exporter:
        target = f"127.0.0.1:{exporter.port}"
        with prometheus_server(tmp_path, target, rules=[rules], interval="200ms") as server:
            [steps] = server.wait_for("drumline_steps_total")
            assert (steps.value, steps.labels["scheduler"], steps.labels["instance"]) == (1, "main", target)
            assert [series.value for series in server.wait_for("steps:doubled")] == [2]
            assert [series.value for series in server.query("scalar(vector(3))")] == [3]
            [over] = server.query_range("vector(1)", steps.times[0], steps.times[0] + 4, 2)
            assert (over.values, over.times[-1] - over.times[0]) == ((1, 1, 1), 4)
            with pytest.raises(PrometheusError, match="parse error"):
                server.query("rate(")
            with pytest.raises(PrometheusError, match="nothing for absent_metric"):
                server.wait_for("absent_metric", timeout_s=0.1)


def test_rules_that_cannot_be_read_are_the_servers_own_words(tmp_path: Path):
    rules = tmp_path / "rules.yml"
    rules.write_text(RULES.replace("2 *", "2 * *"))
    with pytest.raises(PrometheusError, match="steps:doubled"), prometheus_server(tmp_path, rules=[rules]):
        pytest.fail("it must not start")
