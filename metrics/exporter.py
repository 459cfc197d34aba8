"""The page that Prometheus scrapes, with liveness and readiness beside it, on a thread of its own."""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any, NamedTuple, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How long `close` waits, at most, for the accepting thread to notice."""
CLIENT_TIMEOUT_S = 10.0
"""A client that neither reads nor writes for this long is dropped."""


def parse_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` (an IPv6 host in brackets, `[::1]:9464`); raises `ValueError` that says what is wrong."""
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f"address {text!r}: the port is missing, write HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "[" in host or "]" in host:
        raise ValueError(f"address {text!r}: write an IPv6 host in brackets, [HOST]:PORT")
    if not host or host.isspace():
        raise ValueError(f"address {text!r}: the host is missing, write HOST:PORT")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"address {text!r}: the port must be a number from 0 to 65535, not {port!r}")
    return host, int(port)


class _Response(NamedTuple):
    """Status line, headers and body."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes


def _plain(status: HTTPStatus, *headers: tuple[str, str]) -> _Response:
    """A response that says its own status."""
    body = f"{status.phrase}\n".encode()
    return _Response(f"{status.value} {status.phrase}", [("Content-Type", "text/plain; charset=utf-8"), *headers], body)


class _OpenMetricsView(Collector):
    """A registry as OpenMetrics wants it: no two families of one name.

    There a counter `x_total` belongs to a family `x`, which clashes with our histogram `x`. Of such a pair the counter
    is told as a family `x_total` of unknown type: the samples, all that a query sees, stay the same.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def restricted_registry(self, names: Iterable[str]) -> "_OpenMetricsView":
        """The view of only these sample names (the page's `name[]` query)."""
        return _OpenMetricsView(self._source.restricted_registry(names))

    def collect(self) -> Iterable[Metric]:
        """The families of the registry, clashing counters renamed."""
        metrics = list(self._source.collect())
        others = {metric.name for metric in metrics if metric.type != "counter"}
        for metric in metrics:
            if metric.type == "counter" and metric.name in others:
                untyped = Metric(f"{metric.name}_total", metric.documentation, "unknown")
                untyped.samples = [sample for sample in metric.samples if sample.name == untyped.name]
                yield untyped
            else:
                yield metric


class _Handler(WSGIRequestHandler):
    """One request; says nothing on stderr."""

    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line each."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per request, so that a slow scrape does not hold up a liveness probe."""

    daemon_threads = True
    # Elsewhere than on POSIX this option lets two servers share a port, and on POSIX `reuse_port` would.
    allow_reuse_address = os.name == "posix"
    allow_reuse_port = False

    def __init__(self, family: socket.AddressFamily, address: tuple[Any, ...]) -> None:
        self.address_family = family
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of the host's full name, which may wait on DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event of ours."""
        logger.debug("metrics request from %s ended early", client_address, exc_info=True)


class Exporter:
    """Serves `/metrics`, `/healthz` and `/readyz` by GET and HEAD on a daemon thread, from `start` to `close`.

    `health` and `ready` answer 200 for True, 503 for False or an exception; they are called on the exporter's threads,
    so they must be quick and safe to call from there. Port 0 picks a free one, which `port` names after `start`. A
    page of several formats: Prometheus text, OpenMetrics where the client asks for it, either one gzipped.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        host: str = "127.0.0.1",
        port: int = 9464,
        *,
        health: Callable[[], bool],
        ready: Callable[[], bool],
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port: must be from 0 to 65535, not {port}")
        self.host = host
        self.port = port
        self._asked_port = port
        self._probes = {"/healthz": health, "/readyz": ready}
        self._text_app = make_wsgi_app(registry)
        self._openmetrics_app = make_wsgi_app(_OpenMetricsView(registry))
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Where the server stands, such as `http://127.0.0.1:9464`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        """Bind and serve.

        Raises `OSError` naming the address (a port in use, an unknown host), `RuntimeError` if it serves already.
        """
        if self._server is not None:
            raise RuntimeError(f"the exporter already serves on {self.url}")
        try:
            found = socket.getaddrinfo(self.host, self._asked_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            server = _Server(family, address)
        except OSError as error:
            where = f"{self.host}:{self._asked_port}"
            raise OSError(error.errno, f"cannot serve metrics on {where}: {error.strerror}") from error
        server.set_app(self._serve)
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="drumline-metrics", daemon=True)
        self._server, self._thread = server, thread
        thread.start()

    def close(self) -> None:
        """Stop serving, free the port and join the thread (a tenth of a second at most); closing again does nothing."""
        server, thread = self._server, self._thread
        if server is None or thread is None:
            return
        self._server = self._thread = None
        server.shutdown()
        server.server_close()
        thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        """The WSGI application."""
        response = self._respond(environ)
        start_response(response.status, [*response.headers, ("Content-Length", str(len(response.body)))])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [response.body]

    def _respond(self, environ: WSGIEnvironment) -> _Response:
        path = environ["PATH_INFO"]
        if path != "/metrics" and path not in self._probes:
            return _plain(HTTPStatus.NOT_FOUND)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", "GET, HEAD"))
        if path == "/metrics":
            return self._page(environ)
        return self._probe(path)

    def _page(self, environ: WSGIEnvironment) -> _Response:
        """The metrics; 500 where a collector of the host fails, as half a page would read as a reset."""
        answer: list[tuple[str, list[tuple[str, str]]]] = []
        openmetrics = "application/openmetrics-text" in environ.get("HTTP_ACCEPT", "")
        app = self._openmetrics_app if openmetrics else self._text_app
        try:
            # The library's application knows no HEAD; the body is dropped later.
            chunks = app({**environ, "REQUEST_METHOD": "GET"}, lambda *head: answer.append(head))
            body = b"".join(chunks)
        except Exception:
            logger.exception("a collector failed: no metrics page")
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        status, headers = answer[0]
        return _Response(status, headers, body)

    def _probe(self, path: str) -> _Response:
        try:
            state: dict[str, object] = {"ok": bool(self._probes[path]())}
        except Exception as error:
            logger.warning("the probe behind %s raised", path, exc_info=True)
            state = {"ok": False, "error": type(error).__name__}
        status = HTTPStatus.OK if state["ok"] else HTTPStatus.SERVICE_UNAVAILABLE
        body = json.dumps(state).encode() + b"\n"
        return _Response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")], body)
