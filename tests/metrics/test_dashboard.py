"""The dashboard against a live worker and a real Prometheus: every query asks for what there is, and has an answer."""

import asyncio
import json
import math
import re
import urllib.request
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.panels import DASHBOARD, filled, read_panels
from drumline.client import Client
from drumline.metrics.dashboard import OUTCOMES, main
from drumline.model.errors import InvalidRequest
from drumline.scheduler.cli.worker import JournalSettings, Worker, WorkerSettings, run_worker
from drumline.scheduler.config import EngineSettings
from tests.metrics.prometheus_server import Prometheus, PrometheusError, Series, prometheus_server, promtool
from tests.metrics.promql import Matcher, asked
from tests.processes import ROOT
from tests.tiny import tiny_model

RULES = ROOT / "metrics" / "alerts.yml"
DOCUMENT = json.loads(DASHBOARD.read_text("utf-8"))
PANELS = read_panels()
QUERIES = {title: [target["expr"] for target in panel["targets"]] for title, panel in PANELS.items()}
RULE_QUERIES = {
    rule.get("alert") or rule["record"]: [rule["expr"]]
    for group in yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    for rule in group["rules"]
}
RECORDED = {name for name in RULE_QUERIES if ":" in name}
EVERY = [expression for queries in QUERIES.values() for expression in queries]
INTERVAL = "30s"
Labels = dict[str, str]


@dataclass
class Watched:
    """What a worker that has run jobs told Prometheus."""

    page: dict[str, list[Labels]] = field(default_factory=dict)
    """Sample names with the labels of each series, `job` and `instance` among them."""
    answers: dict[str, list[Series] | PrometheusError] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    instances: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return asyncio.run(watch(tmp_path_factory.mktemp("watched")))


async def watch(folder: Path) -> Watched:
    settings = WorkerSettings(
        broker=None,
        metrics=("127.0.0.1", 0),
        engine=EngineSettings(rows=2),
        journal=JournalSettings(folder / "jobs.db"),
        drain_s=0,
    )
    async with run_worker(lambda: tiny_model(window=64), settings) as worker:
        target = f"127.0.0.1:{worker.exporter.port}"
        with prometheus_server(folder, target, rules=[RULES]) as server:
            await asyncio.to_thread(server.wait_for, "drumline_steps_total")  # a rate needs a sample from before
            await live(worker)
            # Two scrapes saw the one refusal, which came last: rates stand.
            await asyncio.to_thread(
                server.wait_for, 'sum_over_time(drumline_rejected_total{reason="invalid"}[10s]) >= 2'
            )
            return await asyncio.to_thread(ask, server, worker.exporter.url, target)


async def live(worker: Worker) -> None:
    """Jobs of all kinds: many, alike, of both priorities, one cancelled, one refused."""
    async with Client(worker.broker.host, worker.broker.port, name="desk") as client:
        jobs = [
            await client.submit("the drum and the drum again", max_tokens=24, ignore_eos=True, priority=priority)
            for priority in ("low", "high", "normal", "low")
        ]
        given_up = await client.submit("stop", max_tokens=40, ignore_eos=True)
        await given_up.cancel()
        for job in (*jobs, given_up):
            await job.result()
        with pytest.raises(InvalidRequest):
            await client.submit("too long " * 50, max_tokens=4)


def ask(server: Prometheus, url: str, target: str) -> Watched:
    seen = Watched()
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {"job": "drumline", "instance": target} | sample.labels
            seen.page.setdefault(sample.name, []).append(labels)
    seen.page["up"] = [{"job": "drumline", "instance": target}]  # Prometheus' own
    for expression in (*EVERY, *(expression for [expression] in RULE_QUERIES.values())):
        try:
            seen.answers[expression] = server.query(filled(expression, INTERVAL))
        except PrometheusError as error:
            seen.answers[expression] = error
    seen.models = server.get("label/model/values", **{"match[]": "drumline_model_info"})
    seen.instances = server.get("label/instance/values", **{"match[]": 'drumline_model_info{model=~".+"}'})
    return seen


def has(series: list[Labels], matcher: Matcher) -> bool:
    """Whether a matcher's label is there, and every value that it names."""
    values = {labels[matcher.label] for labels in series if matcher.label in labels}
    if not values or matcher.value.startswith("$"):
        return bool(values)
    named = matcher.value.split("|") if "~" in matcher.operator else [matcher.value]
    return set(named) <= values


