"""What is answered whichever server asks."""

import json
from http import HTTPStatus

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from drumline.metrics.pages import Asked, Page, Pages, Response, as_json
from drumline.metrics.process import register_process
from tests.metrics.scraping import OPENMETRICS, busy

PROCESS = ("process_open_fds", "process_resident_memory_bytes", "process_cpu_seconds_total", "python_info")


def well() -> list[str]:
    return []


def pages(registry: CollectorRegistry, **further: Page) -> Pages:
    return Pages(registry, health=well, ready=well, pages={f"/{name}": page for name, page in further.items()})


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_page_of_ones_own(registry: CollectorRegistry) -> None:
    def answer(asked: Asked) -> Response:
        return Response(
            b"<p>", "text/html; charset=utf-8", headers=(("Content-Security-Policy", asked.query["csp"][0]),)
        )

    own = pages(registry, panel=Page(answer), trace=Page(lambda asked: as_json({}, HTTPStatus.ACCEPTED), ("POST",)))
    response = own.respond("GET", "/panel", "csp=none")
    assert (response.status, response.body, response.content_type) == (200, b"<p>", "text/html; charset=utf-8")
    assert dict(response.headers) == {
        "Content-Security-Policy": "none",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    assert own.respond("HEAD", "/panel", "csp=none") == response
    assert own.respond("POST", "/trace").status == 202
    refused = {("POST", "/panel"): "GET, HEAD", ("GET", "/trace"): "POST", ("HEAD", "/trace"): "POST"}
    for (method, path), allowed in refused.items():
        response = own.respond(method, path)
        assert (response.status, dict(response.headers)["Allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),  # a program
        ({"sec-fetch-site": "same-origin", "origin": "http://[::1]:9464", "host": "[::1]:9464"}, 202),
        ({"sec-fetch-site": "none"}, 202),  # typed by the user
        ({"sec-fetch-site": "cross-site", "origin": "https://elsewhere.example"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://127.0.0.1:8080", "host": "127.0.0.1:9464"}, 403),
        ({"origin": "http://gateway:9464", "host": "gateway:9464"}, 202),
        ({"origin": "http://gateway:80", "host": "gateway:9464"}, 403),
        ({"origin": "null", "host": "gateway:9464"}, 403),
    ],
)
def test_another_sites_page_only_sees(registry: CollectorRegistry, headers: dict[str, str], status: int) -> None:
    own = pages(registry, trace=Page(lambda asked: as_json({}, HTTPStatus.ACCEPTED), ("POST",)))
    assert own.respond("POST", "/trace", headers=headers).status == status
    assert own.respond("GET", "/healthz", headers=headers).status == 200  # which no browser lets that page read


def test_a_page_that_raises_is_a_500(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    response = pages(registry, panel=Page(lambda asked: as_json(asked.query["missing"]))).respond("GET", "/panel")
    assert (response.status, response.body) == (500, b"Internal Server Error\n")
    assert "/panel could not be answered" in caplog.text


@pytest.mark.parametrize("name", ["metrics", "healthz", "readyz"])
def test_no_page_stands_in_for_one_of_ours(registry: CollectorRegistry, name: str) -> None:
    with pytest.raises(ValueError, match=f"pages: /{name} is taken"):
        pages(registry, **{name: Page(lambda asked: as_json({}))})


def test_every_response_may_not_be_kept_nor_guessed_at(registry: CollectorRegistry) -> None:
    for path in ("/metrics", "/healthz", "/readyz", "/nowhere"):
        told = dict(pages(registry).respond("GET", path).headers)
        assert (told["X-Content-Type-Options"], told["Cache-Control"]) == ("nosniff", "no-store")


def test_the_page_is_the_librarys(registry: CollectorRegistry) -> None:
    """Also where a host's names must be escaped, which ours need not."""
    busy(registry, "main")
    for name in ("host_requests", "host.requests"):
        counter = Counter(name, 'Of "the" host.\n', ["path"], registry=registry)
        counter.labels('/a\\"b"\n').inc(2.5)
        clashing = pages(registry)
        assert clashing.respond("GET", "/metrics").body == generate_latest(registry)
        one_of_a_name = "name[]=drumline_request_seconds_bucket&name[]=host_requests_total&name[]=host.requests_total"
        only = registry.restricted_registry(
            ["drumline_request_seconds_bucket", "host_requests_total", "host.requests_total"]
        )
        expected = sorted(generate_openmetrics(only).splitlines())
        assert (
            sorted(clashing.respond("GET", "/metrics", one_of_a_name, {"accept": OPENMETRICS}).body.splitlines())
            == expected
        )


def test_the_process_is_told_once_and_can_be_asked_for(registry: CollectorRegistry) -> None:
    register_process(registry)
    with pytest.raises(ValueError, match="python_info"):
        register_process(registry)
    Gauge("host_up", "The host's own.", registry=registry)
    query = "&".join(f"name[]={name}" for name in PROCESS)
    families = text_string_to_metric_families(pages(registry).respond("GET", "/metrics", query).body.decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert values.keys() == set(PROCESS)
    assert min(values.values()) > 0


def test_a_probe_answers_json(registry: CollectorRegistry) -> None:
    tired = Pages(registry, health=lambda: ["loop", "engine"], ready=well)
    response = tired.respond("HEAD", "/healthz")
    assert response.status == 503
    assert json.loads(response.body) == {"ok": False, "reasons": ["loop", "engine"]}
