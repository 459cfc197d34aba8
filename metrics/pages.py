"""What an HTTP request is answered with, whichever server took it: metrics, liveness, readiness and further pages."""

import gzip
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from drumline.metrics.browsers import sent_by_another_site

logger = logging.getLogger(__name__)

Headers = tuple[tuple[str, str], ...]
Probe = Callable[[], list[str]]
"""Reasons why not; empty where all is well. Called on a server's threads: quick, and safe to call from there."""

SAFE: Headers = (
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-store"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
"""On every response: a browser takes it for what it says it is, nobody keeps what is true for a moment, and no other
site embeds it."""
GZIP_LEVEL = 6
PLAIN_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class Asked:
    """A request, as far as pages care: its query, and its headers, but for those of a body, by names in lower case."""

    query: Mapping[str, list[str]]
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Response:
    """A status, a body and what it is; the length and the headers `SAFE` are added where it is sent."""

    body: bytes
    content_type: str
    status: HTTPStatus = HTTPStatus.OK
    headers: Headers = ()


@dataclass(frozen=True)
class Page:
    """What answers on a path. It is called on a server's threads, several at a time; HEAD comes with GET."""

    answer: Callable[[Asked], Response]
    methods: tuple[str, ...] = ("GET",)

    @property
    def allowed(self) -> tuple[str, ...]:
        """The methods, HEAD among them."""
        return (*self.methods, "HEAD") if "GET" in self.methods else self.methods


def plain(status: HTTPStatus, *headers: tuple[str, str]) -> Response:
    """A response that says its own status."""
    return Response(f"{status.phrase}\n".encode(), "text/plain; charset=utf-8", status, headers)


def as_json(document: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """A response that is a JSON document."""
    return Response(json.dumps(document).encode() + b"\n", "application/json", status)


class Pages:
    """Answers `/metrics`, `/healthz` and `/readyz`, and what `pages` holds by its path.

    The metrics come as Prometheus text, as OpenMetrics (which alone has exemplars) where the client asks for it, either
    one gzipped. `health` and `ready` answer `{"ok": …, "reasons": […]}`, 200 without reasons, else 503; a probe that
    raises is a reason of its own. Raises `ValueError` for a page on one of these three paths.
    """

    def __init__(
        self, registry: CollectorRegistry, *, health: Probe, ready: Probe, pages: Mapping[str, Page] | None = None
    ) -> None:
        own = {
            "/metrics": Page(_Metrics(registry).answer),
            "/healthz": Page(lambda asked: _probed("/healthz", health)),
            "/readyz": Page(lambda asked: _probed("/readyz", ready)),
        }
        self._pages: dict[str, Page] = own
        for path, page in (pages or {}).items():
            self.add(path, page)

    def add(self, path: str, page: Page) -> None:
        """Answer on one more path from now on. Raises `ValueError` for one that is taken."""
        if path in self._pages:
            raise ValueError(f"pages: {path} is taken")
        self._pages[path] = page

    def respond(self, method: str, path: str, query: str = "", headers: Mapping[str, str] | None = None) -> Response:
        """The answer to a request, with a body for HEAD, too.

        404, 405; 403 where another site's page makes a browser ask for more than to see; 500 where a page raises.
        `query` is what stands behind the path's question mark, the names of `headers` are in lower case.
        """
        response = self._respond(method, path, Asked(parse_qs(query, keep_blank_values=True), headers or {}))
        return Response(response.body, response.content_type, response.status, response.headers + SAFE)

    def _respond(self, method: str, path: str, asked: Asked) -> Response:
        page = self._pages.get(path)
        if page is None:
            return plain(HTTPStatus.NOT_FOUND)
        if method not in page.allowed:
            return plain(HTTPStatus.METHOD_NOT_ALLOWED, ("Allow", ", ".join(page.allowed)))
        if method not in ("GET", "HEAD") and sent_by_another_site(asked.headers):
            return plain(HTTPStatus.FORBIDDEN)
        try:
            return page.answer(asked)
        except Exception:
            logger.exception("%s could not be answered", path)
            return plain(HTTPStatus.INTERNAL_SERVER_ERROR)


class _Metrics:
    """The page of a registry. Where a collector of the host fails it raises: half a page would read as a reset."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def answer(self, asked: Asked) -> Response:
        """In the format that is asked for, and of the samples only those that `name[]` names."""
        encode: Any
        encode, content_type = choose_encoder(asked.headers.get("accept", ""))
        source: Any = self._registry
        if names := list(filter(None, asked.query.get("name[]", ()))):
            source = source.restricted_registry(names)
        if content_type.startswith("application/openmetrics-text"):
            source = _Collected(list(_told_apart(list(source.collect()))))
            if source.plainly_named:
                encode = partial(encode, escaping=ALLOWUTF8)  # the same bytes in two thirds of the time
        body = encode(source)
        if _accepts_gzip(asked.headers.get("accept-encoding", "")):
            return Response(gzip.compress(body, GZIP_LEVEL), content_type, headers=(("Content-Encoding", "gzip"),))
        return Response(body, content_type)


def _accepts_gzip(accept_encoding: str) -> bool:
    return any(re.fullmatch(r"\s*gzip\s*(;\s*q=(1|0?\.0*[1-9]).*)?", wish) for wish in accept_encoding.split(","))


class _Collected(Collector):
    """Families that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    @property
    def plainly_named(self) -> bool:
        """Whether no name needs an escape."""
        samples = [sample for family in self._families for sample in family.samples]
        names = {family.name for family in self._families}.union(sample.name for sample in samples)
        return all(map(PLAIN_NAME.fullmatch, names.union(*(sample.labels for sample in samples))))

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families


def _told_apart(families: list[Metric]) -> Iterator[Metric]:
    """Families as OpenMetrics wants them: no two of one name.

    There a counter `x_total` belongs to a family `x`, which clashes with our histogram `x`. Of such a pair the counter
    is told as a family `x_total` of unknown type: the samples, all that a query sees, stay the same.
    """
    others = {family.name for family in families if family.type != "counter"}
    for family in families:
        if family.type == "counter" and family.name in others:
            untyped = Metric(f"{family.name}_total", family.documentation, "unknown")
            untyped.samples = [sample for sample in family.samples if sample.name == untyped.name]
            yield untyped
        else:
            yield family


def _probed(path: str, probe: Probe) -> Response:
    try:
        reasons = list(probe())
    except Exception as error:
        logger.warning("the probe behind %s raised", path, exc_info=True)
        reasons = [type(error).__name__]
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return as_json({"ok": not reasons, "reasons": reasons}, status)