@pytest.mark.parametrize("title", [*QUERIES, *RULE_QUERIES])
def test_queries_ask_for_what_a_worker_tells(watched: Watched, title: str):
    for expression in (QUERIES | RULE_QUERIES)[title]:
        wanted = asked(expression)
        assert wanted.metrics
        assert wanted.metrics - RECORDED <= set(watched.page)
        for matcher in wanted.matchers:
            assert has(watched.page[matcher.metric], matcher), matcher
        known = {label for name in wanted.metrics - RECORDED for labels in watched.page[name] for label in labels}
        assert wanted.labels <= known


@pytest.mark.parametrize("title", QUERIES)
def test_queries_have_answers(watched: Watched, title: str):
    for expression in QUERIES[title]:
        answer = watched.answers[expression]
        assert isinstance(answer, list), answer
        assert answer, expression
        if "draft_tokens" not in expression:  # the torch backend drafts none: 0 / 0
            assert not all(math.isnan(series.value) for series in answer), expression


@pytest.mark.parametrize("name", RULE_QUERIES)
def test_rules_can_be_evaluated_and_alerts_keep_still(watched: Watched, name: str):
    [expression] = RULE_QUERIES[name]
    answer = watched.answers[expression]
    assert isinstance(answer, list), answer
    if name != "DrumlineEventLoopLag":  # a busy test machine is late
        assert bool(answer) == (name in RECORDED)


def test_variables_have_values(watched: Watched):
    source, model, instance = DOCUMENT["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert (model["query"]["query"], watched.models) == ("label_values(drumline_model_info, model)", ["tiny-llama"])
    assert instance["query"]["query"] == 'label_values(drumline_model_info{model=~"$model"}, instance)'
    assert len(watched.instances) == 1
    for variable in (model, instance):
        assert variable["multi"]
        assert variable["includeAll"]


@pytest.mark.parametrize("title", QUERIES)
def test_queries_follow_the_variables(title: str):
    for expression in QUERIES[title]:
        matchers = [(matcher.label, matcher.operator, matcher.value) for matcher in asked(expression).matchers]
        assert ("model", "=~", "$model") in matchers
        assert ("instance", "=~", "$instance") in matchers
        assert set(re.findall(r"\[([^\]]*)\]", expression)) <= {"$__rate_interval"}


def test_promtool_reads_every_query(tmp_path: Path):
    rules = tmp_path / "dashboard.yml"
    records = [
        {"record": f"dashboard:query:{place}", "expr": filled(expression, INTERVAL)}
        for place, expression in enumerate(EVERY)
    ]
    rules.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}))
    run = promtool("check", "rules", rules)
    assert (run.returncode, run.stderr) == (0, "")
    rules.write_text(rules.read_text().replace("sum by (le)", "sum by le", 1))
    assert promtool("check", "rules", rules).returncode != 0, "it must be able to complain"


def test_the_committed_file_is_what_is_made(tmp_path: Path):
    main(["--output", str(tmp_path)])
    [made] = tmp_path.iterdir()
    command = "python -m drumline.metrics.dashboard --output metrics/dashboards"
    assert made.read_text("utf-8") == DASHBOARD.read_text("utf-8"), f"run: {command}"


def test_panels_lie_beside_one_another():
    places = [panel["gridPos"] for panel in DOCUMENT["panels"]]
    for place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip
        assert apart, (one, other)
    ids = [panel["id"] for panel in DOCUMENT["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("title", PANELS)
def test_a_panel_says_what_it_shows(title: str):
    panel: dict[str, Any] = PANELS[title]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] == "timeseries":
        assert panel["fieldConfig"]["defaults"]["custom"]["axisLabel"]
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len(set(legends)) == len(legends)


def test_outcomes_have_fixed_colours_that_differ(watched: Watched):
    outcomes = {labels["outcome"] for labels in watched.page["drumline_requests_total"]}
    overrides = PANELS["Requests by outcome"]["fieldConfig"]["overrides"]
    colours = {entry["matcher"]["options"]: entry["properties"][0]["value"]["fixedColor"] for entry in overrides}
    assert colours == OUTCOMES
    assert set(colours) == outcomes
    assert len(set(colours.values())) == len(outcomes)
