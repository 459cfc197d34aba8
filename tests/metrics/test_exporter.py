import contextlib
import gzip
import json
import logging
import socket
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from drumline.metrics.browsers import is_loopback
from drumline.metrics.exporter import Exporter, parse_address
from drumline.metrics.pages import Page, Pages, as_json
from drumline.metrics.process import register_process
from tests.metrics.scraping import OPENMETRICS, busy, http
from tests.processes import program


def well() -> list[str]:
    return []


def exported(registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0, **pages: object) -> Exporter:
    return Exporter(Pages(registry, **{"health": well, "ready": well} | pages), host, port)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for name in ("main", "side"):
        busy(registry, name)
    return registry


@pytest.fixture
def exporter(registry: CollectorRegistry) -> Iterator[Exporter]:
    with exported(registry) as exporter:
        yield exporter


def test_a_scrape_parses_and_holds_both_schedulers(exporter: Exporter) -> None:
    status, headers, body = http(f"{exporter.url}/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert int(headers["Content-Length"]) == len(body)
    tokens = {
        (sample.name, sample.labels["scheduler"]): sample.value
        for family in parse_text(body.decode())
        for sample in family.samples
        if sample.name in ("drumline_prompt_tokens_total", "drumline_prompt_tokens_sum")
        and sample.labels.get("source", "computed") == "computed"
    }
    assert tokens == {
        (f"drumline_prompt_tokens_{kind}", name): 11.0 for kind in ("total", "sum") for name in ("main", "side")
    }


def test_openmetrics_on_request_is_valid_and_has_the_same_samples(exporter: Exporter) -> None:
    _, _, plain = http(f"{exporter.url}/metrics")
    _, headers, body = http(f"{exporter.url}/metrics", Accept=OPENMETRICS)
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")

    def keys(families: Iterator[Metric]) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
        return {(s.name, tuple(sorted(s.labels.items())), s.value) for family in families for s in family.samples}

    strict = keys(parse_openmetrics(body.decode()))
    assert strict == keys(parse_text(plain.decode()))
    assert {name for name, _, _ in strict} >= {"drumline_prompt_tokens_total", "drumline_prompt_tokens_count"}


def test_gzip_on_request(exporter: Exporter) -> None:
    _, headers, body = http(f"{exporter.url}/metrics", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == http(f"{exporter.url}/metrics")[2]
    for wish, zipped in {"gzip;q=0": False, "br, gzip; q=0.5": True, "gzip;q=0.0": False, "gzipped": False}.items():
        assert (http(f"{exporter.url}/metrics", Accept_Encoding=wish)[2][:2] == b"\x1f\x8b") == zipped, wish


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text"])
def test_a_scrape_may_ask_for_some_names(exporter: Exporter, accept: str) -> None:
    query = "name[]=drumline_steps_total&name[]=drumline_prompt_tokens_total"
    _, _, body = http(f"{exporter.url}/metrics?{query}", Accept=accept)
    names = {line.split("{")[0] for line in body.decode().splitlines() if not line.startswith("#")}
    assert names == {"drumline_steps_total", "drumline_prompt_tokens_total"}
    _, _, empty = http(f"{exporter.url}/metrics?name[]=", Accept=accept)
    assert len(empty) == len(http(f"{exporter.url}/metrics", Accept=accept)[2])


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
def test_head_has_the_headers_and_no_body(exporter: Exporter, path: str) -> None:
    _, _, body = http(exporter.url + path)
    status, headers, nothing = http(exporter.url + path, "HEAD")
    assert (status, nothing) == (200, b"")
    assert int(headers["Content-Length"]) == len(body) > 0


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(exporter: Exporter, method: str, path: str) -> None:
    status, headers, _ = http(exporter.url + path, method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/metrics/", "/favicon.ico", "/healthz/x"])
def test_other_paths_are_not_found(exporter: Exporter, path: str) -> None:
    assert http(exporter.url + path)[0] == 404


def test_a_name_that_somebody_lets_resolve_to_loopback_is_not_ours(exporter: Exporter) -> None:
    port = exporter.port
    ours = ("127.0.0.1", f"127.0.0.1:{port}", "localhost", f"Localhost:{port}", "localhost.", "a.localhost:1")
    for host in (*ours, "[::1]:9464", "10.0.0.5", "", f"{socket.gethostname()}:{port}"):
        assert http(f"{exporter.url}/readyz", Host=host)[0] == 200, host
    strange = (f"rebound.example:{port}", "127.0.0.1.example", "localhost.example", "[::1", "a@localhost", "localhost/")
    for host in strange:
        status, headers, body = http(f"{exporter.url}/readyz", Host=host)
        assert (status, headers["Cache-Control"], body) == (421, "no-store", b"Misdirected Request\n"), host


def test_a_name_for_loopback_that_was_bound_is_ours(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = socket.getaddrinfo

    def hosts_file(host: str, *asked: object, **options: object) -> object:  # Debian lists a machine's own name there
        return looked_up("127.0.0.1" if host == "Gateway" else host, *asked, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hosts_file)
    with exported(registry, "Gateway") as exporter:
        assert http(f"http://127.0.0.1:{exporter.port}/readyz", Host=f"gateway:{exporter.port}")[0] == 200


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.5", False),
     ("::ffff:10.0.0.5", False), ("fe80::1%eth0", False)],
)  # fmt: skip
def test_what_counts_is_the_address_that_was_reached(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


def test_also_where_all_addresses_are_bound(registry: CollectorRegistry) -> None:
    with exported(registry, "0.0.0.0") as exporter:
        url = f"http://127.0.0.1:{exporter.port}/readyz"
        assert (http(url)[0], http(url, Host="rebound.example")[0]) == (200, 421)


@pytest.mark.parametrize("length", ["9" * 5_000, "10", "-1", "1_0"])
def test_a_body_that_never_comes_is_not_missed(
    registry: CollectorRegistry, length: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("drumline.metrics.exporter._Handler.timeout", 0.2)
    with exported(registry) as exporter, socket.create_connection(("127.0.0.1", exporter.port), 10) as client:
        client.sendall(f"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.0 200")
    assert capfd.readouterr() == ("", "")


def test_what_is_no_request_is_refused_as_text(exporter: Exporter) -> None:
    with socket.create_connection(("127.0.0.1", exporter.port), 10) as client:
        client.sendall(b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n")
        with client.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 414")
    assert b"Content-Type: text/plain" in head
    assert b"Cache-Control: no-store" in head
    assert body.startswith(b"414 ")


def test_a_burst_of_connections_holds_up_nobody(exporter: Exporter) -> None:
    began = time.monotonic()
    with contextlib.ExitStack() as clients:
        for _ in range(100):  # a connection that finds no room is tried again after a second
            clients.enter_context(socket.create_connection(("127.0.0.1", exporter.port), 10)).sendall(b"GET")
        assert http(f"{exporter.url}/healthz")[0] == 200
    assert time.monotonic() - began < 5


def test_the_probes_answer_for_themselves(registry: CollectorRegistry, caplog: pytest.LogCaptureFixture) -> None:
    reasons: dict[str, list[str]] = {"health": [], "ready": ["broker", "journal"]}

    def ready() -> list[str]:
        if reasons["health"]:
            raise RuntimeError("the engine is gone")
        return reasons["ready"]

    def probe(path: str) -> tuple[int, object]:
        status, headers, body = http(exporter.url + path)
        assert headers["Content-Type"] == "application/json"
        return status, json.loads(body)

    with exported(registry, health=lambda: reasons["health"], ready=ready) as exporter:
        assert probe("/healthz") == (200, {"ok": True, "reasons": []})
        assert probe("/readyz") == (503, {"ok": False, "reasons": ["broker", "journal"]})
        reasons["ready"] = []
        assert probe("/readyz") == (200, {"ok": True, "reasons": []})
        reasons["health"] = ["engine"]
        assert probe("/healthz") == (503, {"ok": False, "reasons": ["engine"]})
        assert probe("/readyz") == (503, {"ok": False, "reasons": ["RuntimeError"]})
        assert "the probe behind /readyz raised" in caplog.text
        assert http(f"{exporter.url}/metrics")[0] == 200


def test_a_body_that_nobody_wants_costs_no_answer(registry: CollectorRegistry) -> None:
    started = Page(lambda asked: as_json(asked.query["seconds"]), methods=("POST",))
    with exported(registry, pages={"/trace": started}) as exporter:
        status, _, body = http(f"{exporter.url}/trace?seconds=3", "POST", bytes(60_000))
        assert (status, json.loads(body)) == (200, ["3"])
        status, headers, _ = http(f"{exporter.url}/trace")
        assert (status, headers["Allow"]) == (405, "POST")


def test_a_collector_that_fails_is_a_500_and_the_next_scrape_works(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Collector):
        def collect(self) -> Iterator[Metric]:
            raise OSError("sensor unplugged")

    registry = CollectorRegistry()
    failing = Failing()
    registry.register(failing)
    with exported(registry) as exporter:
        assert http(f"{exporter.url}/metrics")[0] == 500
        assert "sensor unplugged" in caplog.text
        registry.unregister(failing)
        assert http(f"{exporter.url}/metrics")[0] == 200


def test_requests_leave_no_line_on_stderr(
    exporter: Exporter, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for path in ("/metrics", "/healthz", "/nowhere"):
        http(exporter.url + path)
    with socket.create_connection((exporter.host, exporter.port), timeout=30) as raw:
        raw.sendall(b"nonsense\r\n\r\n")
        assert b"400" in raw.recv(4096)
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", "")
    assert caplog.records == []


def test_a_slow_client_does_not_hold_up_a_probe(exporter: Exporter) -> None:
    with socket.create_connection((exporter.host, exporter.port), timeout=30) as silent:
        silent.sendall(b"GET /metr")
        assert http(f"{exporter.url}/healthz")[0] == 200


def test_close_frees_the_port_and_the_thread(registry: CollectorRegistry) -> None:
    exporter = exported(registry)
    exporter.close()
    exporter.start()
    port = exporter.port
    assert port > 0
    assert any(thread.name == "drumline-metrics" for thread in threading.enumerate())
    with pytest.raises(RuntimeError, match=f"already serves on http://127.0.0.1:{port}"):
        exporter.start()
    exporter.close()
    exporter.close()
    assert not any(thread.name == "drumline-metrics" for thread in threading.enumerate())
    with pytest.raises(urllib.error.URLError):
        http(f"http://127.0.0.1:{port}/healthz")
    with exported(registry, port=port) as again:
        assert again.port == port
        assert http(f"{again.url}/healthz")[0] == 200


def test_a_port_in_use_is_one_clear_error(registry: CollectorRegistry, exporter: Exporter) -> None:
    other = exported(registry, port=exporter.port)
    message = f"cannot serve HTTP on 127.0.0.1:{exporter.port}: Address already in use"
    with pytest.raises(OSError, match=message):
        other.start()
    other.close()
    assert http(f"{exporter.url}/healthz")[0] == 200


def test_an_unknown_host_is_one_clear_error(registry: CollectorRegistry) -> None:
    exporter = exported(registry, host="no such host")
    with pytest.raises(OSError, match="cannot serve HTTP on no such host:0"):
        exporter.start()


def test_a_port_out_of_range_is_refused(registry: CollectorRegistry) -> None:
    with pytest.raises(ValueError, match="port: must be from 0 to 65535, not 65536"):
        exported(registry, port=65536)


def test_ipv6(registry: CollectorRegistry) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    with exported(registry, "::1") as exporter:
        assert exporter.url == f"http://[::1]:{exporter.port}"
        assert http(f"{exporter.url}/healthz")[0] == 200


def test_promtool_is_content_with_a_live_scrape(registry: CollectorRegistry, exporter: Exporter) -> None:
    promtool = program("promtool")
    register_process(registry)
    _, _, body = http(f"{exporter.url}/metrics")
    checked = subprocess.run([promtool, "check", "metrics"], input=body, capture_output=True, timeout=60, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    spoiled = body.replace(b"# HELP drumline_steps_total", b"# Help drumline_steps_total")
    refused = subprocess.run(
        [promtool, "check", "metrics"], input=spoiled, capture_output=True, timeout=60, check=False
    )
    assert refused.returncode != 0, "promtool must be able to complain"
    assert b"drumline_steps_total" in refused.stdout + refused.stderr


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
    ],
)
def test_parse_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the port is missing"),
        ("localhost", "the port is missing"),
        (":9464", "the host is missing"),
        ("[]:9464", "the host is missing"),
        ("localhost:", "the port must be a number from 0 to 65535, not ''"),
        ("localhost:http", "not 'http'"),
        ("localhost:65536", "not '65536'"),
        ("localhost:-1", "not '-1'"),
        ("localhost: 80", "not ' 80'"),
        ("localhost:٨٠", "the port must be a number"),
        ("::1:9464", "write an IPv6 host in brackets"),
        ("[::1:9464", "write an IPv6 host in brackets"),
        ("[::1]", "write an IPv6 host in brackets"),
    ],
)
def test_parse_address_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)
