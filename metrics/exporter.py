"""The threaded HTTP server of a worker that has no server of its own: it serves `Pages` on a thread."""

import logging
import os
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from io import StringIO
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any, Self, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from drumline.metrics.browsers import is_loopback, names_loopback
from drumline.metrics.pages import SAFE, Pages, Response, plain

logger = logging.getLogger(__name__)

POLL_S = 0.1
"""How long `close` waits, at most, for the accepting thread to notice."""
CLIENT_TIMEOUT_S = 10.0
"""A client that neither reads nor writes for this long is dropped."""
MAX_UNREAD_BYTES = 65_536
"""Of a request's body, which no page wants: read, as else the answer may get lost when the connection is closed."""
BACKLOG = 128
"""Connections that wait to be taken; one more waits a second, and a probe has no more time than that."""
REACHED = "drumline.reached"


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


class _Handler(WSGIRequestHandler):
    """One request; says nothing on stderr."""

    timeout = CLIENT_TIMEOUT_S
    wbufsize = -1  # an answer leaves in one piece, not header by header
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def get_environ(self) -> WSGIEnvironment:
        """The request, and the address that it reached."""
        return super().get_environ() | {REACHED: self.connection.getsockname()[0]}

    def end_headers(self) -> None:
        """Of what cannot even be read as a request; other answers bring theirs along."""
        for name, value in SAFE:
            self.send_header(name, value)
        super().end_headers()

    def get_stderr(self) -> TextIO:
        """What goes wrong beyond our pages is the client's: it went away, or does not read."""
        return StringIO()

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line each."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread per request, so that a slow scrape does not hold up a liveness probe."""

    daemon_threads = True
    # Elsewhere than on POSIX this option lets two servers share a port, and on POSIX `reuse_port` would.
    allow_reuse_address = os.name == "posix"
    allow_reuse_port = False
    request_queue_size = BACKLOG

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
    """Serves pages on a daemon thread, from `start` to `close`; each request has a thread of its own.

    Port 0 picks a free one, which `port` names after `start`. A request that reached a loopback address must be for an
    address, localhost, this machine or `host`; for any other name the answer is 421.
    """

    def __init__(self, pages: Pages, host: str = "127.0.0.1", port: int = 9464) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port: must be from 0 to 65535, not {port}")
        self.host = host
        self.port = port
        self._asked_port = port
        self._pages = pages
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
            raise OSError(error.errno, f"cannot serve HTTP on {where}: {error.strerror}") from error
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
        unread = environ.get("CONTENT_LENGTH") or "0"
        with suppress(OSError):  # a body that was promised and never comes
            environ["wsgi.input"].read(min(int(unread[:9]), MAX_UNREAD_BYTES) if unread.isdecimal() else 0)
        method = environ["REQUEST_METHOD"]
        response = self._respond(environ)
        told = [("Content-Type", response.content_type), ("Content-Length", str(len(response.body)))]
        start_response(f"{response.status.value} {response.status.phrase}", [*told, *response.headers])
        return [] if method == "HEAD" else [response.body]

    def _respond(self, environ: WSGIEnvironment) -> Response:
        headers = {
            name.removeprefix("HTTP_").replace("_", "-").lower(): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        host = headers.get("host")
        if host and is_loopback(environ[REACHED]) and not names_loopback(host, self.host):
            return plain(HTTPStatus.MISDIRECTED_REQUEST, *SAFE)
        return self._pages.respond(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], headers)
